"""How long a matmul takes on a device that cuts its result into tiles: one model for all shapes. Pure.

[Note: A library has several kernels]
Each kernel makes tiles of one size, as many at once as the device has multiprocessors, and its last wave is rarely
full. Large tiles read less and reach a higher rate; small ones waste less of a small result. A library takes the
kernel that is about the fastest for the shape. So the time is that of the best kernel, and a kernel's time is its
waves times what a tile costs: the depth, and a start and an end of about as much as some more depth. What the
tiles of each size reach is fitted to measured times, all together.

[Note: Rows that don't begin at multiples of 16 bytes]
Fast kernels load 16 bytes at once. Where the rows of an operand or of the result begin elsewhere (an odd number of
columns, a vocabulary of 50257), the library takes others, several times slower. Their share of the rate is
measured for each alignment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from devstream.roofline.curves import Shape

#: Bytes that the fast kernels load at once.
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a result, and the FLOP/s of a device that is full of them."""

    rows: int
    columns: int
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Tiles:
    """The kernels of one dtype; see [Note: A library has several kernels].

    Attributes:
        tiles: one or more.
        units: tiles that run at once.
        depth: what start and end of a tile cost, as additional depth.
        latency_s: of any matmul.
        unaligned: share of the rate by alignment in bytes, see [Note: Rows that don't begin at multiples of 16
            bytes].
        error: relative; root mean square of what the measured times are off.
    """

    tiles: tuple[Tile, ...]
    units: int
    depth: float = 0.0
    latency_s: float = 0.0
    unaligned: Mapping[int, float] = field(default_factory=dict)
    error: float = 0.0

    def __post_init__(self) -> None:
        rates = [one.flops_per_s for one in self.tiles]
        numbers = (*rates, self.units, *self.unaligned.values())
        if not rates or not all(math.isfinite(one) and one > 0 for one in numbers):
            raise ValueError(f"rates, units and shares above 0, and one tile or more: {self}")
        if not all(math.isfinite(one) and one >= 0 for one in (self.depth, self.latency_s, self.error)):
            raise ValueError(f"depth, latency and error are 0 or more: {self}")

    def seconds(self, shape: Shape, *, alignment: int = ALIGNED) -> float:
        """Return the time of a matmul of *shape*; *alignment*: bytes at multiples of which its rows begin."""
        busy = min(_flops(shape, one, self.units, self.depth) / one.flops_per_s for one in self.tiles)
        return self.latency_s + busy / self.share(alignment)

    def share(self, alignment: int) -> float:
        """Return the share of the rate that is left at *alignment*; that of the next worse where it is unknown."""
        if alignment % ALIGNED == 0:
            return 1.0
        worse = [known for known in self.unaligned if alignment % known == 0]
        return self.unaligned[max(worse)] if worse else min(self.unaligned.values(), default=1.0)

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return this as plain JSON data; `from_json` is the way back."""
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "tiles": [[one.rows, one.columns, one.flops_per_s] for one in self.tiles],
            "unaligned": {str(alignment): share for alignment, share in self.unaligned.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:  # Any: JSON
        """Return the tiles that `as_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: something is missing, or isn't what it should be.
        """
        known = {one.name: data[one.name] for one in fields(cls)}
        known["tiles"] = tuple(
            Tile(int(rows), int(columns), float(rate)) for rows, columns, rate in known["tiles"]
        )
        known["unaligned"] = {int(alignment): float(share) for alignment, share in known["unaligned"].items()}
        return cls(**known)

    @property
    def peak(self) -> float:
        """The best FLOP/s of all tiles."""
        return max(one.flops_per_s for one in self.tiles)


def _flops(shape: Shape, tile: Tile, units: int, depth: float) -> float:
    """Return the FLOPs of *shape* when the waves of *tile* are counted as full."""
    batch, rows, columns, deep = shape
    count = batch * math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns)
    return 2.0 * math.ceil(count / units) * units * tile.rows * tile.columns * (deep + depth)


#: The tiles that vendors' libraries use most, and the share of the best rate at which the fit of each begins.
_BEGIN = (
    (64, 64, 0.6),
    (64, 128, 0.75),
    (128, 64, 0.75),
    (128, 128, 0.85),
    (128, 192, 0.95),
    (192, 128, 0.95),
    (128, 256, 1.0),
    (256, 128, 1.0),
    (64, 256, 0.8),
    (256, 64, 0.8),
)

#: How far one try of the fit goes, as a factor's logarithm, and how many tries there are.
_REACH = (0.1, 0.02)
_TRIES = 3000


def fit(samples: Sequence[tuple[Shape, float, float]], units: int) -> Tiles:
    """Return the tiles under which the measured times are off by least (squares of logarithms).

    The figures are changed one at a time, at random but with one seed, and what makes it better is kept. What
    takes less than twice the shortest is mostly latency, and says nothing about tiles.

    Args:
        samples: shape, seconds, and the seconds that its memory traffic takes at least.
        units: tiles that run at once.

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("tiles are fitted to one sample or more")
    peak = max(2.0 * math.prod(shape) / seconds for shape, seconds, _ in samples)
    shortest = min(seconds for _, seconds, _ in samples)
    used = [one for one in samples if one[1] > 2 * shortest] or samples
    drawn = random.Random(0)
    figures = [math.log(peak), math.log(128.0), math.log(shortest / 2)]
    figures += [math.log(share) for _, _, share in _BEGIN]
    best, lowest = _tiles(figures, units), math.inf
    for reach in _REACH:
        for _ in range(_TRIES):
            tried = list(figures)
            if lowest < math.inf:
                number = drawn.randrange(len(tried))
                tried[number] += drawn.gauss(0, reach * (4 if number in (1, 2) else 1))
                tried[3:] = [min(share, 0.0) for share in tried[3:]]  # none is above the best rate
            made = _tiles(tried, units)
            found = sum(math.log(max(made.seconds(shape), floor) / seconds) ** 2 for shape, seconds, floor in used)
            if found < lowest:
                figures, best, lowest = tried, made, found
    return replace(best, error=math.sqrt(lowest / len(used)))


def _tiles(figures: Sequence[float], units: int) -> Tiles:
    rate, depth, latency, *shares = map(math.exp, figures)
    made = (Tile(rows, columns, rate * share) for (rows, columns, _), share in zip(_BEGIN, shares, strict=True))
    return Tiles(tuple(made), units, depth=depth, latency_s=latency)


def with_unaligned(tiles: Tiles, samples: Sequence[tuple[Shape, int, float]]) -> Tiles:
    """Return *tiles* with the shares that *samples*, ``(shape, alignment in bytes, seconds)``, say."""
    found: dict[int, list[float]] = {}
    for shape, alignment, seconds in samples:
        busy = tiles.seconds(shape) - tiles.latency_s
        found.setdefault(alignment, []).append(math.log(busy / max(seconds - tiles.latency_s, busy / 10)))
    shares = {alignment: min(1.0, math.exp(sum(logs) / len(logs))) for alignment, logs in sorted(found.items())}
    return replace(tiles, unaligned=shares)


__all__ = ["ALIGNED", "Tile", "Tiles", "fit", "with_unaligned"]
