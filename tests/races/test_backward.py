"""devstream/races/backward.py: on the CPU a backward counts as run on the stream of its forward."""

from __future__ import annotations

import pytest
import torch

import devstream


@pytest.fixture
def races():
    with devstream.racecheck(on_race="collect") as found:
        yield found


@pytest.fixture
def here():
    return devstream.current_stream("cpu")


@pytest.fixture
def side():
    return devstream.Stream("cpu")


def lane_of_gradient(x):
    """Return the lane that wrote the gradient of *x* last."""
    (watch,) = devstream._observe.subscribers
    writes = watch._checker.memory_of(x.grad.untyped_storage()).history.writes
    return watch._order.lanes[writes[-1].stamp.lane].name


def test_it_runs_on_the_stream_of_the_forward_and_the_caller_waits_for_it(races, here, side):
    x = torch.ones(4, requires_grad=True)
    side.wait_stream(here)
    with devstream.stream(side):
        y = (x * 2).sum()
    here.wait_stream(side)
    y.backward()
    assert lane_of_gradient(x) == f"stream {side.stream_id} of cpu:0"
    x.grad + 1
    assert races == []


def test_a_forward_from_before_the_block_counts_as_the_caller_s(side):
    x = torch.ones(4, requires_grad=True)
    with devstream.stream(side):
        y = (x * 2).sum()
    with devstream.racecheck():
        y.backward()
        assert lane_of_gradient(x) == "the default stream of cpu:0"


def test_a_hook_that_chooses_a_stream_runs_there(races, here, side):
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    copies = []

    def hook(gradient):
        with devstream.stream(side):
            copies.append(gradient * 1)

    y.register_hook(hook)
    y.sum().backward()
    assert [race.second.lane.name for race in races] == [f"stream {side.stream_id} of cpu:0"]


def test_a_hook_that_waits_is_right(races, here, side):
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    copies = []

    def hook(gradient):
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            copies.append(gradient * 1)
        devstream.record_stream(gradient, side)

    y.register_hook(hook)
    y.sum().backward()
    here.wait_stream(side)
    copies[0] + 1
    assert races == []


def test_the_next_forward_of_the_side_stream_needs_its_own_edge(races, here, side):
    weight = torch.ones(4, requires_grad=True)
    for _ in range(2):
        with devstream.stream(side):
            y = (weight * 2).sum()  # in the second round nothing orders this after the update
        here.wait_stream(side)
        y.backward()
        with torch.no_grad():
            weight -= weight.grad
        weight.grad = None
    assert {(race.first.name, race.second.name) for race in races} >= {("sub_", "mul")}
