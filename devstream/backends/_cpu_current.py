"""Which stream of the CPU is current in which thread, and what each open ``with`` block brings back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devstream.exceptions import StreamNotEnteredError

if TYPE_CHECKING:
    from devstream.backends._cpu_stream import CpuStream


class _Chosen(dict[int, "CpuStream"]):
    """The stream that the thread called *thread* chose on each virtual device; dies with the thread."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.current_thread().name


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
        #: The streams whose tasks this thread is in. A task may use its own stream, and must not wait for its end.
        self.runs: list[CpuStream] = []
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

    def abandon(self, depth: int) -> None:
        """Close the blocks beyond the first *depth*, whose opening was cut short."""
        for block in reversed(self.blocks[depth:]):
            self.choose(block.replaced, block.index, device=block.device)
        del self.blocks[depth:]

    def leave(self, stream: CpuStream) -> CpuStream | None:
        """Close the innermost block of *stream*; return what is current there now (None: the default one).

        Raises:
            StreamNotEnteredError: this thread is in no block of it.
        """
        # Not always the last block: two generators may leave theirs out of order.
        at = max((i for i, block in enumerate(self.blocks) if block.stream is stream), default=None)
        if at is None:
            raise StreamNotEnteredError(stream=stream, thread=threading.current_thread().name)
        left = self.blocks[at]
        for inner in self.blocks[at + 1 :]:
            # A block that is left later must not bring back what this one, closed by then, had made current.
            if inner.replaced is stream:
                inner.replaced = left.replaced
            if inner.device == left.index:
                inner.device = left.device
        self.choose(left.replaced, left.index, device=left.device)
        # Last, in one step: as long as the block is there, all of this can be done once more.
        del self.blocks[at]
        return left.replaced

    def runs_task_of(self, stream: CpuStream) -> bool:
        """Say whether this thread is in a task of *stream*."""
        return any(one is stream for one in self.runs)

    def in_task(self, task: Callable[[], None], stream: CpuStream) -> Callable[[], None]:
        """Return *task*, which this thread will then know for one of *stream* while it runs it."""

        def noted() -> None:
            self.runs.append(stream)
            try:
                task()
            finally:
                self.runs.pop()

        return noted

    @contextmanager
    def running(self, stream: CpuStream, index: int) -> Iterator[None]:
        """Let a task of *stream* on a thread of its own find its own stream current."""
        self.runs.append(stream)
        # Not among `Threads`: what others launch on the stream comes after this task, and needs no thread to wait.
        self.chosen = _Chosen()
        self.choose(stream, index, device=index)
        try:
            yield
        finally:
            # An idle worker must not keep its stream alive.
            self.runs.clear()
            self.chosen.clear()
            self.blocks.clear()


class Threads:
    """What every living thread chose."""

    def __init__(self) -> None:
        # Each step on it is one of the interpreter's, so it needs no lock, which a fork could leave held.
        self._chosen: weakref.WeakValueDictionary[int, _Chosen] = weakref.WeakValueDictionary()

    def add(self, chosen: _Chosen) -> None:
        """Note a new thread's choices."""
        self._chosen[id(chosen)] = chosen

    def who_chose(self, stream: CpuStream, index: int, *, beside: object = None) -> str | None:
        """Return the name of a thread that chose *stream* and has it current; not one of the choices *beside*."""
        for ref in self._chosen.valuerefs():
            one = ref()
            if one is not None and one is not beside and one.get(index) is stream:
                return one.thread
        return None
