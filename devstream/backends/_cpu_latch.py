"""Holds a stream of the CPU, until released or dropped."""

from __future__ import annotations

import _thread
import contextlib
import warnings
import weakref
from collections.abc import Callable

from devstream.backends._cpu_queue import Point
from devstream.exceptions import LatchDroppedWarning, warning


class CpuLatch:
    """Holds what comes behind *gate* until `release` opens it with *open_gate*.

    A latch that is dropped unreleased would hold its stream for good; it lets go then, and `LatchDroppedWarning`
    says so.
    """

    def __init__(self, gate: Point, open_gate: Callable[[Point], None], stream: object) -> None:
        self._gate, self._open = gate, open_gate
        self._dropped = weakref.finalize(self, _drop, gate, open_gate, repr(stream))
        self._dropped.atexit = False

    def release(self) -> None:
        """Let the stream go on."""
        if self._dropped.detach() is not None:  # None: it was released before
            self._open(self._gate)


def _drop(gate: Point, open_gate: Callable[[Point], None], stream: str) -> None:
    # By another thread: the garbage collector may call this in the middle of a change of the very timeline, and a
    # thread of `threading` would take a lock that this one may hold.
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        _thread.start_new_thread(open_gate, (gate,))
    warnings.warn(warning(LatchDroppedWarning, stream=stream), stacklevel=2)
