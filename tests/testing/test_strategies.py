"""Random programs on the CPU backend, held against a happens-before that is worked out by brute force."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

import devstream
from devstream.testing import latch
from devstream.testing.strategies import Access, Record, Wait, nestings, programs


def happens_before(program):
    """Return every pair (i, j) of steps in which i comes before j, for every legal way to run the program."""
    edges = set()
    last_of_stream, last_record = {}, {}
    for j, step in enumerate(program.steps):
        if step.stream in last_of_stream:
            edges.add((last_of_stream[step.stream], j))
        if isinstance(step, Wait) and step.event in last_record:
            edges.add((last_record[step.event], j))
        if isinstance(step, Record):
            last_record[step.event] = j
        last_of_stream[step.stream] = j
    for _ in program.steps:
        edges |= {(a, d) for (a, b), (c, d) in itertools.product(edges, edges) if b == c}
    return edges


def run(program, held):
    """Run the program on the CPU with a latch right before step *held*; return which steps haven't happened."""
    streams = [devstream.Stream("cpu") for _ in range(program.streams)]
    events = [devstream.Event("cpu") for _ in range(program.events)]
    marks = []

    def issue(steps):
        for step in steps:
            if isinstance(step, Record):
                events[step.event].record(streams[step.stream])
            elif isinstance(step, Wait):
                events[step.event].wait(streams[step.stream])
            marks.append(streams[step.stream].record_event())

    issue(program.steps[:held])
    with latch(streams[program.steps[held].stream]):
        issue(program.steps[held:])
        late = [not mark.query() for mark in marks]
    assert all(mark.query() for mark in marks)
    return late


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_a_step_is_late_exactly_when_a_held_step_comes_before_it(program, data):
    held = data.draw(st.integers(0, len(program.steps) - 1))
    before = happens_before(program)
    expected = [j == held or (held, j) in before for j in range(len(program.steps))]
    assert run(program, held) == expected


@settings(max_examples=80, deadline=None)
@given(nestings())
def test_any_nesting_restores(order):
    streams = [devstream.Stream("cpu") for _ in range(3)]
    base = devstream.current_stream("cpu")

    def enter(rest):
        if rest:
            with devstream.stream(streams[rest[0]]):
                assert devstream.current_stream("cpu") == streams[rest[0]]
                enter(rest[1:])
                assert devstream.current_stream("cpu") == streams[rest[0]]

    enter(order)
    assert devstream.current_stream("cpu") == base


@given(programs(streams=2, events=1, cells=3, max_steps=5))
def test_a_program_stays_within_its_bounds(program):
    assert (program.streams, program.events, program.cells) == (2, 1, 3)
    assert 1 <= len(program.steps) <= 5
    for step in program.steps:
        assert 0 <= step.stream < 2
        assert step.cell < 3 if isinstance(step, Access) else step.event == 0
