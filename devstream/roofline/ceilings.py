"""What one device can do, as measured there: plain data, with its way to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from devstream.roofline.curves import AlphaBeta, Curve, Tiling
from devstream.roofline.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The ceilings of one device. What could not be measured is absent, and *missing* says why.

    Attributes:
        device: for instance ``cuda:0``.
        name: the product's name.
        versions: what the measurement is valid for: driver, torch, runtime, host threads.
        curves: seconds by amount. The first word of a key is the kind of work: ``matmul DTYPE`` by
            `Tiling.work`; ``attention DTYPE forward|backward HEAD_DIM [causal]`` too; ``pointwise``,
            ``norm``, ``norm_backward``, ``softmax``, ``read``, ``write``, ``copy``, each with the bytes an
            element, by bytes read and written (``pointwise`` also with ``unary``, for one operand); ``link
            h2d|d2h pinned|pageable`` and ``peer`` by bytes.
        tilings: how matmuls and attention are cut up, by the key of their curve.
        tiles: the kernels of matmuls by dtype, where the device has several units.
        peaks: the best FLOP/s of matmuls and attention, by the key of their curve.
        vector: FLOP/s outside of the matrix units, by dtype.
        collectives: latency and rate of each kind, with its *ranks*.
        launch_s: host time to issue one small operation.
        floor_s: device time of an operation that has nothing to do; 0 where it can't be told from the launch.
        event_record_s: host time of ``event.record()``.
        event_wait_s: host time of ``event.wait()``.
        both_ways_bytes_per_s: of the host link, both directions at once, together.
        pinned_bytes_per_s: how fast page-locked memory is allocated.
        streams_at_once: streams whose small kernels truly ran at once.
        copy_slowdown: time of a matmul under a copy to the host over its time alone.
        memory_bytes: of the device's memory; 0: unknown.
        units: multiprocessors; 1: unknown.
        ranks: of *collectives*.
        inline: operations run in the caller, as on the CPU, so that issuing costs nothing beside running.
        missing: what was not measured, and why.
    """

    device: str
    name: str
    versions: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    tilings: Mapping[str, Tiling] = field(default_factory=dict)
    tiles: Mapping[str, Tiles] = field(default_factory=dict)
    peaks: Mapping[str, float] = field(default_factory=dict)
    vector: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, AlphaBeta] = field(default_factory=dict)
    launch_s: float = 0.0
    floor_s: float = 0.0
    event_record_s: float = 0.0
    event_wait_s: float = 0.0
    both_ways_bytes_per_s: float = 0.0
    pinned_bytes_per_s: float = 0.0
    streams_at_once: int = 1
    copy_slowdown: float = 1.0
    memory_bytes: float = 0.0
    units: int = 1
    ranks: int = 1
    inline: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: a number that is 0 or more")
        for name, rates in (("vector", self.vector), ("peaks", self.peaks)):
            if not all(math.isfinite(rate) and rate > 0 for rate in rates.values()):
                raise ValueError(f"{name}={dict(rates)}: rates above 0")

    def curve(self, key: str) -> Curve | None:
        """Return the curve called *key*, or that of the same kind which shares the most words with it, or None.

        Attention with heads of 96 is read from the heads measured, a norm of 2-byte elements from that of
        4-byte ones where only those were measured.
        """
        exact = self.curves.get(key)
        if exact is not None:
            return exact
        kind, *words = key.split()
        same = [name for name in self.curves if name.split()[0] == kind]
        if not same or (kind in _NEVER_ANOTHER and len(words) > 0):
            return None
        return self.curves[max(same, key=lambda name: (_likeness(words, name.split()[1:]), name))]

    def matmul_peak(self, dtype: str) -> float | None:
        """Return the best FLOP/s that a matmul of *dtype* reached; None where none was measured."""
        return self.peak(f"matmul {dtype}")

    def peak(self, key: str) -> float | None:
        """Return the best rate of the curve *key*: FLOP/s, or bytes a second; None where none was measured."""
        curve = self.curves.get(key)
        return self.peaks.get(key, None if curve is None else curve.peak)

    @property
    def memory_bytes_per_s(self) -> float | None:
        """The best rate of device memory over sizes too large for the caches, whatever the mix; None: unknown."""
        rates = [
            curve.points[-1][0] / curve.points[-1][1]
            for key, curve in self.curves.items()
            if key.split()[0] in ("read", "write", "copy", "pointwise")
        ]
        return max(rates, default=None)

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return this as plain JSON data; `from_json` is the way back."""
        plain: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("versions", "vector", "peaks", "missing"):
            plain[name] = dict(plain[name])
        plain["curves"] = {
            key: {"points": [list(point) for point in curve.points], "error": curve.error}
            for key, curve in self.curves.items()
        }
        plain["tiles"] = {key: one.as_json() for key, one in self.tiles.items()}
        for name in ("tilings", "collectives"):
            plain[name] = {
                key: {one.name: getattr(value, one.name) for one in fields(value)}
                for key, value in plain[name].items()
            }
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:  # Any: JSON
        """Return the ceilings that `as_json` wrote; keys that it doesn't write are passed over.

        Raises:
            ValueError: something is missing, or isn't what it should be.
        """
        try:
            known = {one.name: data[one.name] for one in fields(cls)}
            known["curves"] = {
                key: Curve(tuple((float(a), float(s)) for a, s in one["points"]), float(one["error"]))
                for key, one in known["curves"].items()
            }
            known["tilings"] = {key: Tiling(**one) for key, one in known["tilings"].items()}
            known["tiles"] = {key: Tiles.from_json(one) for key, one in known["tiles"].items()}
            known["collectives"] = {key: AlphaBeta(**one) for key, one in known["collectives"].items()}
            for name in ("vector", "peaks"):
                known[name] = {key: float(rate) for key, rate in known[name].items()}
            return cls(**known)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no ceilings: {type(error).__name__}: {error}") from error


_NUMBERS = (
    "launch_s",
    "floor_s",
    "event_record_s",
    "event_wait_s",
    "both_ways_bytes_per_s",
    "pinned_bytes_per_s",
    "streams_at_once",
    "copy_slowdown",
    "memory_bytes",
    "units",
    "ranks",
)

#: A matmul of one dtype says nothing about another's, and neither does one direction of a link.
_NEVER_ANOTHER = frozenset({"matmul", "link"})


def _likeness(wanted: list[str], words: list[str]) -> tuple[int, float]:
    numbers = [[int(word) for word in one if word.isdigit()] for one in (wanted, words)]
    distance = abs(numbers[0][0] - numbers[1][0]) if all(numbers) else 0
    return len(set(wanted) & set(words)) - len(set(words) - set(wanted)), -float(distance)


__all__ = ["Ceilings"]
