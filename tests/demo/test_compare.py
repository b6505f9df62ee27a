"""How much is compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devstream.demo.compare import compared_steps
from devstream.demo.sizes import SIZES

SIZE = st.sampled_from(sorted(SIZES))


@pytest.mark.parametrize("name", sorted(SIZES))
def test_a_run_of_the_default_length_compares_segments_of_the_sizes_own_length(name: str) -> None:
    assert compared_steps(SIZES[name], SIZES[name].steps) == SIZES[name].compared_steps


@given(SIZE, st.integers(1, 2000))
def test_the_comparison_is_no_longer_than_the_training_and_has_a_step_in_each_segment(
    name: str, steps: int
) -> None:
    size = SIZES[name]
    segments = 2 * (size.compared_pairs + 1)
    one = compared_steps(size, steps)
    assert 1 <= one <= min(steps, size.compared_steps)
    assert one == 1 or one * segments <= steps
