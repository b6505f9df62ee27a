"""Every example runs on the CPU as a person would start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PRINTED = {"prefetch.py": "sum of the means: ", "two_branches.py": "mean: 0."}


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_the_example_runs_on_the_cpu(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:devstream", str(EXAMPLES / name), "cpu"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PRINTED[name])
