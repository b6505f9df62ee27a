"""devstream/compiler/_proof.py: it refuses exactly the programs that some legal order of execution breaks."""

from __future__ import annotations

import dataclasses
import pickle
import sys

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from devstream.compiler._build import build
from devstream.compiler._graph import Origin
from devstream.compiler._listing import listing
from devstream.compiler._program import (
    Free,
    Hold,
    Program,
    Record,
    RecordStream,
    Result,
    Synchronize,
    Use,
    Wait,
    Work,
    WorkKind,
)
from devstream.compiler._proof import prove, violations
from devstream.exceptions import ProofError
from devstream.testing.graphs import Capture, graphs
from devstream.testing.interleavings import conflicts, machine

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def misplaced(program: Program) -> bool:  # noqa: PLR0912 - one naive check after the other
    """Whether the order of issue alone is wrong: contents, lifetimes, promises, the user's operations."""
    storage = {slot.name: slot.storage for slot in program.slots}
    owner = {slot.storage: slot.stream for slot in reversed(program.slots)}
    version = {slot.storage: 0 for slot in program.slots if slot.origin is not Origin.PRODUCED}
    freed, issued, landed = set(), set(), set()
    exits = Work(WorkKind.EFFECT, 0, "", reads=program.exit_reads, writes=program.exit_writes)
    promised = [*program.results, *program.exit_writers]
    for step in [*program.steps, *promised, exits]:
        if isinstance(step, Work):
            names = [storage[name] for name in (*step.inputs, *([step.target] if step.target else []))]
            if any(name not in version or name in freed for name in names):
                return True
            if any(version.get(use.storage) != use.version for use in step.reads):
                return True
            if any(use.storage in freed for use in step.writes):
                return True
            version.update((use.storage, use.version) for use in step.writes)
            issued |= {step.name} if step.kind is WorkKind.ISSUE else set()
            if step.kind is WorkKind.COLLECTIVE_WAIT:
                if step.collective not in issued:
                    return True
                landed.add(step.collective)
        elif isinstance(step, Free):
            if step.storage not in version or step.storage in freed or step.stream != owner[step.storage]:
                return True
            freed.add(step.storage)
        elif isinstance(step, RecordStream):
            if storage[step.value] not in version or storage[step.value] in freed:
                return True
        elif isinstance(step, Result):
            if version.get(storage[step.value]) != step.version or storage[step.value] in freed:
                return True
        elif isinstance(step, Use) and version.get(step.storage) != step.version:
            return True
    return issued != landed or misordered(program)


def misordered(program: Program) -> bool:  # noqa: PLR0912 - one naive check after the other
    """Whether the user's operations are not all there, in order, with the work on the right side of them."""
    ops = [step for step in program.steps if getattr(step, "op", None) is not None]
    if sorted(op.op for op in ops) != list(range(program.ops)):
        return True
    for later, second in enumerate(ops):
        for first in ops[:later]:
            if isinstance(first, RecordStream) or isinstance(second, RecordStream) or first.op < second.op:
                continue
            if isinstance(first, Synchronize) or isinstance(second, Synchronize):
                return True
            if first.stream == second.stream or first.event == second.event:
                return True
    for where, op in enumerate(program.steps):
        if getattr(op, "op", None) is None or isinstance(op, RecordStream):
            continue
        for place, work in enumerate(program.steps):
            if not isinstance(work, Work) or work.epochs is None:
                continue
            if isinstance(op, Synchronize):
                epoch = op.epochs[work.stream]
                records, waits = op.event is None and op.stream in {None, work.stream}, True
            else:
                epoch, same = op.epoch, op.stream == work.stream
                records, waits = same and isinstance(op, Record), same and isinstance(op, Wait)
            if (records and place > where and work.epochs[0] <= epoch) or (
                waits and place < where and work.epochs[1] > epoch
            ):
                return True
    return False


def breaks(program: Program) -> bool:
    """The oracle: whether anything can go wrong, by trying all orders."""
    return misplaced(program) or bool(conflicts(machine(program)))


def without(program, index):
    return dataclasses.replace(program, steps=program.steps[:index] + program.steps[index + 1 :])


def swapped(program, one, two):
    steps = list(program.steps)
    steps[one], steps[two] = steps[two], steps[one]
    return dataclasses.replace(program, steps=tuple(steps))


def moved(program, source, target):
    steps = list(program.steps)
    steps.insert(target, steps.pop(source))
    return dataclasses.replace(program, steps=tuple(steps))


@SLOW
@given(graphs(max_actions=9))
def test_every_program_that_is_built_is_proved_and_no_order_of_execution_breaks_it(graph):
    program = build(graph)
    found = [str(one) for one in violations(program)]
    assert not found, listing(program) + "\n".join(found)
    assert not breaks(program)


@SLOW
@given(graphs(max_actions=7), st.data())
def test_the_verdict_on_a_tampered_program_is_that_of_all_orders_of_execution(graph, data):
    program = build(graph)
    assume(len(program.steps) > 1)
    index = st.integers(0, len(program.steps) - 1)
    for _ in range(data.draw(st.integers(1, 2))):
        kind = data.draw(st.sampled_from(["drop", "swap", "move"]))
        if kind == "drop" and len(program.steps) > 1:
            program = without(program, data.draw(index) % len(program.steps))
        elif kind == "swap":
            one, two = (data.draw(index) % len(program.steps) for _ in range(2))
            program = swapped(program, one, two)
        else:
            one, two = (data.draw(index) % len(program.steps) for _ in range(2))
            program = moved(program, one, two)
    found = [str(one) for one in violations(program)]
    assert bool(found) == breaks(program), listing(program) + "\n".join(found)


@SLOW
@given(graphs(max_actions=12))
def test_a_program_without_any_one_wait_is_refused(graph):
    program = build(graph)
    for index, step in enumerate(program.steps):
        if isinstance(step, Wait):
            assert violations(without(program, index)), f"without step {index}"


@SLOW
@given(graphs(max_actions=10))
def test_a_program_without_any_one_hold_is_refused(graph):
    program = build(graph)
    for index, step in enumerate(program.steps):
        if isinstance(step, Hold):
            assert violations(without(program, index))


@SLOW
@given(graphs(max_actions=10))
def test_memory_that_goes_back_before_its_last_use_is_refused(graph):
    program = build(graph)
    for index, step in enumerate(program.steps):
        users = [
            place
            for place, work in enumerate(program.steps[:index])
            if isinstance(work, Work) and step_uses(program, work, step)
        ]
        if users:
            assert violations(moved(program, index, users[-1]))


def step_uses(program, work, free):
    if not isinstance(free, Free):
        return False
    names = {program.slot[name].storage for name in work.inputs}
    return free.storage in names | {use.storage for use in (*work.reads, *work.writes)}


@SLOW
@given(graphs(max_actions=10))
def test_a_result_that_is_promised_to_the_caller_without_a_join_is_refused(graph):
    program = build(graph)
    last = {}
    for step in program.steps:
        if isinstance(step, Work):
            last.update((use.storage, step.stream) for use in step.writes)
    for number, result in enumerate(program.results):
        if result.joined or result.saved:
            continue
        claimed = dataclasses.replace(result, joined=True)
        results = (*program.results[:number], claimed, *program.results[number + 1 :])
        promised = dataclasses.replace(program, results=results)
        assert bool(violations(promised)) == breaks(promised)


@SLOW
@given(graphs(max_actions=10))
def test_two_launches_of_which_one_changes_what_the_other_touches_can_not_be_swapped(graph):
    program = build(graph)
    works = [(place, step) for place, step in enumerate(program.steps) if isinstance(step, Work)]
    for later, (two, second) in enumerate(works):
        for one, first in works[:later]:
            left, right = ({use.storage for use in step.writes} for step in (first, second))
            if left & {use.storage for use in (*second.reads, *second.writes)} or right & {
                use.storage for use in first.reads
            }:
                assert violations(swapped(program, one, two))


@SLOW
@given(graphs(max_actions=12, actions=("compute", "change", "record", "record", "wait", "synchronize", "view")))
def test_no_work_can_be_moved_behind_a_record_nor_in_front_of_a_wait_that_it_was_captured_beside(graph):
    program = build(graph)
    for place, work in enumerate(program.steps):
        if not isinstance(work, Work) or work.epochs is None:
            continue
        for other, op in enumerate(program.steps):
            if getattr(op, "op", None) is None or getattr(op, "stream", None) != work.stream:
                continue
            behind = isinstance(op, Record) and other > place and work.epochs[0] <= op.epoch
            front = isinstance(op, Wait) and other < place and work.epochs[1] > op.epoch
            if behind or front:
                assert violations(moved(program, place, other))


def two_streams():
    """a on the side, b on the caller's stream reads it; x is changed in place before an event is recorded."""
    capture = Capture(streams=2)
    x = capture.input()
    a = capture.node(1, x)
    capture.change(x, 1, a)
    capture.record(0, 1)
    b = capture.node(0, a)
    capture.output(b)
    return build(capture.graph())


def test_a_violation_names_both_steps_both_lines_and_the_missing_wait():
    program = two_streams()
    wait = next(
        index
        for index, step in enumerate(program.steps)
        if isinstance(step, Wait) and step.op is None and step.stream == 0
    )
    found = violations(without(program, wait))
    words = next(str(one) for one in found if one.second < len(program.steps) - 1)
    assert "step.py:1" in words
    assert "step.py:4" in words
    assert "missing: a wait of stream 0 for an event that is recorded on stream 1" in words


def test_a_write_back_behind_the_record_that_stands_for_it_is_refused():
    program = two_streams()
    prove(program)
    back = next(i for i, s in enumerate(program.steps) if isinstance(s, Work) and s.kind is WorkKind.WRITE_BACK)
    record = next(i for i, s in enumerate(program.steps) if isinstance(s, Record) and s.op is not None)
    assert back < record
    with pytest.raises(ProofError, match=r"step\.py:3"):
        prove(moved(program, back, record))


def test_two_launches_on_one_stream_in_the_wrong_order_are_refused_although_nothing_races():
    capture = Capture(streams=2)
    x = capture.input()
    a = capture.node(0, x)
    capture.wait(0, 0)
    capture.node(0, a, writes=(a,), alias=a)
    capture.wait(0, 0)
    capture.output(capture.node(0, a))
    program = build(capture.graph())
    launches = [index for index, step in enumerate(program.steps) if isinstance(step, Work)]
    prove(program)
    assert violations(swapped(program, launches[1], launches[2]))


def test_the_error_carries_the_violations_and_survives_pickling():
    program = two_streams()
    with pytest.raises(ProofError) as caught:
        prove(without(program, next(i for i, s in enumerate(program.steps) if isinstance(s, Wait))))
    assert caught.value.violations
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def chain(length):
    """So many rounds over three streams, with a collective in each."""
    capture = Capture(streams=3)
    value = capture.input()
    for number in range(length):
        value = capture.node(number % 3, value)
        issued = capture.issue(number % 3, value)
        side = capture.node((number + 1) % 3, value)
        value = capture.node((number + 2) % 3, capture.land((number + 2) % 3, issued), side)
    capture.output(value)
    return build(capture.graph())


def calls_of(function, *arguments):
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


def test_the_proof_of_twice_the_program_costs_at_most_2_3_times_as_much():
    once, twice = chain(60), chain(120)
    prove(twice)
    assert len(twice.steps) >= 1.9 * len(once.steps)
    assert calls_of(prove, twice) <= 2.3 * calls_of(prove, once)
