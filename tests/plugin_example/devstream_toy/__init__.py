"""A backend in about a hundred lines, written against `devstream.abc` alone.

Work runs at once, so a stream has no queue. It only knows the latches that work issued now would be behind, and an
event has happened when all latches that it was recorded behind are open.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, ClassVar

import torch

import devstream
from devstream.abc import Backend, Capability

Gates = frozenset[threading.Event]


class ToyStream:
    """A stream of a class of its own, with the methods that users of torch know."""

    def __init__(self, index: int, stream_id: int) -> None:
        self.device = torch.device("cpu", index)
        self.stream_id = stream_id
        self.gates: Gates = frozenset()

    def wait_event(self, event: Any) -> None:
        if not isinstance(event, devstream.Event):
            raise TypeError(f"wait_event takes a devstream.Event, not {event!r}")
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        event = devstream.Event()
        event.record(stream)
        event.wait(self)

    def record_event(self, event: devstream.Event | None = None) -> devstream.Event:
        event = devstream.Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return not closed(self.gates)

    def synchronize(self) -> None:
        for gate in self.gates:
            gate.wait()

    def __copy__(self) -> ToyStream:
        return self

    def __deepcopy__(self, memo: object) -> ToyStream:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a ToyStream can't leave its process")


class ToyEvent:
    def __init__(self) -> None:
        self.gates: Gates | None = None


class ToyLatch:
    def __init__(self, gate: threading.Event) -> None:
        self.release = gate.set


class ToyThread(threading.local):
    def __init__(self) -> None:
        self.index = 0
        self.current: dict[int, ToyStream] = {}


class ToyBackend(Backend[ToyStream, ToyEvent]):
    name: ClassVar[str] = "toy"
    device_type = "cpu"

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._defaults = [ToyStream(index, 0) for index in range(2)]
        self._streams = list(self._defaults)
        self._thread = ToyThread()

    def unavailable_reason(self) -> str | None:
        return None

    def device_count(self) -> int:
        return len(self._defaults)

    def capabilities(self, index: int) -> Capability:
        return Capability.SIDE_STREAMS

    def create_stream(self, index: int, *, priority: int = 0) -> ToyStream:
        stream = ToyStream(index, next(self._ids))
        self._streams.append(stream)
        return stream

    def current_stream(self, index: int | None = None) -> ToyStream:
        index = self._thread.index if index is None else index
        return self._thread.current.get(index, self._defaults[index])

    def default_stream(self, index: int) -> ToyStream:
        return self._defaults[index]

    def set_stream(self, stream: ToyStream) -> None:
        self._thread.index = self.stream_index(stream)
        self._thread.current[self._thread.index] = stream

    def create_event(
        self, index: int | None, *, enable_timing: bool, blocking: bool, interprocess: bool
    ) -> ToyEvent:
        return ToyEvent()

    def record_event(self, event: ToyEvent, stream: ToyStream) -> None:
        event.gates = stream.gates

    def wait_event(self, stream: ToyStream, event: ToyEvent) -> None:
        stream.gates = closed(stream.gates | (event.gates or frozenset()))

    def query_event(self, event: ToyEvent) -> bool:
        return not closed(event.gates or frozenset())

    def synchronize_event(self, event: ToyEvent) -> None:
        for gate in event.gates or ():
            gate.wait()

    def synchronize_device(self, index: int) -> None:
        for stream in list(self._streams):
            if self.stream_index(stream) == index:
                stream.synchronize()

    def hold(self, stream: ToyStream) -> ToyLatch:
        gate = threading.Event()
        stream.gates = closed(stream.gates) | {gate}
        return ToyLatch(gate)


def closed(gates: Gates) -> Gates:
    return frozenset(gate for gate in gates if not gate.is_set())
