"""Check that the GPU jobs of ci/matrix.yml really ran, with the devices that the matrix promises.

    check_started.py REPORTS [--nightly] [--vendor nvidia|amd ...]

REPORTS holds one folder per row, named after its id, with the gpu-report.txt that ci/scripts/gpu_report.sh
printed. A row without a report is a runner that was never started: a job that waits for a missing label, or a
workflow that left a vendor out, must not pass as green.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from make_matrix import GPU_VENDORS, ROOT, EmptyMatrixError, Row, load, select


def report_facts(text: str) -> dict[str, str]:
    """Return the `key: value` lines of a GPU report."""
    facts = {}
    for line in text.splitlines():
        key, colon, value = line.partition(": ")
        if colon:
            facts[key.strip()] = value.strip()
    return facts


def row_problem(row: Row, *, vendor: str, reports: Path) -> str | None:
    """Return why the job of *row* does not count as started, or None."""
    path = reports / row["id"] / "gpu-report.txt"
    if not path.is_file():
        return f"{row['id']}: no report; no runner with the labels {', '.join(row['runner'])} was started"
    facts = report_facts(path.read_text(encoding="utf-8"))
    if facts.get("vendor") != vendor:
        return f"{row['id']}: the report names the vendor {facts.get('vendor', '(none)')}, not {vendor}"
    devices = int(facts.get("devices", "0"))
    if devices < row["gpus"]:
        return f"{row['id']}: {devices} devices were seen, {row['gpus']} are needed"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path)
    parser.add_argument("--nightly", action="store_true", help="also the rows with `when: nightly`")
    parser.add_argument("--vendor", action="append", choices=GPU_VENDORS, help="default: every GPU vendor")
    parser.add_argument("--matrix", type=Path, default=ROOT / "ci" / "matrix.yml")
    options = parser.parse_args(arguments)

    matrix = load(options.matrix)
    found = []
    for vendor in options.vendor or GPU_VENDORS:
        try:
            rows = select(matrix, vendor=vendor, nightly=options.nightly)
        except EmptyMatrixError as error:
            found.append(str(error))
            continue
        for row in rows:
            problem = row_problem(row, vendor=vendor, reports=options.reports)
            print(f"{row['id']}: {'missing' if problem else 'started'}")
            found += [problem] if problem else []
    for problem in found:
        print(f"check_started.py: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
