"""Nodes in order of issue, cut into as few single-stream regions as the order allows.

A stream's work goes on until nothing of it is ready; only then another stream has its turn. So a stream is left
and taken up again only where it needs something that was issued meanwhile, and each time costs it a wait (or a
step of its own, such as a copy). Hence at most one region more on a stream than waits that follow work on it.

[Note: Overlap costs regions]
An event can't be recorded in the middle of a region. ``a; record; b`` as one region records behind b, and whoever
waits for a waits for b as well. So while regions are filled, each stream's time is added up from the costs of its
nodes. A region ends where it would leave another stream without work, or would itself stand still with work in
hand, for more than *delay_us*. A stream that has other work to go on with loses nothing, so nothing ends for it.
Where costs aren't known, there are as few regions as possible.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush

from devstream.compiler._graph import FREE_OF_WORK, OWN_STEP, Graph, Kind, OpKind
from devstream.compiler._order import Order, roots


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


@dataclass(slots=True)
class _Region:
    """A region in the making: when it can start, what it costs, and who waits since when for its end."""

    start: float
    cost: float = 0.0
    items: list[int] = field(default_factory=list)
    waiting: dict[int | None, float] = field(default_factory=dict)
    busy: dict[int | None, float] = field(default_factory=dict)


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
        self.issued: dict[int, int] = {}
        self.groups: list[Group] = []
        self.work: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.own: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.lazy: list[tuple[float, int]] = []
        self.holding: list[tuple[float, int]] = []
        self.instant: deque[int] = deque()
        #: When each stream is done with what it was given, and when each item is, in microseconds.
        self.time: dict[int | None, float] = defaultdict(float)
        self.finish: dict[int, float] = {}
        #: Who waits for an event; None is somebody outside of the graph.
        self.waiters: dict[int | None, set[int | None]] = defaultdict(set)
        for op in self.graph.ops:
            if op.kind is OpKind.WAIT:
                self.waiters[op.event].add(op.stream)
        self.on: dict[int | None, list[int]] = defaultdict(list)
        for item in range(self.count):
            self.on[self.stream[item]].append(item)

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

    def _export(self, item: int) -> set[int | None]:
        """Take *item*; return the streams that could go on with it if the region ended here."""
        found: set[int | None] = set()
        for other in self.exports.get(item, ()):
            self.lacking[other, self.stream[item]] -= 1
            if not self.lacking[other, self.stream[item]]:
                found.add(self.stream[other])
        for ready in self.instant:  # a record that is ready waits only for the region to end
            op = self.order.op(ready)
            if op is not None and op.kind is OpKind.RECORD:
                found |= self.waiters[op.event] or {None}
        return found - {self.stream[item]}

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
                return self._joined()

    def _joined(self) -> tuple[Group, ...]:
        """Return the groups, those regions joined that ended for a stream which then went on only later."""
        latest: set[int] = set()  # groups behind which another stream goes on, needing nothing later of theirs
        for group in self.groups:
            found: dict[int | None, int] = {}
            for stream, number in self._imports(group):
                found[stream] = max(found.get(stream, -1), number)
            latest.update(found.values())
        result: list[Group] = []
        known: dict[tuple[int | None, int | None], int] = {}
        for number, group in enumerate(self.groups):
            imports = self._imports(group)
            waits = any(one > known.get((group.stream, stream), -2) for stream, one in imports)
            for stream, one in imports:
                known[group.stream, stream] = max(one, known.get((group.stream, stream), -2))
            last = result[-1] if result else None
            alike = (
                last is not None and group.kind is last.kind is GroupKind.REGION and group.stream == last.stream
            )
            if last is not None and alike and not waits and number - 1 not in latest:
                result[-1] = Group(GroupKind.REGION, group.stream, last.items + group.items)
            else:
                result.append(group)
        return tuple(result)

    def _imports(self, group: Group) -> list[tuple[int | None, int]]:
        """Return what *group* needs of other streams: each with the number of the group, -1 for their entry."""
        return [
            (self.stream[other] if other >= 0 else -1 - other, self.issued.get(other, -1))
            for item in group.items
            for other in self.order.needs[item]
            if other < self.count and (self.stream[other] if other >= 0 else -1 - other) != group.stream
        ]

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
        region = _Region(self.time[stream])
        while self.work[stream] or self.own[stream]:
            _, item = self._head(stream)
            own = bool(self.own[stream]) and self.own[stream][0][1] == item
            if region.items and (own or self._late(region, item, stream)):
                region = self._close(region, stream)
                continue  # a record may have made something ready
            heappop((self.own if own else self.work)[stream])
            arrival = self._arrival(item, stream)
            if own:
                self.time[stream] = self.finish[item] = max(self.time[stream], arrival) + self._cost(item)
                self._issue(GroupKind.NODE if item < len(self.graph.nodes) else GroupKind.WRITE_BACK, [item])
                region = _Region(self.time[stream])
                continue
            region.items.append(item)
            region.start = max(region.start, arrival)
            region.cost += self._cost(item)
            self._release(item)
            for waiting in self._export(item):
                region.waiting.setdefault(waiting, region.start + region.cost)
        if region.items:
            self._close(region, stream)

    def _close(self, region: _Region, stream: int) -> _Region:
        """End *region*, and return a new one behind it."""
        self.time[stream] = region.start + region.cost
        self.finish.update(dict.fromkeys(region.items, self.time[stream]))
        self._issue(GroupKind.REGION, region.items)
        return _Region(self.time[stream])

    def _late(self, region: _Region, item: int, stream: int) -> bool:
        """Say whether *region* would hold another stream, or itself, back by taking *item* in."""
        idle = min(region.cost, self._arrival(item, stream) - region.start)
        if idle > self.delay_us:
            return True
        end = max(region.start, self._arrival(item, stream)) + region.cost + self._cost(item)
        for waiting, since in region.waiting.items():
            if end - since <= self.delay_us:
                continue
            if waiting not in region.busy:
                region.busy[waiting] = self._busy(waiting, region)
            if end - max(since, region.busy[waiting]) > self.delay_us:
                return True
        return False

    def _arrival(self, item: int, stream: int) -> float:
        """Return when what *item* needs of other streams is there."""
        return max(
            (self.finish.get(other, 0.0) for other in self.order.needs[item] if self._foreign(other, stream)),
            default=0.0,
        )

    def _foreign(self, item: int, stream: int) -> bool:
        return 0 <= item < self.count and self.stream[item] != stream

    def _busy(self, stream: int | None, region: _Region) -> float:
        """Return until when *stream* has work that needs nothing of *region*."""
        if stream is None:
            return 0.0
        inside, free = set(region.items), set()
        total = self.time[stream]
        for item in self.on[stream]:
            if item not in self.issued and all(
                other in free or (other in self.issued and other not in inside)
                for other in self.order.before[item]
            ):
                free.add(item)
                total += self._cost(item)
        return total

    def _cost(self, item: int) -> float:
        node = self.order.node(item)
        return (node.cost_us or 0.0) if node is not None else 0.0


__all__ = ["DELAY_US", "Group", "GroupKind", "anchored", "cut"]
