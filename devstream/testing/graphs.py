"""Hypothesis strategies for the compiler's graphs, and the `Capture` that builds one the way a front end does.

A graph is captured line by line from a random program that one host thread could have run: streams, events, views,
tuples, changes in place, collectives, copies, effects, ``del``. Nothing says that the program is free of races.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from devstream.compiler._graph import (
    Del,
    Given,
    Graph,
    Kind,
    Node,
    OpKind,
    OrderOp,
    Origin,
    Output,
    Stream,
    Value,
    WriteBack,
)


class Capture:
    """Collects a graph, counting lines, storages and epochs."""

    def __init__(self, *, streams: int = 2, device: str = "cpu") -> None:
        self.streams = [Stream(device) for _ in range(streams)]
        self.device = device
        self.epochs = [0] * streams
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.ops: list[OrderOp] = []
        self.outputs: list[Output] = []
        self.write_backs: list[WriteBack] = []
        self.dels: list[Del] = []
        self.given: list[Given] = []
        self.lines = 0

    def line(self) -> str:
        """Return the next line of the made-up source."""
        self.lines += 1
        return f"step.py:{self.lines}"

    def input(self, *, stream: int = 0, origin: Origin = Origin.INPUT) -> str:
        """Add a given value."""
        return self._value(f"{origin}{len(self.values)}", stream=stream, origin=origin)

    def _value(
        self, name: str, *, stream: int, origin: Origin = Origin.PRODUCED, storage: int | None = None
    ) -> str:
        number = len(self.values) if storage is None else storage
        self.values.append(Value(name, number, stream, self.device, origin))
        return name

    def storage(self, name: str) -> int:
        """Return the storage of a value."""
        return next(value.storage for value in self.values if value.name == name)

    def node(
        self,
        stream: int,
        *reads: str,
        kind: Kind = Kind.COMPUTE,
        writes: tuple[str, ...] = (),
        alias: str | None = None,
        collective: str = "",
        cost_us: float | None = None,
    ) -> str:
        """Add a node and return the value that it makes; with *alias* that shares this value's storage."""
        name = f"n{len(self.nodes)}"
        made = self._value(f"v_{name}", stream=stream, storage=None if alias is None else self.storage(alias))
        self.nodes.append(
            Node(
                name,
                stream,
                self.epochs[stream],
                reads,
                (made,),
                writes,
                kind,
                self.line(),
                collective=collective,
                cost_us=cost_us,
            )
        )
        return made

    def view(self, stream: int, base: str) -> str:
        """Add a view of *base*."""
        return self.node(stream, base, kind=Kind.VIEW, alias=base)

    def pair(self, stream: int, *reads: str) -> tuple[str, str]:
        """Add an operation with two results."""
        both = self.node(stream, *reads)
        first, second = (self.node(stream, both, kind=Kind.ITEM, alias=both) for _ in range(2))
        return first, second

    def issue(self, stream: int, *reads: str) -> str:
        """Start a collective; what comes back is for `land` only."""
        return self.node(stream, *reads, kind=Kind.ISSUE)

    def land(self, stream: int, issued: str) -> str:
        """Let *stream* wait for the collective that makes *issued*."""
        maker = next(node.name for node in self.nodes if issued in node.makes)
        return self.node(stream, issued, kind=Kind.WAIT, alias=issued, collective=maker)

    def record(self, event: int, stream: int) -> None:
        """Record *event* on *stream*."""
        self._op(OpKind.RECORD, stream=stream, event=event)
        self.epochs[stream] += 1

    def wait(self, event: int, stream: int) -> None:
        """Let *stream* wait for *event*."""
        self._op(OpKind.WAIT, stream=stream, event=event)
        self.epochs[stream] += 1

    def synchronize(self, *, stream: int | None = None, event: int | None = None) -> None:
        """Hold the host."""
        self._op(OpKind.SYNCHRONIZE, stream=stream, event=event)
        self.epochs = [epoch + 1 for epoch in self.epochs]

    def record_stream(self, value: str, stream: int) -> None:
        """Tell the allocator of *stream*."""
        self._op(OpKind.RECORD_STREAM, stream=stream, value=value)

    def _op(self, kind: OpKind, *, stream: int | None, event: int | None = None, value: str = "") -> None:
        self.ops.append(OrderOp(kind, tuple(self.epochs), stream, event, value, self.line()))

    def change(self, target: str, stream: int, *reads: str) -> str:
        """Change an input in place; later readers take the value that is returned."""
        source = self.node(stream, target, *reads)
        line = self.nodes[-1].line
        self.write_backs.append(WriteBack(target, source, stream, self.epochs[stream], line))
        return source

    def output(self, value: str, *, joined: bool = True, saved: bool = False) -> None:
        """Hand *value* out."""
        self.outputs.append(Output(value, joined=joined, saved=saved))

    def delete(self, value: str, stream: int) -> None:
        """Note a ``del``."""
        self.dels.append(Del(value, stream, self.epochs[stream], self.line()))

    def graph(self) -> Graph:
        """Return what was captured."""
        return Graph(
            streams=tuple(self.streams),
            values=tuple(self.values),
            nodes=tuple(self.nodes),
            ops=tuple(self.ops),
            outputs=tuple(self.outputs),
            write_backs=tuple(self.write_backs),
            dels=tuple(self.dels),
            given=tuple(self.given),
        )


#: What a random program may do besides computing.
ACTIONS = (
    "compute", "compute", "compute", "pair", "view", "write", "change", "record", "wait", "synchronize",
    "issue", "land", "copy", "effect", "del", "record_stream",
)  # fmt: skip


@st.composite
def graphs(
    draw: Callable[[st.SearchStrategy[object]], object],
    *,
    max_streams: int = 3,
    max_actions: int = 8,
    actions: tuple[str, ...] = ACTIONS,
    costs: bool = False,
) -> Graph:
    """Return a strategy for graphs of at most *max_actions* lines."""

    def integer(low: int, high: int) -> int:
        found = draw(st.integers(low, high))
        assert isinstance(found, int)
        return found

    streams = integer(1, max_streams)
    return _Random(integer, streams=streams, costs=costs).run(actions, integer(1, max_actions))


class _Random:
    """Draws one program."""

    def __init__(self, integer: Callable[[int, int], int], *, streams: int, costs: bool) -> None:
        self.integer, self.costs = integer, costs
        self.capture = Capture(streams=streams)
        self.last = streams - 1
        self.live = [self.capture.input() for _ in range(integer(1, 2))]
        if integer(0, 3) == 0:
            self.live.append(self.capture.input(stream=integer(0, self.last), origin=Origin.SAVED))
        if integer(0, 3) == 0:
            self.live.append(self.capture.input(origin=Origin.TANGENT))
        self.fixed = {value.name for value in self.capture.values if value.origin is Origin.INPUT}
        self.changed: set[str] = set()
        self.flying: list[str] = []

    def run(self, actions: tuple[str, ...], count: int) -> Graph:
        for _ in range(count):
            getattr(self, f"_{actions[self.integer(0, len(actions) - 1)]}")(self.integer(0, self.last))
        while self.flying:
            self._land(self.integer(0, self.last))
        produced = [value.name for value in self.capture.values]
        for _ in range(self.integer(0, 2)):
            value = produced[self.integer(0, len(produced) - 1)]
            if self._plain(value):
                kind = self.integer(0, 4)
                self.capture.output(value, joined=kind < 3, saved=kind == 4)
        return self.capture.graph()

    def _in_flight(self) -> set[int]:
        """Return the storages that collectives are reading: changing them is the user's error, not an order."""
        issues = [node for node in self.capture.nodes if set(node.makes) & set(self.flying)]
        return {self.capture.storage(name) for node in issues for name in node.reads}

    def _pick(self) -> str:
        return self.live[self.integer(0, len(self.live) - 1)]

    def _plain(self, name: str) -> bool:
        """Whether *name* is a tensor, and not the tuple of one operation nor a collective's unfinished result."""
        tuples = {node.reads[0] for node in self.capture.nodes if node.kind is Kind.ITEM}
        issued = {made for node in self.capture.nodes if node.kind is Kind.ISSUE for made in node.makes}
        return name not in tuples and name not in issued

    def _compute(self, stream: int) -> None:
        cost = float(self.integer(0, 60)) if self.costs else None
        reads = dict.fromkeys(self._pick() for _ in range(self.integer(1, 2)))
        self.live.append(self.capture.node(stream, *reads, cost_us=cost))

    def _pair(self, stream: int) -> None:
        self.live.extend(self.capture.pair(stream, self._pick()))

    def _view(self, stream: int) -> None:
        base = self._pick()
        self.live.append(self.capture.view(stream, base))
        if base in self.fixed:
            self.fixed.add(self.live[-1])

    def _write(self, stream: int) -> None:
        value = self._pick()
        if value not in self.fixed and self.capture.storage(value) not in self._in_flight():
            self.live.append(self.capture.node(stream, value, writes=(value,), alias=value))

    def _change(self, stream: int) -> None:
        busy = self._in_flight()
        inputs = [one for one in self.capture.values if one.origin is Origin.INPUT and one.storage not in busy]
        targets = sorted({value.name for value in inputs} - self.changed)
        if not targets:
            return
        target = targets[self.integer(0, len(targets) - 1)]
        source = self.capture.change(target, stream)
        aliases = {one.name for one in self.capture.values if one.storage == self.capture.storage(target)}
        self.changed.add(target)
        self.fixed.add(source)
        self.live = [one for one in self.live if one not in aliases] + [source]

    def _record(self, stream: int) -> None:
        self.capture.record(self.integer(0, 1), stream)

    def _wait(self, stream: int) -> None:
        self.capture.wait(self.integer(0, 1), stream)

    def _synchronize(self, stream: int) -> None:
        kind = self.integer(0, 2)
        self.capture.synchronize(
            stream=stream if kind == 0 else None, event=self.integer(0, 1) if kind == 1 else None
        )

    def _issue(self, stream: int) -> None:
        self.flying.append(self.capture.issue(stream, self._pick()))

    def _land(self, stream: int) -> None:
        if self.flying:
            issued = self.flying.pop(self.integer(0, len(self.flying) - 1))
            self.live.append(self.capture.land(stream, issued))

    def _copy(self, stream: int) -> None:
        self.live.append(self.capture.node(stream, self._pick(), kind=Kind.COPY))

    def _effect(self, stream: int) -> None:
        self.live.append(self.capture.node(stream, self._pick(), kind=Kind.EFFECT))

    def _del(self, stream: int) -> None:
        if len(self.live) > 1:
            self.capture.delete(self.live.pop(self.integer(0, len(self.live) - 1)), stream)

    def _record_stream(self, stream: int) -> None:
        self.capture.record_stream(self._pick(), stream)


__all__ = ["ACTIONS", "Capture", "graphs"]
