"""`Recorder` keeps what the verbs reported; `RecordingBackend` is a fake that keeps what it was asked to do.

The fake is a verified one: it passes the laws of `devstream.testing.conformance`, save those for capabilities that
it doesn't have. It runs no queue. Its streams know only which latches their work is behind.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import ClassVar, Self, TypeAlias, TypeVar

import torch

from devstream import _compat, _observe
from devstream._objects import Stream
from devstream._observe import Notice
from devstream.abc import Backend, Capability
from devstream.exceptions import StreamTypeError

N = TypeVar("N")


class Recorder:
    """Keeps the log of everything that the verbs report, in `log`; subscribed inside its ``with`` block.

    A notice keeps its streams, events and tensors alive as long as the log does.
    """

    def __init__(self) -> None:
        self.log: list[Notice] = []
        self._subscription: _observe.Subscription | None = None

    def __call__(self, notice: Notice) -> None:
        """Keep *notice*; this is what the seam calls."""
        self.log.append(notice)

    def of(self, kind: type[N]) -> list[N]:
        """Return the notices of one *kind*, in order; raises `StreamTypeError` where it is no class."""
        if not isinstance(kind, type):
            raise StreamTypeError(
                operation="Recorder.of", got=kind, expected="a class of notices, as _observe.Record"
            )
        return [notice for notice in self.log if isinstance(notice, kind)]

    def __enter__(self) -> Self:
        if self._subscription is not None:
            raise RuntimeError("this Recorder is entered already; make one Recorder a block")
        self._subscription = _observe.subscribe(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._subscription is not None
        self._subscription.close()
        self._subscription = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a `RecordingBackend`: the method's name, and the numbers of the stream and event."""

    operation: str
    stream: int | None = None
    event: int | None = None


#: The latches that a point is behind. A point has happened when all of them are released.
Gates: TypeAlias = frozenset[threading.Event]

_FREE: Gates = frozenset()


class RecordingStream(Stream):
    """A stream that has no work, only the latches that work issued now would be behind."""

    gates: Gates

    def __new__(cls, backend: RecordingBackend, index: int, number: int) -> Self:
        """Return the stream with this number; only the backend calls it."""
        # torch has one CPU, whose index is -1.
        self = _compat.stream_from_ids(cls, number, index or -1, _compat.cpu_stream_type())
        self.gates = _FREE
        return self

    def __enter__(self) -> Self:
        self._fake.enter(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._fake.leave()

    @property
    def _fake(self) -> RecordingBackend:
        assert isinstance(self._backend, RecordingBackend)
        return self._backend


class RecordingEvent:
    """The native event of the fake."""

    def __init__(self, index: int | None, number: int) -> None:
        self.index = index
        self.number = number
        self.gates: Gates | None = None


class RecordingLatch:
    """Holds a stream of the fake."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def release(self) -> None:
        """Let the stream go on."""
        self._gate.set()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.index = 0
        self.current: dict[int, RecordingStream] = {}
        self.left: list[tuple[RecordingStream, RecordingStream]] = []


class RecordingBackend(Backend[RecordingStream, RecordingEvent]):
    """A backend of *devices* devices that keeps each call in `log` and runs nothing.

    A tensor operation under its streams runs at once, as on the CPU.
    """

    name: ClassVar[str] = "recording"
    device_type = "cpu"

    def __init__(self, devices: int = 2) -> None:
        self.log: list[Call] = []
        self._devices = devices
        self._class: type[RecordingStream] = type(
            "RecordingStream", (RecordingStream,), {"_backend": self, "__module__": __name__}
        )
        # Apart from the CPU backend's numbers: torch compares streams by device and number alone.
        self._numbers = itertools.count(1 << 20)
        self._defaults = [self._class(self, index, next(self._numbers)) for index in range(devices)]
        self._thread = _Thread()
        self._streams: list[RecordingStream] = [*self._defaults]

    def unavailable_reason(self) -> str | None:
        """Say nothing: it runs everywhere."""
        return None

    def not_automatic_reason(self) -> str | None:
        """Say that it is for tests."""
        return "it runs nothing and is for tests; ask for it by name"

    def device_count(self) -> int:
        """Return the number of devices that it was made with."""
        return self._devices

    def capabilities(self, index: int) -> Capability:
        """Return what it can do: side streams, and no timing, since nothing takes time."""
        return Capability.SIDE_STREAMS | Capability.RECORD_STREAM | Capability.PEER_ACCESS

    def create_stream(self, index: int, *, priority: int = 0) -> RecordingStream:
        """Return a new stream and log that."""
        stream = self._class(self, index, next(self._numbers))
        self._streams.append(stream)
        self._note("create_stream", stream)
        return stream

    def current_stream(self, index: int | None = None) -> RecordingStream:
        """Return this thread's current stream."""
        index = self._thread.index if index is None else index
        return self._thread.current.get(index, self._defaults[index])

    def default_stream(self, index: int) -> RecordingStream:
        """Return the stream that every thread starts on."""
        return self._defaults[index]

    def set_stream(self, stream: RecordingStream) -> None:
        """Make *stream* current in this thread and log that."""
        self._thread.index = self.stream_index(stream)
        self._thread.current[self._thread.index] = stream
        self._note("set_stream", stream)

    def enter(self, stream: RecordingStream) -> None:
        """Enter ``with stream:``."""
        replaced = self.current_stream(self.stream_index(stream))
        self._thread.left.append((self.current_stream(None), replaced))
        self.set_stream(stream)

    def leave(self) -> None:
        """Leave the innermost ``with`` block."""
        previous, replaced = self._thread.left.pop()
        self.set_stream(replaced)
        self.set_stream(previous)

    def stream_index(self, stream: RecordingStream) -> int:
        """Return the device of *stream*."""
        return max(stream.device_index, 0)

    def create_event(
        self, index: int | None, *, enable_timing: bool, blocking: bool, interprocess: bool
    ) -> RecordingEvent:
        """Return a new event."""
        return RecordingEvent(index, next(self._numbers))

    def event_index(self, event: RecordingEvent) -> int | None:
        """Return the device that the event is bound to."""
        return event.index

    def is_recorded(self, event: RecordingEvent) -> bool:
        """Say whether the event was ever recorded."""
        return event.gates is not None

    def record_event(self, event: RecordingEvent, stream: RecordingStream) -> None:
        """Put the event behind what *stream* is behind, and log that."""
        event.index, event.gates = self.stream_index(stream), stream.gates
        self._note("record_event", stream, event)

    def wait_event(self, stream: RecordingStream, event: RecordingEvent) -> None:
        """Put *stream* behind what the event is behind, and log that."""
        stream.gates = _closed(stream.gates | (event.gates or _FREE))
        self._note("wait_event", stream, event)

    def query_event(self, event: RecordingEvent) -> bool:
        """Say whether every latch before the event is released."""
        self._note("query_event", None, event)
        return not _closed(event.gates or _FREE)

    def synchronize_event(self, event: RecordingEvent) -> None:
        """Block until every latch before the event is released."""
        self._note("synchronize_event", None, event)
        for gate in event.gates or _FREE:
            gate.wait()

    def synchronize_device(self, index: int) -> None:
        """Block until every latch on the device is released."""
        self._note("synchronize_device", None)
        for stream in list(self._streams):
            if self.stream_index(stream) == index:
                for gate in stream.gates:
                    gate.wait()

    def record_stream(self, tensor: torch.Tensor, stream: RecordingStream) -> None:
        """Log that; memory is freed when nobody refers to it."""
        self._note("record_stream", stream)

    def hold(self, stream: RecordingStream) -> RecordingLatch:
        """Put what comes next in *stream* behind a latch."""
        gate = threading.Event()
        stream.gates = _closed(stream.gates) | {gate}
        return RecordingLatch(gate)

    def _note(self, operation: str, stream: RecordingStream | None, event: RecordingEvent | None = None) -> None:
        self.log.append(
            Call(operation, None if stream is None else stream.stream_id, None if event is None else event.number)
        )


def _closed(gates: Gates) -> Gates:
    return frozenset(gate for gate in gates if not gate.is_set())


__all__ = ["Call", "Recorder", "RecordingBackend", "RecordingEvent", "RecordingLatch", "RecordingStream"]
