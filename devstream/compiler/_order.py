"""The order that a graph needs: from what each node reads and writes, and from the user's records and waits.

Everything that will be a step is an *item*, a number: nodes first, then write-backs, then the user's operations,
then for each stream the end of its part (the end of stream 0 is where the call returns). Before all items, stream
s has its entry, ``entry(s)``. Two relations come out:

- ``needs[b]``: items whose work must be over on the device before that of b starts; across streams, by a wait;
- ``before[b]``: items that must be issued before b. This one has no cycle, or the graph has no meaning.

[Note: A collective ends at its wait]
A collective reads and writes from its issue on, and is over for a stream only behind a wait for it. So who needs
a collective to be over must also be issued behind its first wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from devstream.compiler._graph import FREE_OF_WORK, Graph, Kind, Node, OpKind, OrderOp, Origin
from devstream.exceptions import GraphError, WriteBackError


def entry(stream: int) -> int:
    """Return the item that stands for all that *stream* did before the call."""
    return -1 - stream


@dataclass(slots=True)
class _State:
    """One storage on the way through the graph."""

    writer: int
    version: int = 0
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    """What `derive` found; *reads* and *writes* give for an item each storage with the version of its contents."""

    graph: Graph
    needs: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]
    writes: tuple[tuple[tuple[int, int], ...], ...]
    first_wait: dict[int, int]

    def node(self, item: int) -> Node | None:
        """Return the node of an item, or None."""
        return self.graph.nodes[item] if 0 <= item < len(self.graph.nodes) else None

    def op(self, item: int) -> OrderOp | None:
        """Return the user's operation of an item, or None."""
        index = item - len(self.graph.nodes) - len(self.graph.write_backs)
        return self.graph.ops[index] if 0 <= index < len(self.graph.ops) else None

    def end(self, stream: int) -> int:
        """Return the item that stands for the end of *stream*'s part."""
        return end(self.graph, stream)


def end(graph: Graph, stream: int) -> int:
    """Return the item that stands for the end of *stream*'s part."""
    return len(graph.nodes) + len(graph.write_backs) + len(graph.ops) + stream


def roots(graph: Graph) -> dict[str, str]:
    """Return for each value the value that a region takes in for it: the base of a view, otherwise itself."""
    found: dict[str, str] = {value.name: value.name for value in graph.values}
    for node in graph.nodes:
        base = found[node.reads[0]] if node.kind in FREE_OF_WORK else ""
        # An item of a view's tuple (split, unbind) is a view; an item of an operation's tuple is a tensor.
        if node.kind is Kind.VIEW or (node.kind is Kind.ITEM and base != node.reads[0]):
            found.update(dict.fromkeys(node.makes, base))
    return found


def derive(graph: Graph) -> Order:
    """Return the order that *graph* needs.

    Raises:
        WriteBackError: a mutated input can't be written back in its epoch.
        GraphError: the user's operations and the flow of data contradict each other otherwise.
    """
    _check_outside(graph)
    derivation = _Derivation(graph)
    order = derivation.order()
    _check_cycles(order)
    return order


class _Derivation:
    """The walk over a graph that collects the relations."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = end(graph, len(graph.streams))
        self.needs: list[dict[int, None]] = [{} for _ in range(count)]
        self.before: list[dict[int, None]] = [{} for _ in range(count)]
        self.reads: list[dict[int, int]] = [{} for _ in range(count)]
        self.writes: list[dict[int, int]] = [{} for _ in range(count)]
        self.index = {node.name: item for item, node in enumerate(graph.nodes)}
        self.made_by = {name: self.index[node.name] for name, node in graph.maker.items()}
        self.first_wait: dict[int, int] = {}
        for item, node in enumerate(graph.nodes):
            if node.kind is Kind.WAIT:
                self.first_wait.setdefault(self.index[node.collective], item)
        self.states: dict[int, _State] = {
            storage: _State(entry(value.stream))
            for storage, value in graph.owner.items()
            if value.origin is not Origin.PRODUCED
        }

    def order(self) -> Order:
        """Walk, and return what was found."""
        for item, node in enumerate(self.graph.nodes):
            self._issue_after_makers(item, node.reads + node.writes)
            if node.kind not in FREE_OF_WORK and node.kind is not Kind.WAIT:
                self._node(item, node)
            if node.kind is Kind.WAIT:
                self.before[item][self.index[node.collective]] = None
        self._write_backs()
        self._ends()
        self._chains()
        self._epochs()
        return Order(
            self.graph,
            needs=tuple(tuple(found) for found in self.needs),
            before=tuple(tuple(found) for found in self.before),
            reads=tuple(tuple(found.items()) for found in self.reads),
            writes=tuple(tuple(found.items()) for found in self.writes),
            first_wait=self.first_wait,
        )

    def _issue_after_makers(self, item: int, names: Iterable[str]) -> None:
        for name in names:
            if name in self.made_by:
                self.before[item][self.made_by[name]] = None

    def _need(self, item: int, earlier: int) -> None:
        if earlier == item:
            return
        self.needs[item][earlier] = None
        if earlier >= 0:
            self.before[item][earlier] = None
        if earlier in self.first_wait:  # [Note: A collective ends at its wait]
            self.before[item][self.first_wait[earlier]] = None

    def _read(self, item: int, storage: int) -> None:
        state = self.states[storage]
        self._need(item, state.writer)
        state.readers.append(item)
        self.reads[item][storage] = state.version

    def _write(self, item: int, storage: int) -> None:
        state = self.states.get(storage)
        if state is None:
            self.states[storage] = _State(item, version=1)
            self.writes[item][storage] = 1
            return
        for earlier in (state.writer, *state.readers):
            self._need(item, earlier)
        state.writer, state.version, state.readers = item, state.version + 1, []
        self.writes[item][storage] = state.version

    def _node(self, item: int, node: Node) -> None:
        read = self.graph.storages(node.reads)
        for storage in read:
            self._read(item, storage)
        for storage in self.graph.storages(node.writes):
            self._write(item, storage)
        for storage in self.graph.storages(node.makes):
            if storage not in self.states:
                self._write(item, storage)

    def _write_backs(self) -> None:
        for number, back in enumerate(self.graph.write_backs):
            # What AOT copies itself comes after the program, on the caller's stream: at its end.
            item = end(self.graph, 0) if back.outside else len(self.graph.nodes) + number
            self._issue_after_makers(item, (back.source,))
            source, target = (self.graph.value[name].storage for name in (back.source, back.target))
            if source != target:
                self._read(item, source)
            self._write(item, target)
            if back.joined:
                self._need(end(self.graph, 0), item)

    def _ends(self) -> None:
        for output in self.graph.outputs:
            value = self.graph.value[output.value]
            if not output.joined and not output.saved:
                continue
            # The backward takes a saved value for ready on the stream whose memory it is.
            item = end(self.graph, self.graph.owner[value.storage].stream if output.saved else 0)
            self._need(item, self.states[value.storage].writer)
            if output.value in self.made_by:  # a region may make even a view by a copy
                maker = self.graph.nodes[self.made_by[output.value]]
                if maker.kind is Kind.VIEW:
                    self._need(item, self.made_by[output.value])

    def _chains(self) -> None:
        """Keep the order of effects, of each group's collectives, and of the user's operations."""
        last: dict[object, int] = {}

        def follow(item: int, *chains: object) -> None:
            for chain in chains:
                if chain in last:
                    self.before[item][last[chain]] = None
                last[chain] = item

        for item, node in enumerate(self.graph.nodes):
            if node.kind is Kind.EFFECT:
                follow(item, "effects")
            elif node.kind is Kind.ISSUE:
                follow(item, ("group", node.group))
        streams = range(len(self.graph.streams))
        for number, op in enumerate(self.graph.ops):
            item = len(self.graph.nodes) + len(self.graph.write_backs) + number
            if op.kind is OpKind.RECORD_STREAM:
                self._issue_after_makers(item, (op.value,))
                continue
            through = streams if op.kind is OpKind.SYNCHRONIZE else [op.stream]
            follow(item, *(("stream", stream) for stream in through))
            if op.event is not None:
                follow(item, ("event", op.event))

    def _epochs(self) -> None:
        """Put each piece of work before the records behind it and behind the waits before it: [Note: Epochs]."""
        records: dict[int, list[tuple[int, int]]] = defaultdict(list)
        waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
        streams = range(len(self.graph.streams))
        for number, op in enumerate(self.graph.ops):
            item = len(self.graph.nodes) + len(self.graph.write_backs) + number
            for stream in streams:
                if holds_back(op, stream):
                    records[stream].append((op.epochs[stream], item))
                if lets_wait(op, stream):
                    waits[stream].append((op.epochs[stream], item))
        for item, stream, epoch in _placed(self.graph):
            # The next record and the last wait are enough: a stream's operations are a chain.
            later = bisect_left(records[stream], (epoch, 0))
            if later < len(records[stream]):
                self.before[records[stream][later][1]][item] = None
            earlier = bisect_left(waits[stream], (epoch, 0)) - 1
            if earlier >= 0:
                self.before[item][waits[stream][earlier][1]] = None


def holds_back(op: OrderOp, stream: int) -> bool:
    """Whether work of *stream* from before *op* must stay before it."""
    if op.kind is OpKind.RECORD:
        return op.stream == stream
    return op.kind is OpKind.SYNCHRONIZE and op.event is None and op.stream in {None, stream}


def lets_wait(op: OrderOp, stream: int) -> bool:
    """Whether work of *stream* from behind *op* must stay behind it."""
    return op.kind is OpKind.SYNCHRONIZE or (op.kind is OpKind.WAIT and op.stream == stream)


def _placed(graph: Graph) -> Iterator[tuple[int, int, int]]:
    """Yield item, stream and epoch of all work."""
    for item, node in enumerate(graph.nodes):
        if node.kind not in FREE_OF_WORK:
            yield item, node.stream, node.epoch
    for number, back in enumerate(graph.write_backs):
        if not back.outside:
            yield len(graph.nodes) + number, back.stream, back.epoch


def _check_outside(graph: Graph) -> None:
    for back in graph.write_backs:
        for op in graph.ops if back.outside else ():
            if holds_back(op, back.stream) and op.epochs[back.stream] >= back.epoch:
                raise WriteBackError(
                    target=back.target,
                    line=back.line,
                    other=describe(op),
                    other_line=op.line,
                    advice=(
                        "the change reaches the input only after the call, behind what that operation stands for; "
                        "change a copy, return it, and use copy_() outside of the compiled function"
                    ),
                )


def describe(op: OrderOp) -> str:
    """Return a few words that say what the user did."""
    what = f"event {op.event}" if op.event is not None else f"stream {op.stream}"
    if op.kind is OpKind.SYNCHRONIZE:
        return f"the synchronize of {what}" if op.stream is not None or op.event is not None else "synchronize()"
    return f"the {op.kind} of {what} on stream {op.stream}"


def topological(before: Iterable[Iterable[int]]) -> list[int]:
    """Return the items, each behind those that it names, smallest first; items on a cycle are left out."""
    after: dict[int, list[int]] = defaultdict(list)
    open_: list[int] = []
    for item, earlier in enumerate(before):
        found = list(earlier)
        open_.append(len(found))
        for other in found:
            after[other].append(item)
    ready = [item for item, count in enumerate(open_) if not count]
    done = []
    while ready:
        item = heappop(ready)
        done.append(item)
        for other in after[item]:
            open_[other] -= 1
            if not open_[other]:
                heappush(ready, other)
    return done


def _check_cycles(order: Order) -> None:
    stuck = set(range(len(order.before))) - set(topological(order.before))
    if not stuck:
        return
    item, path = min(stuck), []
    while item not in path:
        path.append(item)
        item = min(other for other in order.before[item] if other in stuck)
    cycle = path[path.index(item) :]
    graph, first = order.graph, len(order.graph.nodes)
    named = [_named(order, one) for one in cycle]
    for one in cycle:
        if first <= one < first + len(graph.write_backs):
            back = graph.write_backs[one - first]
            other = next(_named(order, two) for two in [*filter(order.op, cycle), *filter(order.node, cycle)])
            raise WriteBackError(
                target=back.target,
                line=back.line,
                other=other[0],
                other_line=other[1],
                advice=(
                    "the old contents are still read behind it; make a copy (clone) for that reader before the "
                    "change, or record the event behind the last reader"
                ),
            )
    text = ", then ".join(f"{what} ({line})" for what, line in reversed(named))
    raise GraphError(graph=graph.name, problem=f"these must each come before the next, in a circle: {text}")


def _named(order: Order, item: int) -> tuple[str, str]:
    node, op = order.node(item), order.op(item)
    if node is not None:
        return f"{node.name!r} on stream {node.stream}", node.line
    if op is not None:
        return describe(op), op.line
    index = item - len(order.graph.nodes)
    if index < len(order.graph.write_backs):
        return f"the write-back of {order.graph.write_backs[index].target!r}", order.graph.write_backs[index].line
    return "the end", ""


__all__ = ["Order", "derive", "describe", "end", "entry", "holds_back", "lets_wait", "roots", "topological"]
