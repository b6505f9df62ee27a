"""The protocol: what users pass (Protocols) and what the author of a backend writes (one ABC).

`StreamLike` and `EventLike` hold only what torch's, every vendor's and our own classes have in common, so
that all of them type-check. The verbs that order work belong to `Backend`, which is generic in its own stream
and event. A backend has twelve abstract methods; everything that not every vendor has is a `Capability`.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch

from devstream.exceptions import StreamTypeError, UnsupportedError
from devstream.typing import HasCudaStream


@runtime_checkable
class StreamLike(Protocol):
    """A queue of device work: ``torch.Stream``, ``torch.cuda.Stream``, ours, or a plug-in's."""

    @property
    def device(self) -> torch.device:
        """Return the device whose work this queues."""
        ...

    def query(self) -> bool:
        """Say whether all work is done."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work is done."""
        ...


@runtime_checkable
class EventLike(Protocol):
    """A point in a stream: ``torch.Event``, ``torch.cuda.Event``, ours, or a plug-in's."""

    def query(self) -> bool:
        """Say whether the last record has happened."""
        ...

    def synchronize(self) -> None:
        """Block the host until the last record has happened."""
        ...


#: What every verb takes for a stream.
StreamArg: TypeAlias = StreamLike | HasCudaStream


class Capability(enum.Flag):
    """What a device or a stream can do beyond the twelve methods of `Backend`.

    Ask for one by name, ``Capability.TIMING in devstream.capabilities(device)``; what lacks it raises
    `UnsupportedError`. A stream may have fewer than its device: an external stream of some vendors
    can't be recorded.
    """

    TIMING = enum.auto()  #: events can keep time: ``Event(enable_timing=True)``, ``elapsed_time``
    BLOCKING_EVENTS = enum.auto()  #: ``Event(blocking=True).synchronize()`` sleeps instead of spinning
    IPC_EVENTS = enum.auto()  #: ``Event(interprocess=True)`` can be opened by another process
    SIDE_STREAMS = enum.auto()  #: a new stream is a queue of its own, not the default one again
    PRIORITIES = enum.auto()  #: more than one priority
    NATIVE_HANDLE = enum.auto()  #: ``stream.native_handle`` is the vendor's handle
    EXTERNAL_STREAMS = enum.auto()  #: ``devstream.wrap(handle, device)``
    RECORD_STREAM = enum.auto()  #: the allocator can be told that another stream uses a tensor
    PINNED_MEMORY = enum.auto()  #: page-locked host memory, without which a host copy blocks
    ASYNC_COPY = enum.auto()  #: a copy on a side stream runs beside work on another stream
    GRAPH_CAPTURE = enum.auto()  #: the work of a stream can be captured and replayed
    GRAPH_TIMING = enum.auto()  #: events inside a captured graph keep time
    PEER_ACCESS = enum.auto()  #: devices of this type may reach each other's memory


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What a device is, in plain data; the same fields on every vendor.

    Attributes:
        device: for instance ``cuda:0``.
        name: the product's name.
        vendor: ``"nvidia"``, ``"amd"``, ``"intel"``, ``"apple"``, ``"cpu"``, or the plug-in's word.
        arch: the vendor's name of the architecture, for instance ``"sm_90"`` or ``"gfx942"``.
        memory_bytes: size of the device's memory; 0 where it can't be told.
        runtime: the vendor runtime's version, as text.
        priority_range: lowest and highest priority of a stream; lower numbers run first, as in torch.
        hardware_queues: streams that the hardware runs at once; 0 where it isn't known.
    """

    device: torch.device
    name: str
    vendor: str
    arch: str
    memory_bytes: int
    runtime: str
    priority_range: tuple[int, int]
    hardware_queues: int


StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")


class Backend(abc.ABC, Generic[StreamT, EventT]):
    """One vendor's, or one device type's, streams and events.

    A backend deals in its own native objects; the verbs of devstream turn whatever a user passes into those
    first (`adopt_stream`) and report to the seam. So a method here neither checks its arguments' devices
    nor observes. An index is always a number from 0 to ``device_count() - 1``.

    Attributes:
        name: the backend's name, as in the entry point and in ``DEVSTREAM_BACKEND``.
        device_type: the ``torch.device`` type that it serves.
        context_reports: ``with s:`` over its streams reports the switch to the seam by itself.
        rerecord_overwrites: recording an event again before its last record has happened is defined; where it
            isn't, devstream takes a fresh native event for each record.
        works_in_threads: a stream's compiled work is done by a thread of its own, so what it makes is there only
            when that thread is done; `launch` hands work to it.
    """

    name: ClassVar[str]
    device_type: str
    context_reports: ClassVar[bool] = False
    rerecord_overwrites: ClassVar[bool] = True
    works_in_threads: ClassVar[bool] = False

    # -- the twelve ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def unavailable_reason(self) -> str | None:
        """Say why this backend can't run here, or None where it can."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """Return the number of devices."""

    @abc.abstractmethod
    def create_stream(self, index: int, *, priority: int = 0) -> StreamT:
        """Return a new stream of device *index*; *priority* is already clamped to the device's range."""

    @abc.abstractmethod
    def current_stream(self, index: int | None = None) -> StreamT:
        """Return the calling thread's current stream of device *index*, None being the current device."""

    @abc.abstractmethod
    def default_stream(self, index: int) -> StreamT:
        """Return the stream that work goes to where nobody chose one."""

    @abc.abstractmethod
    def set_stream(self, stream: StreamT) -> None:
        """Make *stream*, and its device, current in the calling thread."""

    @abc.abstractmethod
    def create_event(
        self, index: int | None, *, enable_timing: bool, blocking: bool, interprocess: bool
    ) -> EventT:
        """Return a new native event; where *index* is None the first record binds it to a device."""

    @abc.abstractmethod
    def record_event(self, event: EventT, stream: StreamT) -> None:
        """Let *event* happen when all work issued to *stream* so far is done; replaces an older record."""

    @abc.abstractmethod
    def wait_event(self, stream: StreamT, event: EventT) -> None:
        """Hold later work of *stream* until the last record of *event* has happened; never recorded: no-op.

        The stream may be on another device of this backend than the event.
        """

    @abc.abstractmethod
    def query_event(self, event: EventT) -> bool:
        """Say whether the last record of *event* has happened; True where it was never recorded."""

    @abc.abstractmethod
    def synchronize_event(self, event: EventT) -> None:
        """Block the host until the last record of *event* has happened."""

    @abc.abstractmethod
    def synchronize_device(self, index: int) -> None:
        """Block the host until all work of every stream of device *index* is done."""

    # -- with a default built on the twelve ------------------------------------------------------------

    def capabilities(self, index: int) -> Capability:
        """Return what device *index* can do; by default nothing beyond the twelve methods."""
        return Capability(0)

    def stream_capabilities(self, stream: StreamT) -> Capability:
        """Return what *stream* can do; by default what its device can."""
        return self.capabilities(self.stream_index(stream))

    def not_automatic_reason(self) -> str | None:
        """Say why this backend is used only where it is asked for by name, or None."""
        return None

    def stream_index(self, stream: StreamT) -> int:
        """Return the device index of *stream*."""
        return getattr(stream, "device").index or 0  # noqa: B009 - StreamT is not bound to a class

    def stream_key(self, stream: StreamT) -> tuple[str, int, int]:
        """Return what identifies the queue: two streams are the same queue exactly when their keys are equal."""
        return (self.device_type, self.stream_index(stream), int(getattr(stream, "stream_id")))  # noqa: B009

    def current_index(self) -> int:
        """Return the index of the calling thread's current device."""
        return self.stream_index(self.current_stream(None))

    def priority_range(self, index: int) -> tuple[int, int]:
        """Return the lowest and the highest priority of device *index*; lower numbers run first."""
        return (0, 0)

    def stream_priority(self, stream: StreamT) -> int:
        """Return the priority that *stream* was granted."""
        return 0

    def adopt_stream(self, native: object) -> StreamT:
        """Return the stream of ours that is the same queue as *native*, or raise ``StreamTypeError``.

        By default only what this backend hands out itself is a stream of ours.
        """
        device = getattr(native, "device", None)
        if isinstance(native, type(self.default_stream(0))) and getattr(device, "type", "") == self.device_type:
            return native
        raise UnsupportedError(
            operation="using a foreign stream",
            backend=self.name,
            capability="adopt_stream",
            alternative="make the stream with devstream.Stream(device)",
        )

    def adopt_event(self, native: object) -> EventT:
        """Return the event of ours that is *native*, or raise ``StreamTypeError``."""
        raise StreamTypeError(
            operation="an event argument", got=native, expected=f"a devstream.Event of backend {self.name!r}"
        )

    def wrap_handle(self, handle: int, index: int, owner: object = None) -> StreamT:
        """Return the stream of device *index* with this native handle, keeping *owner* alive with it."""
        raise self.lacks(Capability.EXTERNAL_STREAMS, "wrapping a native handle")

    def native_handle(self, stream: StreamT) -> int:
        """Return the vendor's handle of *stream*."""
        raise self.lacks(Capability.NATIVE_HANDLE, "native_handle")

    def query_stream(self, stream: StreamT) -> bool:
        """Say whether all work issued to *stream* is done."""
        return self.query_event(self._mark(stream))

    def synchronize_stream(self, stream: StreamT) -> None:
        """Block the host until all work issued to *stream* is done."""
        self.synchronize_event(self._mark(stream))

    def is_recorded(self, event: EventT) -> bool | None:
        """Say whether a native event was ever recorded; None where the vendor can't tell."""
        return None

    def event_index(self, event: EventT) -> int | None:
        """Return the index of the device that a native event is bound to; None while it has none."""
        device = getattr(event, "device", None)
        return device.index if isinstance(device, torch.device) else None

    def elapsed_ms(self, start: EventT, end: EventT) -> float:
        """Return the milliseconds between two events that have happened."""
        raise self.lacks(Capability.TIMING, "elapsed_time")

    def dlpack_stream(self, stream: StreamT) -> int:
        """Return the number that ``tensor.__dlpack__(stream=...)`` takes for *stream*."""
        raise self.lacks(Capability.NATIVE_HANDLE, "dlpack_stream")

    def ipc_handle(self, event: EventT) -> bytes:
        """Return what another process needs to open *event*."""
        raise self.lacks(Capability.IPC_EVENTS, "ipc_handle")

    def open_ipc_event(self, index: int, handle: bytes) -> EventT:
        """Return the event that another process made."""
        raise self.lacks(Capability.IPC_EVENTS, "from_ipc_handle")

    def record_stream(self, tensor: torch.Tensor, stream: StreamT) -> None:
        """Tell the allocator that *stream* uses *tensor*, so that its memory isn't handed out before."""
        raise self.lacks(Capability.RECORD_STREAM, "record_stream")

    def allocation_stream(self, tensor: torch.Tensor) -> StreamT | None:
        """Return the stream that *tensor*'s memory belongs to; None where that isn't known."""
        return None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: StreamT) -> None:
        """Issue ``destination.copy_(source)`` to *stream*, without blocking the host where that is possible."""

        def task() -> None:
            with torch.no_grad():
                destination.copy_(source, non_blocking=True)

        self._run(task, stream)

    def clear_error(self, stream: StreamT) -> None:
        """Forget an error of *stream*'s work that was reported already; by default a stream keeps none."""

    def launch(self, task: Callable[[], None], stream: StreamT) -> None:
        """Let *task*, which issues or does work, be *stream*'s next.

        By default it is run here, with *stream* current. Where `works_in_threads`, this returns at once, and what
        *task* raises is raised by whoever waits for the stream.
        """
        self._run(task, stream)

    def hold(self, stream: StreamT) -> Latch:
        """Keep work issued to *stream* from now on from happening until the returned latch is released."""
        raise UnsupportedError(
            operation="holding a stream",
            backend=self.name,
            capability="hold",
            alternative="override Backend.hold so that the conformance kit can look at a busy stream",
        )

    def capture(
        self, issue: Callable[[], object], stream: StreamT, *, pool: object = None
    ) -> DeviceGraph[StreamT]:
        """Return the work that *issue* issues to *stream* as one graph. Nothing of it runs until it is replayed.

        A stream that waits for an event which was recorded in the capture belongs to it from there on, and has to
        be joined: *stream* waits for an event behind its last work. What *issue* allocates comes from the graph's
        own pool. Host code of *issue* runs once, now.

        Args:
            issue: what issues the work; *stream* is current in it.
            stream: not the default stream.
            pool: `DeviceGraph.pool` of an earlier graph, whose memory this one may use again where nothing of it
                is referred to any more. Graphs that share one must not be replayed at the same time.

        Raises:
            CaptureError: a stream was not joined, or *issue* asked for something that has to run now.
        """
        raise self.lacks(Capability.GRAPH_CAPTURE, "capture")

    def is_capturing(self) -> bool:
        """Say whether the calling thread's current stream is being captured."""
        return False

    def before_capture(self, streams: Sequence[StreamT]) -> None:
        """Do what has to be done on each of *streams* before it is captured; by default nothing."""

    def spec(self, index: int) -> DeviceSpec:
        """Return what device *index* is."""
        return DeviceSpec(
            device=torch.device(self.device_type, index),
            name=self.name,
            vendor=self.name,
            arch="",
            memory_bytes=0,
            runtime="",
            priority_range=self.priority_range(index),
            hardware_queues=0,
        )

    def lacks(self, capability: Capability, operation: str) -> UnsupportedError:
        """Return the error for an operation whose capability this backend doesn't have."""
        return UnsupportedError(
            operation=operation,
            backend=self.name,
            capability=f"Capability.{capability.name}",
            alternative="ask devstream.capabilities(device) before, and take another way where it is absent",
        )

    def _run(self, task: Callable[[], None], stream: StreamT) -> None:
        """Run *task* here, with *stream* current."""
        previous = self.current_stream(None)
        here = self.current_stream(self.stream_index(stream))
        try:
            self.set_stream(stream)  # inside: a signal's handler may raise after the switch
            task()
        finally:
            # Both: *stream* may be on another device, whose own current stream must come back as well.
            restore_streams([(self, here), (self, previous)])

    def _mark(self, stream: StreamT) -> EventT:
        event = self.create_event(
            self.stream_index(stream), enable_timing=False, blocking=False, interprocess=False
        )
        self.record_event(event, stream)
        return event


class Latch(Protocol):
    """Holds a stream until released; made by `Backend.hold`."""

    def release(self) -> None:
        """Let the stream go on. May be called from any thread, and more than once."""
        ...


_ReplayStreamT_contra = TypeVar("_ReplayStreamT_contra", contravariant=True)


class DeviceGraph(Protocol[_ReplayStreamT_contra]):
    """Captured work; made by `Backend.capture`."""

    @property
    def pool(self) -> object:
        """What a later capture takes to share this graph's memory."""
        ...

    def replay(self, stream: _ReplayStreamT_contra) -> None:
        """Issue the work to *stream*, as its next; what it reads and writes is the memory that was captured."""
        ...


#: A backend whose stream and event classes don't matter to the reader.
AnyBackend = Backend[Any, Any]  # Any: the registry and the verbs serve every pair of classes

__all__ = [
    "AnyBackend",
    "Backend",
    "Capability",
    "DeviceGraph",
    "DeviceSpec",
    "EventLike",
    "Latch",
    "StreamArg",
    "StreamLike",
]


def restore_streams(before: Sequence[tuple[AnyBackend, Any]]) -> None:  # Any: the backend's own class
    """Make each stream of *before* current again, in this order, whatever raises meanwhile.

    A signal's handler may raise between any two calls, and what one `Backend.set_stream` raises must not keep
    another stream current.
    """
    (backend, stream), *others = before
    try:
        backend.set_stream(stream)
    except BaseException:
        backend.set_stream(stream)  # once more: it may have been interrupted on the way
        raise
    finally:
        if others:
            restore_streams(others)
