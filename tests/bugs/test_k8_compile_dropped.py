"""K8: stream calls that a compiler drops, breaks at or crashes on.

Each test's first line names the row of the bug log and where it was reported.
"""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream.compiler import backend as compiler_backend

pytestmark = [
    # Of eager code: one gradient comes from a side stream, its accumulation is on the caller's.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

SIDE, OTHER = devstream.Stream("cpu"), devstream.Stream("cpu")
HELD = {"streams": [SIDE, OTHER]}


class Attribute:
    one, two = SIDE, OTHER


def compiled(function):
    torch.compiler.reset()
    options = {"regions": "eager", "missing_waits": "error"}
    return torch.compile(function, backend=compiler_backend.backend, fullgraph=True, options=options)


def current():
    return devstream.current_stream("cpu")


def test_work_in_a_block_runs_on_the_blocks_stream(cpu, monkeypatch):
    """B45, pytorch/pytorch#109848."""
    seen = []
    launch = cpu.launch
    monkeypatch.setattr(cpu, "launch", lambda task, stream: (seen.append(stream), launch(task, stream))[1])

    def function(x):
        SIDE.wait_stream(current())
        with devstream.stream(SIDE):
            x = x + 1
        current().wait_stream(SIDE)
        return x

    torch.testing.assert_close(compiled(function)(torch.ones(2)), torch.full((2,), 2.0))
    assert SIDE in seen


def two_then_three(x, one, two):
    one.wait_stream(current())
    with devstream.stream(one):
        x = x + 2
    two.wait_stream(one)
    with devstream.stream(two):
        x = x + 3
    current().wait_stream(two)
    return x


def ways_in():
    one, two = SIDE, OTHER
    return {
        "globals": lambda x: two_then_three(x, SIDE, OTHER),
        "closures": lambda x: two_then_three(x, one, two),
        "attributes": lambda x: two_then_three(x, Attribute.one, Attribute.two),
        "containers": lambda x: two_then_three(x, *HELD["streams"]),
    }


@pytest.mark.parametrize("way", ["globals", "closures", "attributes", "containers"])
def test_streams_reach_the_graph_from_outside(way):
    """B46, pytorch/pytorch#120598, #114105, #118204."""
    torch.testing.assert_close(compiled(ways_in()[way])(torch.ones(2)), torch.full((2,), 6.0))


def test_streams_reach_the_graph_as_arguments():
    """B46, pytorch/pytorch#120598."""
    fast = compiled(two_then_three)
    for one, two in ((SIDE, OTHER), (OTHER, SIDE), (SIDE, SIDE)):
        torch.testing.assert_close(fast(torch.ones(2), one, two), torch.full((2,), 6.0))


def test_a_block_of_no_stream_does_nothing():
    """B47, pytorch/pytorch#196193."""

    def function(x):
        with devstream.stream(None):
            return x + 1

    torch.testing.assert_close(compiled(function)(torch.ones(2)), torch.full((2,), 2.0))


def test_waits_without_work():
    """B48, pytorch/pytorch#194234."""

    def function(x):
        SIDE.wait_stream(current())
        current().wait_stream(SIDE)
        return x

    assert compiled(function)(torch.ones(1)).tolist() == [1.0]


def test_a_block_of_the_current_stream():
    """B48, pytorch/pytorch#194234."""

    def function(x):
        with devstream.stream(current()):
            return x + 1

    assert compiled(function)(torch.ones(1)).tolist() == [2.0]


def test_inputs_that_need_gradients():
    """B49, pytorch/pytorch#187695."""

    def function(x, w):
        done = devstream.Event("cpu")
        SIDE.wait_stream(current())
        with devstream.stream(SIDE):
            y = x @ w
            done.record()
        done.wait()
        return y.sum()

    found = []
    for call in (function, compiled(function)):
        x, w = torch.ones(3, 4, requires_grad=True), torch.arange(8.0).view(4, 2).requires_grad_()
        call(x, w).backward()
        found.append((x.grad, w.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
