"""ci/scripts/check_skips.py: a test that is skipped everywhere is not green."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def check_skips(load_script):
    return load_script("check_skips")


@pytest.fixture
def check(check_skips, tmp_path):
    """Run the check over junit files given as file name -> {test: skip type or None}."""

    def run(files, allowed=""):
        for name, cases in files.items():
            body = "".join(_case(test, skip) for test, skip in cases.items())
            path = tmp_path / "reports" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
        (tmp_path / "skips.toml").write_text(allowed)
        return check_skips.main([str(tmp_path / "reports"), "--allowed", str(tmp_path / "skips.toml")])

    return run


def _case(test, skip):
    classname, name = test.split("::")
    inner = f'<skipped type="{skip}" message="no GPU"/>' if skip else ""
    return f'<testcase classname="{classname}" name="{name}">{inner}</testcase>'


def test_a_test_skipped_in_one_configuration_passes(check):
    assert (
        check({"cpu.xml": {"tests.test_a::test_x": "pytest.skip"}, "gpu.xml": {"tests.test_a::test_x": None}}) == 0
    )


def test_a_test_skipped_in_every_configuration_fails(check, capsys):
    skipped = {"tests.test_a::test_x": "pytest.skip", "tests.test_a::test_y": None}
    assert check({"cpu.xml": skipped, "gpu.xml": skipped}) == 1
    printed = capsys.readouterr().err
    assert "tests.test_a::test_x is skipped in every configuration (no GPU)" in printed
    assert "test_y" not in printed


def test_a_listed_test_may_be_skipped_everywhere(check):
    allowed = '[[skip]]\ntest = "tests.test_a::test_x"\nreason = "needs two hosts"\nsince = 2026-01-31\n'
    assert check({"cpu.xml": {"tests.test_a::test_x": "pytest.skip"}}, allowed) == 0


def test_a_listed_test_needs_a_reason(check, capsys):
    assert (
        check({"cpu.xml": {"tests.test_a::test_x": "pytest.skip"}}, '[[skip]]\ntest = "tests.test_a::test_x"\n')
        == 1
    )
    assert "without a reason" in capsys.readouterr().err


def test_a_listed_test_that_ran_is_stale(check, capsys):
    allowed = '[[skip]]\ntest = "tests.test_a::test_x"\nreason = "needs two hosts"\n'
    assert check({"cpu.xml": {"tests.test_a::test_x": None}}, allowed) == 1
    assert "remove the entry" in capsys.readouterr().err


def test_an_expected_failure_is_a_run(check):
    assert check({"cpu.xml": {"tests.test_a::test_x": "pytest.xfail"}}) == 0


def test_reports_without_tests_fail(check, capsys):
    assert check({"cpu.xml": {}}) == 1
    assert "no test at all" in capsys.readouterr().err


def test_reports_in_folders_are_found(check, capsys):
    assert check({"row-1/junit.xml": {"tests.test_a::test_x": "pytest.skip"}}) == 1
    assert "test_x" in capsys.readouterr().err


def test_the_list_of_the_repository_can_be_read(check_skips):
    assert all(check_skips.load_allowed(check_skips.ROOT / "ci" / "skips.toml").values())
