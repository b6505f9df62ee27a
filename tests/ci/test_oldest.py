"""ci/oldest.txt pins exactly the lower bounds that the project states."""

from __future__ import annotations

import re
import tomllib

import pytest

EXTRAS = ("cli", "plot", "test")


def _versions(lines, operator):
    found = {}
    for line in lines:
        match = re.fullmatch(rf"([A-Za-z0-9_.-]+){operator}([0-9][0-9.]*)", line.strip())
        if match:
            found[match[1].lower()] = match[2]
    return found


@pytest.fixture(scope="module")
def pyproject(repository):
    with (repository / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def _padded(version):
    return [*version.split("."), "0", "0"][:3]


def test_the_pins_are_the_lower_bounds(repository, pyproject):
    stated = [line for extra in EXTRAS for line in pyproject["project"]["optional-dependencies"][extra]]
    stated += (repository / "ci" / "requirements.txt").read_text().splitlines()
    bounds = _versions(stated, ">=")
    pins = _versions((repository / "ci" / "oldest.txt").read_text().splitlines(), "==")
    assert bounds
    assert {name: _padded(pins.get(name, "missing")) for name in bounds} == {
        name: _padded(version) for name, version in bounds.items()
    }


def test_the_oldest_environment_has_the_lowest_torch(pyproject):
    (bound,) = pyproject["project"]["dependencies"]
    pin = next(line for line in pyproject["tool"]["tox"]["env"]["oldest"]["deps"] if line.startswith("torch=="))
    assert _padded(pin.removeprefix("torch==")) == _padded(bound.removeprefix("torch>="))
