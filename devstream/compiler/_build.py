"""Build the program of a graph: derive the order, cut, add the fewest waits, and say when memory goes back.

[Note: Fewest waits]
Steps are issued one by one, with vector clocks beside them. A wait is added only where a step needs work that its
stream does not know to be over, latest source first, since that one often brings the others. What comes later
can't make such a wait needless: it was needed at its place. So leaving out any one breaks what needed it.

[Note: Memory goes back without a wait]
Memory of stream s is dropped at the first point, behind the last use, where s has waited for all other users for
reasons of its own. Where there is none, the program holds the references beyond the call until those users'
events. A wait for that alone would stop the overlap that the user built. A user's ``del`` never comes before the
last use, and where his code is right never before that point.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

from devstream.compiler._cut import DELAY_US, Group, GroupKind, cut
from devstream.compiler._graph import Graph, OpKind, Origin
from devstream.compiler._order import Order, derive, entry, roots
from devstream.compiler._program import (
    Completion,
    Free,
    Hold,
    Program,
    Record,
    RecordStream,
    Result,
    Slot,
    Step,
    Synchronize,
    Use,
    Wait,
    Work,
    WorkKind,
)
from devstream.compiler._work import works
from devstream.races.clocks import Clock, Clocks, Lane, Stamp

#: A place in the program: the number of a group, and 0 in front of its step or 1 behind it.
_Place = tuple[int, int]
_HOST = "host"


def build(graph: Graph, *, delay_us: float = DELAY_US) -> Program:
    """Return the program of *graph*; it is not proved yet.

    Args:
        graph: what was captured.
        delay_us: how long a region may delay other streams to save a launch; counts where costs are known.

    Raises:
        WriteBackError: a mutated input can't be written back in its epoch.
        GraphError: the user's operations and the flow of data contradict each other.
    """
    order = derive(graph)
    return _Builder(order, cut(order, delay_us=delay_us)).program()


class _Builder:
    """The steps so far, and the clocks beside them."""

    def __init__(self, order: Order, groups: tuple[Group, ...]) -> None:
        self.order, self.graph, self.groups = order, order.graph, groups
        self.works, self.slots = works(order, groups)
        self.root = roots(self.graph)
        self.clocks = Clocks()
        self.stamps = {entry(stream): self.clocks.tick(stream) for stream in range(len(self.graph.streams))}
        used = [op.event for op in self.graph.ops if op.event is not None]
        self.next_event = max((*used, *(given.event for given in self.graph.given)), default=-1) + 1
        self.events: dict[int, Clock] = {
            given.event: self.clocks.record(given.stream) for given in self.graph.given
        }
        #: Where a record stands for an item: on which stream, behind which group, and the clock there.
        self.sources: dict[int, tuple[int, int, Clock]] = {
            entry(stream): (stream, -1, self.clocks.record(stream)) for stream in range(len(self.graph.streams))
        }
        self.added: dict[tuple[int, int], int] = {(given.stream, -1): given.event for given in self.graph.given}
        self.collectives: dict[str, tuple[int, Clock]] = {}
        self.inputs: dict[str, tuple[str, ...]] = {}
        self.lanes: list[Stamp] = []
        self.front: dict[int, list[Step]] = defaultdict(list)
        self.behind: dict[int, list[Step]] = defaultdict(list)
        self.learned: dict[tuple[int, Lane], list[tuple[int, _Place]]] = defaultdict(list)
        self.users: dict[int, dict[Lane, Stamp]] = defaultdict(dict)
        self.waiter: dict[Lane, int] = {}
        self.last_use: dict[int, _Place] = {}
        self.storage = {slot.name: slot.storage for slot in self.slots}

    def program(self) -> Program:
        """Issue all groups and then the ends, and return the whole."""
        body: dict[int, Step] = {}
        for number, group in enumerate(self.groups):
            if group.kind is GroupKind.OP:
                body[number] = self._op(number, group.items[0])
            else:
                body[number] = self._work(number, group, self.works[number])
        last = len(self.groups)
        streams = [
            *range(1, len(self.graph.streams)),
            0,
        ]  # the end of the call last: it sees what the others wait for
        for number, stream in enumerate(streams, start=last):
            self._require(number, stream, [self.order.end(stream)])
        events = self._memory(last + len(streams))
        steps = list(self.behind[-1])
        for number in range(last + len(streams) + 1):
            steps += [*self.front[number], *([body[number]] if number in body else []), *self.behind[number]]
        return self._finish(tuple(steps), events)

    # -- one step ---------------------------------------------------------------------------------------

    def _op(self, number: int, item: int) -> Step:
        op = self.order.op(item)
        assert op is not None
        index = item - len(self.graph.nodes) - len(self.graph.write_backs)
        if op.kind is OpKind.SYNCHRONIZE:
            streams = range(len(self.graph.streams)) if op.stream is None else (op.stream,)
            for stream in streams if op.event is None else ():
                self.clocks.synchronize(_HOST, stream)
            if op.event in self.events:
                self.clocks.wait(_HOST, self.events[op.event])
            return Synchronize(index, op.epochs, op.stream, op.event, op.line)
        assert op.stream is not None
        self._host(op.stream, (number, 0))
        if op.kind is OpKind.RECORD_STREAM:
            base = self.root[op.value]
            self.last_use[self.storage[base]] = (number, 1)
            return RecordStream(base, op.stream, index, op.line)
        assert op.event is not None
        if op.kind is OpKind.RECORD:
            self.events[op.event] = self.clocks.record(op.stream)
            return Record(op.stream, op.event, index, op.epochs[op.stream], op.line)
        self._wait(op.stream, self.events.get(op.event, {}), (number, 1))
        return Wait(op.stream, op.event, index, op.epochs[op.stream], op.line)

    def _work(self, number: int, group: Group, work: Work) -> Work:
        stream = work.stream
        self._require(number, stream, group.items)
        if work.kind is WorkKind.COLLECTIVE_WAIT:
            issue, clock = self.collectives[work.collective]
            self._wait(stream, clock, (number, 1))
            self.waiter.setdefault(self.stamps[issue].lane, stream)
            self.sources.setdefault(issue, (stream, number, self.clocks.record(stream)))
        if work.kind is WorkKind.ISSUE:
            stamp = self._start(stream)
            self.collectives[work.name] = (group.items[0], self.clocks.record(stamp.lane))
            self.inputs[work.name] = work.inputs
        else:
            stamp = self.clocks.tick(stream)
            self.sources.update(dict.fromkeys(group.items, (stream, number, self.clocks.record(stream))))
        self.stamps.update(dict.fromkeys(group.items, stamp))
        for use in (*work.reads, *work.writes):
            self.users[use.storage][stamp.lane] = stamp
        for name in (*work.inputs, *work.outputs, *([work.target] if work.target else [])):
            self.last_use[self.storage[name]] = (number, 1)
        if work.kind is WorkKind.COLLECTIVE_WAIT:  # the collective's memory must outlive it
            for name in self.inputs[work.collective]:
                self.last_use[self.storage[name]] = (number, 1)
        return work

    def _start(self, stream: int) -> Stamp:
        """Start a collective on a lane of its own, or on one that *stream* knows to be empty again."""
        free = (position for position, last in enumerate(self.lanes) if self.clocks.knows(stream, last))
        position = next(free, len(self.lanes))
        if position == len(self.lanes):
            self.lanes.append(Stamp(("collective", position), 0))
        lane = self.lanes[position].lane
        self.waiter.pop(lane, None)
        self.clocks.wait(lane, self.clocks.view(stream))
        self.lanes[position] = self.clocks.tick(lane)
        return self.lanes[position]

    # -- waits ------------------------------------------------------------------------------------------

    def _require(self, number: int, stream: int, items: list[int] | tuple[int, ...]) -> None:
        """Add the waits in front of group *number* without which *items* could start too early."""
        self._host(stream, (number, 0))
        missing: dict[int, int] = {}
        for item in items:
            for earlier in self.order.needs[item]:
                if earlier in self.stamps and not self.clocks.knows(stream, self.stamps[earlier]):
                    missing.setdefault(earlier, item)
        for earlier in sorted(missing, key=lambda one: self.sources[one][1], reverse=True):
            if self.clocks.knows(stream, self.stamps[earlier]):
                continue
            source, behind, clock = self.sources[earlier]
            event = self.added.get((source, behind))
            if event is None:
                event = self._event((source, behind), source)
            why = f"{self._name(missing[earlier])} needs {self._name(earlier)}"
            self.front[number].append(Wait(stream, event, why=why))
            self._wait(stream, clock, (number, 0))

    def _event(self, key: tuple[int, int], stream: int) -> int:
        """Record a new event on *stream* behind the group ``key[1]``."""
        event, self.next_event = self.next_event, self.next_event + 1
        self.added[key] = event
        self.behind[key[1]].insert(0, Record(stream, event))
        return event

    def _wait(self, stream: int, clock: Clock, place: _Place) -> None:
        if self.clocks.wait(stream, clock):
            for lane, time in self.clocks.view(stream).items():
                known = self.learned[stream, lane]
                if lane != stream and (not known or known[-1][0] < time):
                    known.append((time, place))

    def _host(self, stream: int, place: _Place) -> None:
        self._wait(stream, self.clocks.view(_HOST), place)

    def _name(self, item: int) -> str:
        node = self.order.node(item)
        if node is not None:
            return f"{node.name} on stream {node.stream}" + (f" ({node.line})" if node.line else "")
        if item < 0:
            return f"what stream {-1 - item} was given"
        if item >= self.order.end(0):
            stream = item - self.order.end(0)
            return f"the completion of stream {stream}" if stream else "the caller"
        back = self.graph.write_backs[item - len(self.graph.nodes)]
        return f"the write-back of {back.target}" + (f" ({back.line})" if back.line else "")

    # -- memory -----------------------------------------------------------------------------------------

    def _memory(self, number: int) -> dict[int, int]:
        """Add frees, holds (in group *number*) and completions; return the completions' events by stream."""
        handed = {self.storage[output.value] for output in self.graph.outputs}
        events: dict[int, int] = {}

        def completion(stream: int) -> int:
            if stream not in events:
                events[stream] = self._event((stream, number), stream)
            return events[stream]

        for output in self.graph.outputs:
            stream = self.graph.owner[self.storage[output.value]].stream
            if output.saved and stream:
                completion(stream)
        by_storage: dict[int, list[Slot]] = defaultdict(list)
        for slot in self.slots:
            by_storage[slot.storage].append(slot)
        for storage, slots in by_storage.items():
            names = tuple(slot.name for slot in slots)
            self._give_back(storage, names, keep=storage in handed, number=number, completion=completion)
        return events

    def _give_back(
        self, storage: int, names: tuple[str, ...], *, keep: bool, number: int, completion: Callable[[int], int]
    ) -> None:
        owner = self.graph.owner[storage]
        place, late = self.last_use.get(storage, (-1, 1)), dict[Lane, list[Stamp]]()
        if owner.origin is not Origin.PRODUCED:
            place = max(place, (-1, 1))
        for lane, stamp in self.users[storage].items():
            if lane == owner.stream:
                continue
            known = self.learned[owner.stream, lane]
            at = bisect_left(known, (stamp.time, (-1, 0)))
            if at == len(known):
                late.setdefault(self.waiter.get(lane, lane), []).append(stamp)
            else:
                place = max(place, known[at][1])
        if late:
            for stream in tuple(late):  # one that another's end stands for needs no event of its own
                if any(
                    all(self.clocks.knows(one, stamp) for stamp in late[stream]) for one in late if one != stream
                ):
                    del late[stream]
            events = tuple(completion(stream) for stream in late if isinstance(stream, int))
            self.behind[number].append(Hold(storage, names, events))
        elif not keep and owner.origin is not Origin.INPUT:
            free = Free(storage, names, owner.stream)
            (self.behind if place[1] else self.front)[place[0]].append(free)

    # -- the whole --------------------------------------------------------------------------------------

    def _finish(self, steps: tuple[Step, ...], events: dict[int, int]) -> Program:
        final: dict[int, int] = {}
        for found in self.order.writes:
            for storage, version in found:
                final[storage] = max(final.get(storage, 0), version)
        end = self.order.end(0)
        outside = {storage for storage, _ in self.order.writes[end]}
        results = tuple(
            Result(
                output.value,
                final.get(self.storage[output.value], 0) - (self.storage[output.value] in outside),
                output.joined and not output.saved,
                output.saved,
            )
            for output in self.graph.outputs
        )
        joined = [
            Use(storage, version, back.line)
            for number, back in enumerate(self.graph.write_backs)
            if back.joined and not back.outside
            for storage, version in self.order.writes[len(self.graph.nodes) + number]
        ]
        outside_line = next((back.line for back in self.graph.write_backs if back.outside), "")
        return Program(
            name=self.graph.name,
            streams=self.graph.streams,
            slots=self.slots,
            steps=steps,
            results=results,
            ops=len(self.graph.ops),
            given=tuple(Completion(given.stream, given.event) for given in self.graph.given),
            completions=tuple(Completion(stream, event) for stream, event in events.items()),
            exit_reads=tuple(Use(storage, version, outside_line) for storage, version in self.order.reads[end]),
            exit_writes=tuple(Use(storage, version, outside_line) for storage, version in self.order.writes[end]),
            exit_writers=tuple(joined),
        )


__all__ = ["build"]
