"""``python -m devstream demo``: check what was asked for, train, and show what was found."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path
from typing import Any

from devstream import _files, _registry
from devstream.abc import DeviceSpec
from devstream.cli._output import complain, progress, write_note, write_table
from devstream.cli._usage import UsageError, writable
from devstream.cli._versions import versions
from devstream.demo.result import CACHE_KIND, CACHE_SCHEMA, KIND, SCHEMA, Result
from devstream.demo.sizes import SIZES
from devstream.demo.table import as_table
from devstream.exceptions import CacheWarning, MissingExtraError, warning
from devstream.report.plot import check_available

_DEFAULT_PICTURE = "devstream-demo.png"


def add_parser(commands: Any) -> None:  # Any: argparse keeps the class of its sub-parsers' action private
    """Add this command to *commands*."""
    parser = commands.add_parser(
        "demo",
        help="train a small GPT with and without side streams and compare",
        description="Trains a byte-level GPT on the source of Python's standard library, and measures what side "
        "streams change. Exit code 0: trained; 1: it didn't train; 2: what was asked for can't be done.",
    )
    parser.add_argument("--device", help="for instance cpu or cuda:1 (default: the accelerator, else the CPU)")
    parser.add_argument("--steps", type=int, help="training steps (default: the size's own)")
    parser.add_argument(
        "--size", choices=sorted(SIZES), help="of the model (default: small on the CPU, else medium)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is standard output")
    parser.add_argument(
        "--picture", metavar="FILE", help=f"where to draw the timeline, a PNG (default: {_DEFAULT_PICTURE})"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demonstration; see the parser's description for the exit code."""
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"--steps {options.steps}: one step or more")
    if not 0 <= options.seed < 1 << 32:
        raise UsageError(f"--seed {options.seed}: a number from 0 to {(1 << 32) - 1}")
    json_path = None if options.json in (None, "-") else writable("--json", options.json)
    picture, no_picture = _picture_path(options.picture)
    if picture is not None and picture == json_path:
        raise UsageError(f"--json and --picture both name {picture}")
    spec = _device(options.device)
    # A model that fits two CPU cores is over on an accelerator before its next kernel is launched.
    size = options.size or ("small" if spec.device.type == "cpu" else "medium")

    # The rest takes seconds to import and to read, so what can be wrong was found out before.
    from devstream.demo.compare import Progress  # noqa: PLC0415
    from devstream.demo.compare import run as compare  # noqa: PLC0415
    from devstream.demo.data import read_library  # noqa: PLC0415
    from devstream.report import write_picture  # noqa: PLC0415

    try:
        text = read_library()
    except OSError as error:
        raise UsageError(str(error)) from error
    with progress() as bar:

        def show(now: Progress) -> None:
            loss = "" if now.loss is None else f", loss {now.loss:.2f}"
            bar.show(f"{now.phase}{loss}", now.done, now.total)

        result, spans = compare(
            spec,
            size=size,
            steps=SIZES[size].steps if options.steps is None else options.steps,
            seed=options.seed,
            text=text,
            versions=versions(spec.runtime),
            on_progress=show,
        )
    if picture is not None and spans:
        title = f"{spec.name}: one segment with side streams"
        write_picture(spans, picture, title=title)
    elif picture is not None:
        picture, no_picture = None, "No picture: this device keeps no time."
    previous = _exchange_rate(result)
    fields = {**result.as_json(), "picture": None if picture is None else str(picture)}
    if json_path is not None:
        _files.write_json(json_path, fields, kind=KIND, schema=SCHEMA)
    if options.json == "-":
        sys.stdout.write(_files.dump(fields, kind=KIND, schema=SCHEMA))
    else:
        _show(result, previous)
        write_note(no_picture if picture is None else f"Timeline: {picture}")
    if result.failure is not None:
        complain(f"devstream demo: {result.failure}")
        return 1
    return 0


def _show(result: Result, previous: float | None) -> None:
    table = as_table(result, previous_tokens_per_s=previous)
    write_table(table.heads, table.rows, title=table.title)
    for note in table.notes:
        write_note(note)


def _device(device: str | None) -> DeviceSpec:
    backend, index = _registry.resolve(device)
    return backend.spec(backend.current_index() if index is None else index)


def _picture_path(given: str | None) -> tuple[Path | None, str]:
    """Return where the picture goes, or None and why there is none; only a picture asked for may be missed."""
    if given is not None:
        check_available()
        if not given.endswith(".png"):
            raise UsageError(f"--picture {given}: the picture is a PNG, so its name ends with .png")
        return writable("--picture", given), ""
    try:
        check_available()
        return writable("--picture", _DEFAULT_PICTURE), ""
    except MissingExtraError as error:
        return None, f"No picture: {error}."
    except UsageError as error:
        return None, f"No picture: {error}."


def _exchange_rate(result: Result) -> float | None:
    """Keep this run's tokens/s for the next one, and return those of the run before; None: there was none."""
    document = _files.read_cache(_cache(), kind=CACHE_KIND, schema=CACHE_SCHEMA) or {}
    rates = document.get("tokens_per_s")
    usable = {key: rate for key, rate in rates.items() if _is_rate(rate)} if isinstance(rates, dict) else {}
    if document and usable != rates:
        reason = "it holds rates that are no rates"
        warnings.warn(warning(CacheWarning, path=_cache(), reason=reason), stacklevel=2)
    rates = usable
    previous: float | None = rates.get(result.cache_key)
    fields = {"tokens_per_s": rates | {result.cache_key: result.columns[-1].median_tokens_per_s}}
    _files.write_cache(_cache(), fields, kind=CACHE_KIND, schema=CACHE_SCHEMA)
    return previous


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def _cache() -> Path:
    return _files.cache_dir() / "demo.json"
