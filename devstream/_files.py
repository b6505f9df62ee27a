"""Every file that devstream writes: JSON that says its kind and schema, whole or not at all, its user's alone.

A document looks like ``{"kind": "devstream.demo", "schema": 1, ...}``. It is written to a temporary file in the
same folder and renamed, so that neither a crash nor Ctrl-C leaves half a file, and a reader sees the old one or
the new one.

There are two readers. `read_json` is for what a user named: anything wrong is an error. `read_cache` is for what
we kept for ourselves: anything wrong is one warning, and the file counts as absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devstream.exceptions import CacheWarning, FileFormatError, warning


def cache_dir() -> Path:
    """Return the folder for what can be made again: ``$XDG_CACHE_HOME/devstream``, else ``~/.cache/devstream``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that isn't absolute is to be ignored.
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "devstream"


def write_bytes(path: Path, content: bytes) -> None:
    """Write *content* to *path*, whole or not at all, readable and writable by its user only (mode 0600).

    Raises:
        OSError: the folder doesn't exist or isn't writable, or the disk is full; an older file is then unchanged.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a power cut may leave the new name with no content
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too; it is raised again
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def dump(fields: Mapping[str, Any], *, kind: str, schema: int) -> str:  # Any: whatever JSON can hold
    """Return the document's text.

    Raises:
        ValueError: a number is not finite, which JSON has no word for.
        TypeError: a value is nothing that JSON can hold.
    """
    return json.dumps({"kind": kind, "schema": schema, **fields}, indent=2, allow_nan=False) + "\n"


def write_json(path: Path, fields: Mapping[str, Any], *, kind: str, schema: int) -> None:  # Any: see dump
    """Write a document of this *kind* and *schema*; raises as `write_bytes` and `dump` do."""
    write_bytes(path, dump(fields, kind=kind, schema=schema).encode())


def read_json(path: Path, *, kind: str, schema: int) -> dict[str, Any]:  # Any: see dump
    """Return the document at *path*, with its ``kind`` and ``schema``.

    Raises:
        FileFormatError: it is damaged, or of another kind or schema.
        OSError: it doesn't exist or can't be read.
    """
    text = path.read_bytes()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise FileFormatError(path=str(path), reason=f"it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise FileFormatError(path=str(path), reason=f"it holds a JSON {type(document).__name__}, not an object")
    found = (document.get("kind"), document.get("schema"))
    if found != (kind, schema):
        raise FileFormatError(
            path=str(path), reason=f"it is of kind {found[0]!r}, schema {found[1]!r}, not {kind!r}, {schema}"
        )
    return document


def read_cache(path: Path, *, kind: str, schema: int) -> dict[str, Any] | None:  # Any: see dump
    """Return the document at *path*, or None where there is none that can be used.

    Warns (`CacheWarning`, once a call) where there is one that can't: damaged, foreign, or not ours to read.
    """
    try:
        return read_json(path, kind=kind, schema=schema)
    except FileNotFoundError:
        return None
    except FileFormatError as error:
        reason = error.reason
    except OSError as error:
        reason = error.strerror or str(error)
    warnings.warn(warning(CacheWarning, path=path, reason=reason), stacklevel=2)
    return None


def write_cache(path: Path, fields: Mapping[str, Any], *, kind: str, schema: int) -> None:  # Any: see dump
    """Write a document to the cache, making its folder (mode 0700); warns (`CacheWarning`) where it can't."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, fields, kind=kind, schema=schema)
    except OSError as error:
        reason = f"it can't be written ({error.strerror or error})"
        warnings.warn(warning(CacheWarning, path=path, reason=reason), stacklevel=2)
