"""Each call has its own streams, events and record, whatever runs between its forward and its backward."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import devstream
from devstream import _handles
from devstream.compiler import backend as compiler_backend
from devstream.compiler._program import Program

# Dynamo makes an object of torch.autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def programs() -> Iterator[list[tuple[str, Program]]]:
    found: list[tuple[str, Program]] = []

    def watch(name: str, program: Program) -> None:
        found.append((name, program))

    compiler_backend.watchers.append(watch)
    yield found
    compiler_backend.watchers.remove(watch)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that work was given to, in order."""
    cpu, seen = devstream.backend("cpu"), []
    launch = cpu.launch

    def spy(task: Callable[[], None], stream: Any) -> None:
        seen.append(stream)
        launch(task, stream)

    monkeypatch.setattr(cpu, "launch", spy)
    return seen


def compiled(function: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(
        function, backend=compiler_backend.backend, fullgraph=True, options={"regions": "eager", **options}
    )


def on_side(x: torch.Tensor, w: torch.Tensor, side: Any) -> torch.Tensor:
    side.wait_stream(devstream.current_stream("cpu"))
    with devstream.stream(side):
        y = torch.sin(x @ w)
    devstream.current_stream("cpu").wait_stream(side)
    return y.sum()


def leaves() -> list[torch.Tensor]:
    return [torch.ones(4, 4, requires_grad=True) for _ in range(2)]


def gradient(function: Any, side: Any) -> torch.Tensor:
    x, w = leaves()
    function(x, w, side).backward()
    assert x.grad is not None
    return x.grad


def test_backward_runs_on_the_streams_of_its_own_forward(launched):
    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    function = compiled(on_side)
    function(*leaves(), one).backward()
    launched.clear()
    first, second = function(*leaves(), one), function(*leaves(), two)
    assert launched == [one, two]
    launched.clear()
    second.backward()
    assert set(launched) == {two}
    launched.clear()
    first.backward()
    assert set(launched) == {one}


def test_backward_after_another_compilation(launched):
    one = devstream.Stream("cpu")
    function = compiled(on_side)
    loss = function(*leaves(), one)
    other = torch.compile(
        lambda x, side: on_side(x, x, side) * 2,
        backend=compiler_backend.backend,
        fullgraph=True,
        options={"regions": "eager"},
    )
    other(leaves()[0], devstream.Stream("cpu")).backward()
    launched.clear()
    loss.backward()
    assert set(launched) == {one}


def test_a_graph_that_is_kept_can_be_run_again():
    side = devstream.Stream("cpu")
    x, w = leaves()
    loss = compiled(on_side)(x, w, side)
    loss.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * once)


def test_thousands_of_calls_leave_nothing_behind():
    side = devstream.Stream("cpu")
    function = compiled(on_side)

    def calls(count: int) -> None:
        for number in range(count):
            loss = function(*leaves(), side)
            if number % 3:  # every third graph is abandoned
                loss.backward()

    calls(20)
    gc.collect()
    before = (len(_handles._owners), len(gc.get_objects()))
    calls(2000)
    gc.collect()
    assert len(_handles._owners) == before[0]
    assert len(gc.get_objects()) - before[1] < 200


def test_two_threads_each_on_a_stream_of_its_own(launched):
    function = compiled(on_side)
    wanted = gradient(on_side, devstream.Stream("cpu"))
    gradient(function, devstream.Stream("cpu"))
    launched.clear()
    failed: list[BaseException] = []
    sides = [devstream.Stream("cpu") for _ in range(2)]

    def loop(side: Any) -> None:
        try:
            for _ in range(100):
                torch.testing.assert_close(gradient(function, side), wanted)
        except BaseException as error:  # shown by the main thread
            failed.append(error)

    threads = [threading.Thread(target=loop, args=(side,)) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert launched.count(sides[0]) == launched.count(sides[1]) == len(launched) / 2


def test_two_names_of_one_queue():
    def program(x: torch.Tensor, one: Any, two: Any) -> torch.Tensor:
        one.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(one):
            y = x + 1
        two.wait_stream(one)
        with devstream.stream(two):
            z = y * 2
        devstream.current_stream("cpu").wait_stream(two)
        return z

    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    function = compiled(program)
    x = torch.ones(3)
    for streams in ((one, two), (one, one), (two, one), (one, two)):
        assert function(x, *streams).tolist() == [4.0, 4.0, 4.0]


def test_the_side_stream_is_the_callers_own(launched):
    side = devstream.Stream("cpu")
    function = compiled(on_side)
    wanted = gradient(on_side, side)
    torch.testing.assert_close(gradient(function, side), wanted)
    launched.clear()
    with devstream.stream(side):
        torch.testing.assert_close(gradient(function, side), wanted)
    assert not launched  # all of it was this thread's own stream
    torch.testing.assert_close(gradient(function, side), wanted)
    assert set(launched) == {side}


def test_backward_while_another_stream_is_current(launched):
    side, outer = devstream.Stream("cpu"), devstream.Stream("cpu")
    function = compiled(on_side)
    wanted = gradient(on_side, side)
    x, w = leaves()
    with devstream.stream(outer):
        loss = function(x, w, side)
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted)
    assert devstream.current_stream("cpu") == devstream.default_stream("cpu")
    x, w = leaves()
    loss = function(x, w, side)
    with devstream.stream(outer):
        loss.backward()
        assert devstream.current_stream("cpu") == outer
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted)


def test_an_event_recorded_inside_is_the_users_own():
    side, done = devstream.Stream("cpu"), devstream.Event("cpu")

    def program(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = x * 2
            done.record()
        return y

    y = compiled(program)(torch.ones(2))
    assert devstream.recorded(done)
    done.synchronize()
    assert y.tolist() == [2.0, 2.0]


def test_what_the_user_orders_by_an_event_is_not_joined(programs):
    side, done = devstream.Stream("cpu"), devstream.Event("cpu")

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            early = x * 2
            done.record()
            late = x * 3
        return early, late

    compiled(program)(torch.ones(2))
    ((_, found),) = programs
    assert [result.joined for result in found.results] == [False, True]


def test_an_event_made_and_returned(programs):
    side = devstream.Stream("cpu")

    def program(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        side.wait_stream(devstream.current_stream("cpu"))
        done = devstream.Event("cpu")
        with devstream.stream(side):
            y = x * 2
            done.record()
        return y, done

    function = compiled(program)
    (y, one), (_, two) = function(torch.ones(2)), function(torch.ones(2))
    assert one is not two
    one.synchronize()
    assert y.tolist() == [2.0, 2.0]
    assert [result.joined for _, found in programs for result in found.results] == [False]


def test_dynamic_shapes():
    side = devstream.Stream("cpu")
    function = compiled(on_side)
    for rows in (3, 5, 7, 2):
        x, w = torch.randn(rows, 4, requires_grad=True), torch.randn(4, 4)
        wanted = torch.autograd.grad(on_side(x, w, side), x)
        torch.testing.assert_close(torch.autograd.grad(function(x, w, side), x), wanted)


def test_an_error_in_a_region_reaches_the_caller_and_nobody_else():
    side, other = devstream.Stream("cpu"), devstream.Stream("cpu")

    def program(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = table[index] * 2
        devstream.current_stream("cpu").wait_stream(side)
        return y.sum()

    function = compiled(program)
    table = torch.arange(4.0, requires_grad=True)
    for _ in range(3):
        with pytest.raises(IndexError):
            function(table, torch.tensor([9]))
        # A loop that skips a bad batch goes on, on the same streams and on others.
        loss = function(table, torch.tensor([2]))
        assert loss.item() == 4.0
        loss.backward()
        other.wait_stream(devstream.default_stream("cpu"))
        for stream in (side, other):
            with devstream.stream(stream):
                pass
            stream.synchronize()
    assert devstream.current_stream("cpu") == devstream.default_stream("cpu")


def test_an_error_in_a_backward_reaches_the_caller_and_nobody_else():
    side = devstream.Stream("cpu")

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(index)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            (index,) = ctx.saved_tensors
            return gradient[index] * 1, None

    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = Fails.apply(x, index)
        devstream.current_stream("cpu").wait_stream(side)
        return y.sum()

    function = compiled(program)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(IndexError):
        function(x, torch.tensor([0, 1, 9])).backward()
    function(x, torch.tensor([0, 1, 2])).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 3


def test_parts_of_one_tensor_passed_apart():
    side = devstream.Stream("cpu")

    def both(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            k.add_(1)
            v.mul_(2)
        devstream.current_stream("cpu").wait_stream(side)
        return k * 1

    def one(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            k.add_(1)
        devstream.current_stream("cpu").wait_stream(side)
        return v * 3

    for function in (both, one):
        got, wanted = torch.arange(4.0), torch.arange(4.0)
        torch.testing.assert_close(compiled(function)(got[:2], got[2:]), function(wanted[:2], wanted[2:]))
        torch.testing.assert_close(got, wanted)


def test_overlapping_parts_of_one_tensor():
    side = devstream.Stream("cpu")

    def function(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            k.add_(1)
            y = v * 3
        devstream.current_stream("cpu").wait_stream(side)
        return y

    got, wanted = torch.arange(4.0), torch.arange(4.0)
    torch.testing.assert_close(compiled(function)(got[:3], got[1:]), function(wanted[:3], wanted[1:]))
    torch.testing.assert_close(got, wanted)


def test_an_event_made_in_one_graph_is_waited_for_in_another():
    side = devstream.Stream("cpu")

    def makes(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        side.wait_stream(devstream.current_stream("cpu"))
        done = devstream.Event("cpu")
        with devstream.stream(side):
            y = x * 2
            done.record()
        return y, done

    def waits(y: torch.Tensor, done: Any) -> torch.Tensor:
        done.wait()
        return y.sin()

    def both(x: torch.Tensor) -> torch.Tensor:
        y, done = makes(x)
        torch._dynamo.graph_break()
        done.wait()
        return y.sin()

    x = torch.ones(3)
    first = compiled(makes)
    second = torch.compile(waits, backend=compiler_backend.backend, fullgraph=True, options={"regions": "eager"})
    for _ in range(3):
        torch.testing.assert_close(second(*first(x)), (x * 2).sin())
    torch.compiler.reset()
    broken = torch.compile(both, backend=compiler_backend.backend, options={"regions": "eager"})
    for _ in range(3):
        torch.testing.assert_close(broken(x), (x * 2).sin())


@pytest.mark.parametrize("fallback", [False, True])
def test_dropout_in_a_checkpoint_is_recomputed_as_it_was(fallback: bool):
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    side = devstream.Stream("cpu")

    def body(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = functional.dropout(x, 0.5)
        devstream.current_stream("cpu").wait_stream(side)
        return y

    def program(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(body, x, use_reentrant=False)
        return found

    x = torch.ones(64, requires_grad=True)
    fast = compiled(program, fallback_random=fallback)
    draws = []
    for _ in range(2):
        y = fast(x)
        state = torch.get_rng_state()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient, y.detach())
        assert 10 < int((y == 0).sum()) < 54
        # The repetition in the backward draws nothing of its own.
        assert torch.equal(torch.get_rng_state(), state)
        draws.append(y.detach())
    assert not torch.equal(*draws)
    if fallback:
        torch.manual_seed(5)
        eager = program(x)
        torch.manual_seed(5)
        assert torch.equal(fast(x), eager)


def test_gradients_that_depend_on_no_tangent():
    side = devstream.Stream("cpu")

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.shape = x.shape
            return x * 1

        @staticmethod
        def backward(ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
            return torch.full(ctx.shape, 3.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = Constant.apply(x)
        devstream.current_stream("cpu").wait_stream(side)
        return y

    x = torch.ones(3, requires_grad=True)
    compiled(program)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3


def test_streams_of_two_virtual_devices_in_one_graph(launched):
    there = devstream.Stream("cpu:1")
    here = devstream.Stream("cpu:0")

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for side in (here, there):
            side.wait_stream(devstream.current_stream("cpu:0"))
        with devstream.stream(here):
            a = torch.relu(x @ w)
        there.wait_stream(here)
        with devstream.stream(there):
            b = torch.sin(a) @ w
        devstream.current_stream("cpu:0").wait_stream(there)
        return (b + x).sum()

    wanted, got = leaves(), leaves()
    program(*wanted).backward()
    fast = compiled(program, missing_waits="error")
    fast(*got).backward()
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert {here, there} <= set(launched)
    assert devstream.current_stream("cpu:0") == devstream.default_stream("cpu:0")
