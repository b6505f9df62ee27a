"""Files that a command is asked to write: checked before the work that fills them."""

from __future__ import annotations

import os
from pathlib import Path

from devstream.cli._usage import UsageError


def writable(option: str, given: str) -> Path:
    """Return the path of *given*, the value of *option*.

    Raises:
        UsageError: it is a folder, would replace a link or a device, or its folder isn't there or isn't writable.
    """
    path = Path(given).absolute()
    if path.is_dir():
        raise UsageError(f"{option} {given}: is a folder; give a file's name")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{option} {given}: is a link or a device, which would be replaced; give a file's name")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {given}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {given}: the folder {path.parent} isn't writable")
    return path


def picture(option: str, given: str) -> Path:
    """Return the path of a picture to draw; raises as `writable`, and where its name doesn't end with .png."""
    if not given.endswith(".png"):
        raise UsageError(f"{option} {given}: the picture is a PNG, so its name ends with .png")
    return writable(option, given)
