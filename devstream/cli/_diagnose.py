"""``python -m devstream diagnose MODULE:FUNCTION``: where a function's time goes, and what would help."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from devstream import _files
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
        description="Runs MODULE:FUNCTION, which takes no arguments, about ten times, with its backward where it "
        "returns something differentiable. Exit code 0: diagnosed; 2: it can't be, or the function failed.",
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="for instance train:step")
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
    function = load(options.function)

    from devstream.roofline import diagnose  # noqa: PLC0415 - imports torch's profiler, which takes a while
    from devstream.roofline.plot import write_picture  # noqa: PLC0415

    with progress() as bar:
        found = diagnose(function, device=options.device, on_progress=bar.show)
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


def load(name: str) -> Callable[[], Any]:  # Any: whatever the function returns
    """Return the function called *name*, ``MODULE:FUNCTION``; modules of the current folder are found.

    Raises:
        UsageError: the name is no such name, or the module or the function isn't there or can't be called.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise UsageError(f"{name!r} is not of the form MODULE:FUNCTION, as in train:step")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does for its own module
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise UsageError(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{name}: {getattr(found, '__name__', found)} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{name} is a {type(found).__name__}, which can't be called")
    return found  # type: ignore[no-any-return]


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
