"""`copy`: a tensor on another device, and the event after which it is there.

[Note: Who keeps what alive while a copy runs]
Device memory belongs to the stream that was current when it was made; the allocator hands it out again as soon as
nobody holds it, and in that stream's order only. A copy on another stream reads or writes it later. So the
allocator is told (`record_stream`), and where it can't be told, we hold the tensor until the copy's event.
Host memory is held until the event on every accelerator: torch's host allocator knows only of page-locked
memory that it made itself. A slot of ours is never given to another copy before its event.
"""

from __future__ import annotations

import threading
import warnings
from functools import cache
from typing import Any

import torch

from devstream import _fork, _observe
from devstream._objects import as_stream
from devstream._streams import Event, backend, named_stream
from devstream._streams import stream as switch
from devstream.abc import AnyBackend, Capability, StreamArg
from devstream.exceptions import (
    BlockingCopyWarning,
    CaptureError,
    DeviceMismatchError,
    StreamTypeError,
    UnsupportedError,
    warning,
)
from devstream.overlap._slots import Slots, page_locked
from devstream.typing import DeviceArg

#: The directions in which one side is host memory, in words.
_HOST = {"h2d": "from host to device", "d2h": "from device to host"}

_EXPECTED = "a dense strided tensor (copy the parts of another kind, its values and indices, one by one)"

_kept: list[tuple[Event, tuple[torch.Tensor, ...]]] = []
_slots: dict[tuple[str, int], Slots] = {}
_warned: set[tuple[str, str]] = set()
_lock = threading.RLock()
_fork.renew(globals())


def copy(
    tensor: torch.Tensor, device: DeviceArg, *, stream: StreamArg | None = None
) -> tuple[torch.Tensor, Event]:
    """Return a copy of *tensor* on *device*, and the event after which it may be read.

    Args:
        tensor: any dense strided tensor, neither quantized nor nested. Don't change it in place before the event:
            the copy may still be reading it. You may drop it. The copy is data only: autograd doesn't see it.
        device: where the copy goes. The device that the tensor is on is allowed, and gives a copy all the same
            (a snapshot).
        stream: what does the copying. Default: one stream a device and direction (``named_stream("h2d")`` of the
            target, ``"d2h"``, ``"p2p"`` or ``"d2d"`` of the source), so that copies run under other work and both
            directions of a link are used.

    Raises:
        StreamTypeError: *tensor* is no such tensor.
        DeviceMismatchError: *stream* is on neither device.
        UnsupportedError: the devices are accelerators of two types.

    Ordering:
        The copy comes after all work issued so far to the stream that is current on the tensor's device; for a
        page-locked tensor after that of the target, which may still be writing it. A pageable tensor is read by
        the host in the call, so its copy waits for nothing and runs beside whatever was issued before. Nothing
        waits for the copy: make the reader wait (``ready.wait()`` for a stream, ``ready.synchronize()`` for the
        host, always before the host reads), and a stream other than the one that is current now needs
        ``devstream.record_stream`` besides. The event's record is the end of the copy.
        Doesn't block the host while page-locked memory can be had: a pageable tensor is first copied to a slot of
        ours by the host, which waits only when all slots are still being read. Where the backend has no
        page-locked memory, the copy blocks, and `BlockingCopyWarning` says so once.
    """
    # Before anything is issued: what torch can't copy would fail on the stream's thread, and the stream with it.
    if not isinstance(tensor, torch.Tensor) or _oddity(tensor):
        raise StreamTypeError(operation="overlap.copy", got=_describe(tensor), expected=_EXPECTED)
    tensor = tensor.detach()
    if not _has_kernel(tensor.dtype):
        there, ready = copy(tensor.view(torch.uint8), device, stream=stream)
        return there.view(tensor.dtype), ready
    owner, target, direction = _route(tensor, device)
    home = tensor.device if tensor.device.type == owner.device_type else target
    # The CPU's tensors don't say which virtual device they belong to: the one that is current here.
    index = owner.current_index() if home.index is None or home.type == "cpu" else home.index
    if stream is None:
        own = named_stream(direction, torch.device(owner.device_type, index))
    else:
        own = _checked(stream, owner, tensor.device, target)
    here = owner.current_stream(index)
    same_queue = owner.stream_key(here) == owner.stream_key(own)

    pinned = Capability.PINNED_MEMORY in owner.capabilities(index)
    if direction in _HOST and not pinned:
        _warn_blocking(owner, direction)
    staged = direction == "h2d" and pinned and not tensor.is_pinned()
    if staged and not same_queue:
        # From the copying stream's own memory, so that nothing of *here* has to be waited for.
        with switch(own):
            destination = _empty_like(tensor, target, pinned=False)
    else:
        # Made while *here* is current, whose earlier work may still use this memory; so before the edge below.
        destination = _empty_like(tensor, target, pinned=pinned and direction == "d2h")
    slot = _slots_of(owner, index).take(destination) if staged else None
    try:
        source = tensor if slot is None else slot.fill(tensor, destination)
        if not same_queue and not staged:
            _order(own, here, owner, index)
        if direction == "p2p":
            _order(own, owner.current_stream(target.index), owner, target.index)
        owner.copy(destination, source, own)
        if _observe.subscribers:
            _observe.publish(_observe.Copy(destination, source, own))
    finally:
        # Recorded also where the copy raised: part of it may have been issued, and would read the slot.
        ready = Event(torch.device(owner.device_type, owner.stream_index(own)))
        ready.record(own)
        if slot is not None:
            slot.busy_until(ready)
    known = same_queue and direction != "p2p"  # the allocator knows of this stream, since it is the memory's own
    # Staged, the memory is the copying stream's, and the reader is the one that the allocator must hear of.
    user = None if known else here if staged else own
    _keep(owner, user, ready, (destination,) if slot is not None else (destination, tensor))
    return destination, ready


def _oddity(tensor: torch.Tensor) -> str:
    """Say what keeps *tensor* from being copied as a block of elements with strides; nothing: ``""``."""
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    return "that is nested" if tensor.is_nested else "that is quantized" if tensor.is_quantized else ""


def _describe(tensor: object) -> str:
    return f"a tensor {_oddity(tensor)}" if isinstance(tensor, torch.Tensor) else repr(tensor)


@cache
def _has_kernel(dtype: torch.dtype) -> bool:
    """Say whether torch copies elements of *dtype* on the host; not those of ``torch.uint4`` and its like."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").copy_(torch.empty(1, dtype=dtype, device="cpu"))
    except NotImplementedError:
        return False
    return True


def _route(tensor: torch.Tensor, device: DeviceArg) -> tuple[AnyBackend, torch.device, str]:
    """Return the backend that copies, the target as tensors name it, and the direction."""
    to = backend(device)
    given = torch.device(device) if isinstance(device, str) else device
    index = given.index if isinstance(given, torch.device) else given
    # torch has one CPU, whatever the number of virtual devices.
    kind = to.device_type
    target = (
        torch.device("cpu")
        if kind == "cpu"
        else torch.device(kind, to.current_index() if index is None else index)
    )
    here = tensor.device.type
    if here == kind:
        return to, target, "d2d" if tensor.device == target else "p2p"
    if here == "cpu":
        return to, target, "h2d"
    if kind == "cpu":
        return backend(tensor.device), target, "d2h"
    raise UnsupportedError(
        operation=f"a copy from {tensor.device} to {target}",
        backend=to.name,
        capability=f"copies from {here}",
        alternative="copy to the CPU first",
    )


def _checked(stream: StreamArg, owner: AnyBackend, *devices: torch.device) -> Any:  # Any: of any backend
    given, own = as_stream(stream)
    index = given.stream_index(own)
    # A CPU stream of either virtual device will do: tensors don't say which one they belong to.
    mine = [device.index for device in devices if device.type == owner.device_type]
    if given is not owner or (owner.device_type != "cpu" and index not in mine):
        raise DeviceMismatchError(
            operation="overlap.copy",
            first=f"the stream is on {given.device_type}:{index}",
            second=f"the copy goes from {devices[0]} to {devices[1]}",
            advice="give a stream of the accelerator of the two, or none",
        )
    return own


def _empty_like(tensor: torch.Tensor, target: torch.device, *, pinned: bool) -> torch.Tensor:
    made = torch.empty_like(tensor, device=target, pin_memory=pinned)
    if made.stride() == tensor.stride():
        return made
    # The source has gaps or overlaps itself. torch then copies through temporaries, and one of these would be
    # pageable host memory unless the target is contiguous.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=target, pin_memory=pinned)


def _order(later: Any, earlier: Any, owner: AnyBackend, index: int | None) -> None:  # Any: of any backend
    done = Event(torch.device(owner.device_type, index or 0))
    done.record(earlier)
    done.wait(later)


def _slots_of(owner: AnyBackend, index: int) -> Slots:
    with _lock:
        return _slots.setdefault((owner.name, index), Slots(page_locked))


def _keep(
    owner: AnyBackend, user: Any, ready: Event, tensors: tuple[torch.Tensor, ...]
) -> None:  # Any: see _order
    """Keep *tensors*, which *user* (None: only their own stream) uses, from being reused before *ready*.

    See the note above.
    """
    held = []
    for tensor in tensors:
        if tensor.device.type != owner.device_type:
            held.append(tensor)
        elif user is not None:
            if Capability.RECORD_STREAM in owner.stream_capabilities(user):
                owner.record_stream(tensor, user)
            else:
                held.append(tensor)
            if _observe.subscribers:
                _observe.publish(_observe.RecordStream(tensor, user))
    with _lock:
        entries, _kept[:] = [*_kept, (ready, tuple(held))] if held else _kept[:], []
    # Without the lock: a backend is asked, and with the last reference to a tensor its finalizers may copy.
    waiting, asked = [], 0
    try:
        for entry in entries:  # of several streams, so not in the order of their ends
            if not _has_happened(entry[0]):
                waiting.append(entry)
            asked += 1
    finally:
        with _lock:
            _kept[:0] = waiting + entries[asked:]


def _has_happened(event: Event) -> bool:
    try:
        # Not Event.query: an observer would take it for the user's question.
        return event._backend.query_event(event.native)
    except CaptureError:  # not to be asked now; a later copy will
        return False


def _warn_blocking(owner: AnyBackend, direction: str) -> None:
    with _lock:
        if (owner.name, direction) in _warned:
            return
        _warned.add((owner.name, direction))
    reason = "the backend has no Capability.PINNED_MEMORY"
    facts = {"direction": _HOST[direction], "backend": owner.name, "reason": reason}
    warnings.warn(warning(BlockingCopyWarning, **facts), stacklevel=3)
