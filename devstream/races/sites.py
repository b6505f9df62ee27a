"""The line of the user's code that an operation comes from."""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_HOME = str(Path(__file__).parents[1]) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
#: Programs of ours, whose lines are a user's as far as races go.
_PROGRAMS = tuple(
    _HOME + name for name in ("demo/", "cli/", "__main__.py", "testing/faulty.py", "testing/conformance/")
)


class Site(NamedTuple):
    """A line of code; an empty *file* is an unknown one."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        if not self.file:
            return "an unknown line"
        return f"{self.file}:{self.line}, in {self.function}"

    @property
    def text(self) -> str:
        """The line itself; empty where its file can't be read."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""


NOWHERE = Site("", 0, "")

_PLAIN, _TORCHES, _OURS, _BACKENDS = range(4)
_kinds: dict[str, int] = {}


def _kind(file: str) -> int:
    """Return whose a file of code is, and remember it."""
    if file.startswith(_HOME):
        kind = _BACKENDS if file.startswith(_HOME + "backends/") else _OURS
        if file.startswith(_PROGRAMS):
            kind = _PLAIN
    else:
        kind = _TORCHES if file.startswith((_TORCH, "<frozen")) else _PLAIN
    _kinds[file] = kind
    return kind


def here(depth: int = 1) -> Site:
    """Return the innermost line of the calling thread that is neither torch's nor ours.

    A thread without such a line is one of autograd's: the line is then the main thread's, which waits for it.
    """
    site = _first_plain(_frame(depth))
    if site is NOWHERE and threading.get_ident() != threading.main_thread().ident:
        site = _first_plain(sys._current_frames().get(threading.main_thread().ident or 0))
    return site


def _frame(depth: int) -> FrameType | None:
    """Return the frame *depth* above the caller; None where the stack ends before it.

    A thread of autograd has no frame of Python's below the operation that it reports.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and depth:
        frame, depth = frame.f_back, depth - 1
    return frame


def _first_plain(frame: FrameType | None) -> Site:
    kinds = _kinds
    while frame is not None:
        code = frame.f_code
        kind = kinds.get(code.co_filename)
        if kind is None:
            kind = _kind(code.co_filename)
        if kind == _PLAIN:
            return tuple.__new__(Site, (code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return NOWHERE


def inside_backend(depth: int = 1) -> bool:
    """Whether the innermost frame that isn't torch's belongs to a backend of ours, which reports by itself."""
    frame = _frame(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _kinds.get(file)
        kind = _kind(file) if kind is None else kind
        if kind != _TORCHES and frame.f_globals.get("__name__", "").partition(".races")[0] != "devstream":
            return kind == _BACKENDS
        frame = frame.f_back
    return False


__all__ = ["NOWHERE", "Site", "here", "inside_backend"]
