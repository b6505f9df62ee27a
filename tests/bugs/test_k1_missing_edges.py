"""K1: a missing edge between streams. Each test's first line names the row of the bug log."""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream.races import Fault, NearMiss
from devstream.testing import latch

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
N = 1 << 12


@pytest.fixture(params=KINDS)
def device(request):
    return torch.device(request.param)


def races_of(run, *args):
    with devstream.racecheck(on_race="collect") as races:
        run(*args)
    return races


def reduce_on_a_stream(device, *, waits_for_the_producer):
    """Return the sum of a gradient that was made on a side stream, reduced on another one."""
    producer, reducer = devstream.Stream(device), devstream.Stream(device)
    here = devstream.current_stream(device)
    producer.wait_stream(here)
    with devstream.stream(producer):
        gradient = torch.ones(N, device=device)
        made_on = devstream.current_stream(device)
    reducer.wait_stream(made_on if waits_for_the_producer else devstream.default_stream(device))
    with devstream.stream(reducer):
        total = gradient.sum()
    here.wait_stream(reducer)
    devstream.record_stream(gradient, reducer)
    devstream.record_stream(total, here)
    return producer, total.item()


def test_a_reducer_that_waits_for_the_live_producer_is_exact(device):
    """B02, deepspeedai/DeepSpeed#7898: waits for the stream that is current at production: sum exact."""
    with devstream.racecheck():
        _, total = reduce_on_a_stream(device, waits_for_the_producer=True)
    assert total == N


def test_a_reducer_that_waits_for_the_default_stream_only_is_reported_with_the_producer(device):
    """B02, deepspeedai/DeepSpeed#7898: one report that names the stream that wrote."""
    with devstream.racecheck(on_race="collect") as races:
        producer, _ = reduce_on_a_stream(device, waits_for_the_producer=False)
    (race,) = races
    assert str(producer.stream_id) in race.first.lane.name or "stream" in race.first.lane.name
    assert race.first.name == "ones"
    (note,) = race.notes
    assert note.miss is NearMiss.OTHER_STREAM
    assert note.lane == f"the default stream of {device.type}:0"


def fill_a_bucket(device, joined):
    streams = [devstream.Stream(device) for _ in range(3)]
    here = devstream.current_stream(device)
    bucket = torch.zeros(3 * N, device=device)
    for number, stream in enumerate(streams):
        stream.wait_stream(here)
        with devstream.stream(stream):
            bucket[number * N : (number + 1) * N].fill_(number + 1)
    for stream in streams[:joined]:
        here.wait_stream(stream)
    return bucket.sum().item(), streams


def test_a_bucket_of_three_writers_is_exact_once_all_are_joined(device):
    """B03, deepspeedai/DeepSpeed#8061: sum = 6n of three thirds of n (1, 2, 3)."""
    with devstream.racecheck():
        total, _ = fill_a_bucket(device, joined=3)
    assert total == 6 * N


def test_a_writer_that_is_not_joined_is_named(device):
    """B03, deepspeedai/DeepSpeed#8061: one join dropped, the report names the missing stream."""
    (race,) = races_of(fill_a_bucket, device, 2)
    assert race.fault is Fault.READ_BEFORE_WRITE
    assert race.first.name == "fill_"


def two_buffers(device, *, free_edge):
    """Return what a slow reader sees of two buffers that are refilled in turn, six rounds."""
    here, reader = devstream.current_stream(device), devstream.Stream(device)
    buffers = [torch.zeros(N, device=device) for _ in range(2)]
    free = [devstream.Event(device) for _ in buffers]
    sums = []
    with latch(reader) as slow:
        for step in range(6):
            at = step % 2
            if free_edge:
                free[at].wait(here)
            buffers[at].fill_(step)
            reader.wait_stream(here)
            with devstream.stream(reader):
                sums.append(buffers[at].sum())
                free[at].record()
            if step == 1:
                slow.release()
    reader.synchronize()
    return [one.item() / N for one in sums]


def test_a_buffer_is_refilled_only_after_its_reader(device):
    """B04, deepspeedai/DeepSpeed#5606: 2 buffers, 6 rounds: sums are 0, 1, 2, 3, 4, 5 times n."""
    with devstream.racecheck():
        assert two_buffers(device, free_edge=True) == [0, 1, 2, 3, 4, 5]


def test_a_refill_without_the_backward_edge_is_reported(device):
    """B04, deepspeedai/DeepSpeed#5606: write after read."""
    assert Fault.OVERWRITE in {race.fault for race in races_of(two_buffers_without_edge, device)}


def two_buffers_without_edge(device):
    two_buffers(device, free_edge=False)


def test_everything_inside_the_block_lands_on_its_stream(device):
    """B05, Comfy-Org/ComfyUI#10697: half-precision bytes copied, then cast in the block: difference 0."""
    side, here = devstream.Stream(device), devstream.current_stream(device)
    host = torch.randn(N, dtype=torch.float16)
    with devstream.racecheck():
        side.wait_stream(here)
        with devstream.stream(side):
            arrived = torch.empty(N, dtype=torch.float16, device=device).copy_(host, non_blocking=True)
            cast = arrived.to(torch.float32)
        here.wait_stream(side)
        devstream.record_stream(cast, here)
        difference = (cast - host.to(device).float()).abs().max().item()
    assert difference == 0
