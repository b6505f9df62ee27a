"""The sentence of each warning, by the name of its class; `devstream.exceptions` fills in the facts."""

WARNINGS = {
    "RaceWarning": "{race}",
    "CompileWarning": (
        "torch.compile's backend {compiler!r} does not keep the order of stream code: results may be wrong, or "
        'nothing compiles. Use torch.compile(..., backend="devstream")'
    ),
    "MissingWaitWarning": "in eager mode this code would race; compiled code has the wait: {wait}",
    "EventOverwrittenWarning": (
        "{event} was recorded again before anyone waited for its last record; whoever should have waited for "
        "that one now waits for the later one. Use one event per hand-over"
    ),
    "RecordStreamWarning": (
        "the tensor was allocated on {stream}, so record_stream changes nothing; record the stream that reads "
        "it. (Was current_stream() called inside `with devstream.stream(...)`?)"
    ),
    "BackendWarning": "backend {name!r}: {reason}",
    "BlockingCopyWarning": (
        "the host side of a copy {direction} on backend {backend!r} is pageable, so this copy blocks the host: "
        "{reason}. Said once"
    ),
    "CacheWarning": "doing without the cached file {path}: {reason}",
    "LatchDroppedWarning": (
        "a latch was dropped while it held {stream}, which goes on now; call its release(), or use "
        "devstream.testing.latch in a with statement"
    ),
}
