"""Programs as a picture: a column for each stream, a row for each step, order as arrows. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from typing import Any  # Any: matplotlib's axes, which may be absent

from devstream.compiler._listing import cell
from devstream.compiler._program import Free, Hold, Program, Record, Synchronize, Wait, Work
from devstream.report.plot import check_available

_WIDTH, _HEIGHT = 3.2, 0.34  # inches of a column and of a row
_MAX_HEIGHT = 300  # inches: matplotlib draws no more than 65,536 pixels
_TEXT = 44


def draw(programs: Sequence[tuple[Program, Collection[int]]], *, title: str = "") -> bytes:
    """Return the picture as the bytes of a PNG, with the numbers of the waits to mark beside each program.

    Work is a box; an arrow goes from each record to each wait for it: solid where the user wrote the wait, dashed
    where devstream added it, red where nothing needs it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_available()
    # Not pyplot: it keeps global state and may want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only when a picture is drawn
    from matplotlib.figure import Figure  # noqa: PLC0415

    columns = [max(len(program.streams), 1) for program, _ in programs] or [1]
    rows = max([len(program.steps) for program, _ in programs], default=0)
    size = (_WIDTH * sum(columns), min(1.5 + _HEIGHT * rows, _MAX_HEIGHT))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0]
    for axes, (program, needless) in zip(every, programs, strict=False):
        _program(axes, program, needless, rows)
    for axes in every:
        axes.set_axis_off()
    figure.suptitle(title)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _program(axes: Any, program: Program, needless: Collection[int], rows: int) -> None:
    axes.set_title(f"{program.name}: {len(program.steps)} steps, {len(program.regions)} regions")
    axes.set_xlim(-0.5, len(program.streams) - 0.5)
    axes.set_ylim(max(rows, 1) - 0.2, -1.5)
    for slot, stream in enumerate(program.streams):
        axes.text(slot, -1, f"stream {slot}\n{stream.name or stream.device}", ha="center", va="center", fontsize=8)
        axes.axvline(slot, color="0.8", linewidth=1, zorder=0)
    recorded: dict[int, tuple[int, int]] = {}
    for row, step in enumerate(program.steps):
        where, text, _ = cell(step)
        if isinstance(step, Record):
            recorded[step.event] = (step.stream, row)
        if isinstance(step, Wait) and step.event in recorded:
            _arrow(axes, recorded[step.event], (step.stream, row), step, needless)
        if isinstance(step, Synchronize):
            axes.axhline(row, color="black", linewidth=1)
        column = (len(program.streams) - 1) / 2 if where is None else where
        box = {"facecolor": _color(step), "edgecolor": "0.5", "boxstyle": "round,pad=0.25", "linewidth": 0.6}
        axes.text(column, row, _short(text), ha="center", va="center", fontsize=7, bbox=box, zorder=3)


def _arrow(axes: Any, tail: tuple[int, int], head: tuple[int, int], wait: Wait, needless: Collection[int]) -> None:
    style = {
        "arrowstyle": "-|>",
        "color": "red" if wait.op in needless else "C0" if wait.op is not None else "C1",
        "linestyle": "solid" if wait.op is not None else "dashed",
        "linewidth": 1.2,
        "shrinkA": 8,
        "shrinkB": 8,
    }
    axes.annotate("", xy=head, xytext=tail, arrowprops=style, zorder=2)


def _color(step: object) -> str:
    if isinstance(step, Work):
        return "#cfe3f7"
    return "#eeeeee" if isinstance(step, Free | Hold) else "white"


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


__all__ = ["draw"]
