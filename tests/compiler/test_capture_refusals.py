"""What has no meaning in a graph is an error that says what to do, and runs in eager where a graph may break."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest
import torch

import devstream
from devstream import compiler
from devstream.exceptions import UnsupportedError

ONE, TWO = devstream.Stream("cpu"), devstream.Stream("cpu")
DONE = devstream.Event("cpu", enable_timing=True)


@devstream.carry_streams
def carried(t):
    return t + 1


REFUSED = {
    "Stream.query": lambda t: t + ONE.query(),
    "Event.query": lambda t: t + DONE.query(),
    "Event.recorded": lambda t: t + DONE.recorded,
    "devstream.recorded": lambda t: t + devstream.recorded(DONE),
    "Event.elapsed_time": lambda t: t + DONE.elapsed_time(DONE),
    "devstream.set_stream": lambda t: (devstream.set_stream(ONE), t + 1)[1],
    "devstream.carry_streams": lambda t: carried(t),  # noqa: PLW0108 - its line is looked for
    "devstream.devices": lambda t: t + len(devstream.devices()),
    "devstream.wrap": lambda t: (devstream.wrap(0, "cpu"), t + 1)[1],
    "devstream.Stream": lambda t: (devstream.Stream("cpu:7"), t + 1)[1],
    "devstream.Event": lambda t: (devstream.Event("cpu", interprocess=True), t + 1)[1],
}


@pytest.mark.parametrize("operation", REFUSED)
def test_refusal_names_the_operation_and_the_advice(operation):
    torch.compiler.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=rf"devstream: {operation}.* can't be traced"
    ) as caught:
        torch.compile(REFUSED[operation], backend=compiler.interpret, fullgraph=True)(torch.ones(2))
    assert "Hint: " in str(caught.value)
    assert "test_capture_refusals.py" in str(caught.value)


def test_a_refused_trace_leaves_nothing_behind():
    def refused(t):
        with devstream.stream(ONE):
            return t + DONE.query()

    def next_one(t):
        return t * 2

    found = []

    def backend(graph, inputs):
        found.append(compiler.capture(graph))
        return graph.forward

    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(refused, backend=backend, fullgraph=True)(torch.ones(2))
    torch.compile(next_one, backend=backend, fullgraph=True)(torch.ones(2))
    assert found[0].operations == ()
    assert [compiler.mark_of(n) for n in found[0].module.graph.nodes if n.name == "mul"] == [(0, 0)]


def test_a_break_in_a_block_runs_in_eager_with_one_notice(caplog):
    done = devstream.Event("cpu")
    current = []

    def program(t):
        with devstream.stream(ONE):
            y = t + 1
            done.record()
            current.append(done.query())
            y = y * 2
        return y - 1

    torch.compiler.reset()
    compiled = torch.compile(program, backend=compiler.interpret)
    seen = []
    with caplog.at_level(logging.WARNING, "devstream"), devstream._observe.subscribe(seen.append):
        for _ in range(3):
            assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert current == [True] * 3
    assert [type(notice).__name__ for notice in seen] == ["Switch", "Record", "Happened", "Switch"] * 3
    notices = [r.getMessage() for r in caplog.records if "graph breaks" in r.getMessage()]
    assert len(notices) == 1
    assert "test_capture_refusals.py" in notices[0]


def test_answers_are_asked_anew_where_the_graph_may_break():
    event = devstream.Event("cpu")
    latch = devstream.backend("cpu").hold(ONE)
    event.record(ONE)

    def program(t):
        return t + 1 if event.query() else t

    compiled = torch.compile(program, backend=compiler.interpret)
    assert compiled(torch.zeros(1)).item() == 0
    latch.release()
    event.synchronize()
    assert compiled(torch.zeros(1)).item() == 1


def branches(t):
    def one(t):
        with devstream.stream(ONE):
            return t + 1

    def two(t):
        with devstream.stream(TWO):
            return t * 2

    return torch.cond(t.sum() > 0, one, two, (t,))


def two_inside(t):
    def one(t):
        with devstream.stream(ONE):
            y = t + 1
        with devstream.stream(TWO):
            return y + 1

    return torch.cond(t.sum() > 0, one, lambda t: t * 2, (t,))


def recorded_inside(t):
    def one(t):
        with devstream.stream(ONE):
            y = t + 1
            DONE.record()
            return y

    def two(t):
        with devstream.stream(ONE):
            return t * 2

    return torch.cond(t.sum() > 0, one, two, (t,))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (branches, "cond over more than one stream"),
        (two_inside, "cond over more than one stream"),
        (recorded_inside, "a stream operation inside cond"),
    ],
)
def test_a_branch_with_streams_inside_is_refused_with_its_line(program, words):
    torch.compiler.reset()
    with pytest.raises(Exception, match=words) as caught:
        torch.compile(program, backend=compiler.interpret, fullgraph=True)(torch.ones(2))
    cause = caught.value if isinstance(caught.value, UnsupportedError) else caught.value.__cause__
    assert isinstance(cause, UnsupportedError) or "UnsupportedError" in str(caught.value)
    assert "test_capture_refusals.py" in str(caught.value)


def test_a_branch_on_one_stream_is_one_node_of_it():
    def program(t):
        with devstream.stream(ONE):
            return torch.cond(t.sum() > 0, lambda t: t + 1, lambda t: t * 2, (t,))

    found = []

    def backend(graph, inputs):
        found.append(compiler.capture(graph))
        return compiler.interpret(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    marks = {n.name: compiler.mark_of(n) for n in found[0].module.graph.nodes}
    assert marks["cond"] == (1, 0)


def test_rules_install_themselves_where_nobody_asked_for_our_compiler():
    program = """
        import devstream, torch
        side, done = devstream.Stream("cpu"), devstream.Event("cpu")

        def program(t):
            with devstream.stream(side):
                y = t + 1
                done.record()
            devstream.current_stream().wait_event(done)
            return y * 2

        compiled = torch.compile(program, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
        assert done.recorded
        import sys
        assert "devstream.compiler" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
