"""Graphs of the CPU: what was launched on streams in a capture, launched again at each replay.

The rules are CUDA's. A capture starts on one stream. A stream that waits for an event which was recorded in the
capture belongs to it from there on. While it lasts, its thread may not ask whether anything is done, and its
streams may not wait for what is outside. At its end every stream of it must have been joined with the first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from devstream.exceptions import CaptureError

if TYPE_CHECKING:
    from devstream.backends._cpu_stream import CpuStream
    from devstream.backends.cpu import CpuBackend, CpuEvent


@dataclass(frozen=True, slots=True)
class _Task:
    lane: int
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Record:
    lane: int
    event: int


@dataclass(frozen=True, slots=True)
class _Wait:
    lane: int
    event: int


_Step: TypeAlias = _Task | _Record | _Wait


@dataclass(slots=True)
class _Lane:
    """One stream of a capture.

    Attributes:
        forked: the line that brought the stream in; empty for the first one.
        seen: for each lane, how many of its tasks come before whatever this lane does next.
    """

    stream: CpuStream
    forked: str = ""
    seen: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Capture:
    lanes: list[_Lane]
    steps: list[_Step] = field(default_factory=list)
    #: What each record of an event comes behind.
    records: list[dict[int, int]] = field(default_factory=list)

    def lane(self, stream: CpuStream) -> int | None:
        return next((number for number, one in enumerate(self.lanes) if one.stream is stream), None)

    def unjoined(self) -> list[_Lane]:
        first = self.lanes[0].seen
        return [lane for number, lane in enumerate(self.lanes) if first.get(number, 0) < lane.seen.get(number, 0)]


@dataclass(frozen=True, slots=True)
class Captured:
    """The place of an event's record: which capture, and which of its records."""

    capture: _Capture
    event: int


class CpuGraph:
    """Captured work of the CPU's streams."""

    def __init__(self, backend: CpuBackend, capture: _Capture, pool: object) -> None:
        self.pool = object() if pool is None else pool
        self._backend, self._steps = backend, tuple(capture.steps)
        self._streams = [lane.stream for lane in capture.lanes]
        self._events = len(capture.records)

    def replay(self, stream: CpuStream) -> None:
        """Launch it all again, what the first stream did on *stream*."""
        backend = self._backend
        lanes = [stream, *self._streams[1:]]
        index = backend.stream_index(stream)
        events = [
            backend.create_event(index, enable_timing=False, blocking=False, interprocess=False)
            for _ in range(self._events)
        ]
        for step in self._steps:
            match step:
                case _Task():
                    backend.launch(step.run, lanes[step.lane])
                case _Record():
                    backend.record_event(events[step.event], lanes[step.lane])
                case _Wait():
                    backend.wait_event(lanes[step.lane], events[step.event])


class Captures(threading.local):
    """The capture that the calling thread is in."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self._now: _Capture | None = None

    def capture(self, issue: Callable[[], object], stream: CpuStream, pool: object) -> CpuGraph:
        """Return what *issue* launches on *stream*, and on those that it brings in, as a graph."""
        self.refuse("capture", stream)
        if stream.stream_id == 0:
            raise CaptureError(
                operation="capturing the default stream", stream=stream, advice="capture a stream of your own"
            )
        capture = _Capture([_Lane(stream)])

        def begin() -> None:
            self._now = capture
            try:
                issue()
            finally:
                self._now = None

        self._backend._run(begin, stream)
        loose = capture.unjoined()
        if loose:
            raise CaptureError(
                operation="ending with work that is not joined, on "
                + " and ".join(f"{lane.stream!r}, forked at {lane.forked}" for lane in loose),
                stream=stream,
                advice="let the captured stream wait for each of them at the end",
            )
        return CpuGraph(self._backend, capture, pool)

    def holds(self, stream: CpuStream) -> bool:
        """Say whether *stream* is in this thread's capture."""
        return self._now is not None and self._now.lane(stream) is not None

    def refuse(self, operation: str, item: object) -> None:
        """Refuse to ask whether *item* is done."""
        if self._now is not None:
            raise CaptureError(operation=f"{operation} of {item}", stream=self._now.lanes[0].stream, line=_line())

    def launch(self, task: Callable[[], None], stream: CpuStream) -> bool:
        """Note *task* where *stream* is captured; say whether it is."""
        lane = None if self._now is None else self._now.lane(stream)
        if self._now is None or lane is None:
            return False
        self._now.steps.append(_Task(lane, task))
        seen = self._now.lanes[lane].seen
        seen[lane] = seen.get(lane, 0) + 1
        return True

    def record(self, event: CpuEvent, stream: CpuStream) -> bool:
        """Note a record where *stream* is captured; say whether it is."""
        event.captured = None
        lane = None if self._now is None else self._now.lane(stream)
        if self._now is None or lane is None:
            return False
        event.captured = Captured(self._now, len(self._now.records))
        self._now.steps.append(_Record(lane, len(self._now.records)))
        self._now.records.append(dict(self._now.lanes[lane].seen))
        return True

    def wait(self, stream: CpuStream, event: CpuEvent) -> bool:
        """Note a wait in the capture, and bring *stream* in by it; say whether it is one."""
        now, where = self._now, event.captured
        lane = None if now is None else now.lane(stream)
        if where is None:
            if now is None or lane is None or event.point is None:
                return False  # outside; or never recorded, which orders nothing
            raise CaptureError(
                operation="waiting for an event that was recorded outside",
                stream=stream,
                line=_line(),
                advice="let the stream wait for it before the capture starts",
            )
        if now is not where.capture:
            raise CaptureError(
                operation="waiting, from outside, for an event that was recorded in a capture",
                stream=where.capture.lanes[0].stream,
                line=_line(),
                advice="record the event again behind the replay",
            )
        if lane is None:
            lane = len(now.lanes)
            now.lanes.append(_Lane(stream, forked=_line()))
        seen = now.lanes[lane].seen
        for number, count in now.records[where.event].items():
            seen[number] = max(seen.get(number, 0), count)
        now.steps.append(_Wait(lane, where.event))
        return True


def _line() -> str:
    """Return the innermost line of the calling thread that isn't ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("devstream."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


__all__ = ["Captured", "Captures", "CpuGraph"]
