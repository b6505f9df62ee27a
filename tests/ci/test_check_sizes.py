"""ci/scripts/check_sizes.py: modules are short and have a subject."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def check_sizes(load_script):
    return load_script("check_sizes")


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    return folder


def test_a_module_of_500_lines_is_allowed(check_sizes, package):
    (package / "ordering.py").write_text("x = 1\n" * 500)
    assert check_sizes.problems(package) == []


def test_a_module_of_501_lines_is_refused(check_sizes, package):
    (package / "ordering.py").write_text("x = 1\n" * 501)
    (problem,) = check_sizes.problems(package)
    assert "package/ordering.py: 501 lines" in problem


@pytest.mark.parametrize("name", ["utils", "stream_utils", "_helpers", "common", "stream_manager", "Util"])
def test_a_name_without_a_subject_is_refused(check_sizes, package, name):
    (package / f"{name}.py").write_text("")
    (problem,) = check_sizes.problems(package)
    assert f"the name {name} contains" in problem


def test_a_folder_without_a_subject_is_refused_once(check_sizes, package):
    (package / "helpers").mkdir()
    (package / "helpers" / "__init__.py").write_text("")
    (package / "helpers" / "ordering.py").write_text("")
    assert len(check_sizes.problems(package)) == 1


@pytest.mark.parametrize("name", ["commonality", "utilisation"])
def test_a_longer_word_is_not_mistaken_for_a_refused_one(check_sizes, package, name):
    (package / f"{name}.py").write_text("")
    assert check_sizes.problems(package) == []


def test_a_folder_without_modules_is_a_problem(check_sizes, tmp_path):
    (problem,) = check_sizes.problems(tmp_path)
    assert "no module found" in problem


def test_the_command_fails_on_a_problem(check_sizes, package, capsys):
    assert check_sizes.main([str(package)]) == 0
    (package / "utils.py").write_text("")
    assert check_sizes.main([str(package)]) == 1
    assert "utils" in capsys.readouterr().err
