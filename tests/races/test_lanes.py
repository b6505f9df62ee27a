"""devstream/races/lanes.py: which lane a stream is, and what it is called."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import devstream
from devstream.races.lanes import Lanes
from devstream.races.order import HOST, Order


@pytest.fixture
def lanes():
    return Lanes(Order())


def test_one_queue_is_one_lane_whatever_object_names_it(lanes):
    side = devstream.Stream("cpu")
    native = torch.Stream(stream_id=side.stream_id, device_index=-1, device_type=side.device_type)
    assert lanes.of_stream(side) == lanes.of_stream(devstream.wrap(native)) == lanes.of_stream(native)
    assert lanes.of_stream(side) != lanes.of_stream(devstream.Stream("cpu"))


def test_the_default_streams_of_two_devices_are_two_lanes(lanes):
    zero, one = (lanes.of_stream(devstream.default_stream(f"cpu:{index}")) for index in (0, 1))
    assert zero != one
    assert [lanes._order.lanes[number].name for number in (zero, one)] == [
        "the default stream of cpu:0",
        "the default stream of cpu:1",
    ]


def test_names(lanes):
    side, named = devstream.Stream("cpu"), devstream.named_stream("names of lanes", "cpu")
    assert lanes._order.lanes[lanes.of_stream(side)].name == f"stream {side.stream_id} of cpu:0"
    assert lanes._order.lanes[lanes.of_stream(named)].name == 'the "names of lanes" stream of cpu:0'


def test_work_on_a_tensor_goes_to_the_current_stream(lanes):
    x, side = torch.ones(1), devstream.Stream("cpu")
    assert lanes.of_tensor(x) == lanes.of_stream(devstream.default_stream("cpu"))
    with devstream.stream(side):
        assert lanes.of_tensor(x) == lanes.of_stream(side)


def test_beside_an_accelerator_the_cpu_s_default_stream_is_the_host(lanes):
    lanes.cpu_is_device = False
    x, side = torch.ones(1), devstream.Stream("cpu")
    assert lanes.of_tensor(x) == HOST
    with devstream.stream(side):  # chosen, so it is one of the CPU's streams
        assert lanes.of_tensor(x) == lanes.of_stream(side)


def test_a_device_that_nobody_serves_is_the_host_s(lanes):
    assert lanes._current(torch.device("vulkan")) == HOST


def test_a_stream_is_not_kept_alive(lanes):
    side = devstream.Stream("cpu")
    ref = weakref.ref(side)
    lanes.of_stream(side)
    del side
    gc.collect()
    assert ref() is None
