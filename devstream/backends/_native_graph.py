"""Graphs of an accelerator: a capture through torch, with words for what ends one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: events of several classes

from devstream import _observe
from devstream._compat import graphs
from devstream.exceptions import CaptureError

if TYPE_CHECKING:
    from devstream.backends.accelerator import AcceleratorBackend, AcceleratorStream


class AcceleratorGraph:
    """Captured work of an accelerator's streams."""

    def __init__(self, backend: AcceleratorBackend, native: graphs.NativeGraph) -> None:
        self._backend, self._native = backend, native

    @property
    def pool(self) -> object:
        """What a later capture takes to share this graph's memory."""
        return self._native.pool

    def replay(self, stream: AcceleratorStream) -> None:
        """Issue the graph to *stream*."""
        here = self._backend.current_stream(None)
        if here == stream:
            self._native.replay()
        else:
            self._backend._run(self._native.replay, stream)


class Forks:
    """Which streams a capture brought in, and which of them came back; told by the verbs that it sees."""

    def __init__(self, backend: AcceleratorBackend, first: AcceleratorStream) -> None:
        self._backend = backend
        self._first = backend.stream_key(first)
        #: By stream: its name and the line that brought it in.
        self.open: dict[tuple[str, int, int], str] = {}
        #: By the identity of an event, which is kept: the streams whose work its record comes behind.
        self._events: dict[int, tuple[Any, set[tuple[str, int, int]]]] = {}
        self._behind: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {self._first: {self._first}}

    def see(self, notice: _observe.Notice) -> None:
        """Take in a record or a wait."""
        if isinstance(notice, _observe.Record):
            key = self._key(notice.stream)
            if key in self._behind:
                self._events[id(notice.event)] = (notice.event, set(self._behind[key]))
        elif isinstance(notice, _observe.Wait) and id(notice.event) in self._events:
            key = self._key(notice.stream)
            if key not in self._behind:
                self._behind[key] = {key}
                self.open[key] = f"{notice.stream!r}, forked at {_line()}"
            self._behind[key] |= self._events[id(notice.event)][1]

    def _key(self, stream: Any) -> tuple[str, int, int]:
        return self._backend.stream_key(self._backend.adopt_stream(stream))

    def unjoined(self) -> list[str]:
        """Return the streams that the first one never waited for, and where each was forked."""
        return [text for key, text in self.open.items() if key not in self._behind[self._first]]


def capture(
    backend: AcceleratorBackend, issue: Callable[[], object], stream: AcceleratorStream, pool: object
) -> AcceleratorGraph:
    """Capture what *issue* issues to *stream*; see `Backend.capture`."""
    native = graphs.NativeGraph(backend.device_type, pool)
    forks = Forks(backend, stream)

    def begin() -> None:
        native.begin()
        try:
            with _observe.subscribe(forks.see):
                issue()
        except BaseException:
            _end_badly(native, backend.stream_index(stream))
            raise
        try:
            native.end()
        except RuntimeError as error:
            native.abandon(backend.stream_index(stream))
            raise _why(error, forks, stream) from error

    graphs.clear_workspaces(backend.device_type)
    try:
        backend._run(begin, stream)
    finally:
        graphs.clear_workspaces(backend.device_type)
    return AcceleratorGraph(backend, native)


def _end_badly(native: graphs.NativeGraph, index: int) -> None:
    """End a capture whose work raised, and let nothing hide that error."""
    try:
        native.end()
    except RuntimeError:
        native.abandon(index)


def _why(error: RuntimeError, forks: Forks, stream: AcceleratorStream) -> CaptureError:
    loose = forks.unjoined()
    if loose:
        return CaptureError(
            operation=f"ending with work that is not joined, on {' and '.join(loose)}",
            stream=stream,
            advice="let the captured stream wait for each of them at the end",
        )
    return CaptureError(
        operation=f"what was issued ({str(error).splitlines()[0]})",
        stream=stream,
        advice="leave out what has to run at once: a host read, a copy of pageable memory, a question to an event",
    )


def _line() -> str:
    """Return the innermost line of the calling thread that isn't ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("devstream."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


__all__ = ["AcceleratorGraph", "Forks", "capture"]
