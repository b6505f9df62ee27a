"""From counts and ceilings to times and classes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devstream.roofline.curves import Tiling, attention_shape
from devstream.roofline.model import (
    CLASSES,
    UNKNOWN_ERROR,
    Counts,
    achieved,
    bound_of,
    ideal_times,
    predict_collective,
    predict_op,
    predict_transfer,
    ridge,
)
from devstream.roofline.tiles import Tile, Tiles
from devstream.testing.ceilings import ceilings

TOY = ceilings()

some = st.floats(0, 1e13)
counts = st.builds(
    Counts,
    kind=st.sampled_from(["", "pointwise 4", "norm 2", "attention bfloat16 forward 64", "never measured"]),
    matmul_flops=st.dictionaries(st.sampled_from(["bfloat16", "float32"]), some),
    vector_flops=st.dictionaries(st.just("float32"), some),
    read_bytes=st.floats(0, 1e11),
    write_bytes=st.floats(0, 1e11),
    link_bytes=st.dictionaries(st.sampled_from(["d2h pinned", "h2d pinned"]), st.floats(0, 1e10)),
    collective_bytes=st.dictionaries(st.just("all_reduce"), st.floats(0, 1e10)),
    launches=st.integers(0, 4),
)


@given(counts, counts)
def test_ideal_compute_and_memory_times_add_up(one, other):
    both = ideal_times(one + other, TOY)
    for name in ("memory", "overhead"):
        assert both[name] == pytest.approx(ideal_times(one, TOY)[name] + ideal_times(other, TOY)[name])


@given(counts)
def test_a_prediction_is_at_least_every_ideal_time_but_that_of_memory(one):
    found = predict_op(one, TOY)
    assert found.seconds >= max(time for name, time in found.ideal_s.items() if name != "memory") * (1 - 1e-9)
    assert found.bound in CLASSES


@given(counts, st.floats(1, 100))
def test_more_bytes_and_flops_never_take_less_time(one, factor):
    more = Counts(
        kind=one.kind,
        matmul_flops={key: value * factor for key, value in one.matmul_flops.items()},
        vector_flops={key: value * factor for key, value in one.vector_flops.items()},
        read_bytes=one.read_bytes * factor,
        write_bytes=one.write_bytes * factor,
        link_bytes={key: value * factor for key, value in one.link_bytes.items()},
        collective_bytes={key: value * factor for key, value in one.collective_bytes.items()},
        launches=one.launches,
    )
    assert predict_op(one, TOY).seconds <= predict_op(more, TOY).seconds * (1 + 1e-9)


@given(counts, counts, counts)
def test_sums_of_counts_do_not_depend_on_the_order(one, two, three):
    first, second = (one + two) + three, three + (two + one)
    assert first.flops == pytest.approx(second.flops)
    assert first.memory_bytes == pytest.approx(second.memory_bytes)
    assert first.launches == second.launches


def test_the_sum_of_nothing_changes_nothing():
    one = Counts("pointwise 4", vector_flops={"float32": 3.0}, read_bytes=8.0)
    total = Counts.nothing() + one
    assert (total.flops, total.memory_bytes, total.launches) == (3.0, 8.0, 1)


def test_a_large_matmul_is_bound_by_compute_and_a_thin_one_by_memory():
    n = 4096
    large = Counts("matmul bfloat16", {"bfloat16": 2.0 * n**3}, read_bytes=4.0 * n * n, write_bytes=2.0 * n * n)
    thin = Counts("matmul bfloat16", {"bfloat16": 2.0 * n * n}, read_bytes=2.0 * n * n)
    assert predict_op(large, TOY).bound == "compute"
    assert predict_op(thin, TOY).bound == "memory"
    # The thin one is predicted by the memory's curve, not by that of square matmuls.
    assert predict_op(thin, TOY).seconds >= 2.0 * n * n / 1e12


def test_a_pointwise_operation_turns_from_memory_to_compute_bound_at_the_ridge_of_the_vector_units():
    bytes_moved = 1e9
    for flops_per_byte, bound in ((1, "memory"), (4.9, "memory"), (5.3, "compute"), (100, "compute")):
        one = Counts(
            "pointwise 4", {}, {"float32": flops_per_byte * bytes_moved}, bytes_moved / 2, bytes_moved / 2
        )
        assert predict_op(one, TOY).bound == bound, flops_per_byte


def test_a_fused_chain_takes_the_time_of_one_operation_until_the_vector_units_are_full():
    def fused(k):
        return predict_op(Counts("pointwise 4", {}, {"float32": k * 1e8}, 4e8, 4e8), TOY).seconds

    assert fused(1) == fused(8) == fused(32)  # 8 bytes an element, and 5 FLOPs a byte at the ridge
    assert fused(80) == pytest.approx(2 * fused(40), rel=0.01)


def test_a_tiny_operation_is_overhead():
    assert predict_op(Counts("pointwise 4", {}, {"float32": 64.0}, 256.0, 256.0), TOY).bound == "overhead"


def test_copies_and_collectives_have_classes_of_their_own():
    assert predict_op(Counts(link_bytes={"d2h pinned": 1e8}), TOY).bound == "link"
    assert predict_op(Counts(collective_bytes={"all_reduce": 1e8}), TOY).bound == "communication"


def test_waves_of_tiles_that_are_not_full_show_in_the_time():
    full = Counts("matmul bfloat16", {"bfloat16": 2.0 * 1280 * 1280 * 4096}, shape=(1, 1280, 1280, 4096))
    one_more = Counts("matmul bfloat16", {"bfloat16": 2.0 * 1281 * 1280 * 4096}, shape=(1, 1281, 1280, 4096))
    ratio = predict_op(one_more, TOY).seconds / predict_op(full, TOY).seconds
    assert ratio > 1.9


def test_a_kind_that_was_never_measured_says_that_it_does_not_know():
    assert predict_op(Counts("fft", {}, {"float32": 1e9}, 1e9), TOY).error == UNKNOWN_ERROR
    assert predict_op(Counts("pointwise 4", {}, {}, 1e9), TOY).error == 0.05


def test_a_curve_of_another_element_size_serves_where_its_own_is_missing():
    only = ceilings(curves={"norm 4": TOY.curves["norm 4"]})
    assert only.curve("norm 2") is TOY.curves["norm 4"]
    assert TOY.curve("attention bfloat16 forward 96 causal") is TOY.curves["attention bfloat16 forward 64 causal"]
    assert TOY.curve("pointwise 2 unary") is TOY.curves["pointwise 2"]
    assert TOY.curve("matmul float64") is None
    assert TOY.curve("link h2d pageable") is None


# -- transfers and collectives ---------------------------------------------------------------------------


@given(st.floats(1, 1e11), st.floats(1, 1e11))
def test_more_bytes_over_the_link_never_take_less(one, other):
    low, high = (predict_transfer(size, TOY, direction="d2h").seconds for size in sorted((one, other)))
    assert low <= high


def test_a_transfer_has_the_links_latency_and_rate():
    assert predict_transfer(1, TOY, direction="h2d").seconds == pytest.approx(10e-6, rel=0.01)
    assert predict_transfer(1e10, TOY, direction="h2d").seconds == pytest.approx(1.0, rel=0.01)
    pageable = predict_transfer(1e10, TOY, direction="d2h", pinned=False)
    assert pageable.seconds == pytest.approx(3.3, rel=0.02)
    assert pageable.bound == "link"


def test_a_link_that_was_not_measured_is_refused_with_what_was():
    with pytest.raises(ValueError, match=r"no curve 'link h2d pageable'.*link d2h pageable"):
        predict_transfer(1e6, TOY, direction="h2d", pinned=False)
    with pytest.raises(ValueError, match="direction='up'"):
        predict_transfer(1e6, TOY, direction="up")


def test_a_collective_of_the_measured_kind_and_ranks_has_the_measured_error():
    assert predict_collective("all_reduce", 1e8, TOY, ranks=2).error == 0.1
    assert predict_collective("all_reduce", 1e8, TOY, ranks=8).error == 0.25
    assert predict_collective("all_gather", 1e8, TOY, ranks=2).error == 0.25


def test_small_all_reduces_of_many_ranks_take_the_tree_and_large_ones_the_ring():
    for size, faster in ((1e3, "tree"), (1e10, "ring")):
        chosen = predict_collective("all_reduce", size, TOY, ranks=64).seconds
        assert chosen == predict_collective("all_reduce", size, TOY, ranks=64, algorithm=faster).seconds
        assert chosen <= predict_collective("all_reduce", size, TOY, ranks=64, algorithm="ring").seconds


def test_without_a_measured_collective_the_peer_link_serves_and_without_any_link_it_is_refused():
    peers = ceilings(collectives={})
    assert predict_collective("all_gather", 1e10, peers, ranks=2).seconds == pytest.approx(0.05, rel=0.01)
    with pytest.raises(ValueError, match="no link between devices"):
        predict_collective("all_gather", 1e8, ceilings(collectives={}, curves={}), ranks=2)


# -- what was achieved -----------------------------------------------------------------------------------


def test_achieved_shares_are_of_the_ceilings():
    one = Counts("pointwise 4", {}, {"float32": 1e9}, 5e9, 5e9)
    found = achieved(one, 0.02, TOY)
    assert found.bound == "memory"
    assert found.shares["memory"] == pytest.approx(0.5, rel=0.01)
    assert found.shares["compute"] == pytest.approx(0.01, rel=0.01)
    assert found.bytes_per_s == 5e11


def test_no_time_is_no_measurement():
    with pytest.raises(ValueError, match="above 0"):
        achieved(Counts(), 0.0, TOY)


def test_nothing_at_all_is_overhead():
    assert bound_of(dict.fromkeys(CLASSES, 0.0)) == "overhead"


def test_the_ridge_is_the_ratio_of_the_ceilings():
    assert ridge(TOY, "bfloat16") == pytest.approx(100, rel=0.05)
    assert ridge(TOY, "float64") is None


@given(counts)
def test_intensity_is_flops_by_bytes(one):
    if one.memory_bytes:
        assert one.intensity == one.flops / one.memory_bytes
    else:
        assert one.intensity is None


def test_a_matmul_of_a_device_with_tiles_takes_their_time_and_longer_where_rows_begin_anywhere():
    tiles = Tiles((Tile(128, 128, 100e12),), 100, latency_s=1e-6, unaligned={2: 0.25})
    known = ceilings(tiles={"bfloat16": tiles})
    shape = (1, 1280, 1280, 4096)
    counts = Counts("matmul bfloat16", {"bfloat16": 2.0 * math.prod(shape)}, {}, 1e6, 1e6, shape=shape)
    aligned = predict_op(counts, known)
    assert aligned.seconds == pytest.approx(1e-6 + 2.0 * math.prod(shape) / 100e12)
    odd = predict_op(replace(counts, alignment=2), known)
    assert odd.seconds == pytest.approx(1e-6 + 4 * 2.0 * math.prod(shape) / 100e12)


def test_attention_pays_for_the_wave_that_its_last_rows_begin():
    known = ceilings(tilings={"attention bfloat16 forward 64": Tiling(128, 1, 100, 0)})
    per_head = 4.0 * 128 * 1024 * 64

    def counts(heads: int) -> Counts:
        shape = attention_shape(heads, 128, 1024)
        return Counts("attention bfloat16 forward 64", {"bfloat16": heads * per_head}, {}, 1.0, 1.0, shape=shape)

    one, full, spilled = (predict_op(counts(heads), known).seconds for heads in (51, 100, 101))
    assert one == pytest.approx(full)
    assert spilled > 1.5 * full
