"""Native stream code is read out of the graph; torch's own CPU streams do nothing, so the table is compared."""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream import compiler
from devstream.exceptions import UnsupportedError

CPU = torch.Stream(device="cpu").device_type


def native(number):
    return torch.Stream(stream_id=number, device_index=-1, device_type=CPU)


A, B, DONE = native(911), native(912), torch.Event(device="cpu")
HAS_MUTATION_CHECK = hasattr(torch._dynamo.output_graph.OutputGraph, "check_event_record_after_input_mutation")


def captured(program, *arguments):
    found = []

    def backend(graph, inputs):
        found.append(compiler.capture(graph))
        return compiler.interpret(graph, inputs)

    torch.compiler.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*arguments)
    return found[0]


def said(one):
    return [(op.kind, op.stream, op.other, op.event) for op in one.operations]


def streams(one):
    return [compiler.mark_of(node).stream for node in one.module.graph.nodes if compiler.mark_of(node)]


def test_blocks_nested_and_left():
    def program(t):
        with A:
            y = t + 1
            with B:
                z = y * 2
            z = z - 1
        return z + 3

    assert streams(captured(program, torch.ones(2))) == [1, 2, 1, 0]


def test_events_by_their_own_methods():
    def program(t):
        with A:
            y = t + 1
            DONE.record()
        DONE.wait(B)
        with B:
            return y * 2

    one = captured(program, torch.ones(2))
    assert said(one) == [("record", 1, None, 0), ("wait", 2, None, 0)]
    assert one.operations[0].ends == ((1, 0),)


def test_methods_of_streams():
    def program(t):
        A.record_event(DONE) if False else DONE.record(A)
        B.wait_event(DONE)
        B.wait_stream(A)
        A.synchronize()
        DONE.synchronize()
        return t + 1

    one = captured(program, torch.ones(2))
    assert said(one) == [
        ("record", 1, None, 0),
        ("wait", 2, None, 0),
        ("wait_stream", 2, 1, None),
        ("synchronize_stream", 1, None, None),
        ("synchronize_event", None, None, 0),
    ]


def test_native_streams_are_found_at_each_call():
    def program(t, s):
        with devstream.stream(s):
            y = t + 1
        with s:
            return y * 2

    compiled = torch.compile(program, backend=compiler.interpret, fullgraph=True)
    for number in (921, 922):
        s = native(number)
        seen = []
        with devstream._observe.subscribe(seen.append):
            compiled(torch.ones(2), s)
        entered = [n.stream.stream_id for n in seen if isinstance(n, devstream._observe.Switch)]
        assert entered == [number, 0, number, 0]


def test_an_answer_of_query_is_not_baked_in():
    def program(t):
        return t + 1 if A.query() else t

    with pytest.raises(Exception, match=r"query.*ask outside the compiled function") as caught:
        captured(program, torch.ones(2))
    assert "test_capture_native.py" in str(caught.value)


def test_a_native_event_after_a_changed_input():
    def program(t):
        with A:
            t.add_(1)
            DONE.record(A)
        return t * 2

    if HAS_MUTATION_CHECK:
        with pytest.raises(RuntimeError, match=r"(?s)previously mutated.*Or record a devstream.Event"):
            captured(program, torch.ones(2))
    else:
        assert said(captured(program, torch.ones(2))) == [("record", 1, None, 0)]


def test_our_event_after_a_changed_input_comes_after_the_change():
    done = devstream.Event("cpu")

    def program(t):
        with A:
            t.add_(1)
            done.record()
        return t * 2

    one = captured(program, torch.ones(2))
    change = next(node for node in one.module.graph.nodes if node.name.startswith("add_"))
    assert compiler.mark_of(change) == (1, 0)
    assert one.operations[0].ends == ((1, 0),)


def test_compiled_autograd_is_refused():
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(UnsupportedError, match="compiled autograd"),
    ):
        compiler.capture(torch.fx.symbolic_trace(lambda t: t + 1))
