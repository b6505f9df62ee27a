"""Ceilings as data: JSON and back, and what is refused."""

from __future__ import annotations

import json

import pytest

from devstream.roofline.ceilings import Ceilings
from devstream.testing.ceilings import ceilings


def test_ceilings_survive_json():
    made = ceilings(missing={"peer": "one device"})
    assert Ceilings.from_json(json.loads(json.dumps(made.as_json()))) == made


@pytest.mark.parametrize("lost", ["curves", "vector", "launch_s", "tilings"])
def test_a_document_that_lacks_something_is_refused(lost):
    data = ceilings().as_json()
    del data[lost]
    with pytest.raises(ValueError, match=lost):
        Ceilings.from_json(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("curves", {"matmul float32": {"points": [[1, -1]], "error": 0}}),
        ("curves", {"matmul float32": {"points": "many", "error": 0}}),
        ("curves", [1]),
        ("launch_s", float("nan")),
        ("launch_s", "fast"),
        ("launch_s", -1.0),
        ("vector", {"float32": 0}),
        ("tilings", {"float32": {"rows": 1, "corners": 4}}),
    ],
)
def test_a_damaged_document_is_refused(key, value):
    with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
        Ceilings.from_json(ceilings().as_json() | {key: value})


def test_the_memory_ceiling_is_of_sizes_that_no_cache_holds():
    assert ceilings().memory_bytes_per_s == pytest.approx(1e12, rel=0.01)
    assert Ceilings("toy:0", "toy").memory_bytes_per_s is None
