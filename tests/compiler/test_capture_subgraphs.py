"""Checkpoint and autograd.Function: their graphs are captured too."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import devstream
from devstream import compiler

# Dynamo itself makes one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

ONE, TWO = devstream.Stream("cpu"), devstream.Stream("cpu")
DONE, BACK = devstream.Event("cpu"), devstream.Event("cpu")


def in_checkpoint(t):
    made = devstream.Event("cpu")

    def body(t):
        with devstream.stream(ONE):
            a = torch.sin(t)
            DONE.record()
            made.record()
        DONE.wait(TWO)
        with devstream.stream(TWO):
            return torch.cos(a)

    y = checkpoint(body, t, use_reentrant=False)
    made.wait()
    return y.sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        with devstream.stream(ONE):
            y = torch.sin(t)
            DONE.record()
        ctx.save_for_backward(t)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (t,) = ctx.saved_tensors
        with devstream.stream(TWO):
            DONE.wait()
            result = gradient * torch.cos(t)
            BACK.record()
        return result


def in_a_function(t):
    return Doubled.apply(t * 2).sum()


def run(program, compiled):
    captured, seen = [], []

    def backend(graph, inputs):
        captured.append(compiler.capture(graph))
        return compiler.interpret(graph, inputs)

    t = torch.arange(4.0, requires_grad=True)
    torch.compiler.reset()
    call = torch.compile(program, backend=backend, fullgraph=True) if compiled else program
    with devstream._observe.subscribe(seen.append):
        value = call(t)
        value.backward()
    order = [
        (type(one).__name__, one.stream.stream_id)
        for one in seen
        if isinstance(one, devstream._observe.Record | devstream._observe.Wait)
    ]
    return value.item(), t.grad, order, captured


@pytest.mark.parametrize("program", [in_checkpoint, in_a_function])
def test_values_gradients_and_order_are_those_of_eager(program):
    value, gradient, order, captured = run(program, compiled=True)
    wanted, wanted_gradient, wanted_order, _ = run(program, compiled=False)
    assert value == wanted
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=0)
    # Eager's checkpoint runs its forward again for the backward; an interpreter needn't.
    assert order == wanted_order[: len(order)]
    assert len(order) >= 3
    assert all(one.graph for one in captured[0].operations if one.kind == "record")


def test_a_backward_of_a_function_has_its_own_operations():
    *_, captured = run(in_a_function, compiled=True)
    graphs = {}
    for one in captured[0].operations:
        graphs.setdefault(one.graph, []).append((one.kind, one.stream))
    assert graphs == {
        "fwd_body_0": [("record", 1)],
        "bwd_body_0": [("wait", 2), ("record", 2)],
    }


def test_nodes_of_a_subgraph_are_marked():
    *_, captured = run(in_checkpoint, compiled=True)
    body = captured[0].module.wrap_body_0
    marks = {n.name: compiler.mark_of(n) for n in body.graph.nodes if compiler.mark_of(n)}
    assert marks == {"a": (1, 0), "cos": (2, 1)}
    assert "devstream" not in body.code


def test_marks_reach_the_backward_through_aot_autograd():
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    found = {}

    def keep(name):
        def compile_half(graph, inputs):
            found[name] = {n.name: compiler.mark_of(n) for n in graph.graph.nodes if n.op == "call_function"}
            return make_boxed_func(graph.forward)

        return compile_half

    def backend(graph, inputs):
        one = compiler.capture(graph)
        kept = [inputs[i] for i in one.inputs]
        run = aot_autograd(
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )(one.module, kept)
        return lambda *arguments: run(*[arguments[i] for i in one.inputs])

    def program(t):
        with devstream.stream(ONE):
            a = torch.sin(t)
            DONE.record()
        DONE.wait(TWO)
        with devstream.stream(TWO):
            return torch.exp(a).sum()

    torch.compiler.reset()
    t = torch.arange(4.0, requires_grad=True)
    torch.compile(program, backend=backend, fullgraph=True)(t).backward()
    torch.testing.assert_close(t.grad, torch.cos(t.detach()) * torch.exp(torch.sin(t.detach())))
    assert set(found["forward"].values()) == {(1, 0), (2, 1)}
    assert {mark.stream for mark in found["backward"].values() if mark} == {1, 2}
