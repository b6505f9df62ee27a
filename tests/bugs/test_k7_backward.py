"""K7: streams in the backward. Each test's first line names the row of the bug log and where it was reported."""

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


def compiled(function):
    torch.compiler.reset()
    options = {"regions": "eager", "missing_waits": "error"}
    return torch.compile(function, backend=compiler_backend.backend, fullgraph=True, options=options)


def two_streams(one, two):
    def function(x):
        current = devstream.current_stream("cpu")
        for stream in (one, two):
            stream.wait_stream(current)
        with devstream.stream(one):
            a = x * 2
        with devstream.stream(two):
            b = x * 4
        for stream in (one, two):
            current.wait_stream(stream)
        return a + b

    return function


@pytest.fixture
def launched(cpu, monkeypatch):
    """The streams that work was given to, in order."""
    seen = []
    launch = cpu.launch
    monkeypatch.setattr(cpu, "launch", lambda task, stream: (seen.append(stream), launch(task, stream))[1])
    return seen


def test_after_a_warm_up_under_another_stream_nothing_stays_there(launched):
    """B40, pytorch/pytorch#137483."""
    one, two, warm = (devstream.Stream("cpu") for _ in range(3))
    fast = compiled(two_streams(one, two))
    x = torch.ones(4, requires_grad=True)
    with devstream.stream(warm):
        fast(x).sum().backward()
    warm.synchronize()
    x.grad = None
    launched.clear()
    fast(x).sum().backward()
    assert warm not in launched
    assert {one, two} <= set(launched)
    torch.testing.assert_close(x.grad, torch.full((4,), 6.0))


def test_gradients_of_autograd_grad_can_be_read_at_once(cpu):
    """B41, pytorch/pytorch#59844."""
    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    fast = compiled(two_streams(one, two))
    x = torch.ones(4, requires_grad=True)
    for _ in range(20):
        loss = fast(x).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(gradient, torch.full((4,), 6.0), rtol=0, atol=0)


def test_what_is_queued_for_the_end_of_the_backward_runs_on_the_callers_stream():
    """B42, pytorch/pytorch#37944."""
    one, two, mine = (devstream.Stream("cpu") for _ in range(3))
    fast, seen = compiled(two_streams(one, two)), []
    x = torch.ones(4, requires_grad=True)

    def hook(gradient):
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(devstream.current_stream("cpu"))
        )

    with devstream.stream(mine):
        loss = fast(x).sum()
        x.register_hook(hook)
        loss.backward()
    assert seen == [mine]


def test_leaves_that_two_streams_reach_get_the_whole_gradient():
    """B43, pytorch/pytorch#116957: on a device that torch's autograd engine doesn't know the streams of."""
    function = two_streams(devstream.Stream("cpu"), devstream.Stream("cpu"))
    for call in (function, compiled(function)):
        for _ in range(5):
            x = torch.ones(4, requires_grad=True)
            call(x).sum().backward()
            torch.testing.assert_close(x.grad, torch.full((4,), 6.0), rtol=0, atol=0)
