"""Stream code through ``torch.compile``: what eager means, compiled means.

`capture` reads the stream code out of a graph of Dynamo's; `interpret` is a backend that only captures and then
runs node by node, for tests and for looking at a program without a compiler in the way.
"""

from devstream._compat import dynamo
from devstream.compiler._capture import capture
from devstream.compiler._captured import (
    MARK,
    Captured,
    EventSource,
    Mark,
    Operation,
    StreamSource,
    mark_of,
)
from devstream.compiler._interpret import interpret

# Who asks for a compiler traces soon; so torch's own rules never see a stream of ours.
dynamo.install()

__all__ = [
    "MARK",
    "Captured",
    "EventSource",
    "Mark",
    "Operation",
    "StreamSource",
    "capture",
    "interpret",
    "mark_of",
]
