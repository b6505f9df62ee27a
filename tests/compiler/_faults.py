"""Programs that compilers of stream code get wrong, written once for any API of streams.

Each is right in eager mode. `FAULTS` says for each what goes wrong where it does. ``make(api)`` returns the
function; `api` has ``Stream``, ``Event``, ``stream`` (the block) and ``current``, of devstream or of torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Fault:
    """One program. *calls* "in flight" means two calls forward, then their backwards in the same order."""

    name: str
    wrong: str
    make: Callable[[Any], Callable[..., Any]]
    count: int = 2
    gradients: bool = True
    plain: tuple[int, ...] = ()
    in_flight: bool = False

    def arguments(self, device: str, seed: int = 3) -> list[torch.Tensor]:
        """Return what the function is called with."""
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(16, 16, generator=generator).mul_(0.3).to(device) for _ in range(self.count)]
        return [one.requires_grad_(self.gradients and number not in self.plain) for number, one in enumerate(made)]


FAULTS: dict[str, Fault] = {}


def fault(wrong: str, **more: Any) -> Any:
    def add(make: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
        FAULTS[make.__name__] = Fault(make.__name__, wrong, make, **more)
        return make

    return add


@fault("a buffer is used again while another stream reads it", gradients=False)
def buffer_with_a_reader_on_another_stream(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        first, second = api.Event(), api.Event()
        one.wait_stream(api.current())
        with api.stream(one):
            a = torch.sin(x) @ w
            first.record(one)
        first.wait(two)
        with api.stream(two):
            b = a @ w
            second.record(two)
        with api.stream(one):
            c = torch.cos(x) @ w
            second.wait(one)
            d = b + c
        api.current().wait_stream(one)
        return d

    return function


@fault("work is issued before the wait in front of it", gradients=False)
def consumer_behind_a_wait(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        done = api.Event()
        one.wait_stream(api.current())
        with api.stream(one):
            a = x @ w
            done.record(one)
        done.wait(two)
        with api.stream(two):
            b = a.sum(0)
        api.current().wait_stream(two)
        return b * 2

    return function


@fault("of two waits for one event only the first holds its reader back", gradients=False)
def two_waits_for_one_event(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        done = api.Event()
        y = x + w
        done.record(api.current())
        done.wait(one)
        with api.stream(one):
            a = y * 2
        done.wait(two)
        with api.stream(two):
            b = y * 3
        api.current().wait_stream(one)
        api.current().wait_stream(two)
        return a + b

    return function


@fault("of two readers of a gradient on two streams only the first waits")
def two_readers_in_backward(api):
    one, two, three = api.Stream(), api.Stream(), api.Stream()

    def function(x, w):
        for stream in (one, two):
            stream.wait_stream(api.current())
        with api.stream(one):
            a = x @ w
        with api.stream(two):
            b = torch.sin(w)
        three.wait_stream(one)
        three.wait_stream(two)
        with api.stream(three):
            c = torch.relu(a * b)
        api.current().wait_stream(three)
        return c

    return function


@fault("a side stream reads an incoming gradient too early, and hands its own out too early")
def gradients_in_and_out_of_a_side_stream(api):
    one = api.Stream()

    def function(x, w):
        one.wait_stream(api.current())
        with api.stream(one):
            y = torch.sin(x @ w)
        api.current().wait_stream(one)
        return y

    return function


@fault("an operation of several results on a side stream can't be differentiated")
def several_results_on_a_side_stream(api):
    one = api.Stream()

    def function(x, w):
        one.wait_stream(api.current())
        with api.stream(one):
            a = functional.layer_norm(x @ w, (16,))
            values, _ = torch.topk(a, 3)
        api.current().wait_stream(one)
        return values

    return function


@fault("what checkpoint computes again in the backward is in no order")
def checkpoint_over_streams(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        def body(t):
            one.wait_stream(api.current())
            with api.stream(one):
                a = torch.sin(t @ w)
            two.wait_stream(one)
            with api.stream(two):
                b = torch.cos(a)
            api.current().wait_stream(two)
            return torch.exp(b)

        return checkpoint(body, x, use_reentrant=False)

    return function


@fault("values are saved for the backward only to give an order", count=1)
def chain_that_saves_nothing(api):
    one, two = api.Stream(), api.Stream()

    def function(x):
        for number in range(6):
            stream, other = (one, two) if number % 2 else (two, one)
            stream.wait_stream(other if number else api.current())
            with api.stream(stream):
                x = x * 1.5
        api.current().wait_stream(one)
        return x

    return function


@fault("memory goes back while one of two side streams, or the reader of a view, still reads it", gradients=False)
def memory_with_several_readers(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        a = x @ w
        for stream in (one, two):
            stream.wait_stream(api.current())
        with api.stream(one):
            b = a.t() @ w
        with api.stream(two):
            c = a.view(-1).sin()
        for stream in (one, two):
            api.current().wait_stream(stream)
        del a
        return b + c.view(16, 16) + (x @ w + 1)

    return function


@fault("one expression on two streams becomes one, and its second reader has no wait", count=1)
def one_expression_on_two_streams(api):
    one, two = api.Stream(), api.Stream()

    def function(x):
        for stream in (one, two):
            stream.wait_stream(api.current())
        with api.stream(one):
            a = torch.sin(x) * 2
        with api.stream(two):
            b = torch.sin(x) * 3
        for stream in (one, two):
            api.current().wait_stream(stream)
        return a, b

    return function


@fault("the second record of an event is taken for the first")
def event_recorded_twice(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        done = api.Event()
        one.wait_stream(api.current())
        with api.stream(one):
            a = x @ w
            done.record(one)
        done.wait(two)
        with api.stream(two):
            b = a + 1
        with api.stream(one):
            c = torch.sin(a)
            done.record(one)
        done.wait(two)
        with api.stream(two):
            d = b * c
        api.current().wait_stream(two)
        return d

    return function


@fault("a record on the caller's stream loses the work in front of it", gradients=False)
def record_on_the_callers_stream(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        first, second = api.Event(), api.Event()
        one.wait_stream(api.current())
        a = x @ w
        with api.stream(one):
            b = x * 2
            first.record(one)
        second.record(api.current())
        second.wait(two)
        with api.stream(two):
            c = a.sin()
        api.current().wait_stream(two)
        first.wait(api.current())
        return b + c

    return function


@fault("an input's change on a side stream is not behind the join", plain=(1,))
def input_changed_on_a_side_stream(api):
    one = api.Stream()

    def function(x, total):
        one.wait_stream(api.current())
        with api.stream(one):
            total.add_(x.detach())
        api.current().wait_stream(one)
        return x * total

    return function


@fault("a block of the current stream, or waits without work, name a stream that is nowhere defined", count=1)
def blocks_without_work(api):
    one = api.Stream()

    def function(x):
        with api.stream(api.current()):
            y = x + 1
        one.wait_stream(api.current())
        api.current().wait_stream(one)
        return y

    return function


@fault("the backward of one call runs on the streams of another", in_flight=True)
def two_calls_in_flight(api):
    def function(x, w):
        one = api.Stream()
        one.wait_stream(api.current())
        with api.stream(one):
            y = torch.sin(x @ w)
        api.current().wait_stream(one)
        return y

    return function


@fault("wait_event, wait_stream and record_event, called as methods, vanish", gradients=False)
def order_by_methods(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        done = api.Event()
        one.wait_stream(api.current())
        with api.stream(one):
            a = x @ w
        one.record_event(done)
        two.wait_event(done)
        with api.stream(two):
            b = a + 1
        api.current().wait_stream(two)
        return b

    return function


@fault("views that are made again in the backward change streams with one another")
def views_on_two_streams(api):
    one, two = api.Stream(), api.Stream()

    def function(x, w):
        for stream in (one, two):
            stream.wait_stream(api.current())
        with api.stream(one):
            a = x.t() @ w
        with api.stream(two):
            b = x.t() * w.t()
        for stream in (one, two):
            api.current().wait_stream(stream)
        return a + b

    return function


def plain_api() -> Any:
    """Return an API whose streams and events do nothing: the function's lines run one after the other."""
    return _Nothing()


class _Nothing:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return


def devstream_api(device: str) -> Any:
    """Return devstream's streams of *device*."""
    import devstream

    class Api:
        @staticmethod
        def Stream() -> Any:  # noqa: N802 - a class of the API
            return devstream.Stream(device)

        @staticmethod
        def Event() -> Any:  # noqa: N802
            return devstream.Event(device)

        stream = staticmethod(devstream.stream)

        @staticmethod
        def current() -> Any:
            return devstream.current_stream(device)

    return Api


def run(fault: Fault, function: Callable[..., Any], device: str) -> list[Any]:
    """Call it, twice where two calls are in flight, and differentiate; return results, arguments, gradients."""
    given = [fault.arguments(device, seed) for seed in ((3, 4) if fault.in_flight else (3,))]
    results = []
    for arguments in given:
        found = function(*arguments)
        results.append(list(found) if isinstance(found, tuple) else [found])
    for found in results:
        asked = [one for one in found if one.requires_grad]
        if asked:
            sum((one * one).sum() for one in asked).backward()
    plain = [one.detach() for found in results for one in found]
    return [*plain, *(one.detach() for arguments in given for one in arguments), *_gradients(given)]


def _gradients(given: list[list[torch.Tensor]]) -> list[torch.Tensor | None]:
    return [one.grad for arguments in given for one in arguments]


def agree(found: list[Any], wanted: list[Any]) -> bool:
    """Say whether two runs gave the same."""
    return len(found) == len(wanted) and all(
        (one is None) == (other is None) and (one is None or torch.allclose(one, other, rtol=1e-3, atol=1e-4))
        for one, other in zip(found, wanted, strict=True)
    )
