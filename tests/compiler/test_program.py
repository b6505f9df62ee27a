"""devstream/compiler: a program computes what the captured code says, in every order, and is readable data."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devstream.compiler._build import build
from devstream.compiler._document import from_json, to_json
from devstream.compiler._graph import FREE_OF_WORK, Graph, Kind, Origin
from devstream.compiler._listing import listing
from devstream.compiler._program import Free, Hold, Record, Synchronize, Wait, Work, WorkKind
from devstream.exceptions import FileFormatError
from devstream.testing.graphs import Capture, graphs
from devstream.testing.interleavings import machine, runs

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def given_memory(graph: Graph):
    """Return storage -> contents before the call."""
    return {
        value.storage: f"given {value.storage}" for value in graph.values if value.origin is not Origin.PRODUCED
    }


def execute(graph: Graph, name: str, memory) -> None:
    """Run one node on *memory*, which maps storages to what was computed, as nested text."""
    node = graph.node[name]
    if node.kind in FREE_OF_WORK or node.kind is Kind.WAIT:
        return
    found = f"{name}({', '.join(memory[storage] for storage in graph.storages(node.reads))})"
    read = set(graph.storages(node.reads))
    for storage in {*graph.storages(node.writes), *(set(graph.storages(node.makes)) - read)}:
        memory[storage] = f"{found}.{storage}"


def sequential(graph: Graph):
    """Return the memory after the captured code, run line by line."""
    memory = given_memory(graph)
    for node in graph.nodes:
        execute(graph, node.name, memory)
    final = dict(memory)
    for back in graph.write_backs:
        final[graph.value[back.target].storage] = memory[graph.value[back.source].storage]
    return final


def interpret(graph: Graph, program, choose):
    """Run *program* in one legal order and return the memory after it; memory that went back is overwritten."""
    memory = given_memory(graph)
    for task in runs(machine(program), choose):
        if task.gone is not None and not task.final:
            memory[task.gone] = "overwritten"
        if not 0 <= task.step < len(program.steps):
            continue
        step = program.steps[task.step]
        if not isinstance(step, Work) or (step.kind is WorkKind.ISSUE and not (task.reads or task.writes)):
            continue
        if step.kind is WorkKind.WRITE_BACK:
            memory[program.slot[step.target].storage] = memory[program.slot[step.inputs[0]].storage]
        for name in step.nodes:
            execute(graph, name, memory)
    return memory


@SLOW
@given(graphs(max_actions=10), st.data())
def test_every_order_of_execution_gives_the_result_of_the_lines_one_by_one(graph, data):
    program = build(graph)
    expected = sequential(graph)
    memory = interpret(graph, program, lambda ready: data.draw(st.sampled_from(sorted(ready))))
    freed = {step.storage for step in program.steps if isinstance(step, Free)}
    for result in program.results:
        storage = program.slot[result.value].storage
        assert storage not in freed
        assert memory[storage] == expected[storage]
    for value in graph.values:
        if value.origin is Origin.INPUT:
            assert memory[value.storage] == expected[value.storage]


@SLOW
@given(graphs(max_actions=14, costs=True))
def test_every_piece_of_work_runs_once_and_on_the_stream_of_its_user(graph):
    program = build(graph)
    ran = defaultdict(list)
    for step in program.steps:
        if isinstance(step, Work):
            for name in step.nodes:
                ran[name].append(step.stream)
    for node in graph.nodes:
        if node.kind not in FREE_OF_WORK:
            assert ran[node.name] == [node.stream]


@SLOW
@given(graphs(max_actions=14))
def test_a_region_takes_in_and_hands_on_tensors_that_own_their_memory_or_leave_the_program(graph):
    program = build(graph)
    views = {made for node in graph.nodes if node.kind is Kind.VIEW for made in node.makes}
    handed = {output.value for output in graph.outputs} | {back.source for back in graph.write_backs}
    for work in program.regions:
        assert not views.intersection(work.inputs)
        assert views.intersection(work.outputs) <= handed


@SLOW
@given(graphs(max_actions=14))
def test_the_users_operations_are_all_kept(graph):
    program = build(graph)
    kept = sorted(step.op for step in program.steps if getattr(step, "op", None) is not None)
    assert kept == list(range(len(graph.ops)))


@SLOW
@given(graphs(max_actions=14))
def test_memory_that_nobody_keeps_goes_back_once_or_is_held(graph):
    program = build(graph)
    handed = {program.slot[result.value].storage for result in program.results}
    freed = [step.storage for step in program.steps if isinstance(step, Free)]
    held = {step.storage for step in program.steps if isinstance(step, Hold)}
    assert len(freed) == len(set(freed))
    for slot in program.slots:
        ours = slot.origin is not Origin.INPUT and slot.storage not in handed
        assert ours == (slot.storage in freed) or slot.storage in held
        assert not (slot.storage in freed and slot.storage in held)


@SLOW
@given(graphs(max_actions=14))
def test_a_program_survives_json_and_its_listing_names_every_step(graph):
    program = build(graph)
    assert from_json(to_json(program)) == program
    lines = listing(program).splitlines()
    assert len(lines) == 4 + len(program.steps) + len(program.results) + len(program.completions)


def test_a_document_of_another_schema_or_a_damaged_one_is_refused():
    capture = Capture(streams=1)
    capture.output(capture.node(0, capture.input()))
    text = to_json(build(capture.graph()))
    document = json.loads(text)
    for damaged in (
        text[:-5],
        "[]",
        json.dumps({**document, "schema": 2}),
        json.dumps({**document, "kind": "other"}),
        json.dumps({**document, "steps": [{"step": "jump"}]}),
        json.dumps({key: value for key, value in document.items() if key != "streams"}),
    ):
        with pytest.raises(FileFormatError):
            from_json(damaged)


def test_an_input_that_a_side_stream_reads_is_held_until_that_reader_is_over():
    capture = Capture(streams=2)
    x = capture.input()
    capture.output(capture.node(1, x), joined=False)
    program = build(capture.graph())
    (hold,) = [step for step in program.steps if isinstance(step, Hold)]
    assert hold.values == (x,)
    assert [(one.stream, one.event) for one in program.completions] == [(1, hold.events[0])]


def test_a_joined_output_needs_no_hold_for_the_input_that_made_it():
    capture = Capture(streams=2)
    capture.output(capture.node(1, capture.input()))
    program = build(capture.graph())
    assert not [step for step in program.steps if isinstance(step, Hold)]
    assert isinstance(program.steps[-1], Wait)
    assert program.steps[-1].stream == 0


def test_saved_values_are_not_joined_but_complete_an_event_of_their_stream():
    capture = Capture(streams=2)
    capture.output(capture.node(1, capture.input()), saved=True)
    program = build(capture.graph())
    assert [one.stream for one in program.completions] == [1]
    assert not [step for step in program.steps if isinstance(step, Wait) and step.stream == 0]


def test_a_value_that_crosses_streams_is_freed_where_its_own_stream_has_waited_for_all_readers():
    capture = Capture(streams=3)
    x = capture.input()
    a = capture.node(0, x)
    readers = [capture.node(stream, a) for stream in (1, 2)]
    capture.output(capture.node(0, *readers))
    program = build(capture.graph())
    (free,) = [step for step in program.steps if isinstance(step, Free) and step.values == (a,)]
    before = program.steps[: program.steps.index(free)]
    assert [step.stream for step in before if isinstance(step, Wait)].count(0) == 2
    last = program.regions[-1]
    assert program.steps.index(free) < program.steps.index(last)  # its memory can serve the last region already


def test_a_value_with_a_reader_that_its_stream_never_waits_for_is_held_without_a_wait():
    capture = Capture(streams=2)
    a = capture.node(0, capture.input())
    capture.output(capture.node(1, a), joined=False)
    program = build(capture.graph())
    assert not [step for step in program.steps if isinstance(step, Wait) and step.stream == 0]
    assert any(isinstance(step, Hold) and step.values == (a,) for step in program.steps)


def test_the_host_waits_for_what_was_issued_before_its_synchronize_only():
    capture = Capture(streams=2)
    x = capture.input()
    capture.output(capture.node(1, x), joined=False)
    capture.synchronize(stream=1)
    capture.output(capture.node(0, x))
    program = build(capture.graph())
    kinds = [type(step) for step in program.steps if isinstance(step, Work | Synchronize)]
    assert kinds == [Work, Synchronize, Work]


def test_a_given_event_serves_instead_of_a_record_at_the_entry():
    from devstream.compiler._graph import Given

    capture = Capture(streams=2)
    x = capture.input(stream=1, origin=Origin.SAVED)
    capture.given.append(Given(event=7, stream=1))
    capture.output(capture.node(0, x))
    program = build(capture.graph())
    assert [step.event for step in program.steps if isinstance(step, Wait)] == [7]
    assert not [step for step in program.steps if isinstance(step, Record) and step.stream == 1]


def test_the_listing_shows_streams_as_columns_and_why_each_wait_was_added():
    capture = Capture(streams=2)
    a = capture.node(1, capture.input())
    capture.output(capture.node(0, a))
    text = listing(build(capture.graph()))
    assert text.splitlines()[1].split("|")[1].strip() == "stream 1 (cpu)"
    assert "n1 on stream 0 (step.py:2) needs n0 on stream 1 (step.py:1)" in text
