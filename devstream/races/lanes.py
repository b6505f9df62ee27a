"""Which lane a stream is, and which lane the work on a tensor goes to."""

from __future__ import annotations

from typing import Any

import torch

from devstream import _registry, _streams
from devstream._compat import gpu_trace
from devstream._objects import as_stream
from devstream.abc import AnyBackend, Capability
from devstream.exceptions import DevstreamError
from devstream.races.model import LaneKind
from devstream.races.order import HOST, Order


class Lanes:
    """The lanes of the streams that were met so far."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._by_stream: dict[Any, int] = {}  # Any: streams of every backend, which hash and equal by queue
        self._by_handle: dict[tuple[str, int, int], int] = {}
        self._by_cpu_ids: dict[tuple[int, int], int] = {}
        self._by_ids: dict[tuple[int, int, int], int] = {}
        self._backends: dict[str, AnyBackend] = {}
        #: Whether CPU tensors are a device's, and not the host's side of an accelerator's work.
        self.cpu_is_device = _registry.default_backend().device_type == "cpu"
        self._cpu = self.backend("cpu")
        self._cpu_class = type(self._cpu.current_stream(None))

    def backend(self, device_type: str) -> AnyBackend:
        """Return the backend that serves *device_type*."""
        found = self._backends.get(device_type)
        if found is None:
            found = self._backends[device_type] = _registry.for_type(device_type)
        return found

    def of_stream(self, stream: Any) -> int:
        """Return the lane of *stream*, ours or native."""
        if type(stream) is self._cpu_class:
            return self._of_cpu(stream)
        lane = self._by_stream.get(stream)
        if lane is None:
            backend, own = as_stream(stream)
            if type(own) is self._cpu_class:
                return self._of_cpu(own)
            lane = self._by_stream[stream] = self._make(backend, own)
        return lane

    def _of_cpu(self, stream: torch.Stream) -> int:
        # By its numbers, which never come again: a stream that the program dropped must not live on here.
        ids = (stream.device_index, stream.stream_id)
        lane = self._by_cpu_ids.get(ids)
        if lane is None:
            lane = self._by_cpu_ids[ids] = self._make(self._cpu, stream)
        return lane

    def stream_of(self, lane: int) -> Any:
        """Return a stream of *lane*; None where none was met, and for those of the CPU."""
        return next((stream for stream, number in self._by_stream.items() if number == lane), None)

    def _make(self, backend: AnyBackend, stream: Any) -> int:
        index = backend.stream_index(stream)
        handle = _handle(backend, stream)
        key = None if handle is None else (backend.device_type, index, handle)
        if key is not None and key in self._by_handle:
            return self._by_handle[key]
        device = f"{backend.device_type}:{index}"
        default = backend.stream_key(stream) == backend.stream_key(backend.default_stream(index))
        lane = self._order.add_lane(
            LaneKind.STREAM, _name(backend, stream, device, default), device, default=default
        )
        if key is not None:
            self._by_handle[key] = lane
        return lane

    def of_handle(self, device_type: str, index: int, handle: int) -> int:
        """Return the lane of the stream with a native handle."""
        key = (device_type, index, handle)
        lane = self._by_handle.get(key)
        if lane is None:
            device = f"{device_type}:{index}"
            name = f"the default stream of {device}" if handle == 0 else f"stream {handle:#x} of {device}"
            lane = self._order.add_lane(LaneKind.STREAM, name, device, default=handle == 0)
            self._by_handle[key] = lane
        return lane

    def of_tensor(self, tensor: torch.Tensor) -> int:
        """Return the lane that work on *tensor*, issued now, goes to; the host's for host memory."""
        if tensor.is_cpu:
            stream = self._cpu.current_stream(None)
            if not self.cpu_is_device and self._cpu.stream_key(stream)[2] == 0:
                return HOST
            return self._of_cpu(stream)
        if tensor.is_cuda and gpu_trace.current_stream_ids is not None:
            ids = gpu_trace.current_stream_ids(tensor.get_device())
            lane = self._by_ids.get(ids)
            if lane is None:
                lane = self._by_ids[ids] = self._current(tensor.device)
            return lane
        return self._current(tensor.device)

    def _current(self, device: torch.device) -> int:
        try:
            backend = self.backend(device.type)
        except DevstreamError:  # a device that nobody serves has no streams of ours to race
            return HOST
        return self.of_stream(backend.current_stream(device.index))

    def current_cpu(self) -> int:
        """Return the lane of the calling thread's current stream of the CPU."""
        return self.of_stream(self._cpu.current_stream(None))


def _handle(backend: AnyBackend, stream: Any) -> int | None:
    if Capability.NATIVE_HANDLE not in backend.stream_capabilities(stream):
        return None
    try:
        return backend.native_handle(stream)
    except DevstreamError:
        return None


def _name(backend: AnyBackend, stream: Any, device: str, default: bool) -> str:
    if default:
        return f"the default stream of {device}"
    key = backend.stream_key(stream)
    for (owner, _, purpose), named in list(_streams._named.items()):
        if owner is backend and backend.stream_key(named) == key:
            return f'the "{purpose}" stream of {device}'
    return f"stream {key[2]} of {device}"


__all__ = ["Lanes"]
