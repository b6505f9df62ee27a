"""The only package that knows torch versions or private torch names; one file a subject.

Each flag answers a question by name and says which release makes it needless; callers never compare versions.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: ``torch.Stream.is_capturing`` exists. Needless once the floor is torch 2.13.
HAS_STREAM_IS_CAPTURING = hasattr(torch.Stream, "is_capturing")


def default_accelerator_type() -> str | None:
    """Return the device type of the accelerator that torch would use, or None where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def cpu_stream_type() -> int:
    """Return torch's number of the device type ``cpu``, as ``torch.Stream(device_type=...)`` takes it."""
    # c10::DeviceType::CPU; torch.Stream("cpu") tells it, so that no number of torch's is written down here.
    return int(torch.Stream(device="cpu").device_type)


_StreamT = TypeVar("_StreamT", bound=torch.Stream)


def stream_from_ids(cls: type[_StreamT], stream_id: int, device_index: int, device_type: int) -> _StreamT:
    """Return an object of *cls*, a subclass of ``torch.Stream``, for the queue with these ids."""
    # The keywords are what torch.cuda.Stream itself passes; the stub of torch.Stream leaves them out.
    return torch.Stream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)


def native_handle(stream: torch.Stream) -> int:
    """Return torch's own ``native_handle`` of *stream*, whatever a subclass says; the stub leaves it out."""
    return int(torch.Stream.native_handle.__get__(stream))  # type: ignore[attr-defined]


def is_compiling_now() -> bool:
    """Say whether this thread is in a compilation, in traced code or in the compiler itself."""
    return torch._guards.CompileContext.try_get() is not None


def event_was_recorded(event: torch.Event) -> bool:
    """Say whether a native accelerator event was ever recorded: torch makes the real event at its first record."""
    return int(event.event_id) != 0


__all__ = [
    "HAS_STREAM_IS_CAPTURING",
    "TorchDispatchMode",
    "cpu_stream_type",
    "default_accelerator_type",
    "event_was_recorded",
    "is_compiling_now",
    "tree_leaves",
]


def _object_at_a_low_byte_of(wanted: int) -> object:
    """Return an object whose address ends in this byte."""
    kept = []  # so that no address comes twice
    while True:
        kept.append(object())
        if id(kept[-1]) & 0xFF == wanted:
            return kept[-1]


# [Note: Why an event carries two guards]
# torch.Stream.wait_event casts whatever it is given to torch.Event unchecked (torch 2.11 to 2.14), so an object
# of another class is read as raw memory: mostly an error, now and then a wait that waits for nothing. The third
# and fourth word of a devstream.Event lie where torch looks for the device type and for "was recorded". Both
# hold this object, whose address reads as device type -16 and as recorded, so that the call raises RuntimeError
# each time. Python lays slots out in the order of their names, which is why these two are named as they are.
CAST_GUARD = _object_at_a_low_byte_of(0xF0)
