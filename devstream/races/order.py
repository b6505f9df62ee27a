"""The order of a program as it is issued: lanes, their clocks, events, and what comes near to a missing edge."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import cast

from devstream.races.clocks import Clock, Clocks, Stamp
from devstream.races.model import Lane, LaneKind, NearMiss, Note
from devstream.races.sites import NOWHERE, Site

#: The last waits of a lane that are remembered for explanations.
_WAITS_KEPT = 16
HOST = 0


@dataclass(slots=True)
class Recorded:
    """The last record of one event.

    Attributes:
        stamp: of the recorded lane, when it was recorded.
        seen: whether anyone waited for this record.
        replaced: the record before, where nobody had waited for it.
    """

    clock: Clock
    stamp: Stamp
    site: Site
    seen: bool = False
    replaced: Recorded | None = None


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait of some lane; *recorded* is None where the event had no record."""

    recorded: Recorded | None
    site: Site
    event: Hashable


class Order:
    """Who comes after whom. The host is lane 0: all of its threads are one lane.

    [Note: Why the host is one lane]
    Threads hand work to each other through Python's locks, queues and joins, which can't be seen without patching
    Python. A lane for each thread would miss those edges and report correct programs. So what one thread learned
    by blocking, all of them know, in the order in which the checker heard of it.
    """

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.lanes: list[Lane] = [Lane(HOST, LaneKind.HOST, "the host")]
        self._events: dict[Hashable, Recorded] = {}
        self._waits: dict[int, deque[Waited]] = {}
        # By the lane of a collective that is over: when, which lane waited for it, and where.
        self._collected: dict[int, tuple[int, int, Site]] = {}

    def add_lane(self, kind: LaneKind, name: str, device: str = "", *, default: bool = False) -> int:
        """Return the number of a new lane."""
        lane = Lane(len(self.lanes), kind, name, device, default)
        self.lanes.append(lane)
        return lane.number

    # -- edges -------------------------------------------------------------------------------------------

    def tick(self, lane: int) -> Stamp:
        """Issue a piece of work to *lane*; it comes after what the host knows."""
        return self.clocks.tick(lane, host=None if lane == HOST else HOST)

    def record(self, event: Hashable, lane: int, site: Site) -> None:
        """Record *event* at the end of *lane*."""
        stamp = self.clocks.tick(lane, host=HOST)
        before = self._events.get(event)
        replaced = before if before is not None and not before.seen else None
        if replaced is not None:
            # One step back is enough for a report, and a chain of all would grow without end.
            replaced.replaced = replaced.replaced and Recorded(
                replaced.replaced.clock, replaced.replaced.stamp, replaced.replaced.site
            )
        self._events[event] = Recorded(self.clocks.record(lane), stamp, site, replaced=replaced)

    def wait(self, lane: int, event: Hashable, site: Site) -> None:
        """Let *lane* come after the last record of *event*; without one that orders nothing."""
        recorded = self._events.get(event)
        self._waits.setdefault(lane, deque(maxlen=_WAITS_KEPT)).append(Waited(recorded, site, event))
        if recorded is not None:
            recorded.seen = True
            self.clocks.tick(lane, host=HOST)
            self.clocks.wait(lane, recorded.clock)

    def wait_lane(self, lane: int, other: int) -> None:
        """Let *lane* come after all of *other* so far."""
        if lane != other:
            self.clocks.wait(lane, self.clocks.view(other))

    def follows(self, lane: int, other: int) -> bool:
        """Whether whatever *lane* does next comes after all of *other* so far."""
        return self.clocks.knows(lane, Stamp(other, self.clocks.view(other).get(other, 0)))

    def host_waits_event(self, event: Hashable, site: Site) -> None:
        """Hold the host until the last record of *event*."""
        recorded = self._events.get(event)
        self._waits.setdefault(HOST, deque(maxlen=_WAITS_KEPT)).append(Waited(recorded, site, event))
        if recorded is not None:
            recorded.seen = True
            self.clocks.wait(HOST, recorded.clock)

    def host_waits_device(self, device: str) -> None:
        """Hold the host until all streams of *device* are done."""
        for lane in self.lanes:
            if lane.device == device:
                self.clocks.synchronize(HOST, lane.number)

    def collect(self, flight: int, lane: int, site: Site) -> None:
        """Let *lane* come after the collective on lane *flight*, which is over by that."""
        self.wait_lane(lane, flight)
        self._collected[flight] = (self.clocks.view(flight).get(flight, 0), lane, site)

    def forget(self, event: Hashable) -> None:
        """Drop what is known about an event that is gone."""
        self._events.pop(event, None)

    def known_to_all(self, stamp: Stamp) -> bool:
        """Whether every lane, also a new one, comes after *stamp*."""
        # What the host knows, whoever is issued to next knows too.
        return self.clocks.knows(HOST, stamp)

    # -- explanations ------------------------------------------------------------------------------------

    def near_misses(self, first: Stamp, later: int) -> tuple[Note, ...]:
        """Return what lane *later* waited for that isn't, but nearly is, the work of *first*."""
        notes: dict[NearMiss, Note] = {}
        time, lane, site = self._collected.get(cast("int", first.lane), (0, 0, NOWHERE))
        if time >= first.time:
            return (Note(NearMiss.COLLECTED, site, lane=self.lanes[lane].name),)
        for waited in reversed(self._waits.get(later, ())):
            recorded = waited.recorded
            if recorded is None:
                notes.setdefault(NearMiss.UNRECORDED, self._unrecorded(waited))
                continue
            lane = cast("int", recorded.stamp.lane)
            name = self.lanes[lane].name
            lost = recorded.replaced
            while lost is not None:
                if lost.clock.get(first.lane, 0) >= first.time:
                    note = Note(NearMiss.OVERWRITTEN, waited.site, lost.site, recorded.site, name)
                    notes.setdefault(NearMiss.OVERWRITTEN, note)
                lost = lost.replaced
            if lane == first.lane:
                notes.setdefault(
                    NearMiss.TOO_EARLY, Note(NearMiss.TOO_EARLY, waited.site, recorded.site, lane=name)
                )
            else:
                note = Note(NearMiss.OTHER_STREAM, waited.site, recorded.site, lane=name)
                notes.setdefault(NearMiss.OTHER_STREAM, note)
        # Another stream's event explains nothing where a nearer miss does.
        if len(notes) > 1:
            notes.pop(NearMiss.OTHER_STREAM, None)
        return tuple(notes.values())

    def _unrecorded(self, waited: Waited) -> Note:
        later = self._events.get(waited.event)
        return Note(NearMiss.UNRECORDED, waited.site, later.site if later is not None else NOWHERE)


__all__ = ["HOST", "Order", "Recorded", "Waited"]
