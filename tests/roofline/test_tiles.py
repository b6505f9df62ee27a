"""Tiles: the times that kernels of known tiles would take are found again, and used for other shapes."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devstream.roofline.tiles import Tile, Tiles, fit, with_unaligned

UNITS = 132
SHARES = {
    (64, 64): 0.5,
    (64, 128): 0.7,
    (128, 64): 0.65,
    (128, 128): 0.9,
    (128, 192): 0.95,
    (192, 128): 0.9,
    (128, 256): 1.0,
    (256, 128): 0.95,
    (64, 256): 0.7,
    (256, 64): 0.75,
}
TRUE = Tiles(
    tuple(Tile(rows, columns, 800e12 * share) for (rows, columns), share in SHARES.items()),
    UNITS,
    depth=200.0,
    latency_s=2e-6,
)
SIDES = (512, 768, 1024, 1280, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 6144, 8192)
MEASURED = [(1, side, side, side) for side in SIDES] + [
    (1, 16384, 1024, 4096),
    (1, 16384, 4096, 1024),
    (1, 2048, 8192, 2048),
    (1, 2048, 2048, 16384),
    (16, 1024, 1024, 512),
]
OTHERS = [(1, side, side, side) for side in (640, 896, 1152, 1792, 2176, 2816, 3328, 3840, 5632)] + [
    (1, 32000, 768, 3072),
    (1, 3000, 5000, 704),
    (8, 1536, 1536, 256),
]
shapes = st.tuples(st.integers(1, 8), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))


@pytest.fixture(scope="module")
def found() -> Tiles:
    return fit([(shape, TRUE.seconds(shape), 0.0) for shape in MEASURED], UNITS)


def test_times_of_other_shapes_are_those_of_the_kernels_behind_the_measured_ones(found):
    worst = max(abs(found.seconds(shape) / TRUE.seconds(shape) - 1) for shape in OTHERS)
    assert worst < 0.1
    assert found.error < 0.05


def test_a_curve_by_flops_alone_would_miss_them():
    """What the waves are for: two sizes of nearly the same FLOPs, of which one leaves a wave nearly empty."""
    full, spilled = (1, 128 * 12, 256 * 11, 1024), (1, 128 * 12, 256 * 11 + 1, 1024)
    assert TRUE.seconds(spilled) > 1.2 * TRUE.seconds(full)


@given(shapes, st.integers(0, 2))
def test_a_longer_side_never_takes_less_time(shape, side):
    longer = tuple(size + (number == side + 1) for number, size in enumerate(shape))
    assert TRUE.seconds(longer) >= TRUE.seconds(shape)


@given(shapes)
def test_no_time_is_below_what_the_best_rate_allows(shape):
    assert TRUE.seconds(shape) >= 2.0 * math.prod(shape) / TRUE.peak


def test_what_memory_takes_is_not_laid_on_the_tiles(found):
    """Thin matmuls that wait for memory do not make the tiles look slower."""
    thin = [((64, 512, 512, 64), 100e-6, 100e-6), ((64, 512, 64, 512), 90e-6, 90e-6)]
    other = fit([*((shape, TRUE.seconds(shape), 0.0) for shape in MEASURED), *thin], UNITS)
    assert other.seconds((1, 4096, 4096, 4096)) == pytest.approx(found.seconds((1, 4096, 4096, 4096)), rel=0.03)


def test_rows_that_begin_anywhere_are_as_slow_as_measured_ones():
    shape = (1, 4096, 4096, 4095)
    busy = TRUE.seconds(shape) - TRUE.latency_s
    slow = with_unaligned(TRUE, [(shape, 2, TRUE.latency_s + 5 * busy), (shape, 8, TRUE.latency_s + 2 * busy)])
    assert slow.seconds(shape, alignment=2) == pytest.approx(TRUE.latency_s + 5 * busy)
    assert slow.seconds(shape, alignment=4) == slow.seconds(shape, alignment=2)  # the next worse that is known
    assert slow.seconds(shape, alignment=8) == pytest.approx(TRUE.latency_s + 2 * busy)
    assert slow.seconds(shape, alignment=16) == TRUE.seconds(shape)
    assert slow.seconds(shape, alignment=1) == slow.seconds(shape, alignment=2)


def test_tiles_come_back_from_json():
    whole = with_unaligned(TRUE, [((1, 4096, 4096, 4095), 2, 1e-3)])
    assert Tiles.from_json(json.loads(json.dumps(whole.as_json()))) == whole


@pytest.mark.parametrize(
    "change", [{"tiles": ()}, {"units": 0}, {"depth": -1.0}, {"latency_s": math.nan}, {"unaligned": {2: 0.0}}]
)
def test_figures_without_meaning_are_refused(change):
    known = {"tiles": TRUE.tiles, "units": UNITS, "depth": 1.0, "latency_s": 0.0, "unaligned": {}}
    with pytest.raises(ValueError, match=r"above 0|0 or more"):
        Tiles(**(known | change))


def test_tiles_of_nothing_are_refused():
    with pytest.raises(ValueError, match="one sample"):
        fit([], UNITS)
