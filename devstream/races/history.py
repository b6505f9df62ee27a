"""What happened to one storage so far, as far as it can still race with what comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from devstream.races.clocks import Clock, Stamp
from devstream.races.extents import Extent
from devstream.races.sites import Site

#: So many accesses of one kind are kept before those that everybody knows are dropped.
PRUNE_AT = 64


class Access(NamedTuple):
    """One operation that touches one storage.

    Attributes:
        stamp: which lane, and when on it.
        extent: the bytes.
        write: whether it changes them.
        operation: its name, for people.
        site: the line of the user's code.
    """

    stamp: Stamp
    extent: Extent
    write: bool
    operation: str
    site: Site


class History:
    """The accesses of one storage that a later one may still race with."""

    __slots__ = ("_prune_at", "reads", "writes")

    def __init__(self) -> None:
        self.writes: list[Access] = []
        self.reads: list[Access] = []
        self._prune_at = PRUNE_AT

    def add(self, access: Access, clock: Clock) -> list[Access]:
        """Add *access*, made by whoever has *clock*; return the earlier ones that it races with.

        Costs as much as there are accesses that nobody has superseded: one or two in most programs.
        """
        found = []
        extent = access.extent
        for old in self.writes:
            lane, time = old.stamp
            if clock.get(lane, 0) < time and extent.meets(old.extent):
                found.append(old)
        if access.write:
            for old in self.reads:
                lane, time = old.stamp
                if clock.get(lane, 0) < time and extent.meets(old.extent):
                    found.append(old)
            # Who comes after this write comes after what it superseded, or races with this write already.
            self.writes = [old for old in self.writes if not extent.holds(old.extent)]
            if self.reads:
                self.reads = [old for old in self.reads if not extent.holds(old.extent)]
            self.writes.append(access)
        else:
            lane = access.stamp.lane
            if self.reads:
                self.reads = [old for old in self.reads if old.stamp.lane != lane or not extent.holds(old.extent)]
            self.reads.append(access)
        return found

    def unknown_to(self, clock: Clock) -> list[Access]:
        """Return the accesses that whoever has *clock* doesn't come after."""
        return [one for one in (*self.writes, *self.reads) if clock.get(one.stamp.lane, 0) < one.stamp.time]

    def prune(self, known_to_all: Callable[[Stamp], bool]) -> None:
        """Drop what every lane comes after, once there is much: nothing can race with that any more."""
        if len(self.writes) + len(self.reads) < self._prune_at:
            return
        self.writes = [old for old in self.writes if not known_to_all(old.stamp)]
        self.reads = [old for old in self.reads if not known_to_all(old.stamp)]
        self._prune_at = max(PRUNE_AT, 2 * (len(self.writes) + len(self.reads)))


__all__ = ["PRUNE_AT", "Access", "History"]
