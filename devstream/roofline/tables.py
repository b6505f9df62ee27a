"""Ceilings and diagnoses as rows of text. Pure."""

from __future__ import annotations

from devstream.roofline.ceilings import Ceilings
from devstream.roofline.devices import Datasheet

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
            text = quantity(curve.peak, "FLOP/s")
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
    if rest.isdigit():
        return f"memory, {kind.replace('_', ' ')}, {rest}-byte elements"
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


__all__ = ["ceiling_rows", "duration", "quantity", "size"]
