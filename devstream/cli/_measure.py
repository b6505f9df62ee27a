"""``python -m devstream measure``: this device's ceilings, beside what its maker promises."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from devstream import _files
from devstream.cli._output import progress, write_note, write_table
from devstream.cli._outputs import writable

Row = tuple[str, str, str, str]


def add_parser(commands: Any) -> None:  # Any: argparse keeps the class of its sub-parsers' action private
    """Add this command to *commands*."""
    parser = commands.add_parser(
        "measure",
        help="measure what this device can do: FLOP/s, memory, link, launches",
        description="Measures the ceilings of a device, in under a minute, and keeps them for this device, "
        "driver and torch. Exit code 0: measured, or read from the last measurement; 2: it can't be measured.",
    )
    parser.add_argument("--device", help="for instance cpu or cuda:1 (default: the accelerator, else the CPU)")
    parser.add_argument("--refresh", action="store_true", help="measure again, whatever is kept")
    parser.add_argument("--json", metavar="FILE", help="write the ceilings as JSON; - is standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, or read, and print."""
    json_path = None if options.json in (None, "-") else writable("--json", options.json)
    from devstream.roofline import measure  # noqa: PLC0415 - imports torch.distributed, which takes a while
    from devstream.roofline._measure import KIND, SCHEMA  # noqa: PLC0415

    with progress() as bar:
        found = measure(options.device, refresh=options.refresh, on_progress=bar.show)
    fields = {"ceilings": found.as_json(), "datasheet": _datasheet(found)}
    if json_path is not None:
        _files.write_json(json_path, fields, kind=KIND, schema=SCHEMA)
    if options.json == "-":
        sys.stdout.write(_files.dump(fields, kind=KIND, schema=SCHEMA))
        return 0
    show(found)
    return 0


def _datasheet(ceilings: Any) -> dict[str, Any] | None:  # Any: Ceilings, imported late; JSON
    from devstream.roofline.devices import find  # noqa: PLC0415

    sheet = find(ceilings.name, memory_bytes=ceilings.memory_bytes)
    if sheet is None:
        return None
    return {
        "name": sheet.name,
        "generation": sheet.generation,
        "source": sheet.source,
        "matmul": dict(sheet.matmul),
        "vector": dict(sheet.vector),
        "memory_bytes_per_s": sheet.memory_bytes_per_s,
        "link_bytes_per_s": sheet.link_bytes_per_s,
        "peer_bytes_per_s": sheet.peer_bytes_per_s,
        "flop_per_byte": {dtype: sheet.flop_per_byte(dtype) for dtype in sheet.matmul},
    }


def show(ceilings: Any) -> None:  # Any: Ceilings, imported late
    """Print the ceilings as a table, and what is missing below it."""
    from devstream.roofline.devices import DATASHEETS, find  # noqa: PLC0415
    from devstream.roofline.tables import ceiling_rows  # noqa: PLC0415

    sheet = find(ceilings.name, memory_bytes=ceilings.memory_bytes)
    heads = ("ceiling", "measured", "error", "datasheet")
    write_table(heads, ceiling_rows(ceilings, sheet), title=f"{ceilings.device}: {ceilings.name}")
    for what, reason in ceilings.missing.items():
        write_note(f"Not measured: {what}; {reason}.")
    if sheet is not None:
        write_note(f"Datasheet: {sheet.source}.")
    write_note(", ".join(f"{name} {version}" for name, version in ceilings.versions.items()))
    rows = [
        (one.generation, one.name, f"{one.flop_per_byte('bfloat16'):.0f}", f"{one.flop_per_byte('float32'):.1f}")
        for one in sorted(DATASHEETS.values(), key=lambda one: (one.vendor, one.year))
    ]
    heads = ("generation", "device", "bfloat16", "float32")
    write_table(heads, rows, title="Peak FLOP a byte of memory, by the datasheets")
