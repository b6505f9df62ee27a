"""What ran when, as plain data, and how much of it ran under something else.

A `Span` is one piece of work in one lane (a stream, or a part of what a stream did). `overlap` splits the time
that each lane was busy into *hidden*, while another lane was busy too, and *exposed*, while none was. Only
measured intervals enter: no time is hidden because somebody meant it to be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work: *name* ran in *lane* from *start_ms* to *end_ms*, by the device's clock."""

    lane: str
    name: str
    start_ms: float
    end_ms: float

    def __post_init__(self) -> None:
        if not self.start_ms <= self.end_ms:
            raise ValueError(
                f"span {self.name!r} ends at {self.end_ms} ms, before its start at {self.start_ms} ms"
            )


@dataclass(frozen=True, slots=True)
class Exposure:
    """How long a lane was busy, in ms; ``busy_ms == exposed_ms + hidden_ms``."""

    busy_ms: float
    exposed_ms: float
    hidden_ms: float

    @property
    def hidden_share(self) -> float | None:
        """The part of the busy time that was hidden, 0 to 1; None for a lane that was never busy."""
        return self.hidden_ms / self.busy_ms if self.busy_ms > 0 else None


#: Disjoint intervals (start_ms, end_ms) in rising order.
Intervals: TypeAlias = list[tuple[float, float]]


def lanes(spans: Iterable[Span]) -> list[str]:
    """Return the lanes, in the order of their first appearance."""
    return list(dict.fromkeys(span.lane for span in spans))


def overlap(spans: Iterable[Span], *, under: Collection[str] | None = None) -> dict[str, Exposure]:
    """Return for each lane how much of its busy time was hidden under other lanes.

    Args:
        spans: may overlap, in one lane too: time counts once a lane.
        under: the lanes that count as cover (default: all others). A lane never covers itself.
    """
    spans = list(spans)
    busy = {lane: union((s.start_ms, s.end_ms) for s in spans if s.lane == lane) for lane in lanes(spans)}
    return {lane: _exposure(lane, busy, busy if under is None else under) for lane in busy}


def together(spans: Iterable[Span], of: Collection[str], *, under: Collection[str]) -> Exposure:
    """Return how much of the time in which any of the lanes *of* was busy was hidden under the lanes *under*."""
    spans = list(spans)
    merged = union((s.start_ms, s.end_ms) for s in spans if s.lane in of)
    cover = union((s.start_ms, s.end_ms) for s in spans if s.lane in under and s.lane not in of)
    return _split(merged, cover)


def _exposure(lane: str, busy: dict[str, Intervals], under: Collection[str]) -> Exposure:
    others = (pieces for other, pieces in busy.items() if other != lane and other in under)
    return _split(busy[lane], union(piece for pieces in others for piece in pieces))


def _split(busy: Intervals, cover: Intervals) -> Exposure:
    total, hidden = measure(busy), measure(intersection(busy, cover))
    return Exposure(busy_ms=total, exposed_ms=total - hidden, hidden_ms=hidden)


def union(pieces: Iterable[tuple[float, float]]) -> Intervals:
    """Return the same time as disjoint intervals in rising order; empty pieces vanish."""
    joined: Intervals = []
    for start, end in sorted(pieces):
        if start >= end:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Return the time that is in both; both as `union` returns them."""
    shared: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def measure(pieces: Intervals) -> float:
    """Return the length of disjoint intervals together, in ms."""
    return sum(end - start for start, end in pieces)
