"""The text: the source of Python's standard library, which every machine has, as bytes.

Files are dealt to training or evaluation by a hash of their path, so the two never share a file, and the deal is
the same on every machine with the same Python.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

#: One file in ten is kept for evaluation.
_EVALUATION_SHARE = 10
#: Enough text for any size of the demonstration; the whole library is several times that.
_MAX_BYTES = 12 << 20
#: Not in every installation, or not part of the library.
_LEFT_OUT = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})


@dataclass(frozen=True, slots=True)
class Text:
    """Two texts that share no file, as one-dimensional tensors of bytes on the host."""

    training: torch.Tensor
    evaluation: torch.Tensor
    files: int


def read_library(root: Path | None = None) -> Text:
    """Return the text of the library at *root* (default: the running Python's own).

    Raises:
        FileNotFoundError: there is too little source to train on (some installations ship compiled files only).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    files = size = 0
    for name, path in _sources(root):
        content = path.read_bytes()
        is_evaluation = hashlib.sha256(name.encode()).digest()[0] % _EVALUATION_SHARE == 0
        parts[is_evaluation].append(content)
        files, size = files + 1, size + len(content)
        if size >= _MAX_BYTES:
            break
    training, evaluation = b"".join(parts[False]), b"".join(parts[True])
    if min(len(training), len(evaluation)) < 10_000:
        raise FileNotFoundError(
            f"the Python library at {root} has too little source text to train on ({size} bytes in {files} "
            "files); run the demonstration with a Python that ships its .py files"
        )
    return Text(_as_tensor(training), _as_tensor(evaluation), files)


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each source file, in an order that doesn't depend on the file system."""
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(relative.parts[:-1]) and path.is_file():
            found.append((relative.as_posix(), path))
    yield from sorted(found)


def _as_tensor(content: bytes) -> torch.Tensor:
    # bytearray: torch warns about memory that Python won't let it write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def batch(text: torch.Tensor, *, number: int, size: int, context: int, seed: int) -> torch.Tensor:
    """Return batch *number* as int64 of shape (size, context + 1): a function of its arguments alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()
