"""K15: false alarms and misses of race checkers. Each test's first line names the row of the bug log."""

from __future__ import annotations

import math

import pytest
import torch

import devstream
from devstream.races import Fault
from devstream.testing import cpu
from devstream.testing.faulty import PROGRAMS

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=KINDS)
def device(request):
    return torch.device(request.param)


def test_a_block_made_again_before_its_late_reader_is_one_report(device):
    """B93, pytorch/pytorch#179863: history is kept over free and reuse: exactly 1 report, with both lines."""
    side, here = devstream.Stream(device), devstream.current_stream(device)
    with devstream.racecheck(on_race="collect") as races:
        side.wait_stream(here)
        with devstream.stream(side):
            x = torch.full((1 << 10,), 4.0, device=device)
        here.wait_stream(side)
        late = x * 2  # reads on the main stream
        del x
        with devstream.stream(side):
            torch.full((1 << 10,), 1.0, device=device)  # may be given the same block
        late.sum().item()
    (race,) = races
    assert race.fault is Fault.REUSE
    assert race.first.site.text.startswith("late = x * 2")
    assert race.second.site.text.startswith("torch.full((1 << 10,), 1.0")


def test_an_early_free_gives_nan_and_not_the_old_value_on_the_cpu():
    """B94, pytorch/pytorch#58385: the reader gets NaN, not the old value."""
    with cpu(schedule="lazy"):
        (value,) = PROGRAMS["freed_while_in_use"].run(torch.device("cpu"), True)
    assert math.isnan(value)


@pytest.mark.cuda
def test_an_early_free_gives_nan_and_not_the_old_value_on_a_gpu():
    """B94, pytorch/pytorch#58385: poison fills freed blocks, ordered on the freeing stream."""
    from devstream.testing import latch

    side, here = devstream.Stream("cuda"), devstream.current_stream("cuda")
    with devstream.racecheck(on_race="collect", poison=True):
        x = torch.full((1 << 20,), 4.0, device="cuda")
        side.wait_stream(here)
        with latch(side), devstream.stream(side):
            late = x * 1
            del x
            with devstream.stream(here):
                torch.zeros(1, device="cuda")  # any operation: the checker takes in what was freed
        side.synchronize()
        assert late.isnan().any().item()


def test_halves_of_an_odd_number_of_bytes_are_no_race_and_one_shared_byte_is(device):
    """B95, triton-lang/triton#11205: 0 reports; overlap by 1 byte: 1 report."""

    def write(first_stop, second_start):
        buffer = torch.zeros(1001, dtype=torch.uint8, device=device)
        side = devstream.Stream(device)
        side.wait_stream(devstream.current_stream(device))
        with devstream.stream(side):
            buffer[:first_stop].fill_(1)
        buffer[second_start:].fill_(2)
        devstream.synchronize(device)

    with devstream.racecheck(on_race="collect") as races:
        write(500, 500)
    assert races == []
    with devstream.racecheck(on_race="collect") as races:
        write(501, 500)
    assert len(races) == 1


# B96 is in tests/cli/test_racecheck.py: two ranks, ten steps, two reports.
