"""ci/scripts/make_matrix.py: a matrix is never empty, and every mistake in it is named."""

from __future__ import annotations

import copy
import json
import tomllib

import pytest


@pytest.fixture(scope="module")
def make_matrix(load_script):
    return load_script("make_matrix")


@pytest.fixture
def matrix():
    return copy.deepcopy(
        {
            "cpu": [
                {
                    "id": "c",
                    "python": "3.11",
                    "torch": "2.13.0",
                    "env": "cpu",
                    "when": "change",
                    "runner": ["ubuntu"],
                }
            ],
            "nvidia": [_gpu_row("nvidia", index="cu130")],
            "amd": [_gpu_row("amd", index="rocm7.1")],
        }
    )


def _gpu_row(vendor, *, index, when="change"):
    return {
        "id": vendor,
        "python": "3.12",
        "torch": "2.11.0",
        "index": index,
        "arch": "a1",
        "gpus": 1,
        "when": when,
        "runner": ["self-hosted", vendor, "a1", "x1"],
    }


def _problems(make_matrix, matrix):
    return make_matrix.problems(matrix, tox_torch={"cpu": "2.13.0"})


def test_a_correct_matrix_has_no_problems(make_matrix, matrix):
    assert _problems(make_matrix, matrix) == []


def test_the_matrix_of_the_repository_has_no_problems(make_matrix):
    assert make_matrix.main(["check"]) == 0


@pytest.mark.parametrize("vendor", ["cpu", "nvidia", "amd"])
def test_every_vendor_has_jobs_for_a_change(make_matrix, vendor, capsys):
    assert make_matrix.main([vendor]) == 0
    rows = json.loads(capsys.readouterr().out)["include"]
    assert rows
    assert all(row["when"] == "change" for row in rows)


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_nightly_runs_what_a_change_runs_and_more(make_matrix, vendor):
    matrix = make_matrix.load(make_matrix.ROOT / "ci" / "matrix.yml")
    change = make_matrix.select(matrix, vendor=vendor, nightly=False)
    nightly = make_matrix.select(matrix, vendor=vendor, nightly=True)
    assert len(nightly) > len(change)
    assert all(row in nightly for row in change)


def test_both_gpu_vendors_are_tested_alike(make_matrix):
    matrix = make_matrix.load(make_matrix.ROOT / "ci" / "matrix.yml")
    kinds = {
        vendor: sorted((row["torch"], row["gpus"], row["when"]) for row in matrix[vendor])
        for vendor in ("nvidia", "amd")
    }
    assert kinds["nvidia"] == kinds["amd"]


def test_an_empty_result_is_refused(make_matrix, matrix):
    matrix["amd"] = [_gpu_row("amd", index="rocm7.1", when="nightly")]
    with pytest.raises(make_matrix.EmptyMatrixError, match="no row for amd on a change"):
        make_matrix.select(matrix, vendor="amd", nightly=False)
    assert make_matrix.select(matrix, vendor="amd", nightly=True)


def test_an_empty_result_fails_the_command(make_matrix, tmp_path, capsys):
    path = tmp_path / "matrix.yml"
    path.write_text("nvidia: []\n")
    assert make_matrix.main(["nvidia", "--matrix", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no row for nvidia" in printed.err


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_a_vendor_left_out_is_a_problem(make_matrix, matrix, vendor):
    del matrix[vendor]
    assert any(vendor in problem for problem in _problems(make_matrix, matrix))


@pytest.mark.parametrize(
    ("vendor", "changed", "says"),
    [
        ("nvidia", {"runner": ["self-hosted", "a1", "x1"]}, "lacks the label nvidia"),
        ("amd", {"runner": ["amd", "a1", "x1"]}, "lacks the label self-hosted"),
        ("amd", {"gpus": 2}, "lacks the label x2"),
        ("amd", {"index": "cu130"}, "not one for amd"),
        ("nvidia", {"when": "sometimes"}, "must be change or nightly"),
        ("nvidia", {"python": 3.1}, "must be text"),
        ("nvidia", {"colour": "red"}, "colour is not a known key"),
        ("cpu", {"env": "gone"}, "no environment gone"),
        ("cpu", {"torch": "2.11.0"}, "tox -e cpu installs 2.13.0"),
        ("cpu", {"runner": ["self-hosted"]}, "never reach a self-hosted runner"),
        ("cpu", {"id": "amd"}, "used 2 times"),
    ],
)
def test_a_mistake_in_a_row_is_named(make_matrix, matrix, vendor, changed, says):
    matrix[vendor][0].update(changed)
    assert any(says in problem for problem in _problems(make_matrix, matrix))


def test_a_missing_key_is_named(make_matrix, matrix):
    del matrix["nvidia"][0]["gpus"]
    assert "nvidia: gpus is missing" in _problems(make_matrix, matrix)


def test_a_key_that_is_no_vendor_is_named(make_matrix, matrix):
    matrix["intel"] = []
    assert any(problem.startswith("intel is not a vendor") for problem in _problems(make_matrix, matrix))


def test_the_torch_release_of_a_tox_environment_is_found(make_matrix):
    with (make_matrix.ROOT / "pyproject.toml").open("rb") as file:
        releases = make_matrix.tox_torch_releases(tomllib.load(file))
    assert releases["newest"] == "newest"
    assert releases["oldest"] == "2.11.0"
    assert "lint" not in releases
