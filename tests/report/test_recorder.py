"""Spans come from the events of the work itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devstream
from devstream.abc import Capability
from devstream.backends.cpu import CpuBackend
from devstream.exceptions import StreamTypeError, UnsupportedError
from devstream.report import Recorder, overlap
from devstream.testing import latch


def test_spans_come_in_the_order_of_their_issue_with_lane_and_name(device: torch.device) -> None:
    recorder = Recorder(device)
    for name in ("one", "two"):
        with recorder.span("work", name):
            pass
    spans = recorder.spans()
    assert [(span.lane, span.name) for span in spans] == [("work", "one"), ("work", "two")]
    assert 0 <= spans[0].start_ms <= spans[0].end_ms <= spans[1].start_ms <= spans[1].end_ms


def test_work_behind_a_latch_is_hidden_under_the_work_of_another_stream(device: torch.device) -> None:
    recorder, side, main = Recorder(device), devstream.Stream(device), devstream.Stream(device)
    with recorder.span("main", "long", stream=main), recorder.span("side", "held", stream=side):
        first, second = latch(main), latch(side)
        held_main, held_side = first.__enter__(), second.__enter__()
    held_side.release()
    side.synchronize()  # the side has ended before the main work may end
    held_main.release()
    main.synchronize()
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    times = overlap(recorder.spans())
    assert times["side"].busy_ms > 0
    assert times["side"].exposed_ms == pytest.approx(0, abs=1e-2)


def test_a_span_starts_only_after_what_was_issued_before_it(device: torch.device) -> None:
    recorder, side = Recorder(device), devstream.Stream(device)
    released = devstream.Event(device, enable_timing=True)
    with latch(side) as held:
        with recorder.span("side", "late", stream=side):
            pass
        released.record(devstream.default_stream(device))
        held.release()
        side.synchronize()
    assert recorder.spans()[0].start_ms >= recorder._origin.elapsed_time(released) - 1e-2


def test_work_that_raised_leaves_no_span(device: torch.device) -> None:
    recorder = Recorder(device)
    with pytest.raises(ZeroDivisionError), recorder.span("work", "broken"):
        _ = 1 / 0
    assert recorder.spans() == []


def test_a_device_that_keeps_no_time_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    own = devstream.backend(device)
    if not isinstance(own, CpuBackend):
        assert Capability.TIMING in own.capabilities(0)
        return
    monkeypatch.setattr(type(own), "capabilities", lambda self, index: Capability(0))
    with pytest.raises(UnsupportedError, match="TIMING"):
        Recorder(device)


@pytest.mark.parametrize("wrong", [3, None, b"copy"])
def test_a_lane_or_a_name_that_is_no_text_is_refused_at_the_call(device: torch.device, wrong: Any) -> None:
    recorder = Recorder(device)
    with pytest.raises(StreamTypeError, match=r"Recorder\.span\(lane\) takes a str"):
        recorder.span(wrong, "work")
    with pytest.raises(StreamTypeError, match=r"Recorder\.span\(name\) takes a str"):
        recorder.span("work", wrong)
    assert recorder.spans() == []


def test_a_span_that_is_open_is_not_opened_again(device: torch.device) -> None:
    recorder = Recorder(device)
    span = recorder.span("work", "once")
    with span, pytest.raises(ValueError, match="'once' is open already"), span:
        pass
    with span:
        pass
    assert [one.name for one in recorder.spans()] == ["once", "once"]
