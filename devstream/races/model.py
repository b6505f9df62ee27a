"""What the checker finds, as plain data: a race, its two operations, and what comes near to the missing edge."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from devstream.races.sites import NOWHERE, Site


class Fault(enum.Enum):
    """What kind of fault a race is; the value is its name in reports."""

    READ_BEFORE_WRITE = "read before write"
    OVERWRITE = "overwrite while read"
    TWO_WRITERS = "two writers"
    REUSE = "memory reused while another stream uses it"


class LaneKind(enum.Enum):
    """What runs in order by itself."""

    STREAM = "stream"
    HOST = "host"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue of work.

    Attributes:
        number: the checker's own; 0 is the host.
        name: for people: ``"stream 3 of cuda:0"``.
        device: ``"cuda:0"``; empty for the host and for collectives.
        default: whether it is its device's default stream.
    """

    number: int
    kind: LaneKind
    name: str
    device: str = ""
    default: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One side of a race."""

    name: str
    write: bool
    lane: Lane
    site: Site


class NearMiss(enum.Enum):
    """What was done about the order, and why it wasn't enough."""

    TOO_EARLY = "an event was recorded before the work"
    UNRECORDED = "the event had not been recorded yet"
    OVERWRITTEN = "the event was recorded again before anyone waited"
    COLLECTED = "another stream waited for the collective"
    OTHER_STREAM = "another stream was waited for"
    NATIVE_UNSEEN = "native waits of this device type can't be seen"


@dataclass(frozen=True, slots=True)
class Note:
    """A near miss: where the wait is, where the record is, and which stream was recorded."""

    miss: NearMiss
    wait: Site = NOWHERE
    record: Site = NOWHERE
    again: Site = NOWHERE
    lane: str = ""


@dataclass(slots=True)
class Race:
    """Two operations on the same memory that nothing puts in order.

    Attributes:
        first, second: in the order of their issue. Of reused memory: the last use, and the allocation that may
            be handed that memory.
        size_bytes: of the storage.
        allocated, freed: the lines, where they are known.
        owner: the lane that the memory belongs to, where that is known.
        notes: what comes near to being the missing edge.
        rank: of this process, where it is one of several.
        count: how often this pair of lines raced.
    """

    fault: Fault
    first: Operation
    second: Operation
    size_bytes: int
    allocated: Site = NOWHERE
    freed: Site = NOWHERE
    owner: Lane | None = None
    notes: tuple[Note, ...] = ()
    rank: int | None = None
    count: int = field(default=1, compare=False)

    def __str__(self) -> str:
        from devstream.races.text import describe  # noqa: PLC0415 - the words need this module

        return describe(self)


__all__ = ["Fault", "Lane", "LaneKind", "NearMiss", "Note", "Operation", "Race"]
