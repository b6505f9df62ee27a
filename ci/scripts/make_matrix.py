"""Turn ci/matrix.yml into the job matrix of a workflow.

    make_matrix.py cpu|nvidia|amd [--nightly]   print {"include": [...]}, and refuse to print an empty list
    make_matrix.py check                        check the file itself; every problem is named

Without --nightly only the rows with `when: change` are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
VENDORS = ("cpu", "nvidia", "amd")
GPU_VENDORS = ("nvidia", "amd")

_EVERY_ROW = frozenset({"id", "python", "torch", "when", "runner"})
_CPU_ROW = _EVERY_ROW | {"env"}
_GPU_ROW = _EVERY_ROW | {"index", "arch", "gpus"}

Row = dict[str, Any]
Matrix = dict[str, list[Row]]


class EmptyMatrixError(ValueError):
    """No row is left: a workflow with an empty matrix runs no job and is green."""


def load(path: Path) -> Matrix:
    """Return the rows of *path* by vendor."""
    with path.open(encoding="utf-8") as file:
        matrix: Matrix = yaml.safe_load(file) or {}
    return matrix


def select(matrix: Matrix, *, vendor: str, nightly: bool) -> list[Row]:
    """Return the rows of one vendor for a change, or for a night.

    Raises:
        EmptyMatrixError: there is none.
    """
    rows = [row for row in matrix.get(vendor) or [] if nightly or row["when"] == "change"]
    if not rows:
        raise EmptyMatrixError(
            f"no row for {vendor} {'at night' if nightly else 'on a change'}; add one to ci/matrix.yml"
        )
    return rows


def problems(matrix: Matrix, *, tox_torch: dict[str, str]) -> list[str]:
    """Return what is wrong with *matrix*, a sentence each.

    Args:
        matrix: the rows by vendor.
        tox_torch: the torch release of each tox environment that runs the tests on the CPU.
    """
    found = [
        f"{vendor} is not a vendor; known are {', '.join(VENDORS)}" for vendor in matrix if vendor not in VENDORS
    ]
    for vendor in VENDORS:
        rows = matrix.get(vendor) or []
        if not any(row.get("when") == "change" for row in rows):
            found.append(f"{vendor} has no row with `when: change`, so a change is not tested on it")
        for row in rows:
            found += _row_problems(row, vendor=vendor, tox_torch=tox_torch)
    counts = Counter(row.get("id") for vendor in VENDORS for row in matrix.get(vendor) or [])
    found += [f"the id {name} is used {count} times" for name, count in counts.items() if count > 1]
    return found


def _row_problems(row: Row, *, vendor: str, tox_torch: dict[str, str]) -> list[str]:
    name = row.get("id", "a row without id")
    wanted = _CPU_ROW if vendor == "cpu" else _GPU_ROW
    found = [f"{name}: {key} is missing" for key in sorted(wanted - row.keys())]
    found += [f"{name}: {key} is not a known key" for key in sorted(row.keys() - wanted)]
    if found:
        return found
    found += [
        f"{name}: {key} must be text, in quotes" for key in ("python", "torch") if not isinstance(row[key], str)
    ]
    if row["when"] not in {"change", "nightly"}:
        found.append(f"{name}: when is {row['when']!r}, but must be change or nightly")
    if vendor == "cpu":
        found += _cpu_problems(row, tox_torch=tox_torch)
    else:
        found += _gpu_problems(row, vendor=vendor)
    return found


def _cpu_problems(row: Row, *, tox_torch: dict[str, str]) -> list[str]:
    found = []
    if "self-hosted" in row["runner"]:
        found.append(f"{row['id']}: CPU jobs run on pull requests, which never reach a self-hosted runner")
    if row["env"] not in tox_torch:
        found.append(f"{row['id']}: tox has no environment {row['env']} that installs torch")
    elif tox_torch[row["env"]] != row["torch"]:
        found.append(
            f"{row['id']}: the row says torch {row['torch']}, "
            f"but tox -e {row['env']} installs {tox_torch[row['env']]}"
        )
    return found


def _gpu_problems(row: Row, *, vendor: str) -> list[str]:
    labels = ("self-hosted", vendor, row["arch"], f"x{row['gpus']}")
    found = [f"{row['id']}: the runner lacks the label {label}" for label in labels if label not in row["runner"]]
    flavour = {"nvidia": "cu", "amd": "rocm"}[vendor]
    if not row["index"].startswith(flavour):
        found.append(f"{row['id']}: the torch build {row['index']} is not one for {vendor}")
    return found


def tox_torch_releases(pyproject: dict[str, Any]) -> dict[str, str]:
    """Return the torch release that each tox environment installs, "newest" where it names none."""
    releases = {}
    for name, env in pyproject["tool"]["tox"]["env"].items():
        for requirement in env.get("deps", []):
            if requirement == "torch":
                releases[name] = "newest"
            elif requirement.startswith("torch=="):
                releases[name] = requirement.removeprefix("torch==")
    return releases


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*VENDORS, "check"])
    parser.add_argument("--nightly", action="store_true", help="also the rows with `when: nightly`")
    parser.add_argument("--matrix", type=Path, default=ROOT / "ci" / "matrix.yml")
    options = parser.parse_args(arguments)

    matrix = load(options.matrix)
    if options.what == "check":
        with (ROOT / "pyproject.toml").open("rb") as file:
            found = problems(matrix, tox_torch=tox_torch_releases(tomllib.load(file)))
        for problem in found:
            print(f"ci/matrix.yml: {problem}", file=sys.stderr)
        return 1 if found else 0
    try:
        rows = select(matrix, vendor=options.what, nightly=options.nightly)
    except EmptyMatrixError as error:
        print(f"make_matrix.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"include": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
