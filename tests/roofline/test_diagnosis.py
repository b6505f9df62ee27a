"""Regions, actions and tables from operations and times: no device, no clock."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devstream.exceptions import MissingExtraError
from devstream.report import Span
from devstream.report import plot as report_plot
from devstream.roofline import plot
from devstream.roofline.actions import Situation, actions, chains, fused_bytes, fused_counts
from devstream.roofline.counting import Counted, Kept, Op
from devstream.roofline.diagnosis import Diagnosis, Memory, by_class, region, regions
from devstream.roofline.formulas import Described
from devstream.roofline.model import CLASSES, Counts
from devstream.roofline.tables import as_text
from devstream.testing.ceilings import ceilings

TOY = ceilings()
MIB = 2.0**20


def op(index, kind, *, reads=(), writes=(), size=64 * MIB, dtype="bfloat16", **place):
    place = {"module": "M", "line": "a.py:1", "backward": False} | place
    if kind == "matmul":
        counts = Counts(f"matmul {dtype}", {dtype: 1e11}, {}, 2e6, 1e6, shape=(1, 4096, 4096, 2980))
        what = Described("matmul", counts)
    elif kind == "pointwise":
        what = Described("pointwise", Counts("pointwise 4", {}, {"float32": size / 4}, size, size), fusable=True)
    elif kind == "tiny":
        what = Described("pointwise", Counts("pointwise 4", {}, {"float32": 64}, 256, 256), fusable=True)
    elif kind == "norm":
        what = Described("normalisation", Counts("norm 4", {}, {"float32": 2 * size}, size, size), fusable=True)
    elif kind == "item":
        what = Described("link", Counts("link", link_bytes={"d2h pageable": 4.0}))
    else:
        what = Described("link", Counts("link", link_bytes={"h2d pageable": size}))
    name = "aten._local_scalar_dense.default" if kind == "item" else f"aten.{kind}.default"
    return Op(index, name, what, reads=tuple(reads), writes=tuple(writes), **place)


def situation(ops, *, wall_s=None, busy_s=None, kept=(), sizes=None, **facts):
    busy_s = sum(took for _, took in ops) if busy_s is None else busy_s
    counted = Counted([one for one, _ in ops], list(kept), None, sizes or {})
    return Situation(ops, counted, busy_s if wall_s is None else wall_s, busy_s, facts.pop("device", TOY), **facts)


MIXED = [
    (op(0, "matmul", writes=(1,)), 1.1e-3),
    (op(1, "pointwise", reads=(1,), writes=(2,), line="a.py:2", module="M.act"), 0.2e-3),
    (op(2, "norm", reads=(2,), writes=(3,), line="a.py:3", module="M.norm"), 0.3e-3),
    (op(3, "tiny", line="a.py:4", module=""), 5e-6),
    (op(4, "copy", line="a.py:5", module=""), 0.4e-3),
]


# -- regions ---------------------------------------------------------------------------------------------


def test_shares_of_time_and_of_flops_stand_beside_each_other():
    matmul, pointwise, *_ = by_class(MIXED, TOY)[0], by_class(MIXED, TOY)[2]
    assert matmul.name == "matmul"
    assert matmul.flops_share > 0.99
    assert matmul.time_share == pytest.approx(1.1e-3 / 2.005e-3)
    assert pointwise.flops_share < 0.01


def test_each_operation_gets_its_class():
    lines = {one.name: one.bound for one in regions(MIXED, lambda one: one.line, TOY)}
    assert lines == {
        "a.py:1": "compute",
        "a.py:2": "memory",
        "a.py:3": "memory",
        "a.py:4": "overhead",
        "a.py:5": "link",
    }


def test_a_region_is_what_most_of_its_time_is():
    one = region("all", MIXED, TOY, all_s=1.0, all_flops=1.0)
    assert one.bound == "compute"
    assert one.class_s["memory"] == pytest.approx(0.5e-3)
    assert sum(one.class_s.values()) == pytest.approx(one.seconds)


def test_reached_shares_are_of_the_ceilings():
    one = region("m", MIXED[:1], TOY, all_s=1.0, all_flops=1.0)
    assert one.shares["compute"] == pytest.approx(1e-3 / 1.1e-3, rel=0.02)
    assert one.flops_per_s == pytest.approx(1e11 / 1.1e-3)


def test_regions_are_sorted_by_time_and_what_has_no_name_is_left_out():
    found = regions(MIXED, lambda one: one.module, TOY)
    assert [one.name for one in found] == ["M", "M.norm", "M.act"]


kinds = st.sampled_from(["matmul", "pointwise", "tiny", "norm", "copy"])


@given(st.lists(st.tuples(kinds, st.floats(1e-7, 1e-2)), min_size=1, max_size=20))
def test_regions_add_up_to_the_whole(drawn):
    ops = [(op(index, kind), took) for index, (kind, took) in enumerate(drawn)]
    found = by_class(ops, TOY)
    assert sum(one.time_share for one in found) == pytest.approx(1.0)
    assert sum(one.seconds for one in found) == pytest.approx(sum(took for _, took in ops))
    flops = sum(one.what.counts.flops for one, _ in ops)
    assert sum(one.counts.flops for one in found) == pytest.approx(flops)
    assert sum(one.flops_share for one in found) == pytest.approx(1.0 if flops else 0.0)


def test_compiled_classes_have_the_flops_of_the_code_as_it_is_written():
    kernels = [(op(0, "pointwise"), 1e-3)]
    found = {one.name: one for one in by_class(kernels, TOY, flops_of=MIXED)}
    assert found["pointwise"].flops_share < 0.01
    assert found["pointwise"].seconds == 1e-3
    assert found["matmul"].seconds == 0.0
    assert found["matmul"].flops_share > 0.99


# -- fusing ----------------------------------------------------------------------------------------------


def chain_of(length, *, took=0.2e-3, size=64 * MIB):
    return [
        (op(index, "pointwise", reads=(index,), writes=(index + 1,), size=size), took) for index in range(length)
    ]


def test_a_chain_of_pointwise_operations_is_fused_to_one_read_and_one_write():
    ops = chain_of(5)
    (chain,) = chains(ops)
    assert len(chain) == 5
    sizes = dict.fromkeys(range(6), 64 * MIB)
    assert fused_bytes(chain, {5}, sizes) == 2 * 64 * MIB


def test_what_is_needed_later_must_still_be_written():
    (chain,) = chains(chain_of(5))
    sizes = dict.fromkeys(range(6), 64 * MIB)
    assert fused_bytes(chain, {2, 5}, sizes) == 3 * 64 * MIB


def test_a_matmul_ends_a_chain_and_unrelated_operations_begin_another():
    ops = [*chain_of(2), (op(2, "matmul"), 1.0), (op(3, "pointwise", reads=(9,), writes=(10,)), 1.0)]
    ops += [
        (op(4, "pointwise", reads=(20,), writes=(21,)), 1.0),
        (op(5, "pointwise", reads=(21,), writes=(22,)), 1.0),
    ]
    assert [[one.index for one, _ in chain] for chain in chains(ops)] == [[0, 1], [4, 5]]


@given(st.lists(st.tuples(st.sets(st.integers(0, 8), max_size=3), st.integers(0, 8)), min_size=2, max_size=8))
def test_fusing_never_moves_more(drawn):
    ops = [
        (op(index, "pointwise", reads=tuple(reads), writes=(written,)), 1.0)
        for index, (reads, written) in enumerate(drawn)
    ]
    sizes = dict.fromkeys(range(9), 64 * MIB)
    for chain in chains(ops):
        now = sum(one.what.counts.memory_bytes for one, _ in chain)
        assert 0 <= fused_bytes(chain, set(range(9)), sizes) <= now
    counted = Counted([one for one, _ in ops], [], None, sizes)
    fused = fused_counts(ops, counted)
    assert fused.memory_bytes <= sum(one.what.counts.memory_bytes for one, _ in ops) + 1
    assert fused.flops == pytest.approx(sum(one.what.counts.flops for one, _ in ops))


def kinds_of(found):
    return [one.kind for one in found]


def test_fusing_a_chain_of_five_saves_four_fifths():
    sizes = dict.fromkeys(range(6), 64 * MIB)
    first, *_ = actions(situation(chain_of(5), sizes=sizes))
    assert first.kind == "compile"
    assert first.gain_s == pytest.approx(0.8 * 5 * 0.2e-3)
    assert first.where == "a.py:1"


def test_compiled_code_is_not_told_to_be_compiled():
    assert "compile" not in kinds_of(actions(situation(chain_of(5), compiled=True)))


# -- the other cures -------------------------------------------------------------------------------------


def test_a_device_that_waits_for_the_host_is_told_to_capture_and_what_prevents_it():
    ops = [(op(index, "tiny"), 2e-6) for index in range(100)]
    found = {one.kind: one for one in actions(situation(ops, wall_s=1e-3, can_capture=True))}
    assert found["capture"].gain_s == pytest.approx(0.7e-3)
    ops.append((op(100, "item", line="train.py:9"), 2e-6))
    found = {one.kind: one for one in actions(situation(ops, wall_s=1e-3, can_capture=True))}
    assert "train.py:9" in found["capture"].text


def test_a_device_without_graphs_is_not():
    ops = [(op(index, "tiny"), 2e-6) for index in range(100)]
    assert "capture" not in kinds_of(actions(situation(ops, wall_s=1e-3)))


def test_overhead_is_shared_by_a_larger_batch_and_a_full_device_gains_nothing():
    tiny = [(op(index, "tiny"), 2e-6) for index in range(100)]
    assert "batch" in kinds_of(actions(situation(tiny, wall_s=1e-3)))
    assert "batch" not in kinds_of(actions(situation([(op(0, "matmul"), 1e-3)])))


def test_an_exposed_copy_is_told_with_its_line_and_to_be_pinned():
    ops = [(op(0, "matmul"), 5e-3), (op(1, "copy", line="load.py:7"), 2e-3)]
    found = {one.kind: one for one in actions(situation(ops, exposed_link_s=1.5e-3))}
    assert found["overlap"].gain_s == 1.5e-3
    assert found["overlap"].where == "load.py:7"
    assert "pageable" in found["overlap"].text
    assert "overlap" not in kinds_of(actions(situation(ops, exposed_link_s=0.0)))


def test_float32_matmuls_are_told_to_be_narrower_by_the_ratio_of_the_ceilings():
    ops = [(op(0, "matmul", dtype="float32"), 1e-2)]
    found = {one.kind: one for one in actions(situation(ops))}
    assert found["dtype"].gain_s == pytest.approx(0.9e-2, rel=0.02)
    assert "dtype" not in kinds_of(actions(situation([(op(0, "matmul"), 1e-3)])))


def test_cheap_results_are_recomputed_and_expensive_ones_moved():
    ops = [
        (op(0, "matmul", writes=(1,), line="a.py:1"), 1e-3),
        (op(1, "pointwise", reads=(1,), writes=(2,), line="a.py:2"), 0.2e-3),
        (op(2, "matmul", backward=True), 2e-3),
    ]
    kept = [Kept(1, 8 * MIB, 0), Kept(2, 64 * MIB, 1)]
    found = {one.kind: one for one in actions(situation(ops, kept=kept))}
    assert found["recompute"].gain_bytes == 64 * MIB
    assert found["recompute"].gain_s == -0.2e-3
    assert found["recompute"].where == "a.py:2"
    assert found["offload"].gain_bytes == 8 * MIB
    assert found["offload"].gain_s == 0.0
    assert "fits under" in found["offload"].text


def test_a_copy_that_is_longer_than_the_forward_costs_the_difference():
    ops = [(op(0, "matmul", writes=(1,)), 1e-3)]
    found = {one.kind: one for one in actions(situation(ops, kept=[Kept(1, 1e9, 0)]))}
    assert found["offload"].gain_s == pytest.approx(1e-3 - 0.1, rel=0.01)
    assert "is longer than" in found["offload"].text


def test_actions_are_sorted_by_gain_and_trifles_are_left_out():
    found = actions(situation([*MIXED, *[(op(9, "pointwise"), 1e-9)]], wall_s=1.0, busy_s=0.9))
    assert [one.gain_s for one in found] == sorted((one.gain_s for one in found), reverse=True)
    assert all(one.gain_s > 0.01 for one in found)


# -- the whole -------------------------------------------------------------------------------------------


def whole(**changes):
    all_s = sum(took for _, took in MIXED)
    facts = {
        "function": "step",
        "device": "toy:0",
        "ceilings": TOY,
        "wall_s": 4e-3,
        "busy_s": 2e-3,
        "total": region("total", MIXED, TOY, all_s=all_s, all_flops=1e11),
        "by_class": by_class(MIXED, TOY),
        "by_module": regions(MIXED, lambda one: one.module, TOY),
        "by_line": regions(MIXED, lambda one: one.line, TOY),
        "by_kernel": regions(MIXED, lambda one: one.name, TOY),
        "memory": Memory(80e9, 1e9, 2e9, 3e9, 64 * MIB, "aten.mm at a.py:1"),
        "actions": actions(situation(MIXED, wall_s=4e-3, exposed_link_s=0.4e-3)),
        "spans": (Span("stream 7", "k", 0.0, 1.0), Span("d2h", "c", 0.5, 2.0)),
    }
    return Diagnosis(**(facts | changes))


def test_idle_time_is_overhead():
    found = whole()
    assert found.idle_share == 0.5
    assert found.bound == "overhead"
    assert found.class_s["overhead"] == pytest.approx(2.005e-3)
    assert whole(wall_s=2e-3).bound == "compute"


def test_it_is_json():
    data = json.loads(json.dumps(whole().as_json(), allow_nan=False))
    assert data["class"] == "overhead"
    assert data["by_class"][0]["name"] == "matmul"
    assert set(data["class_s"]) == set(CLASSES)
    assert data["memory"]["capacity"] == 80e9
    assert data["actions"][0]["text"]


def test_the_text_says_the_class_the_shares_the_memory_and_what_helps():
    text = str(whole())
    first, *_ = text.splitlines()
    assert first == "step on toy:0 (toy): overhead-bound, 4 ms a run"
    assert "idle 50%" in text
    assert "capacity 74.5 GiB" in text
    assert "Largest block: 64 MiB, made by aten.mm at a.py:1" in text
    assert "What would help" in text
    for word in ("matmul", "M.norm", "a.py:5", "compute", "memory", "link"):
        assert word in text


def test_the_text_of_nothing_is_text():
    nothing = region("total", [], TOY, all_s=0.0, all_flops=0.0)
    empty = whole(by_class=(), by_module=(), by_line=(), by_kernel=(), total=nothing, actions=(), memory=Memory())
    assert "step on toy:0" in as_text(empty)


# -- the picture -----------------------------------------------------------------------------------------


def test_the_picture_has_the_lines_of_the_ceilings_and_a_dot_a_kernel():
    rate, flat = plot.lines(TOY)
    assert rate == TOY.memory_bytes_per_s
    assert set(flat) == {"matmul bfloat16", "matmul float32", "vector float32"}
    found = {name: (intensity, bound) for intensity, _, _, bound, name in plot.dots(whole().by_kernel)}
    assert found["aten.matmul.default"][1] == "compute"
    assert "aten.copy.default" not in found  # moves nothing in the device's memory


def test_the_picture_is_a_png_also_of_nothing(tmp_path):
    plot.write_picture(whole(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert plot.draw(whole(by_kernel=(), spans=(), ceilings=ceilings(curves={}, vector={}))).startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(report_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="matplotlib"):
        plot.draw(whole())
