"""ci/scripts/check_started.py: a GPU job that never ran is not green."""

from __future__ import annotations

import pytest

MATRIX = """
nvidia:
  - {id: n1, gpus: 1, when: change, runner: [self-hosted, nvidia]}
  - {id: n2, gpus: 2, when: nightly, runner: [self-hosted, nvidia]}
amd:
  - {id: a1, gpus: 1, when: change, runner: [self-hosted, amd]}
"""


@pytest.fixture
def check(load_script, tmp_path):
    """Run the check over reports given as id -> text."""
    script = load_script("check_started")
    (tmp_path / "matrix.yml").write_text(MATRIX)

    def run(reports, *options):
        for name, text in reports.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "gpu-report.txt").write_text(text)
        return script.main([str(tmp_path), "--matrix", str(tmp_path / "matrix.yml"), *options])

    return run


def _report(vendor, devices=1):
    return f"index, name\n0, some device: with a colon\nvendor: {vendor}\ndevices: {devices}\n"


def test_a_report_from_each_vendor_passes(check):
    assert check({"n1": _report("nvidia"), "a1": _report("amd")}) == 0


@pytest.mark.parametrize(("present", "missing"), [({"n1": "nvidia"}, "a1"), ({"a1": "amd"}, "n1")])
def test_a_vendor_whose_runner_was_not_started_fails(check, capsys, present, missing):
    assert check({name: _report(vendor) for name, vendor in present.items()}) == 1
    assert f"{missing}: no report" in capsys.readouterr().err


def test_the_nightly_rows_are_needed_at_night(check, capsys):
    assert check({"n1": _report("nvidia"), "a1": _report("amd")}, "--nightly") == 1
    assert "n2: no report" in capsys.readouterr().err


def test_one_vendor_can_be_checked_alone(check):
    assert check({"a1": _report("amd")}, "--vendor", "amd") == 0


def test_a_report_of_the_other_vendor_fails(check, capsys):
    assert check({"n1": _report("nvidia"), "a1": _report("nvidia")}) == 1
    assert "names the vendor nvidia, not amd" in capsys.readouterr().err


def test_too_few_devices_fail(check, capsys):
    assert check({"n1": _report("nvidia"), "n2": _report("nvidia"), "a1": _report("amd")}, "--nightly") == 1
    assert "n2: 1 devices were seen, 2 are needed" in capsys.readouterr().err


def test_a_report_that_broke_off_fails(check, capsys):
    assert check({"n1": "", "a1": _report("amd")}) == 1
    assert "names the vendor (none)" in capsys.readouterr().err
