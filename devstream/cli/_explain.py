"""``python -m devstream explain``: the programs that a function compiles to."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from devstream.cli import _target
from devstream.cli._output import complain
from devstream.cli._outputs import writable
from devstream.cli._usage import UsageError
from devstream.report.plot import check_available


def add_parser(commands: Any) -> None:  # Any: argparse keeps the class of its sub-parsers' action private
    """Add this command to *commands*."""
    parser = commands.add_parser(
        "explain",
        help="show what a function compiles to: its streams, its order, what devstream added",
        description="Traces FUNCTION, runs nothing of it, and shows its programs, forward and backward. "
        f"{_target.CONVENTION} Exit code 0: shown; 2: it can't be.",
    )
    _target.add_arguments(parser)
    parser.add_argument("--picture", metavar="FILE", help="also draw it, as a PNG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the programs."""
    picture = None
    if options.picture is not None:
        check_available()
        if not options.picture.endswith(".png"):
            raise UsageError(f"--picture {options.picture}: the picture is a PNG, so its name ends with .png")
        picture = writable("--picture", options.picture)
    with _target.quiet(options):
        target = _target.find(options)
        from devstream.compiler._explain import explain  # noqa: PLC0415 - imports torch's compiler

        with _target.told(f"trace {options.target}"):
            found = explain(target.function, *target.arguments)
    if picture is not None:
        found.write_picture(picture)
        complain(f"Picture: {picture}")
    sys.stdout.write(found.to_json() if options.json else str(found))
    return 0
