"""Spans as a few lines of text: one bar a lane, and its busy, exposed and hidden time."""

from __future__ import annotations

from collections.abc import Iterable

from devstream.exceptions import StreamTypeError
from devstream.report.timeline import Span, checked, intersection, lanes, measure, overlap, union

#: A cell of a bar by how much of it was busy: not at all, less than half, more.
_MARKS = " -#"


def as_text(spans: Iterable[Span], *, width: int = 60) -> str:
    """Return the picture of *spans* in *width* characters a bar, plain ASCII.

    Raises:
        StreamTypeError: *spans* has something else than spans, or *width* is no int.
        ValueError: *width* is less than one.
    """
    if isinstance(width, bool) or not isinstance(width, int):
        raise StreamTypeError(operation="as_text(width=)", got=width, expected="an int")
    if width < 1:
        raise ValueError(f"width={width}: a bar has one character or more")
    spans = checked(spans)
    if not spans:
        return "no spans"
    start = min(span.start_ms for span in spans)
    length = max(span.end_ms for span in spans) - start
    column = max(len(lane) for lane in lanes(spans))
    lines = []
    for lane, times in overlap(spans).items():
        pieces = union((s.start_ms - start, s.end_ms - start) for s in spans if s.lane == lane)
        bar = "".join(_mark(pieces, length * cell / width, length * (cell + 1) / width) for cell in range(width))
        lines.append(
            f"{lane:<{column}} |{bar}| busy {times.busy_ms:.3f} ms, "
            f"exposed {times.exposed_ms:.3f} ms, hidden {times.hidden_ms:.3f} ms"
        )
    lines.append(f"{'':<{column}}  {length:.3f} ms from the first start to the last end")
    return "\n".join(lines)


def _mark(pieces: list[tuple[float, float]], start: float, end: float) -> str:
    busy = measure(intersection(pieces, [(start, end)])) if end > start else 0.0
    if busy == 0.0:
        return _MARKS[0]
    return _MARKS[1] if busy < (end - start) / 2 else _MARKS[2]
