"""Takes in what torch itself tells of a GPU: native records and waits, autograd's, those of collectives."""

from __future__ import annotations

from devstream.races.checker import Checker
from devstream.races.collectives import Collectives
from devstream.races.lanes import Lanes
from devstream.races.order import HOST
from devstream.races.sites import here


class GpuListener:
    """A listener of `devstream._compat.gpu_trace.GpuTrace`, for devices of one type."""

    def __init__(self, device_type: str, checker: Checker, lanes: Lanes, collectives: Collectives) -> None:
        self._type = device_type
        self._checker, self._order = checker, checker.order
        self._lanes, self._collectives = lanes, collectives

    def _index(self) -> int:
        # torch makes the device of the stream or event the current one around each of these calls.
        return self._lanes.backend(self._type).current_index()

    def _lane(self, stream: int) -> int:
        return self._lanes.of_handle(self._type, self._index(), stream)

    def gpu_record(self, event: int, stream: int) -> None:
        """A record on the driver's stream *stream*."""
        with self._checker.lock:
            lane = self._lane(stream)
            self._collectives.recorded_on(lane)
            self._order.record((self._type, event), lane, here())

    def gpu_wait(self, event: int, stream: int) -> None:
        """A wait of the driver's stream *stream*."""
        with self._checker.lock:
            self._order.wait(self._lane(stream), (self._type, event), here())

    def gpu_forget_event(self, event: int) -> None:
        """The event was destroyed; its handle may come again."""
        with self._checker.lock:
            self._order.forget((self._type, event))

    def gpu_sync_event(self, event: int) -> None:
        """The host waited for an event."""
        with self._checker.lock:
            self._order.host_waits_event((self._type, event), here())

    def gpu_sync_stream(self, stream: int) -> None:
        """The host waited for a stream."""
        with self._checker.lock:
            self._order.wait_lane(HOST, self._lane(stream))

    def gpu_sync_device(self) -> None:
        """The host waited for the current device."""
        with self._checker.lock:
            self._order.host_waits_device(f"{self._type}:{self._index()}")

    def gpu_free(self, pointer: int) -> None:
        """The allocator took a block back."""
        self._checker.free_pointer(pointer)


__all__ = ["GpuListener"]
