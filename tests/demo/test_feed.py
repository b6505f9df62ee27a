"""The ring hands out batches in order, each copied ahead, and no place is used again before its reader."""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream import _observe
from devstream.demo.feed import Feed
from devstream.demo.lanes import Watch
from devstream.testing import latch


def feed(device: torch.device, side: object, places: int = 2) -> Feed:
    kind = torch.device("cpu") if device.type == "cpu" else device
    return Feed(lambda number: torch.full((64,), number), device=kind, stream=side, watch=Watch(), places=places)


def test_batches_come_in_order_with_their_values(device: torch.device) -> None:
    ring = feed(device, devstream.Stream(device))
    ring.send(0)
    for number in range(6):
        ring.send(number + 1)
        assert ring.take(number).eq(number).all()
        ring.give_back(number)


def test_the_host_goes_on_while_the_next_batch_is_under_way(device: torch.device) -> None:
    side = devstream.Stream(device)
    ring = feed(device, side)
    ring.send(0)
    side.synchronize()
    with latch(side) as held:
        ring.send(1)
        assert ring.take(0).eq(0).all()
        held.release()
        assert ring.take(1).eq(1).all()


def test_a_place_is_used_again_only_after_its_reader(device: torch.device) -> None:
    side = devstream.Stream(device)
    ring = feed(device, side)
    ring.send(0)
    ring.send(1)
    ring.take(0)
    ring.give_back(0)
    read = ring._find(0).read
    seen: list[_observe.Notice] = []
    with _observe.subscribe(seen.append):
        ring.send(2)
    kinds = [one for one in seen if isinstance(one, _observe.Wait | _observe.Copy)]
    waited = next(n for n, one in enumerate(kinds) if isinstance(one, _observe.Wait) and one.event is read)
    assert waited < next(n for n, one in enumerate(kinds) if isinstance(one, _observe.Copy))
    side.synchronize()


def test_one_place_is_too_few(device: torch.device) -> None:
    with pytest.raises(ValueError, match="places=1"):
        feed(device, devstream.Stream(device), places=1)
