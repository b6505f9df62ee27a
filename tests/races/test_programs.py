"""The checker's verdict on random programs, against brute force; and what the schedules make of them."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings

import devstream
from devstream.testing import cpu
from devstream.testing.strategies import Access, Record, programs


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Waits for unrecorded events are meant, and logged once each."""
    logger = logging.getLogger("devstream")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


STREAMS = [devstream.Stream("cpu") for _ in range(3)]


def carry_out(program):
    """Run *program* with real streams and tensors; return the values that reads saw, and the cells at the end."""
    events = [devstream.Event("cpu") for _ in range(program.events)]
    cells = [torch.zeros(2) for _ in range(program.cells)]
    devstream.synchronize("cpu")
    seen = []
    for number, step in enumerate(program.steps, start=1):
        stream = STREAMS[step.stream]
        if isinstance(step, Record):
            events[step.event].record(stream)
        elif not isinstance(step, Access):
            events[step.event].wait(stream)
        else:
            with devstream.stream(stream):
                if step.write:
                    cells[step.cell].fill_(number)
                else:
                    seen.append(cells[step.cell] * 1)
    devstream.synchronize("cpu")
    return [one.tolist() for one in (*seen, *cells)]


def races_by_brute_force(program):
    """Return the pairs of steps on one cell that no path of the program's own edges connects."""
    before, last_of, record_of = {}, {}, {}
    for number, step in enumerate(program.steps):
        direct = {last_of.get(step.stream)}
        if isinstance(step, Record):
            record_of[step.event] = number
        elif not isinstance(step, Access):
            direct.add(record_of.get(step.event))
        direct.discard(None)
        before[number] = direct.union(*(before[one] for one in direct))
        last_of[step.stream] = number
    accesses = [(number, step) for number, step in enumerate(program.steps) if isinstance(step, Access)]
    return {
        (one, two)
        for one, first in accesses
        for two, second in accesses
        if one < two and first.cell == second.cell and (first.write or second.write) and one not in before[two]
    }


@settings(max_examples=300, deadline=None)
@given(programs(max_steps=14))
def test_a_program_has_a_race_exactly_where_brute_force_finds_one(program):
    with devstream.racecheck(on_race="collect") as races:
        carry_out(program)
    assert bool(races) == bool(races_by_brute_force(program))


@settings(max_examples=100, deadline=None)
@given(programs(max_steps=14))
def test_a_program_without_a_race_gives_the_same_values_under_every_schedule(program):
    if races_by_brute_force(program):
        return
    expected = carry_out(program)
    for schedule, seed in (("lazy", 0), ("random", 1), ("random", 2)):
        with cpu(schedule=schedule, seed=seed):
            assert carry_out(program) == expected


@settings(max_examples=100, deadline=None)
@given(programs(streams=2, events=1, cells=1, max_steps=4))
def test_a_race_of_one_pair_gives_other_values_under_lazy(program):
    pairs = races_by_brute_force(program)
    if len(pairs) != 1:
        return
    with cpu(schedule="lazy"):
        found = carry_out(program)
    assert found != carry_out(program)
