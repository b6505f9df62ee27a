"""The programs that compiled code is held against eager code with: each a function over two side streams.

Each is right in eager: every edge is written out, so it runs on an accelerator as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import devstream


@dataclass(frozen=True)
class Program:
    """``make(device, one, two)`` returns the function; ``arguments(device)`` what it is called with."""

    name: str
    make: Callable[..., Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...] = ((8, 8), (8, 8), (8, 8))
    gradients: bool = True
    #: Arguments that no gradient is asked for, by position.
    plain: tuple[int, ...] = ()

    def arguments(self, device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        made = [torch.randn(shape, generator=generator).to(device) for shape in self.shapes]
        return [one.requires_grad_(self.gradients and number not in self.plain) for number, one in enumerate(made)]


PROGRAMS: list[Program] = []


def program(*shapes: tuple[int, ...], gradients: bool = True, plain: tuple[int, ...] = ()) -> Any:
    def add(make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        given = {"shapes": shapes} if shapes else {}
        PROGRAMS.append(Program(make.__name__, make, gradients=gradients, plain=plain, **given))
        return make

    return add


def fork(*streams: Any) -> None:
    for stream in streams:
        stream.wait_stream(devstream.current_stream(stream.device.type))


def join(*streams: Any) -> None:
    for stream in streams:
        devstream.current_stream(stream.device.type).wait_stream(stream)


@program()
def branches(device, one, two):
    def function(x, w, v):
        a = torch.relu(x @ w)
        fork(one, two)
        with devstream.stream(one):
            b = torch.sin(a) @ v
        with devstream.stream(two):
            c = torch.cos(a) @ w
        join(one, two)
        return (b + c).sum()

    return function


@program()
def layer_norm_and_softmax(device, one, two):
    def function(x, w, v):
        fork(one, two)
        with devstream.stream(one):
            a = functional.layer_norm(x @ w, (8,))
        with devstream.stream(two):
            b = (x @ v).softmax(-1)
        join(one, two)
        return a * b

    return function


@program()
def topk_on_a_side_stream(device, one, two):
    def function(x, w, v):
        fork(one)
        with devstream.stream(one):
            values, _ = torch.topk(x @ w, 3)
            y = values.sum(1)
        join(one)
        return y + v[0]

    return function


@program((2, 3, 8, 8), (4, 3, 3, 3), (4, 4, 3, 3))
def conv_and_views(device, one, two):
    def function(x, w, v):
        fork(one)
        with devstream.stream(one):
            y = functional.conv2d(x, w, padding=1).relu()
            flat = y.view(2, 4, 64).transpose(1, 2)
        two.wait_stream(one)
        with devstream.stream(two):
            z = functional.conv2d(y, v, padding=1)
        join(one, two)
        return flat.sum((1, 2)) + z.mean((1, 2, 3))

    return function


@program((2, 2, 8, 8), (2, 2, 8, 8), (2, 2, 8, 8))
def attention_on_a_side_stream(device, one, two):
    def function(q, k, v):
        fork(one)
        with devstream.stream(one):
            y = functional.scaled_dot_product_attention(q, k, v)
        join(one)
        return y.sum()

    return function


@program((2, 2, 8, 8), (2, 2, 8, 8), (2, 2, 8, 8))
def attention_over_two_streams(device, one, two):
    def function(q, k, v):
        fork(one)
        with devstream.stream(one):
            a = torch.matmul(q, k.transpose(-2, -1)).div(8**0.5)
        two.wait_stream(one)
        with devstream.stream(two):
            b = a.softmax(dim=-1)
        one.wait_stream(two)
        with devstream.stream(one):
            c = torch.matmul(b, v)
        join(one)
        return c

    return function


@program((8, 8))
def same_expression_twice(device, one, two):
    def function(x):
        fork(one, two)
        with devstream.stream(one):
            a = torch.sin(x) * 2
        with devstream.stream(two):
            b = torch.sin(x) * 3
        join(one, two)
        return a, b

    return function


@program()
def checkpointed(device, one, two):
    def function(x, w, v):
        def body(t):
            fork(one)
            with devstream.stream(one):
                y = torch.sin(t @ w)
            join(one)
            return torch.cos(y)

        y = checkpoint(body, x, use_reentrant=False)
        fork(two)
        with devstream.stream(two):
            z = y @ v
        join(two)
        return z.sum()

    return function


@program((8, 8), (8, 8))
def autograd_function(device, one, two):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * 2 * x

    def function(x, w):
        fork(one)
        with devstream.stream(one):
            y = Square.apply(x @ w)
        join(one)
        return y + x

    return function


@program((8, 8), (8, 8))
def in_place_on_an_intermediate(device, one, two):
    def function(x, w):
        y = x @ w
        fork(one)
        with devstream.stream(one):
            y.add_(1)
            z = y * 2
        join(one)
        return z + y

    return function


@program((8, 8), (8, 8), (8, 8), plain=(2,))
def input_changed_on_a_side_stream(device, one, two):
    def function(x, w, total):
        fork(one)
        with devstream.stream(one):
            total.add_(x.detach())
            y = x @ w
        join(one)
        return y * total

    return function


@program((8, 8), (8, 8))
def input_with_gradient_changed(device, one, two):
    def function(x, w):
        z = x * 1
        fork(one)
        with devstream.stream(one):
            z.mul_(w)
        join(one)
        return z + x

    return function


@program((4, 8), (8,), (8,), (8,), (8,), plain=(3, 4))
def batch_norm_in_training(device, one, two):
    def function(x, weight, bias, mean, variance):
        fork(one)
        done = devstream.Event(device)
        with devstream.stream(one):
            y = functional.batch_norm(x, mean, variance, weight, bias, training=True)
            done.record()
        done.wait()
        return y * 2

    return function


@program((8, 8), (8, 8))
def tied_weights(device, one, two):
    def function(x, w):
        fork(one, two)
        with devstream.stream(one):
            a = x @ w
        with devstream.stream(two):
            b = x @ w.t()
        join(one, two)
        return a @ w + b

    return function


@program((8, 8), (8, 8))
def several_outputs(device, one, two):
    def function(x, w):
        fork(one, two)
        with devstream.stream(one):
            a = x @ w
            b = a + 1
        with devstream.stream(two):
            c = x * 2
        join(one, two)
        return a, (b, [c, x]), None, 5

    return function


@program((8, 8), (8, 8), (8, 8))
def micro_batches(device, one, two):
    def function(x, w, v):
        fork(one, two)
        parts, events = [], []
        for number, part in enumerate(x.chunk(4)):
            side = one if number % 2 == 0 else two
            done = devstream.Event(device)
            with devstream.stream(side):
                parts.append(torch.relu(part @ w) @ v)
                done.record()
            events.append(done)
        for done in events:
            done.wait()
        return torch.cat(parts).sum()

    return function


@program((8, 8), (8, 8))
def autocast(device, one, two):
    def function(x, w):
        fork(one)
        with torch.autocast(device, dtype=torch.bfloat16), devstream.stream(one):
            y = x @ w
        join(one)
        return y.float() + x

    return function


@program((8, 8), (8, 8), gradients=False)
def optimizer_step(device, one, two):
    def function(w, gradient):
        fork(one)
        with torch.no_grad(), devstream.stream(one):
            torch._foreach_add_([w], [gradient], alpha=-0.1)
        join(one)
        return w * 1

    return function


@program((8, 8), (8, 8))
def nested_blocks(device, one, two):
    def function(x, w):
        fork(one)
        with devstream.stream(one):
            a = x @ w
            two.wait_stream(one)
            with devstream.stream(two):
                b = a.exp()
            one.wait_stream(two)
            c = a + b
        join(one)
        return c

    return function


@program((8, 8))
def views_across_streams(device, one, two):
    def function(x):
        base = x.sin()
        view = base.view(4, 16).t()
        fork(one)
        with devstream.stream(one):
            a = view[::2] * 2
        two.wait_stream(one)
        with devstream.stream(two):
            b = a.reshape(-1).view(8, 4)
            c = b.cumsum(0)
        join(one, two)
        return c, view

    return function


@program((8, 8))
def parts_of_a_tuple(device, one, two):
    def function(x):
        first, second = x.exp().split(4)
        fork(one, two)
        with devstream.stream(one):
            a = first.sum()
            third, fourth = first.unbind(1)[:2]
        with devstream.stream(two):
            b = second.sum()
            values, indices = second.sort()
        join(one, two)
        return a + b, third * fourth, values, indices

    return function


@program((10, 8), (8, 10))
def embedding_and_cross_entropy(device, one, two):
    def function(table, head):
        tokens = torch.arange(6, device=device) % 4
        fork(one)
        with devstream.stream(one):
            hidden = functional.embedding(tokens, table)
        join(one)
        fork(two)
        with devstream.stream(two):
            loss = functional.cross_entropy(hidden @ head, tokens)
        join(two)
        return loss

    return function


@program((8, 8))
def ring_of_events(device, one, two):
    def function(t):
        fork(one, two)
        events = [devstream.Event(device) for _ in range(3)]
        for number, event in enumerate(events):
            if number:
                events[number - 1].wait(one if number % 2 else two)
            with devstream.stream(one if number % 2 else two):
                t = t + number
                event.record()
        for event in events:
            event.wait()
        return t

    return function


@program((8, 8))
def tensors_made_inside(device, one, two):
    def function(x):
        fork(one, two)
        with devstream.stream(one):
            a = torch.zeros(8, 8, device=device) + torch.arange(8, device=device)
        with devstream.stream(two):
            b = torch.zeros(8, 8, device=device) + torch.tensor(2.0, device=device)
        join(one, two)
        return a + b * x

    return function


@program((8, 8), (8, 8))
def scattered(device, one, two):
    def function(x, w):
        fork(one)
        with devstream.stream(one):
            y = x.clone()
            y[2:4] = w[:2]
            y.index_put_((torch.tensor([0, 1], device=device),), w[:2], accumulate=True)
        join(one)
        return y

    return function


@program((8, 8), (8, 8))
def record_stream_and_del(device, one, two):
    def function(x, w):
        y = x @ w
        fork(one)
        with devstream.stream(one):
            z = y.sin()
            if device != "cpu":
                devstream.record_stream(y, one)
        del y
        more = x @ w + 1
        join(one)
        return z + more

    return function


@program((8, 8), (8, 8))
def everything_on_one_side_stream(device, one, two):
    def function(x, w):
        fork(one)
        with devstream.stream(one):
            y = (x @ w).relu().sum()
        join(one)
        return y

    return function


@program((8, 8), (8, 8))
def round_trip_to_the_host(device, one, two):
    def function(x, w):
        fork(one)
        with devstream.stream(one):
            there = (x @ w).to("cpu")  # blocks the host, so it is over
            back = (there * 2).to(device)
        join(one)
        return back + x

    return function


@program((8, 8), (3,), plain=(1,))
def scalars_of_the_host(device, one, two):
    def function(x, _unused):
        scale = torch.tensor(3.0)  # a tensor of the host that a kernel of the device reads
        fork(one)
        with devstream.stream(one):
            y = x * scale
        join(one)
        return y

    return function


@program((8, 8), (8, 8))
def a_condition_beside_streams(device, one, two):
    def function(x, w):
        fork(one)
        with devstream.stream(one):
            y = x @ w
        join(one)
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,))

    return function
