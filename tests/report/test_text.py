"""Spans as text."""

from __future__ import annotations

import pytest

from devstream.report import Span, as_text


def test_each_lane_has_a_bar_and_its_times() -> None:
    text = as_text([Span("copy", "batch", 0, 5), Span("compute", "step", 0, 10)], width=10)
    copy, compute, length = text.splitlines()
    assert copy.startswith("copy    |#####     |")
    assert "busy 5.000 ms, exposed 0.000 ms, hidden 5.000 ms" in copy
    assert compute.startswith("compute |##########|")
    assert "10.000 ms" in length


def test_short_work_leaves_a_mark() -> None:
    assert "|-" in as_text([Span("a", "short", 0, 0.1), Span("b", "long", 0, 100)], width=10).splitlines()[0]


@pytest.mark.parametrize("spans", [[], [Span("a", "nothing", 1, 1)]])
def test_nothing_to_show_is_no_error(spans: list[Span]) -> None:
    assert as_text(spans)


def test_a_bar_without_width_is_refused() -> None:
    with pytest.raises(ValueError, match="width=0"):
        as_text([], width=0)
