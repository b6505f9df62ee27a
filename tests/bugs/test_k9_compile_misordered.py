"""K9: stream calls that a compiler keeps, in the wrong order. Nothing tells of it but the numbers.

Each test's first line names the row of the bug log and where it was reported.
"""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream.compiler import backend as compiler_backend
from devstream.compiler._program import Wait, Work

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")

SIDE, OTHER = devstream.Stream("cpu"), devstream.Stream("cpu")


def compiled(function, **options):
    torch.compiler.reset()
    given = {"regions": "eager", "missing_waits": "error", **options}
    return torch.compile(function, backend=compiler_backend.backend, fullgraph=True, options=given)


def current():
    return devstream.current_stream("cpu")


def test_each_of_two_readers_waits_for_the_event():
    """B51, pytorch/pytorch#193409."""

    def function(x):
        done = devstream.Event("cpu")
        y = x + 1
        done.record()
        done.wait(SIDE)
        with devstream.stream(SIDE):
            a = y * 2
        done.wait(OTHER)
        with devstream.stream(OTHER):
            b = y * 3
        for stream in (SIDE, OTHER):
            current().wait_stream(stream)
        return a + b

    x = torch.arange(4.0)
    torch.testing.assert_close(compiled(function)(x), 5 * (x + 1))
    (program,) = devstream.explain(function, x).programs
    readers = [
        place
        for place, step in enumerate(program.steps)
        if isinstance(step, Work) and {"mul", "mul_1"} & set(step.nodes)
    ]
    assert len(readers) == 2
    for place in readers:
        stream = program.steps[place].stream
        assert any(isinstance(one, Wait) and one.stream == stream for one in program.steps[:place])


@pytest.mark.parametrize("regions", ["eager", "inductor"])
def test_a_diamond_of_matmuls_gives_eagers_values_each_time(regions):
    """B52, pytorch/pytorch#178549."""

    def function(x, w):
        a = x @ w
        for stream in (SIDE, OTHER):
            stream.wait_stream(current())
        with devstream.stream(SIDE):
            b = a @ w
        with devstream.stream(OTHER):
            c = (a + 1) @ w
        for stream in (SIDE, OTHER):
            current().wait_stream(stream)
        return (b + c) @ w

    x, w = torch.eye(64) * 2, torch.rand(64, 64)
    a = x @ w
    wanted = (a @ w + (a + 1) @ w) @ w
    fast = compiled(function, regions=regions)
    for _ in range(50):
        torch.testing.assert_close(fast(x, w), wanted, rtol=1e-4, atol=1e-3)


def test_kernels_follow_the_stream_of_their_block_at_each_call(cpu, monkeypatch):
    """B53, pytorch/pytorch#178547: one compilation, called with other streams."""
    seen = []
    launch = cpu.launch
    monkeypatch.setattr(cpu, "launch", lambda task, stream: (seen.append(stream), launch(task, stream))[1])

    def function(x, stream):
        stream.wait_stream(current())
        with devstream.stream(stream):
            y = (x @ x).relu()
        current().wait_stream(stream)
        return y

    fast, x = compiled(function), torch.rand(8, 8)
    for stream in (SIDE, OTHER, SIDE):
        seen.clear()
        torch.testing.assert_close(fast(x, stream), (x @ x).relu())
        assert stream in seen
        assert not {SIDE, OTHER} - {stream} & set(seen)


def test_copies_are_there_before_the_first_read_of_them():
    """B54, pytorch/pytorch#174695, #182190."""

    def function(x):
        copies, events = [], []
        for part in x.unbind():
            done = devstream.Event("cpu")
            SIDE.wait_stream(current())
            with devstream.stream(SIDE):
                copies.append(part.to("cpu", torch.float64, non_blocking=True))
                done.record()
            events.append(done)
        for done in events:
            done.synchronize()
        return torch.cat(copies)

    x = torch.rand(20, 8)
    fast = compiled(function)
    for _ in range(10):
        torch.testing.assert_close(fast(x), x.double().view(-1), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["wait_stream", "wait_event"])
def test_wait_stream_and_wait_event_order_alike(way):
    """B55, pytorch/pytorch#185627."""

    def function(x):
        SIDE.wait_stream(current())
        with devstream.stream(SIDE):
            y = x * 2
        if way == "wait_stream":
            current().wait_stream(SIDE)
        else:
            current().wait_event(SIDE.record_event())
        return y + 1

    fast = compiled(function)
    assert [fast(torch.tensor([float(one)])).item() for one in range(4)] == [1.0, 3.0, 5.0, 7.0]
