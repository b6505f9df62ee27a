"""A diagnosis as a picture: the roofline with its operations above, the timeline below. Needs matplotlib."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from devstream import _files
from devstream.report.plot import check_available, draw_into
from devstream.roofline.ceilings import Ceilings
from devstream.roofline.diagnosis import Diagnosis, Region

#: So many spans are drawn; more would be thinner than a pixel.
_MOST_SPANS = 3000


def write_picture(diagnosis: Diagnosis, path: str | Path) -> None:
    """Draw *diagnosis* and write the PNG to *path*, whole or not at all.

    Above: FLOP/s by FLOPs a byte, a dot a kernel, its area by its time, under the lines of the ceilings. Below:
    what ran when.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the file can't be written.
    """
    _files.write_bytes(Path(path), draw(diagnosis))


def draw(diagnosis: Diagnosis) -> bytes:
    """Return the picture as the bytes of a PNG; raises as `write_picture` does."""
    check_available()
    # Not pyplot: it keeps global state and may want a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only when a picture is drawn
    from matplotlib.figure import Figure  # noqa: PLC0415

    spans = sorted(diagnosis.spans, key=lambda span: span.start_ms - span.end_ms)[:_MOST_SPANS]
    lanes = len({span.lane for span in spans})
    figure = Figure(figsize=(12, 7 + 0.8 * max(lanes, 1)), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(7, 1 + 0.8 * max(lanes, 1)))
    _roofline(above, diagnosis)
    draw_into(below, sorted(spans, key=lambda span: span.start_ms))
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def lines(ceilings: Ceilings) -> tuple[float, dict[str, float]]:
    """Return bytes a second of the memory, and FLOP/s of each flat line, by name; only what was measured."""
    flat = {
        key: ceilings.peak(key) or curve.peak for key, curve in ceilings.curves.items() if key[:7] == "matmul "
    }
    flat |= {f"vector {dtype}": rate for dtype, rate in ceilings.vector.items()}
    return ceilings.memory_bytes_per_s or 0.0, flat


def dots(regions: tuple[Region, ...]) -> list[tuple[float, float, float, str, str]]:
    """Return FLOPs a byte, FLOP/s, share of time, class and name of each region that has both."""
    return [
        (one.counts.intensity, one.flops_per_s, one.time_share, one.bound, one.name)
        for one in regions
        if one.counts.intensity and one.flops_per_s > 0
    ]


_COLORS = {"compute": "C3", "memory": "C0", "overhead": "C7", "link": "C1", "communication": "C4"}


def _roofline(axes: Any, diagnosis: Diagnosis) -> None:  # Any: matplotlib is imported late
    rate, flat = lines(diagnosis.ceilings)
    placed = dots(diagnosis.by_kernel)
    found = [intensity for intensity, *_ in placed]
    low = min([0.01, *found]) / 2
    high = max([1000.0, *found, *(peak / rate for peak in flat.values() if rate)]) * 2
    for name, peak in flat.items():
        start = peak / rate if rate else low
        axes.plot([start, high], [peak, peak], color="black", linewidth=0.8)
        axes.annotate(name, (high, peak), ha="right", va="bottom", fontsize=8)
    if rate and flat:
        top = max(flat.values()) / rate
        axes.plot([low, top], [low * rate, top * rate], color="black", linewidth=0.8)
        axes.annotate("memory", (low, low * rate), ha="left", va="bottom", fontsize=8)
    named = {name for *_, name in sorted(placed, key=lambda dot: -dot[2])[:8]}
    for intensity, flops_per_s, share, bound, name in placed:
        axes.scatter([intensity], [flops_per_s], s=max(8.0, 2000 * share), color=_COLORS[bound], alpha=0.6)
        if name in named:
            axes.annotate(_shortened(name), (intensity, flops_per_s), fontsize=7, ha="center", va="bottom")
    for bound in dict.fromkeys(bound for *_, bound, _ in placed):
        axes.scatter([], [], color=_COLORS[bound], label=f"{bound}-bound")
    if placed:
        axes.legend(loc="upper left", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    if not placed and not flat:
        axes.set_ylim(1, math.e)
    axes.set_xlabel("FLOPs a byte of memory")
    axes.set_ylabel("FLOP/s")
    axes.set_title(
        f"{diagnosis.function} on {diagnosis.device} ({diagnosis.ceilings.name}): {diagnosis.bound}-bound, "
        f"idle {diagnosis.idle_share:.0%}"
    )


def _shortened(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:27]}..."


__all__ = ["dots", "draw", "lines", "write_picture"]
