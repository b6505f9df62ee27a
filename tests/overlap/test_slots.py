"""A slot isn't given out again while a copy reads it."""

from __future__ import annotations

import threading

import torch

import devstream
from devstream.overlap._slots import SLOTS_PER_SIZE, Slot, Slots
from devstream.testing import latch


def plain(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def recorded(stream: devstream.Stream) -> devstream.Event:
    event = devstream.Event("cpu")
    event.record(stream)
    return event


def test_a_slot_is_used_again_once_its_copy_is_done() -> None:
    slots, side = Slots(plain), devstream.Stream("cpu")
    first = slots.take(torch.ones(8))
    first.busy_until(recorded(side))
    assert slots.take(torch.ones(8)) is first


def test_a_slot_that_is_being_read_is_left_alone() -> None:
    slots, side = Slots(plain), devstream.Stream("cpu")
    with latch(side):
        first = slots.take(torch.ones(8))
        first.busy_until(recorded(side))
        assert slots.take(torch.ones(8)) is not first


def test_a_slot_that_is_being_filled_is_left_alone() -> None:
    slots = Slots(plain)
    assert slots.take(torch.ones(8)) is not slots.take(torch.ones(8))


def test_the_host_waits_for_the_oldest_copy_when_all_slots_are_read() -> None:
    slots, side = Slots(plain), devstream.Stream("cpu")
    with latch(side) as held:
        taken = [slots.take(torch.ones(8)) for _ in range(SLOTS_PER_SIZE)]
        for slot in taken:
            slot.busy_until(recorded(side))
        found: list[Slot] = []
        waiting = threading.Thread(target=lambda: found.append(slots.take(torch.ones(8))))
        waiting.start()
        assert not found  # nothing can be found before the release
        held.release()
        waiting.join(30)
    assert found == [taken[0]]


def test_sizes_do_not_share_slots_and_small_ones_do() -> None:
    slots, side = Slots(plain), devstream.Stream("cpu")
    small = slots.take(torch.ones(8))
    small.busy_until(recorded(side))
    assert slots.take(torch.ones(1 << 12)) is not small
    assert slots.take(torch.ones(16)) is small


def test_a_slot_takes_the_layout_of_the_destination() -> None:
    slots = Slots(plain)
    source = torch.arange(24).reshape(2, 3, 4).transpose(0, 2)
    slot = slots.take(source)
    slot.fill(source, source)
    assert slot.like(source).stride() == source.stride()
    assert torch.equal(slot.like(source), source)
