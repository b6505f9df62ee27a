"""Spans as a trace in Chrome's JSON format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from devstream import _files
from devstream.report.timeline import Span, check_text, checked, lanes

KIND, SCHEMA = "devstream.trace", 1


def chrome_trace(spans: Iterable[Span], *, process: str = "devstream") -> dict[str, Any]:  # Any: JSON
    """Return the trace: one thread a lane, times in µs as the format wants them.

    Raises:
        StreamTypeError: *spans* has something else than spans, or *process* is no text.
    """
    check_text("chrome_trace(process=)", process)
    spans = checked(spans)
    rows = {lane: number for number, lane in enumerate(lanes(spans), 1)}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": process}}]
    for lane, row in rows.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": lane}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": row, "args": {"sort_index": row}})
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": 1,
            "tid": rows[span.lane],
            "ts": span.start_ms * 1e3,
            "dur": (span.end_ms - span.start_ms) * 1e3,
        }
        for span in spans
    ]
    # The format lets readers pass over top-level keys that they don't know.
    return {"kind": KIND, "schema": SCHEMA, "displayTimeUnit": "ms", "traceEvents": events}


def write_trace(spans: Iterable[Span], path: str | Path, *, process: str = "devstream") -> None:
    """Write `chrome_trace` to *path*, whole or not at all; raises ``OSError`` where that can't be done."""
    _files.write_bytes(Path(path), json.dumps(chrome_trace(spans, process=process), allow_nan=False).encode())
