"""Ceilings and diagnoses as rows of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from devstream.roofline.ceilings import Ceilings
from devstream.roofline.devices import Datasheet

if TYPE_CHECKING:  # diagnosis knows tables
    from devstream.roofline.diagnosis import Action, Diagnosis, Region

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(value: float, unit: str) -> str:
    """Return *value* with three digits and a prefix: ``quantity(7.61e14, "FLOP/s")`` is ``"761 TFLOP/s"``."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * factor:
            return f"{_three(value / factor)} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def _three(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return *seconds* with three digits, in the unit that fits: ``"2.5 µs"``."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds / 1e-9)} ns"


def size(count: float) -> str:
    """Return bytes with three digits, in powers of 1024: ``"1.5 MiB"``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{_three(count / 2**power)} {unit}"
    return f"{count:.0f} B"


def ceiling_rows(ceilings: Ceilings, sheet: Datasheet | None) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table of ceilings: what, measured, relative error, what the datasheet promises."""
    rows = []
    for key, curve in ceilings.curves.items():
        kind, _, rest = key.partition(" ")
        if kind in ("matmul", "attention"):
            text = quantity(ceilings.peak(key) or curve.peak, "FLOP/s")
        else:
            # The largest size: smaller ones may have come from a cache.
            text = quantity(curve.points[-1][0] / curve.points[-1][1], "B/s")
        rows.append(
            (
                _named(kind, rest),
                text,
                f"{curve.error:.0%}",
                _promised(kind, rest, sheet),
            )
        )
    for dtype, rate in ceilings.vector.items():
        promised = sheet.vector.get(dtype) if sheet is not None else None
        rows.append(
            (f"vector {dtype}", quantity(rate, "FLOP/s"), "", quantity(promised, "FLOP/s") if promised else "")
        )
    for kind, link in ceilings.collectives.items():
        text = f"{quantity(link.bytes_per_s, 'B/s')}, {duration(link.latency_s)} a message"
        rows.append((f"{kind}, {ceilings.ranks} ranks", text, f"{link.error:.0%}", ""))
    both = quantity(2 * sheet.link_bytes_per_s, "B/s") if sheet is not None else ""
    rows += [
        ("link, both ways at once", quantity(ceilings.both_ways_bytes_per_s, "B/s"), "", both),
        ("launch, on the host", duration(ceilings.launch_s), "", ""),
        ("launch, on the device", duration(ceilings.floor_s), "", ""),
        ("event record", duration(ceilings.event_record_s), "", ""),
        ("event wait", duration(ceilings.event_wait_s), "", ""),
        ("streams at once", str(ceilings.streams_at_once), "", ""),
        ("a matmul under a copy", f"{ceilings.copy_slowdown:.2f}x its time alone", "", ""),
    ]
    if ceilings.pinned_bytes_per_s:
        rows.append(("allocation of page-locked memory", quantity(ceilings.pinned_bytes_per_s, "B/s"), "", ""))
    return rows


def _named(kind: str, rest: str) -> str:
    if kind == "link":
        direction, memory = rest.split()
        return f"link, {'host to device' if direction == 'h2d' else 'device to host'}, {memory}"
    if kind == "peer":
        return "copy to another device"
    element, _, operands = rest.partition(" ")
    if element.isdigit():
        what = f"{operands} {kind}".strip().replace("_", " ")
        return f"memory, {what}, {element}-byte elements"
    return f"{kind} {rest}".strip()


def _promised(kind: str, rest: str, sheet: Datasheet | None) -> str:
    if sheet is None:
        return ""
    if kind == "matmul":
        return quantity(sheet.matmul[rest], "FLOP/s") if rest in sheet.matmul else ""
    if kind == "link":
        return quantity(sheet.link_bytes_per_s, "B/s")
    if kind == "peer":
        return quantity(sheet.peer_bytes_per_s, "B/s")
    return quantity(sheet.memory_bytes_per_s, "B/s") if kind in ("copy", "read", "write", "pointwise") else ""


# -- diagnoses -------------------------------------------------------------------------------------------

REGION_HEADS = (
    "",
    "time",
    "of time",
    "of FLOPs",
    "FLOP/s",
    "B/s",
    "FLOP/B",
    "of compute",
    "of memory",
    "class",
)


def region_rows(regions: Sequence[Region]) -> list[tuple[str, ...]]:
    """Return a row a region; the columns are `REGION_HEADS`."""
    return [
        (
            one.name,
            duration(one.seconds),
            f"{one.time_share:.1%}",
            f"{one.flops_share:.1%}",
            quantity(one.flops_per_s, "").strip() if one.counts.flops else "",
            quantity(one.bytes_per_s, "").strip() if one.counts.memory_bytes else "",
            f"{one.counts.intensity:.3g}" if one.counts.intensity else "",
            f"{one.shares['compute']:.0%}" if one.counts.flops else "",
            f"{one.shares['memory']:.0%}" if one.counts.memory_bytes else "",
            one.bound,
        )
        for one in regions
    ]


def region_tables(diagnosis: Diagnosis, *, most: int) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return title and rows of each table of regions, *most* rows and a total where the rows are parts of it."""
    uncompiled = ", uncompiled" if diagnosis.compiled else ""
    tables = (
        ("By class of operators", diagnosis.by_class, True),
        (f"By module{uncompiled}", diagnosis.by_module, not diagnosis.compiled),
        (f"By line{uncompiled}", diagnosis.by_line, not diagnosis.compiled),
        ("By kernel", diagnosis.by_kernel, True),
    )
    return [
        (title, region_rows([*regions[:most], *([diagnosis.total] if parts else [])]))
        for title, regions, parts in tables
        if regions
    ]


def summary(diagnosis: Diagnosis) -> list[str]:
    """Return the first lines: the class, idle time, memory."""
    total = sum(diagnosis.class_s.values()) or 1.0
    classes = ", ".join(
        f"{name} {seconds / total:.0%}"
        for name, seconds in sorted(diagnosis.class_s.items(), key=lambda one: -one[1])
        if seconds > 0.005 * total
    )
    where = f"{diagnosis.function} on {diagnosis.device} ({diagnosis.ceilings.name})"
    lines = [
        f"{where}: {diagnosis.bound}-bound, {duration(diagnosis.wall_s)} a run",
        f"Time by class, of a run: {classes}",
        f"The device is idle {diagnosis.idle_share:.0%} of a run",
    ]
    memory = diagnosis.memory
    told = (
        ("capacity", memory.capacity),
        ("used", memory.used),
        ("peak", memory.peak),
        ("reserved", memory.reserved),
    )
    text = ", ".join(f"{name} {size(value)}" for name, value in told if value is not None)
    if text:
        lines.append(f"Memory: {text}")
    if memory.largest is not None:
        lines.append(f"Largest block: {size(memory.largest)}, made by {memory.largest_where}")
    return lines


def action_lines(actions: Sequence[Action], wall_s: float, *, most: int = 8) -> list[str]:
    """Return the top actions, a line each, with what they gain."""
    lines = []
    for one in actions[:most]:
        gains = []
        if one.gain_s > 0:
            gains.append(f"saves about {duration(one.gain_s)} ({one.gain_s / wall_s:.0%}) a run")
        if one.gain_bytes > 0:
            gains.append(f"frees {size(one.gain_bytes)}")
        if one.gain_s < 0:
            gains.append(f"costs about {duration(-one.gain_s)} ({-one.gain_s / wall_s:.0%}) a run")
        lines.append(f"{', '.join(gains) or 'no gain'}: {one.text}.")
    return lines


def as_text(diagnosis: Diagnosis, *, most: int = 12) -> str:
    """Return the whole diagnosis as plain text, *most* rows a table."""
    lines = summary(diagnosis)
    for title, rows in region_tables(diagnosis, most=most):
        lines += ["", plain_table((title, *REGION_HEADS[1:]), rows)]
    if diagnosis.actions:
        lines += ["", "What would help, each taken alone:"]
        lines += [
            f"  {number}. {line}"
            for number, line in enumerate(action_lines(diagnosis.actions, diagnosis.wall_s), 1)
        ]
    lines += ["", *diagnosis.notes] if diagnosis.notes else []
    return "\n".join(lines)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in plain characters, the first column to the left and all others to the right."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *(line(row) for row in rows)])


__all__ = [
    "REGION_HEADS",
    "action_lines",
    "as_text",
    "ceiling_rows",
    "duration",
    "plain_table",
    "quantity",
    "region_rows",
    "region_tables",
    "size",
    "summary",
]
