"""Which bytes of a storage a tensor covers, exactly, and whether two such sets of bytes meet.

Byte-exact, since two halves of one buffer are no race and two views that share one byte are. Strides matter: the
columns of a matrix interleave, and the ranges that enclose them overlap although no byte is shared.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple, TypeAlias

#: What repeats an extent: how often, and how many bytes apart; the widest step first.
Dims: TypeAlias = tuple[tuple[int, int], ...]


class Extent(NamedTuple):
    """Bytes of a storage: runs of *run* bytes, repeated by *dims*; the first at *start*, the last ends at *stop*.

    Without *dims* it is the one run from *start* to *stop*.
    """

    start: int
    stop: int
    run: int
    dims: Dims = ()

    def meets(self, other: Extent) -> bool:
        """Whether both hold a common byte."""
        if self.start >= other.stop or other.start >= self.stop:
            return False
        if not (self.dims or other.dims):
            return True
        return _meet(self, other)

    def holds(self, other: Extent) -> bool:
        """Whether *other* is surely inside this one; False may also mean that it takes too long to tell."""
        return (not self.dims and self.start <= other.start and other.stop <= self.stop) or self == other


def extent(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Extent | None:
    """Return what a tensor covers (*offset* and *strides* in elements), or None where it has no elements."""
    run, dims = _normal(shape, strides, itemsize)
    if run == 0:
        return None
    start = offset * itemsize
    return Extent(start, start + run + sum((count - 1) * step for count, step in dims), run, dims)


@lru_cache(maxsize=4096)
def _normal(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, Dims]:
    """Return the run and the dims of a layout, neighbours merged; a run of 0 is no elements."""
    if 0 in shape:
        return 0, ()
    run = itemsize
    dims: list[tuple[int, int]] = []
    # A stride of 0 repeats the same bytes, and a length of 1 repeats nothing.
    for step, count in sorted((s * itemsize, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s):
        if not dims and step <= run:
            # Touching or overlapping runs are one longer run: that loses nothing, since no gap lies between.
            run += (count - 1) * step
        elif dims and step == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * count, dims[-1][1])
        else:
            dims.append((count, step))
    return run, tuple(reversed(dims))


@lru_cache(maxsize=4096)
def _meet(one: Extent, two: Extent) -> bool:
    """Whether two extents with gaps share a byte: a bounded search, pruned by range and by common divisors.

    A byte is shared exactly where start + steps of the first and start + steps of the second are less than a run
    apart: where some whole numbers x, each within its count, bring the sum of x * step between *low* and *high*.
    """
    low = two.start - one.start - one.run + 1
    high = two.start - one.start + two.run - 1
    spans: dict[int, int] = {}
    # Steps of the same size merge: x - y runs through all differences. Each y counts down from its last.
    for count, step in one.dims:
        spans[step] = spans.get(step, 0) + count - 1
    for count, step in two.dims:
        spans[step] = spans.get(step, 0) + count - 1
        low += (count - 1) * step
        high += (count - 1) * step
    steps = sorted(spans, reverse=True)
    # What the steps from here on can add at most, and what divides all that they can add.
    most, divisor = [0] * (len(steps) + 1), [0] * (len(steps) + 1)
    for at in range(len(steps) - 1, -1, -1):
        most[at] = most[at + 1] + spans[steps[at]] * steps[at]
        divisor[at] = gcd(divisor[at + 1], steps[at])
    seen = set()
    todo = [(0, low, high)]
    while todo:
        at, low, high = todo.pop()
        if high < 0 or low > most[at]:
            continue
        if at == len(steps):
            return True
        if -(-low // divisor[at]) > high // divisor[at]:
            continue  # no multiple of the divisor lies between
        if (at, low) in seen:  # high - low never changes
            continue
        seen.add((at, low))
        step = steps[at]
        first = max(0, -((most[at + 1] - low) // step))
        last = min(spans[step], high // step)
        todo += [(at + 1, low - x * step, high - x * step) for x in range(first, last + 1)]
    return False


__all__ = ["Dims", "Extent", "extent"]
