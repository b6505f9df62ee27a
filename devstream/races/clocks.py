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
        # How often a host's clock changed, and the state of it that a lane has joined last: issuing to a lane is
        # what a program does most, and the host has seldom learned anything since.
        self._changes: dict[Lane, int] = {}
        self._joined: dict[Lane, dict[Lane, int]] = {}

    def _of(self, lane: Lane) -> dict[Lane, int]:
        return self._clocks.setdefault(lane, {})

    def tick(self, lane: Lane, *, host: Lane | None = None) -> Stamp:
        """Issue a piece of work to *lane* and return its stamp; it comes after all that *host* knows."""
        clock = self._clocks.get(lane)
        if clock is None:
            clock = self._of(lane)
        if host is not None:
            changes = self._changes.setdefault(host, 0)
            joined = self._joined.setdefault(lane, {})
            if joined.get(host) != changes:
                self.wait(lane, self._of(host))
                joined[host] = changes
        time = clock[lane] = clock.get(lane, 0) + 1
        if lane in self._changes:
            self._changes[lane] += 1
        return tuple.__new__(Stamp, (lane, time))  # half of what Stamp(...) takes

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
        if learned and lane in self._changes:
            self._changes[lane] += 1
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
