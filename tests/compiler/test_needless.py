"""devstream/compiler/_needless.py: it marks the waits that can go together, and no others."""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, given, settings

from devstream.compiler._graph import Given
from devstream.compiler._missing import missing
from devstream.compiler._needless import needless
from devstream.testing.graphs import Capture, graphs

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def fork_and_join(joins: int = 1):
    capture = Capture(streams=2)
    x = capture.input()
    capture.record(0, 0)
    capture.wait(0, 1)
    a = capture.node(1, x)
    for event in range(1, joins + 1):
        capture.record(event, 1)
        capture.wait(event, 0)
    capture.output(capture.node(0, a))
    return capture


def test_in_correct_code_no_wait_is_needless():
    assert needless(fork_and_join().graph()) == ()


def test_of_two_that_do_the_same_the_earlier_is_marked():
    assert needless(fork_and_join(joins=2).graph()) == (3,)


def test_a_wait_that_orders_nothing_is_marked():
    capture = fork_and_join()
    capture.record(2, 0)
    capture.wait(2, 1)
    assert needless(capture.graph()) == (5,)


def test_a_wait_for_an_event_of_outside_is_never_marked():
    capture = fork_and_join()
    capture.wait(7, 1)
    assert needless(capture.graph()) == ()
    capture.given.append(Given(event=7, stream=0))
    assert needless(capture.graph()) == ()


@SLOW
@given(graphs(max_actions=12))
def test_without_all_that_are_marked_nothing_new_is_missing(graph):
    marked = needless(graph)
    rest = tuple(op for number, op in enumerate(graph.ops) if number not in marked)
    assert set(missing(dataclasses.replace(graph, ops=rest))) == set(missing(graph))
    assert needless(dataclasses.replace(graph, ops=rest)) == ()
