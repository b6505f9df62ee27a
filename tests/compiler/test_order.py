"""devstream/compiler/_order.py: what must come before what, and which wishes contradict each other."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings

from devstream.compiler._build import build
from devstream.compiler._graph import WriteBack
from devstream.compiler._order import derive, entry, topological
from devstream.compiler._program import Record, Wait, Work, WorkKind
from devstream.compiler._proof import prove
from devstream.exceptions import GraphError, OrderingError, WriteBackError
from devstream.testing.graphs import Capture, graphs

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def added(program):
    return [step for step in program.steps if isinstance(step, Wait) and step.op is None]


@SLOW
@given(graphs(max_actions=14))
def test_a_captured_graph_always_has_an_order(graph):
    order = derive(graph)
    assert len(topological(order.before)) == len(order.before)


@SLOW
@given(graphs(max_actions=14))
def test_what_an_item_needs_is_issued_before_it(graph):
    order = derive(graph)
    for item, needs in enumerate(order.needs):
        assert {one for one in needs if one >= 0} <= set(order.before[item])


def test_each_reader_on_another_stream_waits_for_the_producer_not_only_the_first():
    capture = Capture(streams=3)
    a = capture.node(0, capture.input())
    for stream in (1, 2):
        capture.output(capture.node(stream, a), joined=False)
    assert sorted(step.stream for step in added(build(capture.graph()))) == [1, 2]


def test_a_second_wait_for_one_event_gates_its_own_consumer():
    capture = Capture(streams=3)
    a = capture.node(0, capture.input())
    capture.record(0, 0)
    readers = []
    for stream in (1, 2):
        capture.wait(0, stream)
        readers.append(capture.node(stream, a))
        capture.output(readers[-1], joined=False)
    program = build(capture.graph())
    prove(program)
    assert not added(program)


def test_a_tangent_that_a_side_stream_reads_is_waited_for():
    capture = Capture(streams=2)
    order = derive_graph(capture, capture.node(1, capture.input()))
    assert order.needs[0] == (entry(0),)


def derive_graph(capture, output):
    capture.output(output)
    return derive(capture.graph())


def test_a_gradient_that_is_made_on_a_side_stream_is_joined():
    capture = Capture(streams=2)
    capture.output(capture.node(1, capture.input()))
    assert [step.stream for step in added(build(capture.graph()))] == [1, 0]


def test_an_output_that_the_user_joined_gets_no_second_wait():
    capture = Capture(streams=2)
    x = capture.input()
    capture.record(0, 0)
    capture.wait(0, 1)
    a = capture.node(1, x)
    capture.record(1, 1)
    capture.wait(1, 0)
    capture.output(a)
    program = build(capture.graph())
    prove(program)
    assert not added(program)


def test_a_wait_whose_source_knows_the_other_source_is_the_only_one():
    capture = Capture(streams=3)
    a = capture.node(1, capture.input())
    b = capture.node(2, a)
    capture.output(capture.node(0, a, b))
    waits = added(build(capture.graph()))
    assert [step.stream for step in waits].count(0) == 1


def test_views_and_items_of_a_value_need_no_wait_of_their_own():
    capture = Capture(streams=2)
    first, second = capture.pair(0, capture.input())
    seen = capture.view(1, first)
    capture.output(capture.node(1, seen, second))
    program = build(capture.graph())
    assert len([step for step in added(program) if step.stream == 1]) == 1


def test_a_changed_input_is_written_back_before_the_event_that_stands_for_it():
    capture = Capture(streams=2)
    x = capture.input()
    capture.change(x, 1)
    capture.record(0, 1)
    program = build(capture.graph())
    prove(program)
    steps = program.steps
    back = next(i for i, s in enumerate(steps) if isinstance(s, Work) and s.kind is WorkKind.WRITE_BACK)
    record = next(i for i, s in enumerate(steps) if isinstance(s, Record) and s.op == 0)
    assert back < record


def test_an_earlier_reader_on_another_stream_is_waited_for_before_the_write_back():
    capture = Capture(streams=2)
    x = capture.input()
    capture.output(capture.node(0, x))
    capture.change(x, 1)
    program = build(capture.graph())
    prove(program)
    assert any("write-back of" in step.why and step.stream == 1 for step in added(program))


def late_reader():
    """x is changed on the side before an event; a reader of the old contents sits behind a wait for that event."""
    capture = Capture(streams=2)
    x = capture.input()
    capture.change(x, 1)
    capture.record(0, 1)
    capture.wait(0, 0)
    capture.output(capture.node(0, x))
    return capture.graph()


def test_a_reader_of_the_old_contents_behind_the_event_is_an_error_with_both_lines_and_the_fix():
    with pytest.raises(WriteBackError) as caught:
        build(late_reader())
    assert isinstance(caught.value, OrderingError)
    assert caught.value.line == "step.py:1"
    assert caught.value.other_line in {"step.py:2", "step.py:3"}
    assert "clone" in str(caught.value)


def test_a_write_back_outside_of_the_program_behind_a_record_is_an_error_with_both_lines():
    capture = Capture(streams=2)
    x = capture.input()
    source = capture.node(1, x)
    capture.write_backs.append(WriteBack(x, source, 1, 0, "step.py:1", outside=True))
    capture.output(source)
    prove(build(capture.graph()))
    capture.record(0, 1)
    with pytest.raises(WriteBackError) as caught:
        build(capture.graph())
    assert (caught.value.line, caught.value.other_line) == ("step.py:1", "step.py:2")


def test_a_write_back_outside_of_the_program_waits_for_readers_on_side_streams():
    capture = Capture(streams=2)
    x = capture.input()
    capture.output(capture.node(1, x), joined=False)
    source = capture.node(0, x)
    capture.write_backs.append(WriteBack(x, source, 0, 0, "step.py:2", outside=True))
    capture.output(source)
    program = build(capture.graph())
    prove(program)
    assert [step.stream for step in added(program)] == [1, 0]


def test_any_other_circle_is_an_error_that_names_its_parts():
    capture = Capture(streams=2)
    a = capture.node(0, capture.input())
    capture.record(0, 1)
    capture.wait(0, 0)
    capture.output(capture.node(1, a))
    graph = capture.graph()
    moved = (dataclasses.replace(graph.nodes[0], epoch=1), dataclasses.replace(graph.nodes[1], epoch=0))
    with pytest.raises(GraphError, match=r"n0.*n1|n1.*n0"):
        build(dataclasses.replace(graph, nodes=moved))


def test_effects_and_collectives_of_a_group_keep_their_order():
    capture = Capture(streams=2)
    x = capture.input()
    issued = [capture.issue(stream, x) for stream in (1, 0, 1)]
    for one in issued:
        capture.output(capture.land(0, one))
    program = build(capture.graph())
    prove(program)
    names = [step.name for step in program.steps if isinstance(step, Work) and step.kind is WorkKind.ISSUE]
    assert names == ["n0", "n1", "n2"]
