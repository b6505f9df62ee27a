"""What keeps a program from being one device graph is found in its steps, and named with its line."""

from __future__ import annotations

import pytest

from devstream.compiler._graph import Origin, Stream
from devstream.compiler._obstacles import hosts, obstacle_of
from devstream.compiler._program import (
    Program,
    Record,
    RecordStream,
    Slot,
    Synchronize,
    Work,
    WorkKind,
)


def program(*steps, slots=(), devices=("cuda:0", "cuda:0")):
    return Program("forward", tuple(Stream(one) for one in devices), slots, steps)


def work(kind, name="step", **given):
    return Work(kind, 0, name, line="a.py:3", **given)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Synchronize(0, (0,), line="a.py:3"), "the host waits"),
        (RecordStream("x", 1, 0, line="a.py:3"), "record_stream"),
        (work(WorkKind.ISSUE, "all_reduce"), "a collective, all_reduce"),
        (work(WorkKind.COLLECTIVE_WAIT, "wait_tensor"), "a collective, wait_tensor"),
        (work(WorkKind.EFFECT, "print"), "print does something on the host"),
        (work(WorkKind.REGION, nodes=("run_and_save_rng_state",)), "state of the random numbers"),
    ],
)
def test_steps(step, words):
    found = obstacle_of(program(Record(0, 0), step))
    assert words in found
    assert "(a.py:3)" in found


def test_regions_and_random_numbers_are_none():
    steps = (work(WorkKind.REGION), work(WorkKind.EFFECT, "rand"), work(WorkKind.WRITE_BACK, target="x"))
    assert obstacle_of(program(*steps), ["rand"]) is None


def test_two_devices():
    assert "cuda:0 and cuda:1" in obstacle_of(program(work(WorkKind.REGION), devices=("cuda:0", "cuda:1")))


def test_host_memory_that_only_copies_read_may_be_captured():
    slots = (Slot("x", 0, 0, "cpu", Origin.INPUT), Slot("y", 1, 0, "cuda:0"))
    copy = work(WorkKind.COPY, inputs=("x",), outputs=("y",))
    assert obstacle_of(program(copy, slots=slots)) is None
    assert hosts(program(copy, slots=slots)) == ("x",)


@pytest.mark.parametrize("origin", [Origin.INPUT, Origin.PRODUCED])
def test_host_memory_that_anything_else_touches_is_none(origin):
    slots = (Slot("x", 0, 0, "cpu", origin),)
    found = obstacle_of(program(work(WorkKind.REGION, inputs=("x",)), slots=slots))
    assert "x (a.py:3) is in the memory of cpu" in found
    assert hosts(program(work(WorkKind.REGION, inputs=("x",)), slots=slots)) == ()


def test_a_copy_to_the_host():
    slots = (Slot("x", 0, 0, "cuda:0", Origin.INPUT), Slot("y", 1, 0, "cpu"))
    found = obstacle_of(program(work(WorkKind.COPY, inputs=("x",), outputs=("y",)), slots=slots))
    assert "y (a.py:3) is in the memory of cpu" in found


def test_on_the_cpu_its_own_memory_is_none():
    slots = (Slot("x", 0, 0, "cpu", Origin.INPUT),)
    found = program(work(WorkKind.REGION, inputs=("x",)), slots=slots, devices=("cpu", "cpu"))
    assert obstacle_of(found) is None
    assert hosts(found) == ()
