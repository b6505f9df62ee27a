"""devstream/backends/_cpu_queue.py: points happen exactly when a plain model says so."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devstream.backends._cpu_queue import Timeline, Worker


class Queue:
    tail = None


@st.composite
def graphs(draw):
    """Draw (kind, predecessors) a node, and an order in which the gates are opened."""
    count = draw(st.integers(1, 24))
    nodes = []
    for i in range(count):
        kind = draw(st.sampled_from(["point", "latch", "task"]))
        before = draw(st.lists(st.integers(0, i - 1), max_size=4)) if i else []
        nodes.append((kind, before))
    gates = [i for i, (kind, _) in enumerate(nodes) if kind != "point"]
    # An opening may come before later nodes are made: its number says after how many nodes.
    opens = [(i, draw(st.integers(i + 1, count))) for i in draw(st.permutations(gates))]
    return nodes, opens, draw(st.sets(st.sampled_from(gates))) if gates else set()


class Model:
    """Says for each node by brute force whether it ran, happened and failed."""

    def __init__(self, nodes, fails):
        self.nodes, self.fails, self.opened = nodes, fails, set()

    def before(self, i):
        found, todo = set(), [i]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += self.nodes[node][1]
        return found

    def happened(self, i):
        return all(self.nodes[j][0] == "point" or j in self.opened for j in self.before(i))

    def ran(self, i):
        return all(self.nodes[j][0] != "task" or j in self.opened for j in self.before(i))

    def failed(self, i):
        return bool(self.before(i) & self.fails & self.opened)


@given(graphs())
@settings(max_examples=200, deadline=None)
def test_points_run_happen_and_fail_as_the_model_says(graph):
    nodes, opens, fails = graph
    timeline, model, points = Timeline(), Model(nodes, fails), []

    def compare():
        for i, point in enumerate(points):
            assert point.happened == model.happened(i)
            assert point.ran == model.ran(i)
            assert point.held == (model.ran(i) and not model.happened(i))
            if point.happened:
                assert (point.error is not None) == model.failed(i)
                assert all(points[j].time_ns <= point.time_ns for j in model.before(i))
            assert point.happened is False or point.followers == []

    for i, (kind, before) in enumerate(nodes):
        earlier = [points[j] for j in before]
        points.append(
            timeline.after(*earlier) if kind == "point" else timeline.gate(*earlier, held=kind == "latch")
        )
        for gate, after in opens:
            if after == i + 1:
                timeline.open(points[gate], KeyError(gate) if gate in fails else None)
                model.opened.add(gate)
        compare()
    assert all(point.happened for point in points)


@given(st.lists(st.sampled_from(["after", "latch", "task"]), max_size=12))
@settings(max_examples=50, deadline=None)
def test_a_queue_is_in_order(kinds):
    timeline, queue = Timeline(), Queue()
    points = [
        timeline.after(queue=queue) if kind == "after" else timeline.gate(held=kind == "latch", queue=queue)
        for kind in kinds
    ]
    for kind, point in reversed(list(zip(kinds, points, strict=True))):
        if kind != "after":
            timeline.open(point)
    times = [point.time_ns for point in points]
    assert all(point.happened for point in points)
    assert times == sorted(times)


def test_a_chain_as_long_as_a_program_happens_without_recursion():
    timeline, queue = Timeline(), Queue()
    gate = timeline.gate(held=True, queue=queue)
    for _ in range(50_000):
        last = timeline.after(queue=queue)
    assert not last.happened
    timeline.open(gate)
    assert last.happened


def test_tasks_of_one_worker_run_in_the_order_of_the_queue():
    timeline, queue, worker, seen = Timeline(), Queue(), Worker("test"), []
    go = threading.Event()
    worker.run(timeline, go.wait, queue)
    for i in range(50):
        end = worker.run(timeline, lambda i=i: seen.append(i), queue)
    assert seen == []
    go.set()
    timeline.wait(end)
    assert seen == list(range(50))


def test_a_task_runs_though_a_latch_before_it_is_closed_and_its_end_waits_for_the_latch():
    timeline, queue, worker = Timeline(), Queue(), Worker("test")
    latch = timeline.gate(held=True, queue=queue)
    ran = threading.Event()
    end = worker.run(timeline, ran.set, queue)
    assert timeline.catch_up(end) is None
    assert ran.is_set()
    assert end.held
    timeline.open(latch)
    assert end.happened


def test_what_comes_behind_a_failed_task_does_not_run_and_fails_likewise():
    timeline, queue, worker, seen = Timeline(), Queue(), Worker("test"), []

    def fail():
        raise KeyError("first")

    worker.run(timeline, fail, queue)
    end = worker.run(timeline, lambda: seen.append("second"), queue)
    with pytest.raises(KeyError, match="first"):
        timeline.wait(end)
    assert seen == []
    assert isinstance(timeline.catch_up(end), KeyError)


def test_an_opened_latch_no_longer_hides_a_task_that_still_works():
    timeline, queue, worker, other = Timeline(), Queue(), Worker("test"), Queue()
    go = threading.Event()
    worker.run(timeline, go.wait, queue)
    latch = timeline.gate(held=True, queue=other)
    joined = timeline.after(latch, queue=queue)
    timeline.open(latch)
    assert not joined.ran
    assert not joined.held
    go.set()
    timeline.wait(joined)
