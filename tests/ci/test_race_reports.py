"""ci/scripts/race_reports.py: the page about races shows what the checker says of its programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import devstream

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_writes(load_script, capsys):
    assert load_script("race_reports").main(["--check"]) == 0, capsys.readouterr().err


def test_a_report_that_is_out_of_date_is_found(load_script):
    reports = load_script("race_reports")
    page = reports.PAGE.read_text()
    assert reports.regenerate(page) == (page, [])
    stale = page.replace("read before write\n", "something else\n", 1)
    assert reports.regenerate(stale) == (page, [])


def test_a_program_without_its_fault_and_a_repair_with_one_are_found(load_script):
    reports = load_script("race_reports")
    page = reports.PAGE.read_text()
    repaired = page.replace("    done.record()\n    y = x * 2\n", "    y = x * 2\n    done.record()\n")
    assert "has no race" in reports.regenerate(repaired)[1][0]
    broken = page.replace("copied.synchronize()\n", "")
    assert "has a race" in reports.regenerate(broken)[1][0]


@pytest.mark.parametrize("page", ["README.md", "docs/streams.md", "docs/races.md"])
def test_programs_of_other_pages_have_no_race(page, capsys):
    text = (ROOT / page).read_text()
    faulty = re.compile(r"```python\n[^`]*```\n+```text")
    for program in re.findall(r"```python\n(.*?)```", faulty.sub("", text), re.DOTALL):
        if "racecheck(" in program or "schedule=" in program or "import torch\n" not in program:
            continue
        with devstream.racecheck():
            exec(program, {"__name__": "example"})
