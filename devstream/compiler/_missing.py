"""Which waits the user's own code lacks: the order that the graph needs, against the order that he gave it.

The graph is walked as eager mode would issue it: node by node, with his records, waits and synchronizes alone.
What the caller did before the call and does after it is not in the graph, so a finding that rests on either is
*unsure*.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from devstream.compiler._graph import FREE_OF_WORK, Graph, Kind, OpKind, Origin
from devstream.compiler._order import Order, derive, entry, holds_back, lets_wait
from devstream.races.clocks import Clock, Clocks, Lane, Stamp, covers

_HOST = "host"


@dataclass(frozen=True, slots=True)
class Missing:
    """A wait that eager mode needs and the code lacks: *second* needs *first* to be over.

    Args:
        sure: both ends are in the function; otherwise code outside of it may have given the order.
        fix: the wait in words.
    """

    first: str
    second: str
    first_line: str
    second_line: str
    first_stream: int
    second_stream: int
    sure: bool
    fix: str

    def __str__(self) -> str:
        lines = [f" ({line})" if line else "" for line in (self.first_line, self.second_line)]
        return (
            f"{self.second}{lines[1]} on stream {self.second_stream} does not wait for {self.first}{lines[0]} on "
            f"stream {self.first_stream}; {self.fix}"
        )


def missing(graph: Graph, order: Order | None = None) -> tuple[Missing, ...]:
    """Return the waits that *graph* needs and its user did not write, each pair of an end and a stream once.

    Args:
        graph: what was captured.
        order: what `derive` found for it, if that is at hand.
    """
    return _Eager(derive(graph) if order is None else order).run()


class _Eager:
    """The walk in order of capture."""

    def __init__(self, order: Order) -> None:
        self.order, self.graph = order, order.graph
        self.clocks = Clocks()
        streams = range(len(self.graph.streams))
        self.stamps: dict[int, Stamp] = {entry(stream): self.clocks.tick(stream) for stream in streams}
        self.events: dict[int, Clock] = {one.event: self.clocks.record(one.stream) for one in self.graph.given}
        self.collectives: dict[str, Clock] = {}
        #: For each stream its operations' epochs, with how many operations there are up to each.
        self.counts: dict[int, list[tuple[int, int]]] = {
            stream: [
                (op.epochs[stream], number)
                for number, op in enumerate(self.graph.ops, start=1)
                if holds_back(op, stream) or lets_wait(op, stream)
            ]
            for stream in streams
        }
        self.found: dict[tuple[Lane, int, int], Missing] = {}
        self.issued = 0
        #: What a stream knew once so many operations were issued, each time that it learned something.
        self.history: dict[int, list[tuple[int, Clock]]] = defaultdict(list)

    def run(self) -> tuple[Missing, ...]:
        """Walk, and return what was found."""
        backs: dict[str, list[int]] = defaultdict(list)
        for number, back in enumerate(self.graph.write_backs):
            maker = self.graph.maker.get(back.source)
            backs[maker.name if maker is not None else ""].append(number)
        for number in backs[""]:
            self._write_back(number)
        for item, node in enumerate(self.graph.nodes):
            if node.kind not in FREE_OF_WORK:
                self._catch_up(node.stream, node.epoch)
                self._node(item)
            # In eager mode the change is the node itself.
            for number in backs[node.name]:
                self._write_back(number)
        while self.issued < len(self.graph.ops):
            self._op()
        self._need(self.order.end(0), 0)
        self._dels()
        return tuple(self.found.values())

    def _write_back(self, number: int) -> None:
        back = self.graph.write_backs[number]
        item = len(self.graph.nodes) + number
        if not back.outside:
            self._catch_up(back.stream, back.epoch)
            self._need(item, back.stream)
            self.stamps[item] = self.clocks.tick(back.stream)

    def _node(self, item: int) -> None:
        node = self.graph.nodes[item]
        self.clocks.wait(node.stream, self.clocks.view(_HOST))
        if node.kind is Kind.WAIT:
            self.clocks.wait(node.stream, self.collectives[node.collective])
            self._note(node.stream)
        self._need(item, node.stream)
        if node.kind is Kind.ISSUE:
            lane = ("collective", node.name)
            self.clocks.wait(lane, self.clocks.view(node.stream))
            self.stamps[item] = self.clocks.tick(lane)
            self.collectives[node.name] = self.clocks.record(lane)
        else:
            self.stamps[item] = self.clocks.tick(node.stream)

    def _issued_before(self, stream: int, epoch: int) -> int:
        """Return how many operations the user wrote before work of this epoch."""
        counted = bisect_left(self.counts[stream], (epoch, 0))
        return self.counts[stream][counted - 1][1] if counted else 0

    def _catch_up(self, stream: int, epoch: int) -> None:
        while self.issued < self._issued_before(stream, epoch):
            self._op()

    def _op(self) -> None:
        op = self.graph.ops[self.issued]
        self.issued += 1
        if op.kind is OpKind.SYNCHRONIZE:
            streams = range(len(self.graph.streams)) if op.stream is None else (op.stream,)
            for stream in streams if op.event is None else ():
                self.clocks.synchronize(_HOST, stream)
            if op.event in self.events:
                self.clocks.wait(_HOST, self.events[op.event])
            for stream in range(len(self.graph.streams)):
                self.clocks.wait(stream, self.clocks.view(_HOST))
                self._note(stream)
        elif op.stream is not None and op.event is not None:
            self.clocks.wait(op.stream, self.clocks.view(_HOST))
            if op.kind is OpKind.RECORD:
                self.events[op.event] = self.clocks.record(op.stream)
            else:
                self.clocks.wait(op.stream, self.events.get(op.event, {}))
                self._note(op.stream)

    def _note(self, stream: int) -> None:
        self.history[stream].append((self.issued, self.clocks.record(stream)))

    def _need(self, item: int, stream: int) -> None:
        for earlier in self.order.needs[item]:
            if earlier in self.stamps:
                self._check(earlier, item, stream)

    def _check(self, earlier: int, item: int, stream: int) -> None:
        stamp = self.stamps[earlier]
        if self.clocks.knows(stream, stamp):
            return
        first, first_line, source = self._end(earlier)
        second, second_line, _ = self._end(item)
        sure = earlier >= 0 and item < self.order.end(0)
        behind = f"behind {first}" if earlier >= 0 else "before this function works on another stream"
        fix = f"record an event on stream {source} {behind}, and let stream {stream} wait for it"
        if earlier in self.order.first_wait:
            fix = f"let stream {stream} wait for that collective"
        self.found.setdefault(
            (stamp.lane, stamp.time, stream),
            Missing(first, second, first_line, second_line, source, stream, sure, fix),
        )

    def _dels(self) -> None:
        """Find memory that the user gives back under a reader on another stream."""
        told = {(self.graph.value[op.value].storage, op.stream) for op in self.graph.ops if op.value}
        users: dict[int, list[int]] = defaultdict(list)
        for item in range(len(self.graph.nodes)):
            for storage, _ in (*self.order.reads[item], *self.order.writes[item]):
                users[storage].append(item)
        for gone in self.graph.dels:
            owner = self.graph.owner[self.graph.value[gone.value].storage]
            if owner.origin is not Origin.PRODUCED:
                continue  # the caller has it as well
            known = self._known(owner.stream, self._issued_before(gone.stream, gone.epoch))
            for item in users[owner.storage]:
                stamp = self.stamps[item]
                if stamp.lane == owner.stream or covers(known, stamp) or (owner.storage, stamp.lane) in told:
                    continue
                first, first_line, source = self._end(item)
                fix = f"let stream {owner.stream} wait for it before, or call {gone.value}.record_stream"
                self.found.setdefault(
                    (stamp.lane, stamp.time, owner.stream),
                    Missing(
                        first, f"the del of {gone.value}", first_line, gone.line, source, owner.stream, True, fix
                    ),
                )

    def _known(self, stream: int, issued: int) -> Clock:
        return next((clock for count, clock in reversed(self.history[stream]) if count <= issued), {})

    def _end(self, item: int) -> tuple[str, str, int]:
        """Return name, line and stream of one end."""
        node = self.order.node(item)
        if node is not None:
            return node.name, node.line, node.stream
        if item < 0:
            return "what the call was given", "", -1 - item
        if item >= self.order.end(0):
            return "the caller", "", item - self.order.end(0)
        back = self.graph.write_backs[item - len(self.graph.nodes)]
        return f"the change of {back.target}", back.line, back.stream


__all__ = ["Missing", "missing"]
