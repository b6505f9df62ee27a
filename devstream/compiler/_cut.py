"""Nodes in order of issue, cut into as few single-stream regions as the order allows.

A stream's work goes on until nothing of it is ready; only then another stream has its turn. So a stream is left
and taken up again only where it needs something that was issued meanwhile, and each time costs it a wait (or a
step of its own, such as a copy). Hence at most one region more on a stream than waits that follow work on it.

[Note: Overlap costs regions]
An event can't be recorded in the middle of a region. ``a; record; b`` as one region records behind b, and whoever
waits for a waits for b as well. Where costs are known, a region ends before it would delay another stream, or
itself, by more than *delay_us*; where they aren't, there are as few regions as possible.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

from devstream.compiler._graph import FREE_OF_WORK, OWN_STEP, Graph, Kind, OpKind
from devstream.compiler._order import Order, entry, roots


class GroupKind(StrEnum):
    """What a group becomes: a region, one node as a step, a write-back, or an operation of the user's."""

    REGION = "region"
    NODE = "node"
    WRITE_BACK = "write_back"
    OP = "op"


@dataclass(frozen=True, slots=True)
class Group:
    """Items that become one step, in order; *stream* is None for a synchronize of more than one stream."""

    kind: GroupKind
    stream: int | None
    items: tuple[int, ...]


#: About what two more launches of a region cost. Source: the region program's probe, 4-9 us a region.
DELAY_US = 20.0


def cut(order: Order, *, delay_us: float = DELAY_US) -> tuple[Group, ...]:
    """Return all work and all user operations as groups in order of issue; see [Note: Overlap costs regions]."""
    return _Cutter(order, delay_us).run()


def anchored(graph: Graph) -> set[str]:
    """Return the views that must exist by themselves: those that leave the graph, and their own bases."""
    names = {output.value for output in graph.outputs} | {back.source for back in graph.write_backs}
    for node in reversed(graph.nodes):
        if node.kind in FREE_OF_WORK and names.intersection(node.makes):
            names.update(node.reads)
    return names


class _Cutter:
    """The state of the list scheduler."""

    def __init__(self, order: Order, delay_us: float) -> None:
        self.order, self.graph, self.delay_us = order, order.graph, delay_us
        self.count = order.end(0)
        self.root = roots(self.graph)
        keep = anchored(self.graph)
        # An item of an operation's tuple is made with the tuple; one of a view's tuple is a view itself.
        self.ghosts = {
            item
            for item, node in enumerate(self.graph.nodes)
            if (node.kind is Kind.ITEM and self.root[node.makes[0]] == node.makes[0])
            or (node.kind in FREE_OF_WORK and not keep.intersection(node.makes))
        }
        self.attached = self._attached()
        self.stream = [self._stream(item) for item in range(self.count)]
        self.key = self._keys()
        self.after: dict[int, list[int]] = defaultdict(list)
        self.open = [len(order.before[item]) for item in range(self.count)]
        self.foreign: dict[int | None, int] = defaultdict(int)
        for item in range(self.count):
            for other in order.before[item]:
                self.after[other].append(item)
                self.foreign[self.stream[item]] += self.stream[other] != self.stream[item]
        self.lacking: dict[tuple[int, int | None], int] = defaultdict(int)
        self.exports = self._exports()
        self.seen: dict[tuple[int | None, int | None], int] = {}
        self.issued: dict[int, int] = {}
        self.groups: list[Group] = []
        self.work: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.own: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.lazy: list[tuple[float, int]] = []
        self.holding: list[tuple[float, int]] = []
        self.instant: deque[int] = deque()

    def _attached(self) -> dict[int, list[int]]:
        """Return for a node the items of its tuple, and theirs."""
        found: dict[int, list[int]] = defaultdict(list)
        head: dict[str, int] = {}
        for item, node in enumerate(self.graph.nodes):
            if node.kind is Kind.ITEM and self.root[node.makes[0]] == node.makes[0]:
                maker = head[node.reads[0]]
                found[maker].append(item)
                head.update(dict.fromkeys(node.makes, maker))
            else:
                head.update(dict.fromkeys(node.makes, item))
        return found

    def _stream(self, item: int) -> int | None:
        node, op = self.order.node(item), self.order.op(item)
        if node is not None:
            # A view is made where its memory is: it would be the only thing that another stream has there.
            return self.graph.value[self.root[node.makes[0]]].stream if node.kind in FREE_OF_WORK else node.stream
        if op is not None:
            return op.stream if op.kind is not OpKind.SYNCHRONIZE else None
        return self.graph.write_backs[item - len(self.graph.nodes)].stream

    def _keys(self) -> list[float]:
        """Return about where each item was captured, as a number among the nodes."""
        nodes = len(self.graph.nodes)
        keys = [float(item) for item in range(self.count)]
        last = -1.0
        for item in range(nodes + len(self.graph.write_backs), self.count):
            last = max(last, *(float(other) for other in self.order.before[item] if other < nodes), -1.0)
            keys[item] = last + 0.5
        return keys

    def _exports(self) -> dict[int, list[int]]:
        """Return for an item those on other streams that need it; count what each needs of one stream."""
        found: dict[int, list[int]] = defaultdict(list)
        for item in range(self.count):
            for other in self.order.needs[item]:
                if other >= 0 and self.stream[other] != self.stream[item]:
                    found[other].append(item)
                    self.lacking[item, self.stream[other]] += 1
        return found

    def _export(self, item: int) -> bool:
        """Take *item*; say whether another stream could go on now if the region ended here."""
        for other in self.exports.get(item, ()):
            self.lacking[other, self.stream[item]] -= 1
        # A record that is ready waits only for the region to end.
        return bool(self.instant) or any(
            not self.lacking[other, self.stream[item]] for other in self.exports.get(item, ())
        )

    def run(self) -> tuple[Group, ...]:
        """Issue everything."""
        for item in range(self.count):
            if not self.open[item]:
                self._ready(item)
        self._settle()
        while True:
            stream = self._choose()
            if stream is not None:
                self._fill(stream)
            elif self.lazy or self.holding:
                _, item = heappop(self.lazy or self.holding)
                self._issue(GroupKind.OP if self.order.op(item) else GroupKind.NODE, [item])
            else:
                return tuple(self.groups)

    def _ready(self, item: int) -> None:
        node, op, stream = self.order.node(item), self.order.op(item), self.stream[item]
        entry_ = (self.key[item], item)
        if item in self.ghosts or (op is not None and op.kind in {OpKind.RECORD, OpKind.RECORD_STREAM}):
            self.instant.append(item)
        elif op is not None and op.kind is OpKind.SYNCHRONIZE:
            heappush(self.holding, entry_)  # the host stands still there: issue everything else first
        elif op is not None or (node is not None and node.kind is Kind.WAIT):
            heappush(self.lazy, entry_)  # a wait as late as possible, so that nothing waits that need not
        elif stream is not None:
            heappush((self.own if node is None or node.kind in OWN_STEP else self.work)[stream], entry_)

    def _release(self, item: int) -> None:
        """Note that *item* is issued, and with it the views that nobody issues."""
        done = [item]
        while done:
            item = done.pop()
            self.issued[item] = len(self.groups)
            for other in self.after[item]:
                self.open[other] -= 1
                self.foreign[self.stream[other]] -= self.stream[other] != self.stream[item]
                if not self.open[other] and other in self.ghosts:
                    done.append(other)
                elif not self.open[other]:
                    self._ready(other)

    def _settle(self) -> None:
        """Issue what waits for nothing and delays nothing: records, and views that other regions make anew."""
        while self.instant:
            item = self.instant.popleft()
            if item in self.ghosts:
                self._release(item)
            else:
                self.groups.append(Group(GroupKind.OP, self.stream[item], (item,)))
                self._release(item)

    def _issue(self, kind: GroupKind, items: list[int]) -> None:
        whole = [one for item in items for one in (item, *self.attached.get(item, ()))]
        self.groups.append(Group(kind, self.stream[items[0]], tuple(whole)))
        for item in items:
            if kind is not GroupKind.REGION:
                self._export(item)
                self._release(item)
        self._settle()

    def _choose(self) -> int | None:
        """Return the stream that goes on: one that can finish its work, else the one captured first."""
        streams = [stream for stream in range(len(self.graph.streams)) if self.work[stream] or self.own[stream]]
        return min(streams, key=lambda one: (self.foreign[one] > 0, self._head(one)), default=None)

    def _head(self, stream: int) -> tuple[float, int]:
        return min(heap[0] for heap in (self.work[stream], self.own[stream]) if heap)

    def _fill(self, stream: int) -> None:
        """Issue the work of *stream* until nothing of it is ready."""
        region: list[int] = []
        cost = exported = 0.0
        exporting = False
        while self.work[stream] or self.own[stream]:
            _, item = self._head(stream)
            own = bool(self.own[stream]) and self.own[stream][0][1] == item
            delay = self._cost(item) + exported if exporting else 0.0
            late = delay > self.delay_us or (cost > self.delay_us and self._imports(item, stream))
            if region and (own or late):
                self._issue(GroupKind.REGION, region)
                region, cost, exported, exporting = [], 0.0, 0.0, False
                continue  # a record may have made something ready
            heappop((self.own if own else self.work)[stream])
            if own:
                self._issue(GroupKind.NODE if item < len(self.graph.nodes) else GroupKind.WRITE_BACK, [item])
                continue
            region.append(item)
            cost += self._cost(item)
            exported += self._cost(item) if exporting else 0.0
            self._learn(item, stream)
            self._release(item)
            exporting = self._export(item) or exporting
        if region:
            self._issue(GroupKind.REGION, region)

    def _cost(self, item: int) -> float:
        node = self.order.node(item)
        return (node.cost_us or 0.0) if node is not None else 0.0

    def _imports(self, item: int, stream: int) -> bool:
        """Whether *item* brings a wait for something that *stream* has not waited for yet."""
        return any(
            self.stream[other] != stream and self.issued[other] > self.seen.get((stream, self.stream[other]), -1)
            for other in self.order.needs[item]
            if other > entry(0)
        )

    def _learn(self, item: int, stream: int) -> None:
        for other in self.order.needs[item]:
            if other > entry(0) and self.stream[other] != stream:
                pair = (stream, self.stream[other])
                self.seen[pair] = max(self.seen.get(pair, -1), self.issued[other])


__all__ = ["DELAY_US", "Group", "GroupKind", "anchored", "cut"]
