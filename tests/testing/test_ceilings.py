"""The made-up device that plans are tested on."""

from __future__ import annotations

import pytest

from devstream.roofline import Ceilings
from devstream.testing.ceilings import SIZES, ceilings, line


def test_it_has_the_round_numbers_that_it_promises():
    made = ceilings()
    assert made.matmul_peak("bfloat16") == pytest.approx(100e12, rel=0.01)
    assert made.memory_bytes_per_s == pytest.approx(1e12, rel=0.01)
    assert made.curves["link d2h pinned"].peak == pytest.approx(10e9, rel=0.01)
    assert (made.launch_s, made.floor_s) == (10e-6, 2e-6)


def test_it_can_be_changed_and_is_like_a_measured_one():
    assert ceilings(floor_s=1.0).floor_s == 1.0
    assert Ceilings.from_json(ceilings().as_json()) == ceilings()


def test_a_line_has_its_latency_and_its_rate():
    curve = line(1e-6, 1e9, *SIZES)
    assert curve.seconds(0) == pytest.approx(1e-6, rel=0.3)
    assert curve.seconds(1e9) == pytest.approx(1.0, rel=0.01)
