"""``python -m devstream diagnose MODULE:FUNCTION``: where a function's time goes, and what would help."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from devstream import _files
from devstream.cli import _target
from devstream.cli._output import progress, write_note, write_table
from devstream.cli._outputs import picture, writable
from devstream.cli._usage import UsageError
from devstream.report.plot import check_available

KIND, SCHEMA = "devstream.diagnosis", 1


def add_parser(commands: Any) -> None:  # Any: argparse keeps the class of its sub-parsers' action private
    """Add this command to *commands*."""
    parser = commands.add_parser(
        "diagnose",
        help="say where a function's time goes, and what would help",
        description="Runs a function about ten times, and its backward where it returns something differentiable. "
        f"{_target.CONVENTION} Exit code 0: diagnosed; 2: it can't be, or the function failed.",
    )
    _target.add_arguments(parser, json=False)
    parser.add_argument("--device", help="where it runs (default: the accelerator, else the CPU)")
    parser.add_argument("--json", metavar="FILE", help="write the diagnosis as JSON; - is standard output")
    parser.add_argument("--picture", metavar="FILE", help="where to draw the roofline and the timeline, a PNG")
    parser.add_argument("--rows", type=int, default=12, help="of each table (default: 12)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Diagnose and print."""
    if options.rows < 1:
        raise UsageError(f"--rows {options.rows}: one row or more")
    json_path = None if options.json in (None, "-") else writable("--json", options.json)
    picture_path = None
    if options.picture is not None:
        check_available()
        picture_path = picture("--picture", options.picture)
    if picture_path is not None and picture_path == json_path:
        raise UsageError(f"--json and --picture both name {picture_path}")

    from devstream.roofline import diagnose  # noqa: PLC0415 - imports torch's profiler, which takes a while
    from devstream.roofline.plot import write_picture  # noqa: PLC0415

    with _target.quiet(options), progress() as bar:
        target = _target.find(options)
        found = diagnose(target.function, *target.arguments, device=options.device, on_progress=bar.show)
    if picture_path is not None:
        write_picture(found, picture_path)
    fields = {**found.as_json(), "picture": None if picture_path is None else str(picture_path)}
    if json_path is not None:
        _files.write_json(json_path, fields, kind=KIND, schema=SCHEMA)
    if options.json == "-":
        sys.stdout.write(_files.dump(fields, kind=KIND, schema=SCHEMA))
        return 0
    _show(found, options.rows)
    if picture_path is not None:
        write_note(f"Picture: {picture_path}")
    return 0


def _show(diagnosis: Any, rows: int) -> None:  # Any: Diagnosis, imported late
    from devstream.roofline.tables import REGION_HEADS, action_lines, region_tables, summary  # noqa: PLC0415

    for line in summary(diagnosis):
        write_note(line)
    for title, cells in region_tables(diagnosis, most=rows):
        write_table(REGION_HEADS, cells, title=title)
    if diagnosis.actions:
        write_note("What would help, each taken alone:")
    for number, line in enumerate(action_lines(diagnosis.actions, diagnosis.wall_s), 1):
        write_note(f"{number}. {line}")
    for note in diagnosis.notes:
        write_note(note)
