"""Every error and warning that devstream raises, with all of their wording.

    DevstreamError
    ├─ BackendError
    │  ├─ BackendNotFoundError      + LookupError
    │  ├─ BackendUnavailableError   + RuntimeError
    │  ├─ BackendLoadError          + ImportError
    │  └─ BackendConflictError      + ValueError
    ├─ UnsupportedError             + NotImplementedError
    ├─ StreamTypeError              + TypeError
    ├─ FileFormatError              + ValueError
    ├─ MissingExtraError            + ImportError
    ├─ OrderingError                + RuntimeError
    │  ├─ GraphError                + ValueError
    │  ├─ WriteBackError
    │  ├─ ProofError
    │  └─ MissingWaitError
    ├─ MeasurementError             + RuntimeError
    ├─ DiagnosisError               + RuntimeError
    └─ StreamError                  + RuntimeError
       ├─ DeviceMismatchError       + ValueError
       ├─ EventNotRecordedError     + ValueError
       ├─ EventNotReadyError
       ├─ TimingDisabledError       + ValueError
       ├─ StreamNotEnteredError
       ├─ StreamInUseError
       ├─ ForkedProcessError
       ├─ IpcHandleError
       ├─ RaceError
       └─ CaptureError

    DevstreamWarning                + UserWarning
    ├─ EventOverwrittenWarning
    ├─ RecordStreamWarning
    ├─ BackendWarning
    ├─ BlockingCopyWarning
    ├─ RaceWarning
    ├─ CacheWarning
    ├─ CompileWarning
    ├─ MissingWaitWarning
    ├─ GraphCaptureWarning
    └─ LatchDroppedWarning

A constructor takes facts, by keyword, and keeps them as attributes; ``__str__`` writes the sentence. That is
why each class survives pickling, which ranks and worker processes rely on. Streams, events and tensors are
kept as text, because the objects themselves can't leave the process.

``EventNotRecordedError`` and ``TimingDisabledError`` are also ``ValueError``, since that is what
``torch.Event.elapsed_time`` raises in the same two cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from devstream._warnings import (
    BackendWarning,
    BlockingCopyWarning,
    CacheWarning,
    CompileWarning,
    DevstreamWarning,
    EventOverwrittenWarning,
    GraphCaptureWarning,
    LatchDroppedWarning,
    MissingWaitWarning,
    RaceWarning,
    RecordStreamWarning,
    warning,
)


class DevstreamError(Exception):
    """Base of every error of ours."""

    def __init__(self, **facts: object) -> None:
        self.facts = {name: _portable(value) for name, value in facts.items()}
        super().__init__(*self.facts.values())
        for name, value in self.facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # Any: a fact has the type that its raiser gave it


def _rebuild(cls: type[DevstreamError], facts: dict[str, object]) -> DevstreamError:
    return cls(**facts)


def _portable(value: object) -> object:
    """Keep plain data as it is; replace everything else by its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list | set | frozenset):
        return tuple(_portable(item) for item in value)
    return str(value)


# -- backends --------------------------------------------------------------------------------------------


class BackendError(DevstreamError):
    """Something about a backend, not about what was asked of it."""


class BackendNotFoundError(BackendError, LookupError):
    """No backend has this name, or none serves this device.

    Facts: *wanted*, *known* (names), *decided_by* (the step that asked for it).
    """

    def __init__(self, *, wanted: str, known: Iterable[str], decided_by: str) -> None:
        super().__init__(wanted=str(wanted), known=tuple(known), decided_by=decided_by)

    def __str__(self) -> str:
        near = [name for name in get_close_matches(self.wanted, self.known) if name != self.wanted]
        guess = f"Did you mean {near[0]!r}? " if near else ""
        return (
            f"no backend for {self.wanted!r} (asked for by {self.decided_by}); known backends: "
            f"{', '.join(self.known) or 'none'}. {guess}Install the package that provides it, or choose one "
            "of these with DEVSTREAM_BACKEND or a device argument"
        )


class BackendUnavailableError(BackendError, RuntimeError):
    """The backend exists but can't run here. Facts: *name*, *reason*."""

    def __init__(self, *, name: str, reason: str) -> None:
        super().__init__(name=name, reason=reason)

    def __str__(self) -> str:
        return (
            f"backend {self.name!r} can't run here: {self.reason}. "
            'Use device "cpu", or run `python -m devstream info` to see what this machine offers'
        )


class BackendLoadError(BackendError, ImportError):
    """A plug-in's backend failed to import or to start. Facts: *name*, *distribution*, *cause*."""

    def __init__(self, *, name: str, distribution: str, cause: str) -> None:
        super().__init__(name=name, distribution=distribution, cause=cause)

    def __str__(self) -> str:
        return (
            f"backend {self.name!r} of {self.distribution} could not be loaded: {self.cause}. "
            f"Repair or uninstall {self.distribution}; other backends are not affected"
        )


class BackendConflictError(BackendError, ValueError):
    """Two claim the same backend name. Facts: *name*, *first*, *second* (the two claimants)."""

    def __init__(self, *, name: str, first: str, second: str) -> None:
        super().__init__(name=name, first=first, second=second)

    def __str__(self) -> str:
        return (
            f"the backend name {self.name!r} is claimed twice: by {self.first} and by {self.second}. "
            "Uninstall one of them, or ask its authors to register another name"
        )


class UnsupportedError(DevstreamError, NotImplementedError):
    """The backend, device or stream lacks a capability.

    Facts: *operation*, *backend*, *capability*, *alternative* (what to do instead).
    """

    def __init__(self, *, operation: str, backend: str, capability: str, alternative: str) -> None:
        super().__init__(operation=operation, backend=backend, capability=capability, alternative=alternative)

    def __str__(self) -> str:
        return (
            f"{self.operation} is not supported by backend {self.backend!r} "
            f"(it lacks {self.capability}): {self.alternative}"
        )


# -- streams and events ----------------------------------------------------------------------------------


class StreamTypeError(DevstreamError, TypeError):
    """An argument is no stream, event, device or tensor. Facts: *operation*, *got*, *expected*."""

    def __init__(self, *, operation: str, got: object, expected: str) -> None:
        text = got if isinstance(got, str) else f"{type(got).__name__} {got!r}"
        super().__init__(operation=operation, got=text, expected=expected)

    def __str__(self) -> str:
        return f"{self.operation} takes {self.expected}, not {self.got}"


class FileFormatError(DevstreamError, ValueError):
    """A file isn't what it should be: damaged, or of another kind or schema. Facts: *path*, *reason*."""

    def __init__(self, *, path: str, reason: str) -> None:
        super().__init__(path=path, reason=reason)

    def __str__(self) -> str:
        return f"{self.path} can't be used: {self.reason}; make the file anew"


class MissingExtraError(DevstreamError, ImportError):
    """An optional package is not installed. Facts: *operation*, *package*, *extra*."""

    def __init__(self, *, operation: str, package: str, extra: str) -> None:
        super().__init__(operation=operation, package=package, extra=extra)

    def __str__(self) -> str:
        return (
            f"{self.operation} needs {self.package}, which is not installed: "
            f"run `pip install devstream[{self.extra}]`"
        )


class StreamError(DevstreamError, RuntimeError):
    """A stream or an event was used in a way that has no meaning."""


class DeviceMismatchError(StreamError, ValueError):
    """Two objects that must share a device, or a backend, don't.

    Facts: *operation*, *first*, *second* (texts that name both devices), *advice*.
    """

    def __init__(self, *, operation: str, first: str, second: str, advice: str) -> None:
        super().__init__(operation=operation, first=first, second=second, advice=advice)

    def __str__(self) -> str:
        return f"{self.operation}: {self.first}, but {self.second}; {self.advice}"


class EventNotRecordedError(StreamError, ValueError):
    """An event was used before its first record. Facts: *operation*, *event*."""

    def __init__(self, *, operation: str, event: object) -> None:
        super().__init__(operation=operation, event=event)

    def __str__(self) -> str:
        return (
            f"{self.operation} on an event that was never recorded: {self.event}; call event.record(stream) "
            "first, or ask devstream.recorded(event) where an unrecorded event is expected"
        )


class EventNotReadyError(StreamError):
    """Elapsed time was asked for before both events had happened. Facts: *event*."""

    def __init__(self, *, event: object) -> None:
        super().__init__(event=event)

    def __str__(self) -> str:
        return f"elapsed_time: {self.event} has not happened yet; call event.synchronize() on it first"


class TimingDisabledError(StreamError, ValueError):
    """Elapsed time was asked of an event without a clock. Facts: *event*."""

    def __init__(self, *, event: object) -> None:
        super().__init__(event=event)

    def __str__(self) -> str:
        return (
            f"elapsed_time: {self.event} keeps no time; make both events with devstream.Event(enable_timing=True)"
        )


class StreamNotEnteredError(StreamError):
    """A ``with`` block of a stream was left in a thread that had not entered it. Facts: *stream*, *thread*."""

    def __init__(self, *, stream: object, thread: str) -> None:
        super().__init__(stream=stream, thread=thread)

    def __str__(self) -> str:
        return (
            f"leaving the block of {self.stream}: thread {self.thread!r} is in no such block; enter and leave it "
            "in one thread, since the current stream belongs to the thread"
        )


class StreamInUseError(StreamError):
    """Under strict: a copy on a stream of the CPU that another thread has current. Facts: *stream*, *thread*."""

    def __init__(self, *, stream: object, thread: str) -> None:
        super().__init__(stream=stream, thread=thread)

    def __str__(self) -> str:
        return (
            f"a copy or a host function on {self.stream}, which is current in thread {self.thread!r}: the CPU "
            "runs that thread's operations at once, so the two may run at the same time; use a stream of its own "
            "for the copy, and order it by events"
        )


class ForkedProcessError(StreamError):
    """A forked child used a device that its parent had opened. Facts: *operation*, *device*."""

    def __init__(self, *, operation: str, device: str) -> None:
        super().__init__(operation=operation, device=device)

    def __str__(self) -> str:
        return (
            f"{self.operation} in a forked child: {self.device} was opened by the parent process and can't be "
            'used here; start the child with multiprocessing.get_context("spawn")'
        )


class IpcHandleError(StreamError):
    """An interprocess event could not be opened. Facts: *device*, *cause*."""

    def __init__(self, *, device: str, cause: str) -> None:
        super().__init__(device=device, cause=cause)

    def __str__(self) -> str:
        return (
            f"this handle could not be opened as an event on {self.device}: {self.cause}. A handle opens only in "
            "another process than its maker's, on the same host, and while the maker keeps its event alive"
        )


class RaceError(StreamError):
    """The race checker found races. Facts: *races* (a report each)."""

    def __init__(self, *, races: Iterable[str]) -> None:
        super().__init__(races=tuple(races))

    def __str__(self) -> str:
        count = len(self.races)
        head = f"{count} race{'s' * (count != 1)} found; make the later work wait, as each report says"
        return "\n\n".join([head, *self.races])


_OUTSIDE = "do it before the capture starts or after it ends"


class CaptureError(StreamError):
    """The call isn't allowed in the capture of a graph. Facts: *operation*, *stream*, *line*, *advice*."""

    def __init__(self, *, operation: str, stream: object, line: str = "", advice: str = _OUTSIDE) -> None:
        super().__init__(operation=operation, stream=stream, line=line, advice=advice)

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return (
            f"{self.operation}{where} is not allowed while {self.stream} is captured into a graph, since it would "
            f"end the capture; {self.advice}"
        )


# -- the order of a compiled program ---------------------------------------------------------------------


class OrderingError(DevstreamError, RuntimeError):
    """Work on several streams has no right order, or was not shown to have one."""


class GraphError(OrderingError, ValueError):
    """A graph or a program can't be given a meaning, so no order can be derived. Facts: *graph*, *problem*."""

    def __init__(self, *, graph: str, problem: str) -> None:
        super().__init__(graph=graph, problem=problem)

    def __str__(self) -> str:
        return f"{self.graph} can't be ordered: {self.problem}; make the graph anew from the captured function"


class WriteBackError(OrderingError):
    """A mutated input can't be written back where the user changed it.

    Facts: *target*, *line* (of the mutation), *other*, *other_line* (what contradicts it), *advice*.
    """

    def __init__(self, *, target: str, line: str, other: str, other_line: str, advice: str) -> None:
        super().__init__(target=target, line=line, other=other, other_line=other_line, advice=advice)

    def __str__(self) -> str:
        return (
            f"{self.target} is changed in place at {self.line or 'an unknown line'}, which can't be kept in order "
            f"with {self.other} at {self.other_line or 'an unknown line'}; {self.advice}"
        )


class ProofError(OrderingError):
    """A program could race, so it does not run. Facts: *program*, *violations* (a sentence each)."""

    def __init__(self, *, program: str, violations: Iterable[str]) -> None:
        super().__init__(program=program, violations=tuple(violations))

    def __str__(self) -> str:
        shown = "; ".join(self.violations[:10])
        more = f"; and {len(self.violations) - 10} more" if len(self.violations) > 10 else ""
        return (
            f"{self.program} could race, so it was refused: {shown}{more}. This is a fault in devstream, not in "
            "your code: use eager mode for this function, and report it with this text"
        )


class MissingWaitError(OrderingError):
    """Eager mode would race, and the user asked to be stopped. Facts: *waits* (a sentence each)."""

    def __init__(self, *, waits: Iterable[str]) -> None:
        super().__init__(waits=tuple(waits))

    def __str__(self) -> str:
        shown = "; ".join(self.waits[:10])
        more = f"; and {len(self.waits) - 10} more" if len(self.waits) > 10 else ""
        return (
            f"in eager mode this code would race: {shown}{more}. Make these waits, or take the option "
            "missing_waits away: compiled code has them in any case"
        )


# -- measuring -------------------------------------------------------------------------------------------


class MeasurementError(DevstreamError, RuntimeError):
    """A device's ceilings could not be measured. Facts: *what*, *device*, *cause*."""

    def __init__(self, *, what: str, device: str, cause: str) -> None:
        super().__init__(what=what, device=device, cause=cause)

    def __str__(self) -> str:
        return (
            f"measuring {self.device} failed at '{self.what}': {self.cause}. Nothing was kept; stop what else "
            "runs on the device and uses its memory, and run the measurement again"
        )


class DiagnosisError(DevstreamError, RuntimeError):
    """The function under diagnosis raised. Facts: *function*, *phase*, *cause*, *line* (of the user's code)."""

    def __init__(self, *, function: str, phase: str, cause: str, line: str) -> None:
        super().__init__(function=function, phase=phase, cause=cause, line=line)

    def __str__(self) -> str:
        return (
            f"{self.function} raised {self.cause} at {self.line or 'an unknown line'}, {self.phase}; make it run "
            "several times with the same arguments, and diagnose it then"
        )


def _adopt(*classes: type[DevstreamWarning]) -> None:
    """Say that *classes* live here, where users find them and their filters name them."""
    for cls in classes:
        cls.__module__ = __name__


_adopt(DevstreamWarning, *DevstreamWarning.__subclasses__())

__all__ = [
    "BackendConflictError",
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "BackendWarning",
    "BlockingCopyWarning",
    "CacheWarning",
    "CaptureError",
    "CompileWarning",
    "DeviceMismatchError",
    "DevstreamError",
    "DevstreamWarning",
    "DiagnosisError",
    "EventNotReadyError",
    "EventNotRecordedError",
    "EventOverwrittenWarning",
    "FileFormatError",
    "ForkedProcessError",
    "GraphCaptureWarning",
    "GraphError",
    "IpcHandleError",
    "LatchDroppedWarning",
    "MeasurementError",
    "MissingExtraError",
    "MissingWaitError",
    "MissingWaitWarning",
    "OrderingError",
    "ProofError",
    "RaceError",
    "RaceWarning",
    "RecordStreamWarning",
    "StreamError",
    "StreamInUseError",
    "StreamNotEnteredError",
    "StreamTypeError",
    "TimingDisabledError",
    "UnsupportedError",
    "WriteBackError",
    "warning",
]
