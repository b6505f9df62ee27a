"""What ran when, as plain data, and how much of it ran under something else.

A `Span` is one piece of work in one lane (a stream, or a part of what a stream did). `overlap` splits the time
that each lane was busy into *hidden*, while another lane was busy too, and *exposed*, while none was. Only
measured intervals enter: no time is hidden because somebody meant it to be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from devstream.exceptions import StreamTypeError


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work: *name* ran in *lane* from *start_ms* to *end_ms*, by the device's clock.

    Raises:
        StreamTypeError: *lane* or *name* is no text, or a time no number.
        ValueError: a time is not finite, or the end lies before the start.
    """

    lane: str
    name: str
    start_ms: float
    end_ms: float

    def __post_init__(self) -> None:
        for which, text in (("lane", self.lane), ("name", self.name)):
            check_text(f"Span({which}=)", text)
        for which, time_ms in (("start_ms", self.start_ms), ("end_ms", self.end_ms)):
            if isinstance(time_ms, bool) or not isinstance(time_ms, int | float):
                raise StreamTypeError(operation=f"Span({which}=)", got=time_ms, expected="a number, in ms")
            if not math.isfinite(time_ms):
                raise ValueError(f"span {self.name!r} has {which}={time_ms}, which is not finite")
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


def check_text(operation: str, text: object) -> None:
    """Raise `StreamTypeError` where *text*, what *operation* takes for a name, is none."""
    if not isinstance(text, str):
        raise StreamTypeError(operation=operation, got=text, expected="a str")


def checked(spans: Iterable[Span]) -> list[Span]:
    """Return *spans* as a list; raise `StreamTypeError` where one of them is none."""
    found = list(spans)
    for one in found:
        if not isinstance(one, Span):
            raise StreamTypeError(operation="a report", got=one, expected="objects of devstream.report.Span")
    return found


def _check_lanes(which: str, names: Collection[str] | None) -> None:
    if isinstance(names, str):  # a collection of its letters, which are no lanes
        raise StreamTypeError(operation=which, got=repr(names), expected="several lanes, as {'copies'}")


def lanes(spans: Iterable[Span]) -> list[str]:
    """Return the lanes, in the order of their first appearance."""
    return list(dict.fromkeys(span.lane for span in spans))


def overlap(spans: Iterable[Span], *, under: Collection[str] | None = None) -> dict[str, Exposure]:
    """Return for each lane how much of its busy time was hidden under other lanes.

    Args:
        spans: may overlap, in one lane too: time counts once a lane.
        under: the lanes that count as cover (default: all others). A lane never covers itself, and one without
            spans covers nothing.

    Raises:
        StreamTypeError: *spans* has something else than spans, or *under* is a str.
    """
    _check_lanes("overlap(under=)", under)
    spans = checked(spans)
    busy = {lane: union((s.start_ms, s.end_ms) for s in spans if s.lane == lane) for lane in lanes(spans)}
    return {lane: _exposure(lane, busy, busy if under is None else under) for lane in busy}


def together(spans: Iterable[Span], of: Collection[str], *, under: Collection[str]) -> Exposure:
    """Return how much of the time in which any of the lanes *of* was busy was hidden under the lanes *under*.

    Raises:
        StreamTypeError: *spans* has something else than spans, or *of* or *under* is a str.
    """
    _check_lanes("together(of=)", of)
    _check_lanes("together(under=)", under)
    spans = checked(spans)
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
