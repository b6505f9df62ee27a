"""What ran where and when: spans from timed events, their overlap, and text, trace and picture of them.

recorder = report.Recorder(device)
with recorder.span("copy", "batch 7", stream=side):
    ...
spans = recorder.spans()
report.overlap(spans)["copy"].hidden_share
"""

from devstream.report._recorder import Recorder
from devstream.report.plot import write_picture
from devstream.report.text import as_text
from devstream.report.timeline import Exposure, Span, overlap, together
from devstream.report.trace import chrome_trace, write_trace

__all__ = [
    "Exposure",
    "Recorder",
    "Span",
    "as_text",
    "chrome_trace",
    "overlap",
    "together",
    "write_picture",
    "write_trace",
]
