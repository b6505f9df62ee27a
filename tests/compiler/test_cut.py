"""devstream/compiler/_cut.py: few regions, each of one stream, and no work held up for long to save a launch."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings

from devstream.compiler._build import build
from devstream.compiler._cut import GroupKind, cut
from devstream.compiler._graph import OWN_STEP, Kind
from devstream.compiler._listing import listing
from devstream.compiler._order import derive
from devstream.compiler._program import Record, Synchronize, Wait, Work, WorkKind
from devstream.compiler._proof import prove
from devstream.testing.graphs import Capture, graphs

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PLAIN = ("compute", "compute", "pair", "view", "write", "record", "wait", "del")


def bound(program, *, steps=False, records=False):
    """Return the sum over streams of the waits on it that follow work, + 1; with what else ends a region."""
    allowed, worked = {}, defaultdict(bool)
    for step in program.steps:
        if isinstance(step, Work) and step.kind is WorkKind.REGION:
            allowed.setdefault(step.stream, 1)
            worked[step.stream] = True
            continue
        if isinstance(step, Synchronize):
            for stream in [one for one in allowed if worked[one]]:
                allowed[stream] += 1
            continue
        ends = (
            isinstance(step, Wait) or (steps and isinstance(step, Work)) or (records and isinstance(step, Record))
        )
        if ends and worked[step.stream]:
            allowed[step.stream] += 1
    return sum(allowed.values())


@SLOW
@given(graphs(max_actions=20, actions=PLAIN))
def test_there_are_at_most_as_many_regions_as_waits_that_follow_work_and_one_for_each_stream(graph):
    program = build(graph)
    assert len(program.regions) <= bound(program)


@SLOW
@given(graphs(max_actions=20))
def test_steps_of_their_own_cost_at_most_one_region_each(graph):
    program = build(graph)
    assert len(program.regions) <= bound(program, steps=True)


@SLOW
@given(graphs(max_actions=20, costs=True, actions=("compute", "compute", "pair", "view", "write", "del")))
def test_with_costs_a_region_ends_at_most_where_an_event_is_recorded_or_waited_for(graph):
    program = build(graph)
    assert len(program.regions) <= bound(program, records=True), listing(program)


@SLOW
@given(graphs(max_actions=20, costs=True))
def test_a_program_that_is_cut_by_costs_is_proved(graph):
    prove(build(graph))


@SLOW
@given(graphs(max_actions=16))
def test_nothing_that_is_a_step_of_its_own_enters_a_region(graph):
    order = derive(graph)
    for group in cut(order):
        nodes = [graph.nodes[item] for item in group.items if item < len(graph.nodes)]
        if group.kind is GroupKind.REGION:
            assert not [node for node in nodes if node.kind in OWN_STEP]
            assert {node.stream for node in nodes if node.kind not in {Kind.VIEW, Kind.ITEM}} <= {group.stream}


@SLOW
@given(graphs(max_actions=16))
def test_groups_hold_every_item_once_and_respect_the_order_of_issue(graph):
    order = derive(graph)
    place = {}
    for number, group in enumerate(cut(order)):
        for item in group.items:
            assert item not in place
            place[item] = number
    kept = set(range(order.end(0))) - place.keys()
    assert all(graph.nodes[item].kind is Kind.VIEW for item in kept)
    for item, number in place.items():
        assert all(place[other] <= number for other in order.before[item] if other in place)


def micro_batches(count):
    """Micro-batches on two streams in turn, and a sum of all on the caller's stream."""
    capture = Capture(streams=3)
    x = capture.input()
    parts = []
    for number in range(count):
        stream = 1 + number % 2
        value = x
        for _ in range(4):
            value = capture.node(stream, value)
        parts.append(value)
    total = parts[0]
    for part in parts[1:]:
        total = capture.node(0, total, part)
    capture.output(total)
    return capture.graph()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_micro_batches_on_two_streams_are_one_region_a_stream(count):
    program = build(micro_batches(count))
    prove(program)
    assert sorted(work.stream for work in program.regions) == [0, 1, 2]


def fork_and_join(cost_us):
    """a; a side stream works beside b; c joins them."""
    capture = Capture(streams=2)
    a = capture.node(0, capture.input(), cost_us=cost_us)
    capture.record(0, 0)
    capture.wait(0, 1)
    side = capture.node(1, a, cost_us=cost_us)
    b = capture.node(0, a, cost_us=cost_us)
    capture.record(1, 1)
    capture.wait(1, 0)
    capture.output(capture.node(0, b, side, cost_us=cost_us))
    return capture.graph()


def nodes(program):
    return [work.nodes for work in program.regions]


def test_work_that_takes_long_does_not_hold_up_the_stream_that_waits_for_what_is_before_it():
    program = build(fork_and_join(100.0))
    assert nodes(program) == [("n0",), ("n2",), ("n1",), ("n3",)] or nodes(program) == [
        ("n0",),
        ("n1",),
        ("n2",),
        ("n3",),
    ]
    fork = next(
        index for index, step in enumerate(program.steps) if isinstance(step, Record) and step.op is not None
    )
    beside = next(
        index for index, step in enumerate(program.steps) if isinstance(step, Work) and "n2" in step.nodes
    )
    assert fork < beside


@pytest.mark.parametrize("cost_us", [None, 2.0])
def test_short_work_and_work_of_unknown_cost_are_merged(cost_us):
    assert nodes(build(fork_and_join(cost_us))) == [("n0", "n2"), ("n1",), ("n3",)]


def test_a_collective_starts_before_later_work_of_its_stream_and_is_waited_for_as_late_as_possible():
    capture = Capture(streams=1)
    x = capture.input()
    a = capture.node(0, x)
    issued = capture.issue(0, a)
    done = capture.land(0, issued)
    b = capture.node(0, x)
    capture.output(capture.node(0, done, b))
    program = build(capture.graph())
    assert [work.name for work in program.steps if isinstance(work, Work)] == [
        "region0",
        "n1",
        "region1",
        "n2",
        "region2",
    ]
    assert nodes(program) == [("n0",), ("n3",), ("n4",)]


def test_work_of_an_earlier_epoch_stays_in_front_of_the_users_wait():
    capture = Capture(streams=2)
    x = capture.input()
    side = capture.node(1, x)
    capture.record(0, 1)
    a = capture.node(0, x)
    capture.wait(0, 0)
    capture.output(capture.node(0, a, side))
    program = build(capture.graph())
    assert nodes(program) == [("n0",), ("n1",), ("n2",)] or nodes(program) == [("n1",), ("n0",), ("n2",)]
