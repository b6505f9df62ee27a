"""Which stream of the CPU is current in which thread, and what each open ``with`` block brings back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devstream.exceptions import StreamNotEnteredError

if TYPE_CHECKING:
    from devstream.backends.cpu import CpuStream


class _Chosen(dict[int, "CpuStream"]):
    """The stream that one thread chose on each virtual device; dies with the thread."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Block:
    """One ``with`` block that is open in a thread."""

    stream: CpuStream
    index: int
    replaced: CpuStream | None
    device: int


class CurrentStreams(threading.local):
    """The calling thread's current device and streams; a new thread has chosen none."""

    def __init__(self, threads: Threads) -> None:
        self.device = 0
        self.chosen = _Chosen()
        self.blocks: list[_Block] = []
        #: The stream whose task this thread runs. It may use its own stream, and must not wait for its own end.
        self.runs: CpuStream | None = None
        threads.add(self.chosen)

    def choose(self, stream: CpuStream | None, index: int, *, device: int) -> None:
        """Make *stream* (None: the default one) current on device *index*, and *device* the current device."""
        if stream is None:
            self.chosen.pop(index, None)
        else:
            self.chosen[index] = stream
        self.device = device

    def enter(self, stream: CpuStream, index: int) -> None:
        """Open a block of *stream*."""
        self.blocks.append(_Block(stream, index, self.chosen.get(index), self.device))
        self.choose(stream, index, device=index)

    def leave(self, stream: CpuStream) -> CpuStream | None:
        """Close the innermost block of *stream*; return what is current there now (None: the default one).

        Raises:
            StreamNotEnteredError: this thread is in no block of it.
        """
        # Not always the last block: two generators may leave theirs out of order.
        at = max((i for i, block in enumerate(self.blocks) if block.stream is stream), default=None)
        if at is None:
            raise StreamNotEnteredError(stream=stream, thread=threading.current_thread().name)
        left = self.blocks.pop(at)
        for inner in self.blocks[at:]:
            # A block that is left later must not bring back what this one, closed by then, had made current.
            if inner.replaced is stream:
                inner.replaced = left.replaced
            if inner.device == left.index:
                inner.device = left.device
        self.choose(left.replaced, left.index, device=left.device)
        return left.replaced

    @contextmanager
    def running(self, stream: CpuStream, index: int) -> Iterator[None]:
        """Let a task of *stream* find its own stream current."""
        self.runs = stream
        # Not among `Threads`: what others launch on the stream comes after this task, and needs no thread to wait.
        self.chosen = _Chosen()
        self.choose(stream, index, device=index)
        try:
            yield
        finally:
            # An idle worker must not keep its stream alive.
            self.runs = None
            self.chosen.clear()
            self.blocks.clear()


class Threads:
    """What every living thread chose."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: see CpuBackend
        self._chosen: list[weakref.ref[_Chosen]] = []

    def add(self, chosen: _Chosen) -> None:
        """Note a new thread's choices, and forget those of threads that have ended."""
        with self._lock:
            self._chosen = [ref for ref in self._chosen if ref() is not None]
            self._chosen.append(weakref.ref(chosen))

    def any_chose(self, stream: CpuStream, index: int) -> bool:
        """Say whether *stream* is current in some thread that chose it."""
        return any((one := ref()) is not None and one.get(index) is stream for ref in self._chosen)
