"""A `Recorder` brackets work with timed events and turns them into spans, on any backend that keeps time."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from devstream._streams import Event, backend, current_stream
from devstream.abc import StreamArg
from devstream.report.timeline import Span, check_text
from devstream.typing import DeviceArg


@dataclass(slots=True)
class _Bracket:
    lane: str
    name: str
    start: Event
    end: Event


class Recorder:
    """Records when work ran on one device, by the device's own clock.

    A span lies between two events of one stream. So it starts when everything issued to that stream before it is
    done, waits included: to leave a wait out of a span, issue the wait before the span. What a stream does
    inside counts as busy, gaps between two kernels too.

    Raises:
        UnsupportedError: events of this device keep no time.
    """

    def __init__(self, device: DeviceArg = None) -> None:
        self._backend = backend(device)
        self._brackets: list[_Bracket] = []
        self._origin = Event(device, enable_timing=True)
        self._device = device
        self._origin.record(current_stream(device))

    def span(self, lane: str, name: str, *, stream: StreamArg | None = None) -> _Open:
        """Return a context whose work on *stream* (default: the current one) becomes one span.

        Adds no order between streams, and doesn't block the host. Work that raised leaves no span.

        Raises:
            StreamTypeError: *lane* or *name* is no text.
        """
        check_text("Recorder.span(lane)", lane)
        check_text("Recorder.span(name)", name)
        return _Open(self, lane, name, current_stream(self._device) if stream is None else stream)

    def spans(self) -> list[Span]:
        """Block until all recorded work is done and return its spans, in the order of their issue.

        Times count from when this recorder was made. A span that seems to start before that (the clocks of
        some devices tick coarsely) starts at 0.
        """
        found = []
        self._origin.synchronize()
        for bracket in self._brackets:
            bracket.end.synchronize()
            start_ms = max(self._origin.elapsed_time(bracket.start), 0.0)
            # The same clock, so an end before its start is a rounding error of the last digit.
            end_ms = max(self._origin.elapsed_time(bracket.end), start_ms)
            found.append(Span(bracket.lane, bracket.name, start_ms, end_ms))
        return found


class _Open:
    """A span whose end isn't recorded yet."""

    def __init__(self, recorder: Recorder, lane: str, name: str, stream: Any) -> None:  # Any: of any backend
        self._recorder, self._lane, self._name, self._stream = recorder, lane, name, stream
        self._start: Event | None = None

    def __enter__(self) -> None:
        if self._start is not None:
            raise ValueError(f"span {self._name!r} is open already; ask Recorder.span for one more")
        start = Event(self._recorder._device, enable_timing=True)
        start.record(self._stream)
        self._start = start

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        start, self._start = self._start, None
        if kind is None and start is not None:
            end = Event(self._recorder._device, enable_timing=True)
            end.record(self._stream)
            self._recorder._brackets.append(_Bracket(self._lane, self._name, start, end))
