"""The program: what runs, step by step, as data.

One host thread issues the steps from first to last; each goes to its stream's queue. A program is complete in
itself: the proof, the printed text and the runner need nothing of the graph but the code of the nodes.

[Note: Versions]
A `Use` says which contents of a storage a step reads (the number of writes before it) or leaves behind. Given
values start at 0, a value that the program makes at 1. So a program whose steps were exchanged is found to read
something else, even where every access is ordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

from devstream.compiler._graph import Origin, Stream


class WorkKind(StrEnum):
    """What a `Work` step does."""

    REGION = "region"
    COPY = "copy"
    EFFECT = "effect"
    ISSUE = "issue"
    COLLECTIVE_WAIT = "collective_wait"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True)
class Use:
    """One storage as a step meets it: *version* is what a read expects and what a write leaves."""

    storage: int
    version: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """Launch something on *stream*.

    *nodes* are run in this order: views are listed wherever they are needed. *inputs* and *outputs* are values;
    only *reads* and *writes* say what memory is touched. *epochs* are the first and the last epoch of the nodes
    that work.

    Args:
        collective: of a `WorkKind.COLLECTIVE_WAIT`, the name of the `WorkKind.ISSUE` step.
        target: of a `WorkKind.WRITE_BACK`, the input that gets the contents of the one value in *inputs*.
    """

    kind: WorkKind
    stream: int
    name: str
    nodes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    reads: tuple[Use, ...] = ()
    writes: tuple[Use, ...] = ()
    epochs: tuple[int, int] | None = None
    line: str = ""
    collective: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """Record *event* on *stream*. *op* numbers the user's operation, None where devstream added the record."""

    stream: int
    event: int
    op: int | None = None
    epoch: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Let *stream* wait for *event*; *why* says what needs an added one."""

    stream: int
    event: int
    op: int | None = None
    epoch: int = 0
    line: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Synchronize:
    """Hold the host for an event, for a stream, or for all streams."""

    op: int
    epochs: tuple[int, ...]
    stream: int | None = None
    event: int | None = None
    line: str = ""


@dataclass(frozen=True, slots=True)
class RecordStream:
    """Tell the allocator that *stream* uses the memory of *value*."""

    value: str
    stream: int
    op: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the program's references to *values*: their memory goes back to the pool of *stream*."""

    storage: int
    values: tuple[str, ...]
    stream: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep references to *values* beyond the call, until all *events* have happened."""

    storage: int
    values: tuple[str, ...]
    events: tuple[int, ...]


Step: TypeAlias = Work | Record | Wait | Synchronize | RecordStream | Free | Hold


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that the program handles: its memory belongs to the pool of *stream*."""

    name: str
    storage: int
    stream: int
    device: str
    origin: Origin = Origin.PRODUCED


@dataclass(frozen=True, slots=True)
class Result:
    """A value that the program hands out.

    Args:
        joined: it is ready for the caller's stream when the call returns.
        saved: it is ready for its own stream's event in `Program.completions`.
    """

    value: str
    version: int
    joined: bool
    saved: bool


@dataclass(frozen=True, slots=True)
class Completion:
    """Behind *event* all that the call left on *stream* is over."""

    stream: int
    event: int


@dataclass(frozen=True)
class Program:
    """Steps over numbered streams; slot 0 is the caller's.

    Args:
        ops: how many operations of the user's there must be among the steps.
        given: events that were recorded before the call, each behind all that its stream gives to it.
        exit_reads: what is read on the caller's stream after the last step (write-backs outside of the program).
        exit_writes: what is written there.
        exit_writers: what the caller's stream must have waited for beyond the joined results.
    """

    name: str
    streams: tuple[Stream, ...]
    slots: tuple[Slot, ...]
    steps: tuple[Step, ...]
    results: tuple[Result, ...] = ()
    ops: int = 0
    given: tuple[Completion, ...] = ()
    completions: tuple[Completion, ...] = ()
    exit_reads: tuple[Use, ...] = ()
    exit_writes: tuple[Use, ...] = ()
    exit_writers: tuple[Use, ...] = ()

    @cached_property
    def slot(self) -> dict[str, Slot]:
        """The values by name."""
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def regions(self) -> tuple[Work, ...]:
        """The steps that launch compiled code."""
        return tuple(step for step in self.steps if isinstance(step, Work) and step.kind is WorkKind.REGION)


__all__ = [
    "Completion",
    "Free",
    "Hold",
    "Program",
    "Record",
    "RecordStream",
    "Result",
    "Slot",
    "Step",
    "Synchronize",
    "Use",
    "Wait",
    "Work",
    "WorkKind",
]
