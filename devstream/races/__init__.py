"""Missing waits: `racecheck` finds them by happens-before, on any device."""

from devstream.races._racecheck import racecheck
from devstream.races.model import Fault, Lane, LaneKind, NearMiss, Note, Operation, Race
from devstream.races.text import describe, summary

__all__ = [
    "Fault",
    "Lane",
    "LaneKind",
    "NearMiss",
    "Note",
    "Operation",
    "Race",
    "describe",
    "racecheck",
    "summary",
]
