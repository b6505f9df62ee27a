"""NVIDIA: what ``torch.cuda`` has beyond ``torch.accelerator``.

External streams, interprocess and blocking events, priorities as a range, capture, device properties.
"""

from __future__ import annotations

import os
import threading
from typing import ClassVar

import torch

from devstream import _compat
from devstream.abc import Capability, DeviceSpec
from devstream.backends.accelerator import AcceleratorBackend, AcceleratorStream
from devstream.exceptions import CaptureError, IpcHandleError, StreamTypeError
from devstream.typing import HasCudaStream


class CudaStream(AcceleratorStream):
    """A CUDA stream; other libraries take it through ``__cuda_stream__``."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Answer CUDA's stream protocol, version 0, with the native handle."""
        return (0, self.native_handle)

    @property
    def cuda_stream(self) -> int:
        """The native handle under torch.cuda's name for it."""
        return self.native_handle


class CudaBackend(AcceleratorBackend):
    """Streams and events of NVIDIA devices.

    A plain event is the generic ``torch.Event``, the cheap one. An event that keeps time, sleeps or crosses
    processes is a ``torch.cuda.Event``: only that class honours ``blocking=`` and ``interprocess=``, and two
    classes can't be measured against each other, so every timed event is of one.
    """

    name: ClassVar[str] = "cuda"
    stream_base: ClassVar[type[AcceleratorStream]] = CudaStream
    vendor: ClassVar[str] = "nvidia"

    def __init__(self) -> None:
        super().__init__()
        self._pools: dict[int, dict[int, int]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}
        self._pool_lock = threading.Lock()

    def _device_type(self) -> str:
        return "cuda"

    def unavailable_reason(self) -> str | None:
        """Say why: another build of torch, or no device."""
        if torch.version.hip is not None:
            return f"torch {torch.__version__} is built for ROCm {torch.version.hip}; use the backend 'rocm'"
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
        return self._device_reason("NVIDIA", "nvidia-smi")

    def _device_reason(self, maker: str, tool: str) -> str | None:
        if torch.cuda.is_available():
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
        return f"torch {torch.__version__} finds no {maker} device{hidden}; see whether `{tool}` lists one"

    def capabilities(self, index: int) -> Capability:
        """Return what every CUDA device can do."""
        return _CUDA | Capability.PEER_ACCESS if self.device_count() > 1 else _CUDA

    def stream_capabilities(self, stream: AcceleratorStream) -> Capability:
        """Return the same for all: an external CUDA stream can do what one of torch's can."""
        return self.capabilities(stream.device_index)

    def priority_range(self, index: int) -> tuple[int, int]:
        """Return torch's range, (0, -3) on today's devices; the driver itself has more levels."""
        limits = self._ranges.get(index)
        if limits is None:
            with torch.cuda.device(index):
                lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # a static method; torch's stub says otherwise
            limits = self._ranges[index] = (int(lowest), int(highest))
        return limits

    def stream_priority(self, stream: AcceleratorStream) -> int:
        """Return the priority that the driver granted."""
        return int(_as_cuda(stream).priority)

    def query_stream(self, stream: AcceleratorStream) -> bool:
        """Ask the stream; refused during a capture, which the question would end."""
        self._not_while_capturing("query", stream)
        return torch.Stream.query(stream)

    def synchronize_stream(self, stream: AcceleratorStream) -> None:
        """Wait for the stream; refused during a capture, which the wait would end."""
        self._not_while_capturing("synchronize", stream)
        torch.Stream.synchronize(stream)

    def query_event(self, event: torch.Event) -> bool:
        """Ask the event; refused during a capture, which the question would end."""
        self._not_while_capturing("event.query", event)
        return event.query()

    def synchronize_event(self, event: torch.Event) -> None:
        """Wait for the event; refused during a capture, which the wait would end."""
        self._not_while_capturing("event.synchronize", event)
        event.synchronize()

    def is_capturing(self) -> bool:
        """Ask CUDA about the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def _not_while_capturing(self, operation: str, item: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(operation=operation, stream=item)

    def spec(self, index: int) -> DeviceSpec:
        """Return the device's properties."""
        facts = torch.cuda.get_device_properties(index)
        return DeviceSpec(
            device=torch.device("cuda", index),
            name=facts.name,
            vendor=self.vendor,
            arch=self._arch(index),
            memory_bytes=facts.total_memory,
            runtime=self._runtime(),
            priority_range=self.priority_range(index),
            hardware_queues=self.hardware_queues(),
        )

    def _arch(self, index: int) -> str:
        major, minor = torch.cuda.get_device_capability(index)
        return f"sm_{major}{minor}"

    def _runtime(self) -> str:
        return f"CUDA {torch.version.cuda}"

    def hardware_queues(self) -> int:
        """Return how many streams of one priority run at once: all 32 of torch's pool did on an H200."""
        return 32

    # -- streams -----------------------------------------------------------------------------------------

    def default_stream(self, index: int) -> AcceleratorStream:
        """Return CUDA's default stream."""
        stream = self._defaults.get(index)
        if stream is None:
            stream = self._same_queue(torch.cuda.default_stream(index), external=False)
            self._defaults[index] = stream
        return stream

    def adopt_stream(self, native: object) -> AcceleratorStream:
        """Return our object for a native stream, an external one, or an object with ``__cuda_stream__``."""
        if isinstance(native, torch.Stream):
            stream = super().adopt_stream(native)
            return self._canonical(stream.native_handle, stream) if stream._external else stream
        if isinstance(native, HasCudaStream):
            version, handle = native.__cuda_stream__()
            if version != 0:
                raise StreamTypeError(
                    operation="a stream argument",
                    got=f"version {version} of __cuda_stream__",
                    expected="version 0",
                )
            return self.wrap_handle(handle, _device_of(native, self.current_index()), owner=native)
        raise StreamTypeError(operation="a stream argument", got=native, expected="a CUDA stream")

    def wrap_handle(self, handle: int, index: int, owner: object = None) -> AcceleratorStream:
        """Return the stream with this ``cudaStream_t``; 0 and 1 (legacy) are the default stream."""
        if handle in (0, 1):
            return self.default_stream(index)
        external = torch.cuda.get_stream_from_external(handle, torch.device("cuda", index))
        return self._canonical(handle, self._same_queue(external, external=True, owner=owner))

    def _canonical(self, handle: int, stream: AcceleratorStream) -> AcceleratorStream:
        """Return the pool's own stream where the handle is one of its, so that one queue is one key."""
        index = stream.device_index
        if handle == 0:
            return self.default_stream(index)
        if index not in self._pools:
            with self._pool_lock:
                self._pools[index] = self._pool_ids(index)
        known = self._pools[index].get(handle)
        if known is None:
            return stream
        found = _compat.stream_from_ids(self._stream_class, known, index, stream.device_type)
        found._owner = stream._owner
        return found

    def _pool_ids(self, index: int) -> dict[int, int]:
        """Return the id of every pool stream by its handle: one whole turn of each priority's pool."""
        ids: dict[int, int] = {}
        lowest, highest = self.priority_range(index)
        for priority in range(highest, lowest + 1):
            while True:
                stream = self.create_stream(index, priority=priority)
                if stream.native_handle in ids:
                    break  # one more than a turn would shift who gets which stream next; the order has no meaning
                ids[stream.native_handle] = stream.stream_id
        return ids

    def native_handle(self, stream: AcceleratorStream) -> int:
        """Return the ``cudaStream_t``; 0 is the default stream."""
        return _compat.native_handle(stream)

    def dlpack_stream(self, stream: AcceleratorStream) -> int:
        """Return the number for ``tensor.__dlpack__(stream=...)``: 1 is CUDA's default stream there."""
        return self.native_handle(stream) or 1

    # -- events ------------------------------------------------------------------------------------------

    def create_event(
        self, index: int | None, *, enable_timing: bool, blocking: bool, interprocess: bool
    ) -> torch.Event:
        """Return the class that can do what is asked (see the class's docstring)."""
        if enable_timing or blocking or interprocess:
            return torch.cuda.Event(  # type: ignore[no-untyped-call]
                enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )
        return super().create_event(index, enable_timing=False, blocking=False, interprocess=False)

    def is_recorded(self, event: torch.Event) -> bool | None:
        """Ask the real event: a ``torch.cuda.Event`` contains an unused generic one, which says no."""
        if isinstance(event, torch.cuda.Event):
            return bool(event.cuda_event)
        return super().is_recorded(event)

    def ipc_handle(self, event: torch.Event) -> bytes:
        """Return the driver's 64 bytes."""
        return bytes(event.ipc_handle())

    def open_ipc_event(self, index: int, handle: bytes) -> torch.Event:
        """Open an event that another process made."""
        try:
            event: torch.Event = torch.cuda.Event.from_ipc_handle(  # type: ignore[no-untyped-call]
                torch.device("cuda", index), handle
            )
        except RuntimeError as error:
            raise IpcHandleError(device=f"cuda:{index}", cause=str(error).splitlines()[0]) from error
        return event

    def _opened(self) -> bool:
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


_CUDA = (
    Capability.TIMING
    | Capability.BLOCKING_EVENTS
    | Capability.IPC_EVENTS
    | Capability.SIDE_STREAMS
    | Capability.PRIORITIES
    | Capability.NATIVE_HANDLE
    | Capability.EXTERNAL_STREAMS
    | Capability.RECORD_STREAM
    | Capability.PINNED_MEMORY
    | Capability.ASYNC_COPY
    | Capability.GRAPH_CAPTURE
    | Capability.GRAPH_TIMING
)


def _as_cuda(stream: torch.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _device_of(native: object, current: int) -> int:
    """Return the device that a foreign stream names, in the ways that libraries do; else the current one."""
    for name in ("device_id", "device"):
        value = getattr(native, name, None)
        for found in (value, getattr(value, "device_id", None), getattr(value, "id", None)):
            if isinstance(found, int) and found >= 0:
                return found
    return current
