"""Measures what kernels reach: matmuls, attention, pointwise operations, norms, reads, writes, copies."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from devstream._streams import stream as switch
from devstream._streams import synchronize
from devstream.roofline import tiles
from devstream.roofline._clock import Clock, curve_of
from devstream.roofline._plan import Plan
from devstream.roofline.curves import (
    Curve,
    Shape,
    Tiling,
    attention_shape,
    attention_tilings,
    best_for_all,
    best_tiling,
    tilings,
)
from devstream.roofline.tiles import Tiles

#: Multiply-adds an element of the kernel that measures the vector units: so many that memory is idle, and in
#: chains side by side, since one after the other they would wait for each other.
_CHAINS, _STEPS = 8, 32


@dataclass(frozen=True, slots=True)
class Matmuls:
    """Measured matmuls of one dtype: the curve, the tiling that it follows, and the times behind them.

    Attributes:
        samples: shape and seconds.
        unaligned: shape, bytes at multiples of which the rows of its tensors begin, and seconds.
        itemsize: of an element, in bytes.
    """

    curve: Curve
    tiling: Tiling
    samples: tuple[tuple[Shape, float], ...]
    unaligned: tuple[tuple[Shape, int, float], ...]
    itemsize: int

    @property
    def peak(self) -> float:
        """The best FLOP/s of all of them."""
        return max(2.0 * math.prod(shape) / seconds for shape, seconds in self.samples)

    def tiles(self, units: int, bytes_per_s: float) -> Tiles:
        """Return the kernels that these times tell of, on a device of so many units and such a memory."""
        found = tiles.fit(
            [
                (shape, seconds, _elements(shape) * self.itemsize / bytes_per_s if bytes_per_s else 0.0)
                for shape, seconds in self.samples
            ],
            units,
        )
        return tiles.with_unaligned(found, self.unaligned)


def _elements(shape: Shape) -> int:
    batch, m, n, k = shape
    return batch * (m * k + k * n + m * n)


def matmuls(clock: Clock, plan: Plan, dtype: str, units: int) -> Matmuls | None:
    """Measure matmuls of *dtype*; None where the device has none of that type."""
    with _precision(dtype):
        made = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        size = torch.empty((), dtype=made).element_size()
        odd = [
            ((batch, m, n, k - alignment // size), alignment)
            for batch, m, n, k in plan.unaligned_shapes
            for alignment in (2, 4, 8)
            if alignment >= size
        ]
        largest = max(
            batch * max(m * k, k * n, m * n) for batch, m, n, k in (*plan.shapes, *plan.unaligned_shapes)
        )
        try:
            # Random: the power that a matmul takes, and so its clock, depends on the data.
            one, two, out = (torch.randn(largest, device=clock.tensors).to(made) for _ in range(3))
            torch.mm(one[:4].view(2, 2), two[:4].view(2, 2))
        except (RuntimeError, NotImplementedError, TypeError):
            return None  # what it raises is the answer: no such type here

        def work(shape: Shape) -> Callable[[], object]:
            batch, m, n, k = shape
            a, b = one[: batch * m * k].view(batch, m, k), two[: batch * k * n].view(batch, k, n)
            return _multiply(a, b, out[: batch * m * n].view(batch, m, n))

        shapes = sorted(plan.shapes, key=math.prod)
        points = [
            (float(math.prod(shape)) * (1 + 1e-9 * index), work(shape)) for index, shape in enumerate(shapes)
        ]
        found = clock.sweep(points, longest_s=plan.longest_s)
        unaligned = [(shape, alignment, clock.time(work(shape)).seconds) for shape, alignment in odd]
    samples = [(shape, timed.seconds) for shape, (_, timed) in zip(shapes, found, strict=False)]
    spread = statistics.median(timed.spread for _, timed in found)
    tiling = best_tiling(samples, tilings(units))
    curve = Curve.measured([(tiling.work(shape), s) for shape, s in samples], spread=spread)
    return Matmuls(curve, tiling, tuple(samples), tuple(unaligned), size)


def _multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
    if a.shape[0] == 1:
        x, y, z = a[0], b[0], c[0]
        return lambda: torch.mm(x, y, out=z)
    return lambda: torch.bmm(a, b, out=c)


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Allow, or forbid, float32 matmuls to use TF32 meanwhile."""
    if dtype not in ("tf32", "float32"):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def kernels(clock: Clock, plan: Plan, dtype: str) -> dict[str, Curve]:
    """Return the curves of the kinds of memory-bound kernels, for elements of *dtype*."""
    made: torch.dtype = getattr(torch, dtype)
    size = torch.empty((), dtype=made).element_size()
    points: dict[str, list[tuple[float, Callable[[], object]]]] = {}
    for moved in plan.kernel_bytes:
        for key, amount, work in _works(clock, moved, made, size):
            points.setdefault(key, []).append((amount, work))
    return {key: curve_of(clock.sweep(works, longest_s=plan.longest_s)) for key, works in points.items()}


def _works(
    clock: Clock, moved: int, dtype: torch.dtype, size: int
) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield key, bytes really moved and work of each kernel that moves about *moved* bytes."""
    count = moved // size
    third = count // 3  # two operands and a result
    x, y, z = (torch.rand(third, device=clock.tensors).to(dtype) for _ in range(3))
    # With results of their own, as models have them: on the CPU new memory costs more than the operation.
    yield f"pointwise {size}", 3.0 * third * size, lambda: torch.add(x, y)
    yield f"pointwise {size} unary", 2.0 * third * size, lambda: torch.relu(x)
    yield f"copy {size}", 2.0 * third * size, lambda: z.copy_(x)
    yield f"write {size}", 1.0 * third * size, lambda: z.fill_(1.0)
    yield f"read {size}", 1.0 * third * size, lambda: torch.sum(x)
    width = 1024
    rows = third // width
    if rows == 0:
        return
    matrix, gradient, weight = x[: rows * width].view(rows, width), y[: rows * width].view(rows, width), x[:width]
    moved_once = 1.0 * rows * width * size
    yield f"norm {size}", 2 * moved_once, lambda: torch.nn.functional.layer_norm(matrix, (width,), weight, weight)
    yield f"softmax {size}", 2 * moved_once, lambda: torch.softmax(matrix, -1)
    _, mean, deviation = torch.native_layer_norm(matrix, (width,), weight, weight, 1e-5)
    backward = torch.ops.aten.native_layer_norm_backward
    yield (
        f"norm_backward {size}",
        3 * moved_once,
        lambda: backward(gradient, matrix, (width,), mean, deviation, weight, weight, [True, True, True]),
    )


_Attention = tuple[dict[str, Curve], dict[str, Tiling], dict[str, float]]


def attention(clock: Clock, plan: Plan, dtype: str, units: int) -> _Attention:
    """Return the curves of attention, forward and backward, by head size and with or without a causal mask.

    With each come how its rows are cut up, as for a matmul of `attention_shape`, and its best FLOP/s.
    """
    made: torch.dtype = getattr(torch, dtype)
    points: dict[str, list[tuple[float, Callable[[], object]]]] = {}
    shapes: dict[float, Shape] = {}
    sizes = itertools.chain(
        ((plan.attention_heads, sequence) for sequence in plan.sequences),
        # A few with fewer heads, so that what grows with the heads is told from what grows with the sequence.
        ((max(1, plan.attention_heads * 3 // 8), sequence) for sequence in plan.sequences[1:-2]),
    )
    for (heads, sequence), head_dim, causal in itertools.product(sizes, plan.head_dims, (False, True)):
        shape = (1, heads, sequence, head_dim)
        q, k, v = (torch.randn(shape, device=clock.tensors).to(made).requires_grad_() for _ in range(3))
        flops = 4.0 * heads * sequence * sequence * head_dim * (0.5 if causal else 1.0)
        shapes[flops] = shapes[2.5 * flops] = attention_shape(heads, sequence, sequence)
        # The backward runs on the stream of its forward.
        synchronize(clock.device)
        with switch(clock.stream):
            out = _attend(q, k, v, causal)
        gradient = torch.ones_like(out)
        key = f"{head_dim}{' causal' if causal else ''}"
        points.setdefault(f"attention {dtype} forward {key}", []).append(
            (flops, _no_grad(_attend, q, k, v, causal))
        )
        # The backward does five products of the size of which the forward does two.
        points.setdefault(f"attention {dtype} backward {key}", []).append(
            (2.5 * flops, _backward(out, (q, k, v), gradient))
        )
    # A backward is issued by autograd's engine, about ten times as slowly, so fewer of them are queued.
    found = {
        key: clock.sweep(sorted(works, key=lambda one: one[0]), longest_s=plan.longest_s, longest_loops=20)
        for key, works in points.items()
    }
    curves, cut = {}, {}
    for way, causal in itertools.product(("forward", "backward"), (False, True)):
        keys = [key for key in found if f" {way} " in key and key.endswith("causal") == causal]
        samples = [[(shapes[flops], timed.seconds) for flops, timed in found[key]] for key in keys]
        # Blocks under a causal mask are of unlike length, and fill each other's gaps: there may be no waves.
        tiling = best_for_all(samples, attention_tilings(units, waves=not causal))
        for key in keys:
            cut[key] = tiling
            curves[key] = curve_of(
                [(flops * tiling.inflation(shapes[flops]), timed) for flops, timed in found[key]]
            )
    return curves, cut, {key: max(flops / timed.seconds for flops, timed in one) for key, one in found.items()}


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _no_grad(function: Callable[..., object], *args: object) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return function(*args)

    return run


def _backward(out: torch.Tensor, inputs: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def vector_rate(clock: Clock, dtype: str, count: int) -> float:
    """Return FLOP/s outside of the matrix units: a chain of multiply-adds, compiled into one kernel.

    Raises:
        RuntimeError: nothing here compiles it (no Triton, no C++ compiler).
    """

    def chain(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        chains = [x + number for number in range(_CHAINS)]
        for _ in range(_STEPS):
            chains = [one * a + b for one in chains]
        return sum(chains[1:], chains[0])

    made: torch.dtype = getattr(torch, dtype)
    # Tensors of one element, not numbers: a compiler could work a chain of constants out beforehand.
    a, b = (torch.full((1,), value, dtype=made, device=clock.tensors) for value in (0.999, 1e-3))
    x = torch.rand(count, device=clock.tensors).to(made)
    compiled = torch.compile(chain, dynamic=False, fullgraph=True)
    timed = clock.time(lambda: compiled(x, a, b))
    return 2.0 * _CHAINS * (_STEPS + 1) * count / timed.seconds


__all__ = ["attention", "kernels", "matmuls", "vector_rate"]
