"""``python -m devstream check``: the waits that a function lacks in eager mode."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from devstream.cli import _target


def add_parser(commands: Any) -> None:  # Any: argparse keeps the class of its sub-parsers' action private
    """Add this command to *commands*."""
    parser = commands.add_parser(
        "check",
        help="find the waits that a function lacks in eager mode",
        description="Traces FUNCTION, runs nothing of it, and names every wait without which eager mode would "
        f"race, with both lines and what to do. {_target.CONVENTION} "
        "Exit code 0: none is missing; 1: some are; 2: it can't be checked.",
    )
    _target.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the check; see the parser's description for the exit code."""
    with _target.quiet(options):
        target = _target.find(options)
        from devstream.compiler._check import check  # noqa: PLC0415 - imports torch's compiler, which takes a second

        with _target.told(f"trace {options.target}"):
            found = check(target.function, *target.arguments)
    sys.stdout.write(found.to_json() if options.json else str(found))
    return 0 if found.ok else 1
