"""What torch itself tells of events, waits, synchronisation and memory on a GPU, native calls included.

torch calls these hooks in C++, so they see what passes through no verb of ours: ``event.record()`` of a native
event, autograd's own waits, the events of collectives. Torch has them for CUDA and HIP, under ``torch.cuda``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Listener(Protocol):
    """Who is told. Handles are the driver's: ``cudaEvent_t``, ``cudaStream_t`` and device addresses."""

    def gpu_record(self, event: int, stream: int) -> None: ...

    def gpu_wait(self, event: int, stream: int) -> None: ...

    def gpu_forget_event(self, event: int) -> None: ...

    def gpu_sync_event(self, event: int) -> None: ...

    def gpu_sync_stream(self, stream: int) -> None: ...

    def gpu_sync_device(self) -> None: ...

    def gpu_free(self, pointer: int) -> None: ...


#: A registry of torch's -> the method that it calls.
_HOOKS = {
    "EventRecordCallbacks": "gpu_record",
    "EventWaitCallbacks": "gpu_wait",
    "EventDeletionCallbacks": "gpu_forget_event",
    "EventSynchronizationCallbacks": "gpu_sync_event",
    "StreamSynchronizationCallbacks": "gpu_sync_stream",
    "DeviceSynchronizationCallbacks": "gpu_sync_device",
    "MemoryDeallocationCallbacks": "gpu_free",
}


def has_gpu_trace() -> bool:
    """Say whether this torch has the hooks. Asked of the module and its names, since no release promises them."""
    if not hasattr(torch._C, "_activate_gpu_trace"):
        return False
    try:
        module = importlib.import_module("torch.cuda._gpu_trace")
    except ImportError:
        return False
    return all(isinstance(getattr(getattr(module, name, None), "callback_list", None), list) for name in _HOOKS)


class GpuTrace:
    """Tells one listener until `close`. Torch can't switch its side off again: what stays is an empty loop."""

    def __init__(self, listener: Listener) -> None:
        module = importlib.import_module("torch.cuda._gpu_trace")
        torch._C._activate_gpu_trace()
        self._added: list[tuple[list[Callable[..., Any]], Callable[..., Any]]] = []
        for name, method in _HOOKS.items():
            callbacks: list[Callable[..., Any]] = getattr(module, name).callback_list
            callback = getattr(listener, method)
            callbacks.append(callback)
            self._added.append((callbacks, callback))

    def close(self) -> None:
        """Stop telling. Closing twice does nothing."""
        for callbacks, callback in self._added:
            # By identity: bound methods of equal objects are equal.
            callbacks[:] = [other for other in callbacks if other is not callback]
        self._added = []


#: Returns (stream id, device index, device type) of the current stream of a GPU, far cheaper than a stream object;
#: None where this torch has no such function.
current_stream_ids: Callable[[int], tuple[int, int, int]] | None = getattr(
    torch._C, "_cuda_getCurrentStream", None
)


def event_handle(event: object) -> int:
    """Return the driver's handle of a native event, as the hooks name it; 0 before its first record."""
    # torch.cuda.Event contains an unused generic one, whose event_id says nothing.
    handle = getattr(event, "cuda_event", None)
    return int(getattr(event, "event_id", 0) if handle is None else handle)


__all__ = ["GpuTrace", "Listener", "current_stream_ids", "event_handle", "has_gpu_trace"]
