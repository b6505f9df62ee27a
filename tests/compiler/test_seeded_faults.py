"""Every program of the suite, forward and backward: each fault that can be put into it is refused, one by one.

Whether a changed program is at fault is decided by an oracle that knows nothing of clocks: the transitive closure
of what queues and events put in order (`devstream.testing.interleavings`).
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings

from devstream.compiler._build import build
from devstream.compiler._listing import listing
from devstream.compiler._program import (
    Free,
    Hold,
    Record,
    RecordStream,
    Synchronize,
    Wait,
    Work,
    WorkKind,
)
from devstream.compiler._proof import violations
from devstream.testing.graphs import graphs
from devstream.testing.interleavings import conflicts, machine, unordered

pytestmark = [
    # Dynamo makes an object of torch.autograd.Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]


def with_steps(program, steps):
    return dataclasses.replace(program, steps=tuple(steps))


def without(program, index):
    """Leave one step out; where it is the user's, as if he had never written it."""
    gone = getattr(program.steps[index], "op", None)
    rest = [*program.steps[:index], *program.steps[index + 1 :]]
    if gone is None:
        return with_steps(program, rest)
    renumbered = [
        dataclasses.replace(step, op=step.op - 1) if (getattr(step, "op", None) or -1) > gone else step
        for step in rest
    ]
    return dataclasses.replace(program, steps=tuple(renumbered), ops=program.ops - 1)


def moved(program, source, target):
    """Take a step out and put it in front of the one that was at *target*."""
    steps = list(program.steps)
    step = steps.pop(source)
    steps.insert(target - (source < target), step)
    return with_steps(program, steps)


def swapped(program, one, two):
    steps = list(program.steps)
    steps[one], steps[two] = steps[two], steps[one]
    return with_steps(program, steps)


def racing(program):
    return bool(unordered(machine(program)))


def storages(program, work):
    """Return what a step touches, and what of it it changes."""
    named = {program.slot[name].storage for name in (*work.inputs, *([work.target] if work.target else []))}
    changed = {use.storage for use in work.writes}
    return named | changed | {use.storage for use in work.reads}, changed


def launches(program):
    return [(place, step) for place, step in enumerate(program.steps) if isinstance(step, Work)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(max_actions=7))
def test_the_oracle_for_large_programs_is_the_one_that_tries_all_orders(graph):
    program = build(graph)
    for index, step in enumerate(program.steps):
        if isinstance(step, Wait | Hold):
            changed = without(program, index)
            assert unordered(machine(changed)) == conflicts(machine(changed))
    assert unordered(machine(program)) == conflicts(machine(program)) == set()


def test_nothing_is_wrong_with_any_program_of_the_suite(halves):
    for program in halves:
        assert not violations(program), listing(program)
        assert not racing(program)


def test_without_any_one_wait_that_the_order_rests_on_it_is_refused(halves):
    for program in halves:
        for index, step in enumerate(program.steps):
            if not isinstance(step, Wait):
                continue
            changed = without(program, index)
            assert bool(violations(changed)) == racing(changed), f"step {index} of\n{listing(program)}"


def test_no_wait_nor_record_that_was_added_is_redundant(halves):
    for program in halves:
        used = {event for step in program.steps if isinstance(step, Hold) for event in step.events}
        used |= {one.event for one in program.completions}
        for index, step in enumerate(program.steps):
            if isinstance(step, Wait):
                used.add(step.event)
            if isinstance(step, Wait) and step.op is None:
                assert step.why
                assert violations(without(program, index)), f"step {index} of\n{listing(program)}"
        for step in program.steps:
            if isinstance(step, Record) and step.op is None:
                assert step.event in used, listing(program)


def test_a_wait_for_an_event_that_is_recorded_only_later_is_refused(halves):
    for program in halves:
        for index, step in enumerate(program.steps):
            if isinstance(step, Wait) and step.op is None:
                records = [
                    place
                    for place, one in enumerate(program.steps)
                    if isinstance(one, Record) and one.event == step.event
                ]
                for record in records:
                    assert violations(moved(program, record, index + 1)), f"step {index} of\n{listing(program)}"


def test_without_any_one_step_of_the_users_it_is_refused(halves):
    for program in halves:
        for index, step in enumerate(program.steps):
            if getattr(step, "op", None) is not None:
                rest = [*program.steps[:index], *program.steps[index + 1 :]]
                assert violations(with_steps(program, rest))


def test_two_launches_of_which_one_needs_the_other_can_not_be_swapped(halves):
    for program in halves:
        works = launches(program)
        for later, (two, second) in enumerate(works):
            for one, first in works[:later]:
                left, right = storages(program, first), storages(program, second)
                if left[1] & right[0] or right[1] & left[0]:
                    assert violations(swapped(program, one, two)), f"steps {one}, {two} of\n{listing(program)}"


def test_memory_that_goes_back_too_early_is_refused(halves):
    for program in halves:
        for index, step in enumerate(program.steps):
            if not isinstance(step, Free):
                continue
            users = [place for place, work in launches(program) if step.storage in storages(program, work)[0]]
            last = max((place for place in users if place < index), default=-1)
            for target in range(index):
                changed = moved(program, index, target)
                # In front of a user, or of the wait that makes it safe.
                if target <= last or racing(changed):
                    assert violations(changed), f"step {index} at {target} of\n{listing(program)}"
                else:
                    assert not violations(changed), f"step {index} at {target} of\n{listing(program)}"


def test_memory_that_is_not_held_for_a_reader_that_still_runs_is_refused(halves):
    for program in halves:
        for index, step in enumerate(program.steps):
            if isinstance(step, Hold):
                assert violations(without(program, index))
                freed = [Free(step.storage, step.values, program.slot[step.values[0]].stream)]
                assert violations(
                    with_steps(program, [*program.steps[:index], *freed, *program.steps[index + 1 :]])
                )
                for event in step.events:  # each is needed too
                    fewer = dataclasses.replace(step, events=tuple(one for one in step.events if one != event))
                    steps = [*program.steps[:index], fewer, *program.steps[index + 1 :]]
                    assert violations(with_steps(program, steps)), listing(program)


def test_an_output_that_is_handed_over_unjoined_is_refused(halves):
    for program in halves:
        for result in program.results:
            storage = program.slot[result.value].storage
            makers = [
                (place, work.stream)
                for place, work in launches(program)
                if storage in storages(program, work)[1] or result.value in work.outputs
            ]
            if not makers:
                continue
            place, stream = makers[-1]
            if result.joined and stream != 0:
                # Without the waits of the caller's stream behind its maker, whoever wrote them.
                changed = program
                for index in reversed(range(place, len(program.steps))):
                    step = program.steps[index]
                    if isinstance(step, Wait) and step.stream == 0:
                        changed = without(changed, index)
                assert racing(changed)
                assert violations(changed), listing(changed)
            if result.saved and stream != 0:
                nobody = dataclasses.replace(program, completions=())
                assert violations(nobody)
            if not result.joined:
                claimed = dataclasses.replace(result, joined=True, saved=False)
                results = tuple(claimed if one == result else one for one in program.results)
                promised = dataclasses.replace(program, results=results)
                assert bool(violations(promised)) == racing(promised)


def test_work_on_the_wrong_side_of_an_operation_of_the_users_is_refused(halves):
    """A write-back in the wrong epoch is one of these."""
    for program in halves:
        for place, work in launches(program):
            if work.epochs is None:
                continue
            for other, op in enumerate(program.steps):
                if getattr(op, "op", None) is None or isinstance(op, RecordStream):
                    continue
                if isinstance(op, Synchronize):
                    epoch = op.epochs[work.stream]
                elif op.stream == work.stream:
                    epoch = op.epoch
                else:
                    continue
                behind = isinstance(op, Record) and place < other and work.epochs[0] <= epoch
                front = isinstance(op, Wait) and place > other and work.epochs[1] > epoch
                if behind or front:
                    changed = moved(program, place, other + 1 if behind else other)
                    assert violations(changed), f"step {place} beside {other} of\n{listing(program)}"


def test_a_write_back_behind_the_record_that_stands_for_it_names_both_lines(suite, compile_halves):
    program = next(one for one in suite.PROGRAMS if one.name == "input_changed_on_a_side_stream")
    forward, *_ = compile_halves(program)
    (back,) = [place for place, work in launches(forward) if work.kind is WorkKind.WRITE_BACK]
    (record,) = [
        place
        for place, step in enumerate(forward.steps)
        if isinstance(step, Record) and step.op is not None and step.stream == forward.steps[back].stream
    ]
    assert back < record
    (words,) = [str(one) for one in violations(moved(forward, back, record + 1)) if "belongs" in str(one)]
    assert forward.steps[back].line in words
    assert forward.steps[record].line in words


def test_the_suite_has_enough_of_each(suite, compile_halves):
    steps = [step for program in suite.PROGRAMS for half in compile_halves(program) for step in half.steps]
    assert sum(isinstance(step, Wait) for step in steps) >= 250
    assert sum(isinstance(step, Wait) and step.op is None for step in steps) >= 70
    assert sum(isinstance(step, Free) for step in steps) >= 90
    assert sum(isinstance(step, Hold) for step in steps) >= 80
    assert sum(isinstance(step, Work) and step.kind is WorkKind.WRITE_BACK for step in steps) >= 5
