"""Every warning: its class, and its sentence, which `warning` writes; `devstream.exceptions` exports them."""

_TEXTS = {
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
    "GraphCaptureWarning": (
        "a compiled {what} is launched step by step, with no device graph: {reason}. Its results are the same. "
        "Said once for this function"
    ),
    "CacheWarning": "doing without the cached file {path}: {reason}",
    "LatchDroppedWarning": (
        "a latch was dropped while it held {stream}, which goes on now; call its release(), or use "
        "devstream.testing.latch in a with statement"
    ),
}


class DevstreamWarning(UserWarning):
    """Base of every warning of ours."""


class EventOverwrittenWarning(DevstreamWarning):
    """Under strict: an event was recorded again before anyone had looked at its last record."""


class RecordStreamWarning(DevstreamWarning):
    """``record_stream`` was told the stream that already owns the memory."""


class BackendWarning(DevstreamWarning):
    """A backend runs in a way that its user should know about."""


class BlockingCopyWarning(DevstreamWarning):
    """A copy between host and device blocks the host, because its host memory is pageable."""


class RaceWarning(DevstreamWarning):
    """The race checker found a race, under ``on_race="warn"``."""


class CompileWarning(DevstreamWarning):
    """Stream code goes to a compiler that doesn't keep its order."""


class MissingWaitWarning(DevstreamWarning):
    """Compiled code has a wait that its eager form lacks, and would race without."""


class GraphCaptureWarning(DevstreamWarning):
    """A mode that captures device graphs was asked for, and a program is launched without one."""


class CacheWarning(DevstreamWarning):
    """A cached file was damaged or foreign, and was ignored."""


class LatchDroppedWarning(DevstreamWarning):
    """A latch was dropped while it still held its stream."""


def warning(cls: type[DevstreamWarning], **facts: object) -> DevstreamWarning:
    """Return the warning of class *cls* with its sentence written from *facts*."""
    return cls(_TEXTS[cls.__name__].format(**facts))


__all__ = [
    "BackendWarning",
    "BlockingCopyWarning",
    "CacheWarning",
    "CompileWarning",
    "DevstreamWarning",
    "EventOverwrittenWarning",
    "GraphCaptureWarning",
    "LatchDroppedWarning",
    "MissingWaitWarning",
    "RaceWarning",
    "RecordStreamWarning",
    "warning",
]
