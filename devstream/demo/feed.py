"""Batches copied ahead to the device: a ring with events both ways.

One event says that a batch has arrived, and the training stream waits for it. The other says that the batch was
read, and the copying stream waits for that before the place in the ring is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from devstream._streams import Event, current_stream
from devstream.abc import StreamArg
from devstream.demo.lanes import BATCHES, Watch
from devstream.overlap import copy


@dataclass(slots=True)
class _Place:
    number: int
    tensor: torch.Tensor
    ready: Event
    read: Event = field(repr=False)


class Feed:
    """Hands out batches in order, each copied ahead of its use.

    Args:
        make: returns batch *number* on the host.
        device: where the batches go.
        stream: what copies them; the current one gives a feed that doesn't overlap.
        watch: brackets the copies.
        places: batches under way or in use at once, two or more.
    """

    def __init__(
        self,
        make: Callable[[int], torch.Tensor],
        *,
        device: torch.device,
        stream: StreamArg,
        watch: Watch,
        places: int = 2,
    ) -> None:
        if places < 2:
            raise ValueError(f"places={places}: copying ahead needs one batch in use and one under way")
        self._make, self._device, self._stream, self._watch, self._places = make, device, stream, watch, places
        self._ring: deque[_Place] = deque()

    def send(self, number: int) -> None:
        """Start the copy of batch *number*; it runs beside whatever else is under way."""
        # Made before the copy's stream is made to wait, so that the wait is as late as can be.
        batch = self._make(number)
        if len(self._ring) == self._places:
            # The place's old batch goes back to the allocator only now; the copy must not overtake its reader.
            self._ring.popleft().read.wait(self._stream)
        with self._watch.span(BATCHES, "batch", stream=self._stream):
            tensor, ready = copy(batch, self._device, stream=self._stream)
        self._ring.append(_Place(number, tensor, ready, Event(self._device)))

    def take(self, number: int) -> torch.Tensor:
        """Return batch *number*; the current stream waits for its copy. Say `give_back` after its last reader."""
        tensor, ready = self.look(number)
        ready.wait(current_stream(self._device))
        return tensor

    def look(self, number: int) -> tuple[torch.Tensor, Event]:
        """Return batch *number* and the event behind its copy, for who waits himself. See `take`."""
        place = self._find(number)
        return place.tensor, place.ready

    def give_back(self, number: int) -> None:
        """Let the place of batch *number* be used again once the current stream has passed this point."""
        self._find(number).read.record(current_stream(self._device))

    def _find(self, number: int) -> _Place:
        return next(place for place in self._ring if place.number == number)
