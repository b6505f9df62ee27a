"""devstream/compiler/_eager.py: each operator reads and changes the memory that it would in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import devstream
from devstream.compiler._look import look

# Dynamo looks at the gradient of every argument.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # And an object of torch.autograd.Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

SIDE = devstream.Stream("cpu")


def graph_of(function, *arguments):
    return look(function, arguments, {}, programs=False).eager


def touched(graph):
    """Return for each operator its name, its stream, and the storages that it reads, makes and changes."""
    return [(node.name, node.stream, node.reads, node.makes, node.writes) for node in graph.nodes]


def test_views_are_no_work_and_share_their_storage():
    def function(x):
        with devstream.stream(SIDE):
            y = x.view(16)[2:].t()
            return y.exp()

    assert touched(graph_of(function, torch.ones(4, 4))) == [("exp", 1, ("s0",), ("s1",), ())]


def test_a_change_through_a_view_changes_the_base():
    def function(x):
        y = x.exp()
        with devstream.stream(SIDE):
            y[1:].mul_(2)
        return y

    assert touched(graph_of(function, torch.ones(4, 4))) == [
        ("exp", 0, ("s0",), ("s1",), ()),
        ("mul_", 1, ("s1",), (), ("s1",)),
    ]


def test_where_a_result_goes_is_changed():
    def function(x, y):
        with devstream.stream(SIDE):
            torch.add(x, x, out=y)
        return x + y

    graph = graph_of(function, torch.ones(4), torch.ones(4))
    assert touched(graph) == [
        ("add", 1, ("s0", "s1"), (), ("s1",)),
        ("add_1", 0, ("s0", "s1"), ("s2",), ()),
    ]
    assert [output.value for output in graph.outputs] == ["s2", "s1"]  # the caller reads his own tensor too


def test_arguments_that_share_memory_share_a_storage():
    def function(x, y):
        with devstream.stream(SIDE):
            x.add_(1)
        return y * 2

    base = torch.ones(8)
    nodes = touched(graph_of(function, base[:4], base[4:]))
    assert nodes[0][4] == nodes[1][2] == ("s0",)
    (found,) = devstream.check(function, base[:4], base[4:]).missing
    assert (found.first, found.second) == ("add_", "mul")


def test_constants_sizes_and_results_that_depend_on_data():
    weight = torch.ones(4)

    def function(x):
        with devstream.stream(SIDE):
            y = x.nonzero() + weight.sum() + torch.tensor(2.0) + x.shape[0]
        return y * 2

    found = devstream.check(function, torch.ones(4))
    assert [one.second for one in found.missing] == ["mul"]


def test_what_stands_in_checkpoint_and_autograd_function_is_walked():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    def function(x):
        def body(y):
            with devstream.stream(SIDE):
                return y.exp()

        return Double.apply(checkpoint(body, x, use_reentrant=False)) + 1

    found = devstream.check(function, torch.ones(4, requires_grad=True))
    assert [(one.first, one.second) for one in found.missing] == [("exp", "mul")]


def test_an_operator_that_runs_as_a_whole_is_one_piece_of_work():
    def function(x):
        with devstream.stream(SIDE):
            y = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))
        return y + 1

    found = devstream.check(function, torch.ones(4))
    assert [(one.first, one.second) for one in found.missing] == [("cond", "add")]


def test_a_stream_is_told_of_memory_in_its_order():
    def function(x):
        y = x.exp()
        SIDE.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(SIDE):
            z = y + 1
            devstream.record_stream(y, SIDE)
        devstream.current_stream("cpu").wait_stream(SIDE)
        return z

    graph = graph_of(function, torch.ones(4))
    assert [op.kind.value for op in graph.ops] == ["record", "wait", "record_stream", "record", "wait"]
    assert graph.ops[2].value == "s1"
    assert devstream.check(function, torch.ones(4)).ok
    assert devstream.explain(function, torch.ones(4)).halves[0].needless == ()
