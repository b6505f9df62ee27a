"""Any device that ``torch.accelerator`` serves: XPU, MPS, MTIA, NPU, a PrivateUse1 plug-in; the base of CUDA's.

Only ``torch.Stream``, ``torch.Event`` and ``torch.accelerator`` are used, through which torch reaches every such
device. What a device type can do beyond that is a row of `_FACTS`, and for a type without a row it is tried once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from devstream import _compat
from devstream._compat import graphs
from devstream._objects import Stream
from devstream.abc import Backend, Capability, DeviceSpec, Latch
from devstream.backends import _native_graph
from devstream.backends._cuda_latch import MemoryLatch
from devstream.backends._native_graph import AcceleratorGraph
from devstream.exceptions import ForkedProcessError, StreamTypeError


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one device type can do. Source: torch's guard classes of each vendor, releases 2.11 and 2.13."""

    vendor: str
    capabilities: Capability
    priority_range: tuple[int, int] = (0, 0)
    stream_query: bool = True  # False: the guard overrides neither query nor synchronize of a stream
    external_can_order: bool = True  # False: an external stream can be entered but neither waits nor records


_ORDINARY = (
    Capability.TIMING
    | Capability.SIDE_STREAMS
    | Capability.RECORD_STREAM
    | Capability.PINNED_MEMORY
    | Capability.ASYNC_COPY
)

_GRAPHS = Capability.GRAPH_CAPTURE if graphs.HAS_ACCELERATOR_GRAPH else Capability(0)

_FACTS: dict[str, _Facts] = {
    # SYCL queues; native_handle is the address of a C++ sycl::queue. Two pools of 32, so priorities 0 and -1.
    # Graphs through torch.accelerator.Graph, which Intel's build implements; not run on hardware here.
    "xpu": _Facts("intel", _ORDINARY | Capability.NATIVE_HANDLE | Capability.PRIORITIES | _GRAPHS, (0, -1)),
    # One stream: torch.Stream("mps") is the default one each time, and it can't be queried itself.
    "mps": _Facts("apple", Capability.TIMING, stream_query=False),
    "mtia": _Facts("meta", Capability.TIMING | Capability.SIDE_STREAMS),
    # The docstring of torch_npu's ExternalStream lists nearly all methods as unsupported.
    "npu": _Facts("huawei", _ORDINARY, external_can_order=False),
}


#: How many streams `AcceleratorBackend.current_stream` remembers.
_SEEN_LIMIT = 1024


#: What a forked child may still ask: attributes, and answers that need no driver.
_WITHOUT_DEVICE = {
    "context_reports",
    "device_type",
    "lacks",
    "name",
    "not_automatic_reason",
    "rerecord_overwrites",
    "stream_index",
    "stream_key",
    "unavailable_reason",
}


class AcceleratorStream(Stream):
    """A native stream of an accelerator; ``with s:`` is torch's own, unwrapped."""

    #: What must live as long as this stream: the object of another library that it was made from.
    _owner: object = None
    _external: bool = False


class AcceleratorBackend(Backend[AcceleratorStream, torch.Event]):
    """Streams and events of torch's current accelerator."""

    name: ClassVar[str] = "accelerator"
    stream_base: ClassVar[type[AcceleratorStream]] = AcceleratorStream

    def __init__(self) -> None:
        self.device_type = self._device_type()
        self._stream_class: type[AcceleratorStream] = type(
            self.stream_base.__name__, (self.stream_base,), {"_backend": self, "__module__": __name__}
        )
        self._defaults: dict[int, AcceleratorStream] = {}
        self._seen: dict[torch.Stream, AcceleratorStream] = {}
        self._tried: _Facts | None = None
        self._stand_in: str | None = None
        self._torch_type: int | None = None
        self._opened_at_fork = False
        self._lends: bool | None = None
        os.register_at_fork(before=self._before_fork, after_in_child=self._after_fork)

    def _device_type(self) -> str:
        return _compat.default_accelerator_type() or "accelerator"

    # -- what there is -----------------------------------------------------------------------------------

    def unavailable_reason(self) -> str | None:
        """Say why: no accelerator, or one whose events record nothing."""
        if _compat.default_accelerator_type() is None:
            return f"torch {torch.__version__} finds no accelerator"
        if self._stand_in is None:
            # Once: it waits for a stream, and whoever asks later may be holding that one.
            self._stand_in = self._stand_in_reason() or ""
        return self._stand_in or None

    def _stand_in_reason(self) -> str | None:
        """Refuse a device whose guard is a stub: its waits would order nothing, in silence."""
        try:
            event = torch.Event(device=self.device_type)
            event.record(torch.accelerator.current_stream())
            event.synchronize()
        except (RuntimeError, NotImplementedError) as error:
            return f"device type {self.device_type!r} has no working events: {str(error).splitlines()[0]}"
        if not _compat.event_was_recorded(event):
            return f"the events of device type {self.device_type!r} record nothing"
        return None

    def device_count(self) -> int:
        """Return the number of visible devices."""
        return torch.accelerator.device_count()

    @property
    def _facts(self) -> _Facts:
        known = _FACTS.get(self.device_type)
        if known is not None:
            return known
        if self._tried is None:
            self._tried = _Facts(self.device_type, self._try_capabilities())
        return self._tried

    def _try_capabilities(self) -> Capability:
        """Find out what an unknown device type can do, by doing it once on its current device."""
        found = Capability(0)
        device = torch.device(self.device_type, torch.accelerator.current_device_index())
        here = torch.accelerator.current_stream()
        one, two = torch.Stream(device=device), torch.Stream(device=device)
        if len({one.stream_id, two.stream_id, here.stream_id}) == 3:
            found |= Capability.SIDE_STREAMS
        trials: tuple[tuple[Capability, Callable[[], object]], ...] = (
            (Capability.TIMING, lambda: _try_timing(device, here)),
            (Capability.NATIVE_HANDLE, lambda: _compat.native_handle(one)),
            (Capability.RECORD_STREAM, lambda: torch.empty(1, device=device).record_stream(one)),
            # From and to the device itself: another accelerator of the machine may own the pinned memory.
            (Capability.PINNED_MEMORY, lambda: torch.empty(1, pin_memory=True).to(device, non_blocking=True)),
        )
        for capability, trial in trials:
            try:
                trial()
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                continue  # what it raises is the answer: this device can't
            found |= capability
        return found

    def capabilities(self, index: int) -> Capability:
        """Return what the device type can do."""
        found = self._facts.capabilities
        return found | Capability.PEER_ACCESS if self.device_count() > 1 else found

    def stream_capabilities(self, stream: AcceleratorStream) -> Capability:
        """Return what *stream* can do; an external stream of some vendors can't even be recorded."""
        if stream._external and not self._facts.external_can_order:
            return Capability(0)
        return self.capabilities(self.stream_index(stream))

    def priority_range(self, index: int) -> tuple[int, int]:
        """Return the range of the device type."""
        return self._facts.priority_range

    def spec(self, index: int) -> DeviceSpec:
        """Return what torch.accelerator tells about the device, which isn't much."""
        return DeviceSpec(
            device=torch.device(self.device_type, index),
            name=f"{self.device_type} {index}",
            vendor=self._facts.vendor,
            arch="",
            memory_bytes=0,
            runtime=f"torch {torch.__version__}",
            priority_range=self.priority_range(index),
            hardware_queues=0,
        )

    # -- streams -----------------------------------------------------------------------------------------

    def create_stream(self, index: int, *, priority: int = 0) -> AcceleratorStream:
        """Return the next stream of torch's pool."""
        device = torch.device(self.device_type, index)
        return torch.Stream.__new__(self._stream_class, device=device, priority=priority)

    def current_stream(self, index: int | None = None) -> AcceleratorStream:
        """Return torch's current stream, as an object of ours."""
        native = torch.accelerator.current_stream(index)
        stream = self._seen.get(native)  # by torch's own equality, a third of the cost of a new object
        if stream is None:
            if len(self._seen) >= _SEEN_LIMIT:  # a pool has few streams, but there is no end to external ones
                self._seen.clear()
            stream = self._seen[native] = _compat.stream_from_ids(
                self._stream_class, native.stream_id, native.device_index, native.device_type
            )
        return stream

    def default_stream(self, index: int) -> AcceleratorStream:
        """Return the stream that a new thread starts on, which is how every vendor defines it."""
        stream = self._defaults.get(index)
        if stream is None:
            found: list[AcceleratorStream] = []
            thread = threading.Thread(target=lambda: found.append(self.current_stream(index)))
            thread.start()
            thread.join()
            stream = self._defaults[index] = found[0]
        return stream

    def set_stream(self, stream: AcceleratorStream) -> None:
        """Make *stream* and its device current."""
        torch.accelerator.set_stream(stream)

    def current_index(self) -> int:
        """Return torch's current device."""
        return torch.accelerator.current_device_index()

    def stream_index(self, stream: AcceleratorStream) -> int:
        """Return the device of *stream*."""
        return stream.device_index

    def adopt_stream(self, native: object) -> AcceleratorStream:
        """Return our object for a native stream's queue, keeping the native one alive."""
        if isinstance(native, AcceleratorStream) and native._backend is self:
            return native
        if not isinstance(native, torch.Stream) or native.device.type != self.device_type:
            raise StreamTypeError(
                operation="a stream argument", got=native, expected=f"a stream of {self.device_type!r}"
            )
        return self._same_queue(native, external="External" in type(native).__name__)

    def _same_queue(self, native: torch.Stream, *, external: bool, owner: object = None) -> AcceleratorStream:
        stream = _compat.stream_from_ids(
            self._stream_class, native.stream_id, native.device_index, native.device_type
        )
        stream._owner = native if owner is None else owner
        stream._external = external
        return stream

    def native_handle(self, stream: AcceleratorStream) -> int:
        """Return torch's native_handle."""
        if Capability.NATIVE_HANDLE not in self.capabilities(stream.device_index):
            raise self.lacks(Capability.NATIVE_HANDLE, "native_handle")
        return _compat.native_handle(stream)

    def query_stream(self, stream: AcceleratorStream) -> bool:
        """Ask the stream, or an event on it where the device type can't."""
        if not self._facts.stream_query:
            return super().query_stream(stream)
        return torch.Stream.query(stream)

    def synchronize_stream(self, stream: AcceleratorStream) -> None:
        """Wait for the stream, or for an event on it where the device type can't."""
        if not self._facts.stream_query:
            super().synchronize_stream(stream)
        else:
            torch.Stream.synchronize(stream)

    def synchronize_device(self, index: int) -> None:
        """Wait for all streams of the device."""
        torch.accelerator.synchronize(index)

    # -- events ------------------------------------------------------------------------------------------

    def create_event(
        self, index: int | None, *, enable_timing: bool, blocking: bool, interprocess: bool
    ) -> torch.Event:
        """Return a generic event, which knows neither *blocking* nor *interprocess*."""
        device = torch.device(self.device_type) if index is None else torch.device(self.device_type, index)
        return torch.Event(device=device, enable_timing=enable_timing)

    def adopt_event(self, native: object) -> torch.Event:
        """Take any native event of this device type."""
        if isinstance(native, torch.Event):
            device: torch.device | None = native.device
            if device is None or device.type == self.device_type:
                return native
        raise StreamTypeError(
            operation="an event argument", got=native, expected=f"an event of {self.device_type!r}"
        )

    def is_recorded(self, event: torch.Event) -> bool | None:
        """Say whether torch has made the real event, which it does at the first record."""
        return _compat.event_was_recorded(event)

    def record_event(self, event: torch.Event, stream: AcceleratorStream) -> None:
        """Record through the event: every class of event takes every class of stream there."""
        event.record(stream)

    def wait_event(self, stream: AcceleratorStream, event: torch.Event) -> None:
        """Wait through the event: ``torch.Stream.wait_event`` of a vendor's event waits for nothing."""
        event.wait(stream)

    def query_event(self, event: torch.Event) -> bool:
        """Ask the event."""
        return event.query()

    def synchronize_event(self, event: torch.Event) -> None:
        """Block the host until the event has happened."""
        event.synchronize()

    def elapsed_ms(self, start: torch.Event, end: torch.Event) -> float:
        """Return the device's own measure."""
        return start.elapsed_time(end)

    # -- memory ------------------------------------------------------------------------------------------

    def record_stream(self, tensor: torch.Tensor, stream: AcceleratorStream) -> None:
        """Tell torch's caching allocator."""
        if self._lends is None:
            self._lends = Capability.RECORD_STREAM in self.capabilities(stream.device_index)
        if not self._lends:
            raise self.lacks(Capability.RECORD_STREAM, "record_stream")
        tensor.record_stream(stream)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: AcceleratorStream) -> None:
        """Issue the copy to *stream*; it blocks the host only where host memory isn't pinned."""
        with stream, torch.no_grad():
            destination.copy_(source, non_blocking=True)

    # -- graphs ------------------------------------------------------------------------------------------

    def capture(
        self, issue: Callable[[], object], stream: AcceleratorStream, *, pool: object = None
    ) -> AcceleratorGraph:
        """Capture through torch, other threads left alone."""
        if Capability.GRAPH_CAPTURE not in self.capabilities(stream.device_index):
            raise self.lacks(Capability.GRAPH_CAPTURE, "capture")
        return _native_graph.capture(self, issue, stream, pool)

    # -- holding a stream --------------------------------------------------------------------------------

    def hold(self, stream: AcceleratorStream) -> Latch:
        """Hold *stream*, where the device type is ``cuda``: only there is a way that needs no vendor module."""
        if self.device_type == "cuda":
            return MemoryLatch(self.native_handle(stream), stream)
        return super().hold(stream)

    # -- fork --------------------------------------------------------------------------------------------

    def _opened(self) -> bool:
        """Say whether this process has opened the device."""
        return bool(self._defaults)

    def _before_fork(self) -> None:
        # Asked in the parent: in the child torch itself no longer says so.
        self._opened_at_fork = self._opened()

    def _after_fork(self) -> None:
        """Refuse every call in a child whose parent had opened the device; drivers crash or hang there."""
        if not self._opened_at_fork:
            return
        for operation in dir(Backend):
            if not operation.startswith("_") and operation not in _WITHOUT_DEVICE:
                self.__dict__[operation] = self._refusal(operation)

    def _refusal(self, operation: str) -> Callable[..., NoReturn]:
        device = f"device type {self.device_type!r}"

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:  # Any: stands in for every method
            raise ForkedProcessError(operation=operation, device=device)

        return refuse


def _try_timing(device: torch.device, stream: torch.Stream) -> None:
    one, two = torch.Event(device=device, enable_timing=True), torch.Event(device=device, enable_timing=True)
    one.record(stream)
    two.record(stream)
    two.synchronize()
    one.elapsed_time(two)
