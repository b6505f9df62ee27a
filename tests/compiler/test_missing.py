"""devstream/compiler/_missing.py: it finds the waits that the user's own code lacks, and no others."""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, given, settings

from devstream.compiler._build import build
from devstream.compiler._graph import OpKind
from devstream.compiler._missing import missing
from devstream.compiler._program import Wait
from devstream.testing.graphs import ACTIONS, Capture, graphs

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def right(*, wait=True):
    """A fork and a join that eager mode does right, but for the last wait."""
    capture = Capture(streams=2)
    x = capture.input()
    capture.record(0, 0)
    capture.wait(0, 1)
    a = capture.node(1, x)
    b = capture.node(0, x)
    capture.record(1, 1)
    if wait:
        capture.wait(1, 0)
    capture.output(capture.node(0, a, b))
    return capture.graph()


def test_correct_code_lacks_nothing():
    assert missing(right()) == ()


def test_a_missing_wait_is_named_with_both_lines_and_the_fix():
    (found,) = missing(right(wait=False))
    assert (found.first, found.first_line, found.first_stream) == ("n0", "step.py:3", 1)
    assert (found.second, found.second_line, found.second_stream) == ("n2", "step.py:6", 0)
    assert found.sure
    assert "record an event on stream 1 behind n0, and let stream 0 wait for it" in str(found)


def test_a_wait_that_comes_too_late_is_missing():
    capture = Capture(streams=2)
    a = capture.node(0, capture.input())
    capture.record(0, 0)
    b = capture.node(1, a)
    capture.wait(0, 1)
    capture.output(capture.node(1, b), joined=False)
    assert [(one.first, one.second) for one in missing(capture.graph())] == [("n0", "n1")]


def test_what_the_caller_may_have_ordered_is_unsure():
    capture = Capture(streams=2)
    capture.output(capture.node(1, capture.input()))
    assert [one.sure for one in missing(capture.graph())] == [False, False]


def test_an_event_that_was_given_orders_what_was_given_with_it():
    from devstream.compiler._graph import Given

    capture = Capture(streams=2)
    x = capture.input()
    capture.given.append(Given(event=0, stream=0))
    capture.wait(0, 1)
    capture.output(capture.node(1, x), joined=False)
    assert missing(capture.graph()) == ()


def test_a_change_under_an_earlier_reader_is_missing_a_wait():
    capture = Capture(streams=2)
    x = capture.input()
    capture.output(capture.node(1, x), joined=False)
    capture.change(x, 0)
    (found,) = [one for one in missing(capture.graph()) if one.sure]
    assert (found.first, found.second) == ("n0", f"the change of {x}")


def delete_under_a_reader(*, told=False, waited=False):
    capture = Capture(streams=2)
    x = capture.input()
    a = capture.node(0, x)
    capture.record(0, 0)
    capture.wait(0, 1)
    b = capture.node(1, a)
    capture.record(1, 1)
    if told:
        capture.record_stream(a, 1)
    if waited:
        capture.wait(1, 0)
    capture.delete(a, 0)
    capture.wait(1, 0)
    capture.output(capture.node(0, b))
    return capture.graph()


def test_a_del_under_a_reader_of_another_stream_is_missing_a_wait():
    (found,) = missing(delete_under_a_reader())
    assert (found.first, found.second) == ("n1", "the del of v_n0")
    assert "record_stream" in found.fix


def test_a_del_behind_the_wait_or_with_record_stream_is_right():
    assert missing(delete_under_a_reader(waited=True)) == ()
    assert missing(delete_under_a_reader(told=True)) == ()


# Not with collectives: the program may take work in front of a collective's wait that also ordered something else.
@SLOW
@given(graphs(max_actions=12, actions=tuple(one for one in ACTIONS if one not in {"issue", "land"})))
def test_code_that_lacks_nothing_needs_no_added_wait(graph):
    if not missing(graph):
        assert not [step for step in build(graph).steps if isinstance(step, Wait) and step.op is None]


@SLOW
@given(graphs(max_actions=12))
def test_without_the_users_operations_nothing_is_found_less_often(graph):
    bare = dataclasses.replace(
        graph,
        ops=(),
        nodes=tuple(dataclasses.replace(node, epoch=0) for node in graph.nodes),
        write_backs=tuple(dataclasses.replace(back, epoch=0) for back in graph.write_backs),
        dels=(),
    )
    if any(op.kind is not OpKind.RECORD_STREAM for op in graph.ops):
        pairs = {(one.first, one.second_stream) for one in missing(dataclasses.replace(graph, dels=()))}
        assert pairs <= {(one.first, one.second_stream) for one in missing(bare)}
