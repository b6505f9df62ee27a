"""The trace has what Chrome's format wants."""

from __future__ import annotations

import json
from pathlib import Path

from devstream.report import Span, chrome_trace, write_trace

SPANS = [Span("copy", "batch", 1.0, 1.5), Span("compute", "step", 1.25, 3.0)]


def test_each_span_is_a_complete_event_in_microseconds() -> None:
    events = [event for event in chrome_trace(SPANS)["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("batch", 1000.0, 500.0),
        ("step", 1250.0, 1750.0),
    ]


def test_each_lane_is_a_thread_with_its_name() -> None:
    events = chrome_trace(SPANS)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [names[event["tid"]] for event in events if event["ph"] == "X"] == ["copy", "compute"]


def test_the_file_is_json_of_our_kind(tmp_path: Path) -> None:
    write_trace(SPANS, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert (document["kind"], document["schema"]) == ("devstream.trace", 1)
    assert len(document["traceEvents"]) == 7
