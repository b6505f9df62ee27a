"""Curves through measured points, the tiles of matmuls, the links of collectives."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devstream.roofline.curves import (
    COLLECTIVES,
    AlphaBeta,
    Curve,
    Tiling,
    best_tiling,
    leave_one_out,
    steps_and_share,
    tilings,
)

amounts = st.floats(1.0, 1e15)
times = st.floats(1e-7, 1e2)
samples = st.lists(st.tuples(amounts, times), min_size=1, max_size=12)
shapes = st.tuples(*(st.integers(1, limit) for limit in (8, 5000, 5000, 5000)))


@given(samples, amounts, amounts)
def test_more_never_takes_less_time(points, one, other):
    curve = Curve.measured(points)
    low, high = sorted((one, other))
    assert curve.seconds(low) <= curve.seconds(high)


@given(samples)
def test_a_curve_is_right_at_its_own_points(points):
    curve = Curve.measured(points)
    for amount, seconds in curve.points:
        assert curve.seconds(amount) == pytest.approx(seconds)


@given(samples, st.floats(1e-3, 1e3), amounts)
def test_a_device_that_is_slower_by_a_factor_has_a_curve_that_is(points, factor, amount):
    curve = Curve.measured(points)
    slower = Curve.measured([(a, s * factor) for a, s in points])
    assert slower.seconds(amount) == pytest.approx(factor * curve.seconds(amount), rel=1e-6)
    assert slower.error == pytest.approx(curve.error, abs=1e-6)


@given(samples, amounts)
def test_the_rate_is_never_above_the_peak(points, amount):
    curve = Curve.measured(points)
    if amount >= curve.points[0][0]:
        assert curve.rate(amount) <= curve.peak * (1 + 1e-9)


@given(st.floats(1e6, 1e15), amounts)
def test_a_constant_rate_is_read_exactly_at_every_amount_in_between(rate, amount):
    curve = Curve.measured([(a, a / rate) for a in (1.0, 1e5, 1e10, 1e15)])
    assert curve.seconds(amount) == pytest.approx(amount / rate)
    assert curve.error < 1e-6


def test_below_the_first_point_only_latency_is_left_and_above_the_last_the_rate_stays():
    curve = Curve(((10.0, 1.0), (100.0, 2.0)))
    assert curve.seconds(1.0) == curve.seconds(0.0) == curve.latency == 1.0
    assert curve.seconds(1000.0) == 20.0


def test_the_error_is_the_larger_of_spread_and_of_what_merging_changed():
    assert Curve.measured([(1, 1), (2, 2), (4, 4)], spread=0.07).error == 0.07
    assert Curve.measured([(1, 1), (1, 1.44)]).error == pytest.approx(0.19, abs=0.01)


def test_beside_a_bend_the_error_is_larger_than_far_from_it():
    bent = Curve.measured([(1, 1), (2, 2), (4, 12), (8, 24), (16, 48), (32, 96)])
    assert leave_one_out(bent.points) > 0.4
    assert bent.error_at(3) > 0.2
    assert bent.error_at(20) == pytest.approx(0, abs=1e-9)
    assert bent.error_at(1000) == pytest.approx(0, abs=1e-9)


def test_one_disturbed_time_does_not_raise_all_later_ones():
    curve = Curve.measured([(1, 1), (2, 50), (4, 4), (8, 8), (16, 16)])
    assert curve.seconds(16) == pytest.approx(16)
    assert curve.error > 0.5


def test_where_a_time_falls_although_the_amount_rises_both_get_their_mean():
    curve = Curve.measured([(1, 4), (2, 1)])
    assert curve.points == ((1, pytest.approx(2)), (2, pytest.approx(2)))
    assert curve.error == pytest.approx(math.sqrt((0.5**2 + 1) / 2))


@pytest.mark.parametrize(
    "points",
    [(), ((1.0, 0.0),), ((0.0, 1.0),), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)), ((1.0, math.nan),)],
)
def test_points_that_make_no_curve_are_refused(points):
    with pytest.raises(ValueError, match=r"curve|above 0"):
        Curve(points)


# -- tiles -----------------------------------------------------------------------------------------------


@given(shapes, st.sampled_from(tilings(132)))
def test_work_is_never_less_than_the_flops(shape, tiling):
    batch, rows, columns, depth = shape
    assert tiling.work(shape) >= 2.0 * batch * rows * columns * depth


@given(shapes, st.sampled_from(tilings(132)), st.integers(0, 3))
def test_work_never_falls_where_a_side_grows(shape, tiling, side):
    larger = tuple(n + (index == side) for index, n in enumerate(shape))
    assert tiling.work(larger) >= tiling.work(shape)


def test_one_tile_too_many_costs_a_whole_wave():
    tiling = Tiling(128, 128, 132)
    full = tiling.work((1, 128 * 132, 128, 64))
    assert tiling.work((1, 128 * 132 + 1, 128, 64)) == 2 * full


def test_the_tiling_that_made_the_times_is_found():
    true = Tiling(128, 256, 132, 64)
    sizes = [(1, n, n, n) for n in range(512, 8192, 448)]
    found = best_tiling([(shape, 3e-6 + true.work(shape) / 700e12) for shape in sizes], tilings(132))
    assert (found.rows, found.columns) in {(128, 256), (256, 128)}


def test_without_known_units_no_waves_are_looked_for():
    assert {(t.rows, t.columns, t.units) for t in tilings(1)} == {(1, 1, 1)}


# -- collectives -----------------------------------------------------------------------------------------

kinds = st.sampled_from(COLLECTIVES)
algorithms = st.sampled_from(["ring", "tree"])


@given(kinds, algorithms, st.integers(1, 512), st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_collective_of_more_bytes_never_takes_less(kind, algorithm, ranks, one, other):
    link = AlphaBeta(5e-6, 1e11)
    low, high = sorted((one, other))
    assert link.seconds(kind, low, ranks, algorithm=algorithm) <= link.seconds(
        kind, high, ranks, algorithm=algorithm
    )


@given(kinds, algorithms, st.integers(2, 511))
def test_more_ranks_never_need_fewer_steps(kind, algorithm, ranks):
    fewer, more = (steps_and_share(kind, n, algorithm) for n in (ranks, ranks + 1))
    assert fewer[0] <= more[0]
    assert fewer[1] <= more[1]


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    link = AlphaBeta(5e-6, 1e11)
    parts = [link.seconds(kind, 1e9, 8, algorithm="ring") for kind in ("reduce_scatter", "all_gather")]
    assert link.seconds("all_reduce", 1e9, 8, algorithm="ring") == pytest.approx(sum(parts))


def test_one_rank_sends_nothing():
    assert AlphaBeta(1.0, 1.0).seconds("all_reduce", 1e9, 1, algorithm="ring") == 0.0


@given(kinds, st.integers(2, 64), st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_the_fit_finds_the_link_that_made_the_times(kind, ranks, latency, rate):
    true = AlphaBeta(latency, rate)
    sizes = [1e3, 1e6, 1e9]
    made = [(size, true.seconds(kind, size, ranks, algorithm="ring")) for size in sizes]
    found = AlphaBeta.fit(made, kind=kind, ranks=ranks)
    assert found.latency_s == pytest.approx(latency, rel=1e-3, abs=1e-9)
    assert found.error < 1e-2


@given(st.lists(st.tuples(st.floats(1, 1e10), st.floats(1e-6, 10)), min_size=2, max_size=6))
def test_a_fit_of_anything_has_a_latency_and_a_rate(made):
    if len({size for size, _ in made}) > 1:
        found = AlphaBeta.fit(made, kind="all_reduce", ranks=4)
        assert found.latency_s >= 0
        assert found.bytes_per_s > 0


def test_what_is_no_collective_is_refused():
    with pytest.raises(ValueError, match="kind='gossip'"):
        steps_and_share("gossip", 2, "ring")
    with pytest.raises(ValueError, match="ranks=0"):
        steps_and_share("send", 0, "ring")
    with pytest.raises(ValueError, match="algorithm='star'"):
        steps_and_share("send", 2, "star")
    with pytest.raises(ValueError, match="two ranks and two sizes"):
        AlphaBeta.fit([(1e6, 1.0)], kind="send", ranks=2)
