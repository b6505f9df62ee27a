"""K2: the life of memory that streams share. Each test's first line names the row of the bug log."""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream.races import Fault
from devstream.testing import latch


@pytest.mark.cuda
def test_forty_epochs_on_a_named_stream_reserve_two_blocks_at_most():
    """B11, huggingface/pytorch-image-models#2784: 32 MiB an epoch, 64 MiB reserved."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(40):
        with devstream.stream(devstream.named_stream("prefetch of forty epochs", "cuda")):
            batch = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        del batch
    devstream.synchronize("cuda")
    assert torch.cuda.memory_reserved() - before <= 64 << 20


KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=KINDS)
def device(request):
    return torch.device(request.param)


def drop_while_in_use(device, *, told):
    """Make a weight on the side, use it here, drop it, and make another one on the side; return what use saw."""
    side, here = devstream.Stream(device), devstream.current_stream(device)
    side.wait_stream(here)
    with devstream.stream(side):
        weight = torch.full((1 << 12,), 3.0, device=device)
    here.wait_stream(side)
    used = weight * 1
    if told:
        devstream.record_stream(weight, here)
    del weight
    with devstream.stream(side):
        other = torch.full((1 << 12,), -1.0, device=device)
    here.wait_stream(side)
    devstream.record_stream(other, here)
    return (used + 0 * other).mean().item()


def test_a_weight_that_was_recorded_keeps_its_values(device):
    """B07, Comfy-Org/ComfyUI#10501: old values kept."""
    with devstream.racecheck():
        assert drop_while_in_use(device, told=True) == 3


def test_a_weight_that_vanishes_while_it_is_used_is_one_report(device):
    """B07, Comfy-Org/ComfyUI#10501: exactly 1 report, with size, maker stream and last user stream."""
    with devstream.racecheck(on_race="collect") as races:
        drop_while_in_use(device, told=False)
    (race,) = races
    assert race.fault is Fault.REUSE
    assert race.size_bytes == 4 << 12
    assert race.owner == race.second.lane
    assert race.first.lane.default
    assert "16384 bytes" in str(race)


@pytest.mark.cuda
@pytest.mark.parametrize("told", [True, False])
def test_a_storage_that_is_shrunk_to_nothing_during_a_copy(told):
    """B08, meta-pytorch/torchrec#4231: record_stream protects it; without it, 1 report."""
    side, here = devstream.Stream("cuda"), devstream.current_stream("cuda")
    host = torch.zeros(1 << 20, pin_memory=True)
    with devstream.racecheck(on_race="collect") as races:
        source = torch.full((1 << 20,), 5.0, device="cuda")
        side.wait_stream(here)
        with latch(side), devstream.stream(side):
            host.copy_(source, non_blocking=True)
            if told:
                devstream.record_stream(source, side)
            with devstream.stream(here):
                source.untyped_storage().resize_(0)
                other = torch.full((1 << 20,), -1.0, device="cuda")
        side.synchronize()
    if told:
        assert races == []
        assert host.unique().tolist() == [5.0]
    else:
        assert [race.fault for race in races] == [Fault.REUSE]
    assert other.unique().tolist() == [-1.0]


@pytest.mark.cuda
def test_memory_of_a_named_stream_serves_the_next_use_of_that_stream():
    """B10, NVIDIA/Megatron-LM#6885: blocks belong to their stream for good, so a named stream is used again."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        with devstream.stream(devstream.named_stream("start-up of a model", "cuda")):
            start_up = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        devstream.synchronize("cuda")
        del start_up
    assert torch.cuda.memory_reserved() - before <= int(1.1 * (1 << 28))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 1 << 24
