"""Graphs of operations on several streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devstream.roofline.model import Counts, predict_op
from devstream.roofline.schedule import Schedule, Task, predict_graph
from devstream.testing.ceilings import ceilings

TOY = ceilings()

MATMUL = Counts("matmul bfloat16", {"bfloat16": 1e11})  # fills the device: 1 ms
TINY = Counts("pointwise 4", {}, {"float32": 64.0}, 256.0, 256.0)  # 2 µs of nothing
COPY = Counts(link_bytes={"d2h pinned": 5e6})  # half a millisecond of link


@st.composite
def graphs(draw):
    tasks = []
    for index in range(draw(st.integers(1, 10))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        tasks.append(
            Task(
                draw(st.sampled_from([MATMUL, TINY, COPY])),
                draw(st.sampled_from("abc")),
                tuple(after),
                host_s=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
            )
        )
    return tasks


def longest_path(tasks):
    ends, last = [], {}
    for task in tasks:
        needs = [ends[i] for i in task.after] + ([last[task.stream]] if task.stream in last else [])
        ends.append(max(needs, default=0.0) + predict_op(task.counts, TOY).seconds)
        last[task.stream] = ends[-1]
    return max(ends)


@given(graphs(), st.booleans())
def test_the_time_lies_between_the_longest_path_and_everything_in_turn(tasks, captured):
    found = predict_graph(tasks, TOY, captured=captured)
    alone = sum(predict_op(task.counts, TOY).seconds for task in tasks)
    host = 0.0 if captured else sum(task.host_s for task in tasks)
    assert longest_path(tasks) * (1 - 1e-9) <= found.seconds <= (alone + host) * (1 + 1e-9)


@given(graphs())
def test_the_order_is_kept(tasks):
    spans = predict_graph(tasks, TOY).spans
    last = {}
    for index, task in enumerate(tasks):
        for other in (*task.after, *([last[task.stream]] if task.stream in last else [])):
            assert spans[other][1] <= spans[index][0] + 1e-12
        last[task.stream] = index


@given(graphs())
def test_a_resource_is_never_used_more_than_there_is(tasks):
    found = predict_graph(tasks, TOY, captured=True)
    copies = sum(predict_op(task.counts, TOY).seconds for task in tasks if task.counts is COPY)
    matmuls = sum(predict_op(task.counts, TOY).ideal_s["compute"] for task in tasks if task.counts is MATMUL)
    assert found.seconds >= max(copies, matmuls) * (1 - 1e-9)


@given(graphs())
def test_capturing_one_stream_never_makes_it_slower(tasks):
    # With several streams it can: another order may share better, as in every schedule without foresight.
    tasks = [replace(task, stream="a") for task in tasks]
    assert predict_graph(tasks, TOY, captured=True).seconds <= predict_graph(tasks, TOY).seconds * (1 + 1e-9)


def test_two_streams_of_big_matmuls_gain_nothing():
    one = predict_graph([Task(MATMUL, "a")] * 4, TOY, captured=True)
    two = predict_graph([Task(MATMUL, stream) for stream in "abab"], TOY, captured=True)
    assert two.seconds == pytest.approx(one.seconds, rel=0.01)


def test_two_streams_of_small_kernels_halve_the_time():
    one = predict_graph([Task(TINY, "a")] * 8, TOY, captured=True)
    two = predict_graph([Task(TINY, stream) for stream in "abababab"], TOY, captured=True)
    assert two.seconds == pytest.approx(one.seconds / 2, rel=0.01)


def test_a_copy_hides_under_compute():
    hidden = predict_graph([Task(MATMUL, "a"), Task(COPY, "b")], TOY, captured=True)
    assert hidden.seconds == pytest.approx(predict_op(MATMUL, TOY).seconds)


def test_two_copies_of_one_direction_share_the_link_and_two_directions_do_not():
    back = Counts(link_bytes={"h2d pinned": 5e6})
    same = predict_graph([Task(COPY, "a"), Task(COPY, "b")], TOY, captured=True)
    both = predict_graph([Task(COPY, "a"), Task(back, "b")], TOY, captured=True)
    assert same.seconds == pytest.approx(2 * both.seconds)


def test_a_launch_bound_graph_is_overhead_until_it_is_captured():
    tasks = [Task(TINY, "a")] * 100
    launched = predict_graph(tasks, TOY)
    assert launched.bound == "overhead"
    assert launched.seconds == pytest.approx(100 * TOY.launch_s, rel=0.01)
    assert launched.idle_s == pytest.approx(100 * (TOY.launch_s - TOY.floor_s), rel=0.02)
    assert predict_graph(tasks, TOY, captured=True).seconds == pytest.approx(100 * TOY.floor_s, rel=0.05)


def mlp(batch, width=1024, layers=16):
    layer = Counts(
        "matmul bfloat16",
        {"bfloat16": 2.0 * batch * width * width},
        {},
        2.0 * (batch * width + width * width),
        2.0 * batch * width,
    )
    relu = Counts("pointwise 2", {}, {"float32": 1.0 * batch * width}, 2.0 * batch * width, 2.0 * batch * width)
    return [Task(counts, "a") for _ in range(layers) for counts in (layer, relu)]


def test_a_larger_batch_takes_a_step_from_overhead_to_compute_and_a_sample_never_costs_more():
    found = {batch: predict_graph(mlp(batch), TOY) for batch in (16, 64, 256, 1024, 4096, 16384, 65536)}
    bounds = [one.bound for one in found.values()]
    assert bounds[0] == "overhead"
    assert bounds[-1] == "compute"
    assert bounds.index("compute") == len(bounds) - bounds[::-1].count("compute")  # once, and for good
    costs = [one.seconds / batch for batch, one in found.items()]
    assert costs == sorted(costs, reverse=True)


def test_measured_times_take_the_place_of_predicted_ones():
    found = predict_graph([Task(MATMUL, "a", seconds=0.5)], TOY, captured=True)
    assert found.seconds == 0.5
    assert found.error == 0.0


def test_no_tasks_take_no_time():
    assert predict_graph([], TOY) == Schedule(
        0.0,
        0.0,
        (),
        dict.fromkeys(("compute", "memory", "overhead", "link", "communication"), 0.0),
        0.0,
        "compute",
    )


def test_a_task_cannot_wait_for_a_later_one():
    with pytest.raises(ValueError, match="earlier ones"):
        predict_graph([Task(TINY, after=(0,))], TOY)
