"""devstream/races/clocks.py: clocks know exactly what paths of records and waits lead to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from devstream.races.clocks import Clocks, covers
from devstream.testing.strategies import Access, Record, Wait, programs


def reachable(program):
    """Return for each access the accesses before it, by following edges: the naive way."""
    edges, last, records = {}, {}, {}
    for number, step in enumerate(program.steps):
        before = {last[step.stream]} if step.stream in last else set()
        if isinstance(step, Wait) and step.event in records:
            before.add(records[step.event])
        if isinstance(step, Record):
            records[step.event] = number
        edges[number] = before.union(*(edges[one] for one in before))
        last[step.stream] = number
    return edges


@given(programs(streams=4, events=3, max_steps=30))
def test_clocks_know_what_a_path_leads_to_and_nothing_else(program):
    clocks, events, stamps = Clocks(), {}, {}
    before = reachable(program)
    for number, step in enumerate(program.steps):
        if isinstance(step, Record):
            events[step.event] = clocks.record(step.stream)
        elif isinstance(step, Wait):
            clocks.wait(step.stream, events.get(step.event, {}))
        elif isinstance(step, Access):
            known = {one for one, stamp in stamps.items() if clocks.knows(step.stream, stamp)}
            assert known == {one for one in before[number] if isinstance(program.steps[one], Access)}
            stamps[number] = clocks.tick(step.stream)


def test_a_record_is_a_copy():
    clocks = Clocks()
    event = clocks.record("a")
    stamp = clocks.tick("a")
    assert not covers(event, stamp)
    assert covers(clocks.record("a"), stamp)


def test_waiting_says_whether_it_taught_anything():
    clocks = Clocks()
    clocks.tick("a")
    assert clocks.wait("b", clocks.record("a"))
    assert not clocks.wait("b", clocks.record("a"))


def test_what_a_host_issues_after_it_synchronized_comes_after_the_stream():
    clocks = Clocks()
    first = clocks.tick("a")
    clocks.tick("b", host="host")
    assert not clocks.knows("b", first)
    clocks.synchronize("host", "a")
    clocks.tick("b", host="host")
    assert clocks.knows("b", first)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_a_stamp_that_is_known_brings_all_that_its_lane_knew(edges):
    clocks, known = Clocks(), {}
    for source, target in edges:
        stamp = clocks.tick(source)
        known[stamp] = clocks.record(source)
        clocks.wait(target, clocks.record(source))
    for lane in range(4):
        for stamp, clock in known.items():
            if clocks.knows(lane, stamp):
                assert all(clocks.view(lane).get(other, 0) >= time for other, time in clock.items())
