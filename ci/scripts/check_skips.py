"""Check that no test was skipped in every configuration.

    check_skips.py JUNIT_FILE_OR_FOLDER ... [--allowed ci/skips.toml]

A test that is skipped everywhere tests nothing and looks green. It fails here unless ci/skips.toml lists it
with a reason. An entry of that list whose test ran fails too, so that the list only shrinks. Expected
failures are runs, not skips.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def junit_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files among *paths*, and every .xml file below the folders among them."""
    return [file for path in paths for file in (sorted(path.rglob("*.xml")) if path.is_dir() else [path])]


def outcomes(file: Path) -> dict[str, str | None]:
    """Return the tests of one junit file, each with the message of its skip, or None if it ran."""
    found: dict[str, str | None] = {}
    for case in ET.parse(file).getroot().iter("testcase"):
        skip = case.find("skipped")
        skipped = skip is not None and skip.get("type") != "pytest.xfail"
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = (skip.get("message") or "") if skip is not None and skipped else None
    return found


def problems(runs: list[dict[str, str | None]], *, allowed: dict[str, str]) -> list[str]:
    """Return the tests that no run ran and nobody allowed, and the allowed ones that ran.

    Args:
        runs: what `outcomes` returned for each configuration.
        allowed: test name -> reason.
    """
    if not any(runs):
        return ["the junit files hold no test at all"]
    skips = {name: message for run in runs for name, message in run.items() if message is not None}
    ran = {name for run in runs for name, message in run.items() if message is None}
    found = [
        f"{name} is skipped in every configuration ({skips[name]}); run it, or list it in ci/skips.toml"
        for name in sorted(skips.keys() - ran - allowed.keys())
    ]
    found += [
        f"{name} is listed in ci/skips.toml, but it ran; remove the entry" for name in sorted(allowed.keys() & ran)
    ]
    found += [
        f"{name} is listed in ci/skips.toml without a reason" for name, reason in allowed.items() if not reason
    ]
    return found


def load_allowed(path: Path) -> dict[str, str]:
    """Return the tests that may be skipped everywhere, each with its reason."""
    with path.open("rb") as file:
        entries = tomllib.load(file).get("skip", [])
    return {entry["test"]: entry.get("reason", "").strip() for entry in entries}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--allowed", type=Path, default=ROOT / "ci" / "skips.toml")
    options = parser.parse_args(arguments)

    runs = [outcomes(file) for file in junit_files(options.paths)]
    found = problems(runs, allowed=load_allowed(options.allowed))
    for problem in found:
        print(f"check_skips.py: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
