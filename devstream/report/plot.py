"""Spans as a picture, a row a lane. Needs matplotlib, which is imported only when a picture is drawn."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from devstream import _files
from devstream.exceptions import MissingExtraError
from devstream.report.timeline import Span, check_text, checked, lanes, overlap


def check_available() -> None:
    """Raise `MissingExtraError` where matplotlib is not installed; imports nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(operation="drawing a timeline", package="matplotlib", extra="plot")


def write_picture(spans: Iterable[Span], path: str | Path, *, title: str = "") -> None:
    """Draw *spans* and write the PNG to *path*, whole or not at all.

    Work is labelled where its name fits into its bar; a lane's label has its busy time and the hidden part of it.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StreamTypeError: *spans* has something else than spans, or *title* is no text.
        ValueError: the name of *path* doesn't end with ``.png``.
        OSError: the file can't be written.
    """
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"the picture is a PNG, so its name ends with .png, unlike {str(path)!r}")
    _files.write_bytes(Path(path), draw(spans, title=title))


def draw(spans: Iterable[Span], *, title: str = "") -> bytes:
    """Return the picture as the bytes of a PNG; raises as `write_picture` does."""
    check_text("write_picture(title=)", title)
    spans = checked(spans)
    check_available()
    # Not pyplot: it keeps global state and may want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only when a picture is drawn
    from matplotlib.figure import Figure  # noqa: PLC0415

    spans = list(spans)
    figure = Figure(figsize=(12, 1.6 + 0.8 * max(len(lanes(spans)), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_into(axes, spans)
    axes.set_title(title)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def draw_into(axes: Any, spans: Iterable[Span]) -> None:  # Any: matplotlib is imported late
    """Draw *spans* into *axes* of matplotlib, a row a lane."""
    spans = list(spans)
    rows = {lane: row for row, lane in enumerate(lanes(spans))}
    times = overlap(spans)
    first_ms = min((span.start_ms for span in spans), default=0.0)
    length_ms = max((span.end_ms for span in spans), default=1.0) - first_ms
    names = list(dict.fromkeys(span.name for span in spans))
    for span in spans:
        start, width = span.start_ms - first_ms, span.end_ms - span.start_ms
        color = f"C{names.index(span.name) % 10}"
        # A white edge tells neighbours apart; round a thin bar it would hide the bar itself.
        edge = "white" if width > 0.004 * length_ms else color
        axes.barh(rows[span.lane], width, left=start, height=0.6, color=color, edgecolor=edge, linewidth=0.6)
        if width > 0.012 * length_ms * len(span.name):
            axes.text(start + width / 2, rows[span.lane], span.name, ha="center", va="center", fontsize=8)
    labels = [
        f"{lane}\n{_milliseconds(times[lane].busy_ms)} busy, {(times[lane].hidden_share or 0):.0%} hidden"
        for lane in rows
    ]
    axes.set_yticks(list(rows.values()), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
