"""Page-locked host memory through which pageable tensors go to a device, given out again only after the copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from devstream._streams import Event

#: Copies of one size that may be under way at once; the next one makes the host wait for the oldest.
SLOTS_PER_SIZE = 4
_SMALLEST_BYTES = 1 << 12


def page_locked(size_bytes: int) -> torch.Tensor:
    """Return page-locked memory of torch's current accelerator."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class Slot:
    """One block of page-locked memory, and the event of the copy that reads it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._event: Event | None = None
        self.taken = False

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this memory as a tensor with the shape, strides and type of *tensor*, which has no gaps."""
        size_bytes = tensor.numel() * tensor.element_size()
        return self._memory[:size_bytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def fill(self, source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        """Copy *source* here, in the layout of *destination*, and return it; the host does it."""
        return self.like(destination).copy_(source)

    def busy_until(self, event: Event) -> None:
        """Let nobody take this slot before *event*."""
        self._event, self.taken = event, False

    def free(self) -> bool:
        """Say whether no copy reads this slot any more."""
        return not self.taken and (self._event is None or self._event.query())

    def wait(self) -> None:
        """Block the host until the copy that reads this slot is done."""
        if self._event is not None:
            self._event.synchronize()


class Slots:
    """The slots of one device, by size: powers of two, so that few sizes serve all tensors.

    Args:
        allocate: returns that many bytes of host memory, as uint8.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._by_size: dict[int, list[Slot]] = {}
        self._lock = threading.RLock()  # re-entrant: a finalizer may copy something

    def take(self, tensor: torch.Tensor) -> Slot:
        """Return a slot that *tensor* fits into and that no copy reads; say `Slot.busy_until` once it is issued.

        Blocks the host where all slots of this size are still being read.
        """
        size = max(_SMALLEST_BYTES, 1 << max(tensor.numel() * tensor.element_size() - 1, 0).bit_length())
        with self._lock:
            slots = self._by_size.setdefault(size, [])
            found = next((slot for slot in slots if slot.free()), None)
            if found is None and len(slots) >= SLOTS_PER_SIZE:
                found = next((slot for slot in slots if not slot.taken), None)
            if found is None:
                found = Slot(self._allocate(size))
                slots.append(found)
            else:
                # To the back: the front is the one that was taken the longest time ago.
                slots.remove(found)
                slots.append(found)
            found.taken = True
        found.wait()
        return found
