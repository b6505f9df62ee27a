"""Measured times as curves: what a device needs for an amount of work that was not itself measured.

Pure. A `Curve` goes through measured points; a `Tiling` says which amount a matmul's time follows; an `AlphaBeta`
is a collective's latency and rate.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

#: Batch, rows, columns, depth: ``(b, m, k) @ (b, k, n)`` has the shape ``(b, m, n, k)``.
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by amount (FLOPs or bytes), through measured points.

    Between two points the logarithm of the time is linear in that of the amount, which is exact for a constant
    rate and for a constant time. Below the first point the time is the first point's: what is left there is
    latency. Above the last one the rate is the last point's.

    Attributes:
        points: ``(amount, seconds)``, amounts rising, seconds never falling, all above 0.
        error: relative error of the points themselves. See `measured`, and `error_at` for what is read between.
    """

    points: tuple[tuple[float, float], ...]
    error: float = 0.0

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve has one point or more")
        if not all(math.isfinite(value) and value > 0 for point in self.points for value in point):
            raise ValueError(f"amounts and seconds of a curve are finite and above 0: {self.points}")
        for (amount, seconds), (later, longer) in itertools.pairwise(self.points):
            if not (amount < later and seconds <= longer):
                raise ValueError(
                    f"a curve's amounts rise and its seconds don't fall; {later:g} in {longer:g} s comes after "
                    f"{amount:g} in {seconds:g} s"
                )
        if not (math.isfinite(self.error) and self.error >= 0):
            raise ValueError(f"error={self.error}: a relative error is 0 or more")

    @classmethod
    def measured(cls, samples: Iterable[tuple[float, float]], *, spread: float = 0.0) -> Self:
        """Return the curve of *samples*, ``(amount, seconds)`` in any order, amounts more than once too.

        Times of one amount are merged to their geometric mean; where a time falls although the amount rises, it
        and its neighbours get one mean. The error is the larger of *spread* and of what this changed (root mean
        square).

        Args:
            samples: one or more.
            spread: relative spread of repeated measurements.
        """
        found: dict[float, list[float]] = {}
        for amount, seconds in samples:
            found.setdefault(amount, []).append(seconds)
        amounts = sorted(found)
        logs = [statistics.fmean(math.log(seconds) for seconds in found[amount]) for amount in amounts]
        weights = [len(found[amount]) for amount in amounts]
        points = tuple(
            (amount, math.exp(log)) for amount, log in zip(amounts, _rising(logs, weights), strict=True)
        )
        changes = [seconds / one - 1 for amount, seconds in points for one in found[amount]]
        return cls(points, max(spread, math.sqrt(statistics.fmean(change**2 for change in changes))))

    def seconds(self, amount: float) -> float:
        """Return the time for *amount*; never less for more."""
        index = bisect_right(self.points, amount, key=lambda point: point[0])
        if index == 0:
            return self.points[0][1]
        lower = self.points[index - 1]
        if index == len(self.points):
            return lower[1] * (amount / lower[0])
        return _between(lower, self.points[index], amount)

    def error_at(self, amount: float) -> float:
        """Return the relative error that a time read at *amount* may have.

        Between points that is the points' own, or half of what either neighbour would be off if it were read from
        the points around it: half, because the reading has its neighbours at half that distance.
        """
        index = bisect_right(self.points, amount, key=lambda point: point[0])
        around = [one for one in (index - 1, index) if 0 < one < len(self.points) - 1]
        return max([self.error, *(leave_one_out(self.points[one - 1 : one + 2]) / 2 for one in around)])

    def rate(self, amount: float) -> float:
        """Return amount per second at *amount*."""
        return amount / self.seconds(amount)

    @property
    def peak(self) -> float:
        """The best rate of all points, whatever the size."""
        return max(amount / seconds for amount, seconds in self.points)

    @property
    def latency(self) -> float:
        """Seconds of the smallest amount that was measured."""
        return self.points[0][1]


def _rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Return the nearest sequence that never falls, by weighted least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            other, more, longer = blocks.pop()
            mean = (mean * total + other * more) / (total + more)
            total, length = total + more, length + longer
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


def _between(lower: tuple[float, float], upper: tuple[float, float], amount: float) -> float:
    share = math.log(amount / lower[0]) / math.log(upper[0] / lower[0])
    # Rounding must not leave the interval: times would fall where the amount rises.
    between = lower[1] * math.exp(share * math.log(upper[1] / lower[1]))
    return min(max(between, lower[1]), upper[1])


def leave_one_out(points: Sequence[tuple[float, float]]) -> float:
    """Return the largest relative error of an inner point read from its two neighbours; 0 without one."""
    return max(
        (abs(_between(a, c, b[0]) / b[1] - 1) for a, b, c in zip(points, points[1:], points[2:], strict=False)),
        default=0.0,
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a device cuts a matmul up: tiles of the result, as many at once as there are *units*.

    The last wave of tiles is rarely full, and every tile has a start and an end beside its depth. So the time
    follows `work`, not the FLOPs.

    Attributes:
        rows, columns: of a tile.
        units: tiles that run at once; 1: no waves.
        depth: what start and end of a tile cost, as additional depth.
    """

    rows: int = 1
    columns: int = 1
    units: int = 1
    depth: int = 0

    def work(self, shape: Shape) -> float:
        """Return the FLOPs that a matmul of *shape* has when its waves are counted as full."""
        batch, rows, columns, depth = shape
        tiles = batch * math.ceil(rows / self.rows) * math.ceil(columns / self.columns)
        waves = math.ceil(tiles / self.units)
        return 2.0 * waves * self.units * self.rows * self.columns * (depth + self.depth)

    def inflation(self, shape: Shape) -> float:
        """Return `work` over the FLOPs of a matmul of *shape*, 1 or more."""
        return self.work(shape) / (2.0 * math.prod(shape))


#: The tiles that vendors' libraries use most, by rows and columns.
_TILES = ((1, 1), (64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256), (256, 256))
_DEPTHS = (0, 32, 64, 128, 256)


def tilings(units: int) -> list[Tiling]:
    """Return the tilings to try on a device with *units* multiprocessors (1: no waves to look for)."""
    if units <= 1:
        return [Tiling(depth=depth) for depth in _DEPTHS]
    return [
        Tiling(rows, columns, 1 if rows == 1 else units, depth) for rows, columns in _TILES for depth in _DEPTHS
    ]


def attention_shape(heads: int, rows: int, columns: int) -> Shape:
    """Return attention as *heads* matmuls: its rows are cut into blocks, each as deep as there are columns."""
    return heads, rows, 1, columns


def attention_tilings(units: int, *, waves: bool) -> list[Tiling]:
    """Return the ways to cut attention that are tried; with *waves*, only such as fill a device in waves."""
    if units <= 1:
        return [Tiling(depth=depth) for depth in _DEPTHS]
    rows = (64, 128, 256) if waves else (1, 64, 128, 256)
    return [Tiling(one, 1, 1 if one == 1 else units, depth) for one in rows for depth in (*_DEPTHS, 512)]


def best_tiling(samples: Sequence[tuple[Shape, float]], candidates: Sequence[Tiling]) -> Tiling:
    """Return the candidate under which *samples*, ``(shape, seconds)``, lie best on one curve.

    Best is the smallest mean square of what each point differs, in logarithms, from the line between its
    neighbours. Of equals the first candidate wins.
    """
    return best_for_all([samples], candidates)


def best_for_all(groups: Sequence[Sequence[tuple[Shape, float]]], candidates: Sequence[Tiling]) -> Tiling:
    """Return the candidate under which each of *groups* lies best on a curve of its own; see `best_tiling`."""

    def misfit(tiling: Tiling) -> float:
        total = 0.0
        for samples in groups:
            points = sorted((tiling.work(shape), seconds) for shape, seconds in samples)
            for (below, low), (amount, seconds), (above, high) in zip(
                points, points[1:], points[2:], strict=False
            ):
                share = 0.5 if below == above else math.log(amount / below) / math.log(above / below)
                total += (math.log(low) + share * math.log(high / low) - math.log(seconds)) ** 2
        return total

    return min(candidates, key=misfit)


#: Collectives, and what each rank sends over its slowest link in a ring, by ranks, as a share of the size.
#: The size is that of the whole tensor: the gathered one, and the one before reduce-scatter.
#: Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
_RING_SHARE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}
_RING_STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "send": lambda n: 1,
}
#: A tree needs fewer steps for the same bytes (pipelined); only these two are trees.
_TREE_STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * math.ceil(math.log2(n)),
    "broadcast": lambda n: math.ceil(math.log2(n)),
}
_TREE_SHARE: dict[str, Callable[[int], float]] = {"all_reduce": lambda n: 2.0, "broadcast": lambda n: 1.0}

COLLECTIVES = tuple(_RING_SHARE)


def steps_and_share(kind: str, ranks: int, algorithm: str) -> tuple[int, float]:
    """Return how many messages follow each other in a collective, and the bytes that a rank sends, as a share.

    Raises:
        ValueError: an unknown kind or algorithm, or less than one rank.
    """
    if kind not in _RING_SHARE:
        raise ValueError(f"kind={kind!r}: one of {', '.join(map(repr, COLLECTIVES))}")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: one or more")
    if algorithm not in ("ring", "tree"):
        raise ValueError(f"algorithm={algorithm!r}: 'ring' or 'tree'")
    if ranks == 1:
        return 0, 0.0
    if algorithm == "tree" and kind in _TREE_STEPS:
        return _TREE_STEPS[kind](ranks), _TREE_SHARE[kind](ranks)
    return _RING_STEPS[kind](ranks), _RING_SHARE[kind](ranks)


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """A link between ranks: seconds a message (alpha), bytes a second (one over beta), and the relative error."""

    latency_s: float
    bytes_per_s: float
    error: float = 0.0

    def __post_init__(self) -> None:
        if not (
            self.latency_s >= 0 and self.bytes_per_s > 0 and math.isfinite(self.latency_s) and self.error >= 0
        ):
            raise ValueError(f"latency is 0 or more and the rate above 0: {self}")

    def seconds(self, kind: str, size_bytes: float, ranks: int, *, algorithm: str) -> float:
        """Return the time of a collective; *size_bytes* is the whole tensor's. Raises as `steps_and_share`."""
        steps, share = steps_and_share(kind, ranks, algorithm)
        return steps * self.latency_s + share * size_bytes / self.bytes_per_s

    @classmethod
    def fit(
        cls, samples: Sequence[tuple[float, float]], *, kind: str, ranks: int, algorithm: str = "ring"
    ) -> Self:
        """Return the line through *samples*, ``(size_bytes, seconds)``, that has the least relative squares.

        Raises:
            ValueError: fewer than two sizes, or one rank.
        """
        steps, share = steps_and_share(kind, ranks, algorithm)
        if steps == 0 or len({size for size, _ in samples}) < 2:
            raise ValueError("a line needs two ranks and two sizes or more")
        # seconds = steps * a + share * size * b, each equation divided by its seconds.
        rows = [(steps / seconds, share * size / seconds) for size, seconds in samples]
        xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
        x, y = (sum(row[i] for row in rows) for i in (0, 1))
        determinant = xx * yy - xy * xy
        # Sizes that are nearly one can't tell latency from rate: then all of it is rate.
        solved = determinant > 1e-9 * xx * yy
        alpha = (x * yy - y * xy) / determinant if solved else -1.0
        beta = (y * xx - x * xy) / determinant if solved else 0.0
        if alpha < 0:  # no latency seen: the rate alone
            alpha, beta = 0.0, y / yy
        elif beta <= 0:  # no rate seen: the sizes are too small; the largest says at least this much
            size, seconds = max(samples)
            alpha, beta = x / xx, seconds / (share * size)
        found = cls(alpha, 1 / beta)
        error = max(abs(found.seconds(kind, s, ranks, algorithm=algorithm) / t - 1) for s, t in samples)
        return cls(alpha, 1 / beta, error)


__all__ = [
    "COLLECTIVES",
    "AlphaBeta",
    "Curve",
    "Shape",
    "Tiling",
    "attention_shape",
    "attention_tilings",
    "best_for_all",
    "best_tiling",
    "leave_one_out",
    "steps_and_share",
    "tilings",
]
