"""Vector clocks: what happened before what, for streams, host threads and everything else that runs in order.

A *lane* is one queue: a stream, a host thread, one collective in flight. Work on a lane gets a `Stamp`; a lane
knows a stamp when that work is over before anything that the lane does next. All operations cost as much as there
are lanes, however long the program is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeAlias

Lane: TypeAlias = Hashable
#: How far each lane had got, for whoever holds it; a lane that is absent is not known at all.
Clock: TypeAlias = Mapping[Lane, int]


class Stamp(NamedTuple):
    """The *time*-th piece of work on *lane*, counted from 1."""

    lane: Lane
    time: int


def covers(clock: Clock, stamp: Stamp) -> bool:
    """Whether whoever has this clock comes after the work of *stamp*."""
    return clock.get(stamp.lane, 0) >= stamp.time


class Clocks:
    """The clock of each lane, carried through a program in the order of issue."""

    def __init__(self) -> None:
        self._clocks: dict[Lane, dict[Lane, int]] = {}
        # How often a lane's clock changed, and the state of a host that a lane has joined last: issuing to a lane
        # is what a program does most, and the host has seldom learned anything since.
        self._changes: dict[Lane, int] = {}
        self._joined: dict[tuple[Lane, Lane], int] = {}

    def _of(self, lane: Lane) -> dict[Lane, int]:
        return self._clocks.setdefault(lane, {})

    def tick(self, lane: Lane, *, host: Lane | None = None) -> Stamp:
        """Issue a piece of work to *lane* and return its stamp; it comes after all that *host* knows."""
        if host is not None:
            changes = self._changes.get(host, 0)
            if self._joined.get((lane, host)) != changes:
                self.wait(lane, self._of(host))
                self._joined[lane, host] = changes
        clock = self._of(lane)
        time = clock[lane] = clock.get(lane, 0) + 1
        self._changes[lane] = self._changes.get(lane, 0) + 1
        return Stamp(lane, time)

    def record(self, lane: Lane) -> Clock:
        """Return a copy of the clock of *lane*: what an event that is recorded here stands for."""
        return dict(self._of(lane))

    def wait(self, lane: Lane, clock: Clock) -> bool:
        """Let *lane* come after *clock*; say whether it learned something by that."""
        own, learned = self._of(lane), False
        for other, time in clock.items():
            if own.get(other, 0) < time:
                own[other] = time
                learned = True
        if learned:
            self._changes[lane] = self._changes.get(lane, 0) + 1
        return learned

    def synchronize(self, host: Lane, lane: Lane) -> None:
        """Hold *host* until all work of *lane* so far is over."""
        self.wait(host, self._of(lane))

    def knows(self, lane: Lane, stamp: Stamp) -> bool:
        """Whether whatever *lane* does next happens after the work of *stamp*."""
        return covers(self._of(lane), stamp)

    def view(self, lane: Lane) -> Clock:
        """Return the clock of *lane* itself, which goes on changing."""
        return self._of(lane)


__all__ = ["Clock", "Clocks", "Lane", "Stamp", "covers"]
