"""Interval arithmetic against counting, millisecond by millisecond."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devstream.exceptions import StreamTypeError
from devstream.report import as_text, chrome_trace, write_picture, write_trace
from devstream.report.timeline import Span, intersection, lanes, measure, overlap, together, union

LENGTH = 24
PIECE = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda p: (float(min(p)), float(max(p))))
PIECES = st.lists(PIECE, max_size=8)
SPANS = st.lists(st.builds(lambda lane, p: Span(lane, "work", *p), st.sampled_from("abc"), PIECE), max_size=12)


def cells(pieces: list[tuple[float, float]]) -> set[int]:
    """Return the whole milliseconds in *pieces*."""
    return {cell for start, end in pieces for cell in range(int(start), int(end))}


def busy(spans: list[Span], wanted: str) -> set[int]:
    return cells([(span.start_ms, span.end_ms) for span in spans if span.lane in wanted])


@given(PIECES)
def test_union_keeps_the_time_and_is_sorted_and_disjoint(pieces: list[tuple[float, float]]) -> None:
    joined = union(pieces)
    assert cells(joined) == cells(pieces)
    assert all(first[1] < second[0] for first, second in pairwise(joined))
    assert measure(joined) == len(cells(pieces))


@given(PIECES, PIECES)
def test_intersection_is_the_time_in_both(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> None:
    assert cells(intersection(union(first), union(second))) == cells(first) & cells(second)


@given(SPANS)
def test_busy_hidden_and_exposed_count_each_millisecond_once(spans: list[Span]) -> None:
    for lane, times in overlap(spans).items():
        others = busy(spans, "abc".replace(lane, ""))
        assert times.busy_ms == len(busy(spans, lane))
        assert times.hidden_ms == len(busy(spans, lane) & others)
        assert times.exposed_ms == times.busy_ms - times.hidden_ms


@given(SPANS)
def test_only_the_lanes_asked_for_count_as_cover(spans: list[Span]) -> None:
    for lane, times in overlap(spans, under={"a"}).items():
        cover = set() if lane == "a" else busy(spans, "a")
        assert times.hidden_ms == len(busy(spans, lane) & cover)


@given(SPANS)
def test_lanes_taken_together_count_shared_time_once(spans: list[Span]) -> None:
    times = together(spans, {"a", "b"}, under={"c", "a"})
    assert times.busy_ms == len(busy(spans, "ab"))
    assert times.hidden_ms == len(busy(spans, "ab") & busy(spans, "c"))


def test_a_lane_does_not_cover_itself() -> None:
    spans = [Span("a", "one", 0, 4), Span("a", "two", 2, 6)]
    assert overlap(spans)["a"].hidden_ms == 0
    assert overlap(spans)["a"].busy_ms == 6


def test_a_lane_without_time_has_no_share() -> None:
    assert overlap([Span("a", "nothing", 1, 1)])["a"].hidden_share is None


def test_lanes_come_in_the_order_of_their_first_span() -> None:
    assert lanes([Span("b", "", 0, 1), Span("a", "", 0, 1), Span("b", "", 1, 2)]) == ["b", "a"]


@pytest.mark.parametrize("end", [0.5, -1e-9])
def test_a_span_that_ends_before_its_start_is_refused(end: float) -> None:
    with pytest.raises(ValueError, match="before its start"):
        Span("a", "work", 1.0, end)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_not_finite_is_refused(time: float) -> None:
    for which, times in (("start_ms", (time, 1.0)), ("end_ms", (1.0, time))):
        with pytest.raises(ValueError, match=f"'work' has {which}={time}, which is not finite"):
            Span("a", "work", *times)


@pytest.mark.parametrize("time", ["1", None, True, 1j])
def test_a_time_that_is_no_number_is_refused(time: Any) -> None:
    with pytest.raises(StreamTypeError, match=r"Span\(end_ms=\) takes a number, in ms"):
        Span("a", "work", 0.0, time)


@pytest.mark.parametrize("text", [3, None, b"a", ("a",)])
def test_a_lane_or_a_name_that_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(StreamTypeError, match=r"Span\(lane=\) takes a str"):
        Span(text, "work", 0.0, 1.0)
    with pytest.raises(StreamTypeError, match=r"Span\(name=\) takes a str"):
        Span("a", text, 0.0, 1.0)


def test_what_is_no_span_is_refused_by_every_report(tmp_path: Path) -> None:
    wrong: Any = [Span("a", "work", 0.0, 1.0), ("a", "work", 0.0, 1.0)]
    for report in (
        overlap,
        as_text,
        chrome_trace,
        lambda spans: together(spans, {"a"}, under={"b"}),
        lambda spans: write_picture(spans, tmp_path / "x.png"),
        lambda spans: write_trace(spans, tmp_path / "x.json"),
    ):
        with pytest.raises(StreamTypeError, match=r"takes objects of devstream\.report\.Span, not tuple"):
            report(wrong)
    assert list(tmp_path.iterdir()) == []


def test_one_text_is_no_collection_of_lanes() -> None:
    spans = [Span("a", "work", 0.0, 1.0), Span("b", "work", 0.0, 1.0)]
    for call in (
        lambda: overlap(spans, under="a"),
        lambda: together(spans, "a", under={"b"}),
        lambda: together(spans, {"a"}, under="b"),
    ):
        with pytest.raises(StreamTypeError, match="several lanes"):
            call()


@pytest.mark.parametrize("width", [1.5, True, float("nan"), "60"])
def test_a_width_that_is_no_number_of_characters_is_refused(width: Any) -> None:
    with pytest.raises(StreamTypeError, match=r"as_text\(width=\) takes an int"):
        as_text([], width=width)


def test_a_picture_of_another_kind_or_an_odd_title_is_refused_before_it_is_drawn(tmp_path: Path) -> None:
    spans = [Span("a", "work", 0.0, 1.0)]
    for name in ("x.jpg", "x", "x.svg"):
        with pytest.raises(ValueError, match=r"ends with \.png"):
            write_picture(spans, tmp_path / name)
    with pytest.raises(StreamTypeError, match="title"):
        write_picture(spans, tmp_path / "x.png", title=3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
