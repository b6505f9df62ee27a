"""``python -m devstream racecheck SCRIPT``: run a program under the race checker."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from devstream import _files
from devstream.cli._usage import UsageError
from devstream.races import Operation, Race, racecheck, summary
from devstream.races.sites import Site

KIND, SCHEMA = "devstream.races", 1
#: Races were found, and the program itself ended well. Source: the exit code of ThreadSanitizer.
RACES_FOUND = 66


def add_parser(commands: Any) -> None:  # Any: argparse keeps the class of its sub-parsers' action private
    """Add this command to *commands*."""
    parser = commands.add_parser(
        "racecheck",
        help="run a program and report its missing waits",
        description=(
            "Runs SCRIPT with its arguments and reports every pair of operations that no wait orders. "
            f"Exit code {RACES_FOUND}: races were found and the program ended well; else the program's own. "
            "Under a launcher: torchrun ... -m devstream racecheck SCRIPT ..."
        ),
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the races as JSON too; - is standard output, each rank has its own FILE",
    )
    parser.add_argument("--poison", action="store_true", help="fill unwritten and freed memory with NaN")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the script; returns its exit code, or `RACES_FOUND`."""
    if not options.module and not Path(options.script).is_file():
        raise UsageError(f"there is no file {options.script!r}; give a script, or -m and a module")
    with racecheck(on_race="collect", poison=options.poison) as races:
        code = _execute(options.script, options.arguments, as_module=options.module)
    if races:
        sys.stderr.write(summary(races) + "\n")
    if options.json:
        _write(options.json, races)
    return code or (RACES_FOUND if races else 0)


def _execute(script: str, arguments: list[str], *, as_module: bool) -> int:
    """Run the program as its own ``__main__``; what it raises is shown as Python shows it."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    try:
        if as_module:
            sys.path.insert(0, "")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except Exception:  # the program's own end; its races are reported all the same
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def _write(file: str, races: list[Race]) -> None:
    fields = {"rank": races[0].rank if races else None, "races": [as_json(race) for race in races]}
    if file == "-":
        sys.stdout.write(_files.dump(fields, kind=KIND, schema=SCHEMA))
        return
    rank = os.environ.get("RANK", "")
    path = Path(file)
    if rank and os.environ.get("WORLD_SIZE", "1") != "1":
        path = path.with_suffix(f".rank{rank}{path.suffix}")
    _files.write_json(path, fields, kind=KIND, schema=SCHEMA)


def as_json(race: Race) -> dict[str, Any]:  # Any: JSON
    """Return *race* as plain data; ``text`` is the report that people read."""
    return {
        "fault": race.fault.value,
        "first": _operation(race.first),
        "second": _operation(race.second),
        "size_bytes": race.size_bytes,
        "allocated": _site(race.allocated),
        "freed": _site(race.freed),
        "rank": race.rank,
        "count": race.count,
        "text": str(race),
    }


def _operation(operation: Operation) -> dict[str, Any]:
    return {
        "name": operation.name,
        "writes": operation.write,
        "stream": operation.lane.name,
        "site": _site(operation.site),
    }


def _site(site: Site) -> dict[str, Any] | None:
    return {"file": site.file, "line": site.line, "function": site.function} if site.file else None
