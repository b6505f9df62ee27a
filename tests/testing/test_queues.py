"""devstream/testing/_queues.py: which orders the schedules choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devstream.races.extents import Extent
from devstream.testing._queues import Queues, Touch

ALL = Extent(0, 4, 4)


@st.composite
def programs(draw):
    """Reads, writes, records, waits and demands of three lanes on two storages."""
    steps = []
    for _ in range(draw(st.integers(1, 16))):
        lane = draw(st.sampled_from("abc"))
        kind = draw(st.sampled_from(["read", "write", "wait", "demand"]))
        steps.append((kind, lane, draw(st.sampled_from("abc") if kind == "wait" else st.integers(0, 1))))
    return steps


def carry_out(steps, schedule, seed=0):
    """Return the order in which the steps ran, and each step's needs, by their place in the program."""
    queues, ran, needs, last = Queues(schedule, seed), [], {}, {}
    for at, (kind, lane, what) in enumerate(steps):
        if kind == "demand":
            queues.demand(queues.tail(lane))
            continue
        before = [queues.tail(what)] if kind == "wait" and queues.tail(what) else []
        touches = [Touch(what, ALL, kind == "write")] if kind != "wait" else []
        queues.add(lane, lambda at=at: ran.append(at), needs=before, touches=touches)
        needs[at] = {last.get(lane), last.get(what) if kind == "wait" else None} - {None}
        last[lane] = at
        queues.idle()
    queues.demand_all()
    assert queues.pending() == []
    return ran, needs


def closure(needs):
    """Return, for each step, every step that comes before it."""
    found = {}
    for at in sorted(needs):
        found[at] = set(needs[at]).union(*(found[one] for one in needs[at]))
    return found


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@given(steps=programs(), seed=st.integers(0, 5))
def test_every_task_runs_once_and_after_what_it_needs(schedule, steps, seed):
    ran, needs = carry_out(steps, schedule, seed)
    assert sorted(ran) == sorted(needs)
    place = {at: index for index, at in enumerate(ran)}
    for at, before in closure(needs).items():
        assert all(place[one] < place[at] for one in before)


@given(programs(), st.integers(0, 5))
def test_a_seed_replays(steps, seed):
    assert carry_out(steps, "random", seed) == carry_out(steps, "random", seed)


@pytest.mark.parametrize("kinds", [("read", "write"), ("write", "read"), ("write", "write")])
def test_lazy_runs_a_racing_pair_in_the_reverse_of_its_issue(kinds):
    for demanded in "ab":
        steps = [(kinds[0], "a", 0), (kinds[1], "b", 0), ("demand", demanded, 0)]
        ran, _ = carry_out(steps, "lazy")
        assert ran == [1, 0]


def test_lazy_leaves_an_ordered_pair_in_its_order():
    ran, _ = carry_out([("write", "a", 0), ("wait", "b", "a"), ("read", "b", 0), ("demand", "b", 0)], "lazy")
    assert ran == [0, 1, 2]


def test_lazy_leaves_disjoint_bytes_alone():
    queues, ran = Queues("lazy"), []
    queues.add("a", lambda: ran.append("a"), touches=[Touch(0, Extent(0, 2, 2), True)])
    queues.add("b", lambda: ran.append("b"), touches=[Touch(0, Extent(2, 4, 2), True)])
    queues.demand(queues.tail("a"))
    assert ran == ["a"]


def test_a_task_that_raises_is_done_and_the_others_still_run():
    queues, ran = Queues("lazy"), []

    def fail():
        raise KeyError("mine")

    queues.add("a", fail)
    queues.add("a", lambda: ran.append(1))
    with pytest.raises(KeyError):
        queues.demand_all()
    queues.demand_all()
    assert ran == [1]


def test_a_long_queue_needs_no_deep_stack():
    queues, ran = Queues("lazy"), []
    for _ in range(5000):
        queues.add("a", lambda: ran.append(1))
    queues.demand(queues.tail("a"))
    assert len(ran) == 5000
