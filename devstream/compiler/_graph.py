"""The functional graph with streams, as plain data: what the order, the regions and the proof are derived from.

One `Graph` describes one forward, backward or inference graph after AOT Autograd. Names are those of the traced
nodes. Streams are numbered; slot 0 is the stream that is current where the call enters. A line is text such as
``"file.py:12"``.

[Note: Epochs]
A front end keeps a counter for each stream: how many ordering operations the stream has seen. A node's *epoch* is
its stream's counter at capture. Record and wait raise the counter of their own stream *after* they were noted;
synchronize holds the host back, hence everything captured later, and raises the counter of every stream. An
`OrderOp` keeps all counters from before it was counted. So a node on stream t was captured before it exactly when
``node.epoch <= op.epochs[t]``, for the streams whose counter the operation raises. Nodes that no user line
ordered (those of a backward) have epoch 0 in a graph without operations.

[Note: Storage is the unit]
Two values with the same storage number share memory: views, getitems of one tuple, the result of a collective's
wait, an in-place result. Order, lifetime and proof speak of storages, never of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from devstream.exceptions import GraphError


class Origin(StrEnum):
    """Where a value comes from."""

    INPUT = "input"  #: passed by the caller, who keeps it
    SAVED = "saved"  #: kept by the forward for this backward
    TANGENT = "tangent"  #: handed in by the autograd engine
    PRODUCED = "produced"  #: made by a node of this graph


class Kind(StrEnum):
    """What a node does."""

    COMPUTE = "compute"
    VIEW = (
        "view"  #: touches no memory, so it needs no order: each region that reads it makes it anew from its base
    )
    ITEM = "item"  #: getitem of a tuple: goes where the tuple is made
    COPY = "copy"  #: between devices or host; a step of its own
    ISSUE = "issue"  #: starts a collective: until its wait its inputs stay as they are and its outputs are unread
    WAIT = "wait"  #: makes its stream wait for a collective; its result aliases the collective's output
    EFFECT = "effect"  #: keeps program order among its like; a step of its own


class OpKind(StrEnum):
    """What an ordering operation does."""

    RECORD = "record"
    WAIT = "wait"
    SYNCHRONIZE = "synchronize"  #: the host waits: for an event, for a stream, or (neither given) for the device
    RECORD_STREAM = "record_stream"  #: the allocator is told of a reader; orders nothing


@dataclass(frozen=True, slots=True)
class Stream:
    """One queue: its *device* as text, and the other devices whose memory its kernels may touch."""

    device: str
    peers: tuple[str, ...] = ()
    name: str = ""

    def reaches(self, device: str) -> bool:
        """Whether work on this stream may touch memory of *device*."""
        return device == self.device or device in self.peers


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor (or tuple of tensors).

    *stream* made it, and its memory belongs to that stream's pool. For an input and a tangent it is the stream
    that they are ready on (0, unless the front end knows better), for a saved value the stream of its forward
    node.
    """

    name: str
    storage: int
    stream: int
    device: str
    origin: Origin = Origin.PRODUCED


@dataclass(frozen=True, slots=True)
class Node:
    """One operation on one stream; *writes* names values that exist already and are mutated.

    Args:
        collective: of a `Kind.WAIT`, the name of the issuing node.
        group: of a `Kind.ISSUE`, the process group; issues of one group keep their order.
        cost_us: how long the device takes, if a model or a measurement says so.
    """

    name: str
    stream: int
    epoch: int = 0
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    kind: Kind = Kind.COMPUTE
    line: str = ""
    cost_us: float | None = None
    collective: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class OrderOp:
    """An ordering operation of the user's, in order of capture; *epochs* as in [Note: Epochs]."""

    kind: OpKind
    epochs: tuple[int, ...]
    stream: int | None = None
    event: int | None = None
    value: str = ""  #: of a record_stream
    line: str = ""


@dataclass(frozen=True, slots=True)
class WriteBack:
    """A mutated input gets its new contents, *source*, on *stream* in *epoch*.

    Args:
        outside: AOT copies it itself after the program, on the caller's stream, instead of the program.
        joined: the caller's stream waits for it, as for an output.
    """

    target: str
    source: str
    stream: int
    epoch: int = 0
    line: str = ""
    outside: bool = False
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """A value that outlives the program.

    Args:
        joined: the caller's stream waits for it before the call returns; False where the user orders it by an
            event of his own.
        saved: kept for the backward, never joined: the program records its stream's completion instead.
    """

    value: str
    joined: bool = True
    saved: bool = False


@dataclass(frozen=True, slots=True)
class Del:
    """The user's ``del``: his last name for *value* went away on *stream* in *epoch*."""

    value: str
    stream: int
    epoch: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """An *event* that was recorded on *stream* before the call, behind all that this stream gives to the call."""

    event: int
    stream: int


@dataclass(frozen=True)
class Graph:
    """One functional graph; *nodes* and *ops* in order of capture. Creation checks it (`GraphError`)."""

    streams: tuple[Stream, ...]
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    ops: tuple[OrderOp, ...] = ()
    outputs: tuple[Output, ...] = ()
    write_backs: tuple[WriteBack, ...] = ()
    dels: tuple[Del, ...] = ()
    given: tuple[Given, ...] = ()
    name: str = "graph"

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def value(self) -> dict[str, Value]:
        """The values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def maker(self) -> dict[str, Node]:
        """The node that makes a value, by the value's name; given values have none."""
        return {made: node for node in self.nodes for made in node.makes}

    @cached_property
    def node(self) -> dict[str, Node]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    def storages(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the storages of these values, each once, in order."""
        return tuple(dict.fromkeys(self.value[name].storage for name in names))

    @cached_property
    def owner(self) -> dict[int, Value]:
        """The first value of each storage: its stream's pool is where the memory goes back to."""
        found: dict[int, Value] = {}
        for value in self.values:
            found.setdefault(value.storage, value)
        return found


#: Does nothing that the device orders: no memory is touched.
FREE_OF_WORK = frozenset({Kind.VIEW, Kind.ITEM})
#: A step of its own in the program; everything else enters a region.
OWN_STEP = frozenset({Kind.COPY, Kind.ISSUE, Kind.WAIT, Kind.EFFECT})
_ORDERS = frozenset({OpKind.RECORD, OpKind.WAIT, OpKind.SYNCHRONIZE})


def check(graph: Graph) -> None:
    """Raise `GraphError` unless the graph can be given a meaning."""
    problem = next(_problems(graph), None)
    if problem is not None:
        raise GraphError(graph=graph.name, problem=problem)


def _problems(graph: Graph) -> Iterator[str]:
    yield from _value_problems(graph)
    yield from _node_problems(graph)
    yield from _collective_problems(graph)
    yield from _op_problems(graph)
    yield from _edge_problems(graph)


def _value_problems(graph: Graph) -> Iterator[str]:
    if not graph.streams:
        yield "it has no stream; slot 0 is the caller's"
    seen: set[str] = set()
    device: dict[int, str] = {}
    for value in graph.values:
        if value.name in seen:
            yield f"value {value.name!r} is listed twice"
        seen.add(value.name)
        if not 0 <= value.stream < len(graph.streams):
            yield f"value {value.name!r} was made on stream {value.stream}, which is not listed"
        if device.setdefault(value.storage, value.device) != value.device:
            yield f"value {value.name!r} is on {value.device}, its storage on {device[value.storage]}"


def _node_problems(graph: Graph) -> Iterator[str]:
    ready = {value.name for value in graph.values if value.origin is not Origin.PRODUCED}
    produced = {value.name for value in graph.values} - ready
    written = {graph.value[name].storage for name in ready}
    names: set[str] = set()
    for node in graph.nodes:
        if node.name in names:
            yield f"node {node.name!r} is listed twice"
        names.add(node.name)
        if not 0 <= node.stream < len(graph.streams) or node.epoch < 0:
            yield f"node {node.name!r} is on stream {node.stream} in epoch {node.epoch}"
            return
        for name in (*node.reads, *node.writes):
            if name not in ready:
                yield f"node {node.name!r} ({node.line}) reads or writes {name!r} before anything made it"
                return
        for name in node.makes:
            if name not in produced or name in ready:
                yield f"{name!r}, made by {node.name!r}, is {'made twice' if name in ready else 'not listed'}"
                return
            ready.add(name)
        yield from _storage_problems(graph, node, written)
        written.update(graph.storages(node.makes))
    for name in sorted(produced - ready):
        yield f"value {name!r} is made by no node"


def _storage_problems(graph: Graph, node: Node, written: set[int]) -> Iterator[str]:
    """Yield what is wrong with the memory that *node* touches; *written* are the storages that exist before it."""
    touched = graph.storages((*node.reads, *node.writes))
    for name in node.makes:
        value = graph.value[name]
        if node.kind in {*FREE_OF_WORK, Kind.WAIT} and value.storage not in touched:
            yield f"node {node.name!r} is a {node.kind}, but {name!r} shares no storage with what it reads"
        if value.storage not in written and value.stream != node.stream:
            yield f"{name!r} is made by {node.name!r} on stream {node.stream}, but listed on stream {value.stream}"
        if value.storage in written and value.storage not in touched:
            yield f"{name!r} shares storage {value.storage}, which {node.name!r} does not read"
    if node.kind in FREE_OF_WORK and (node.writes or len(node.reads) != 1):
        yield f"node {node.name!r} is a {node.kind}: it reads one value and writes none"
    if node.kind in {Kind.COPY, *FREE_OF_WORK}:
        return
    stream = graph.streams[node.stream]
    for name in (*node.reads, *node.writes, *node.makes):
        if not stream.reaches(graph.value[name].device):
            yield (
                f"node {node.name!r} ({node.line}) on {stream.device} touches {name!r} on "
                f"{graph.value[name].device}, which is no peer of it; copy it first"
            )


def _collective_problems(graph: Graph) -> Iterator[str]:
    issued: dict[str, Node] = {}
    waited: set[str] = set()
    for node in graph.nodes:
        if node.kind is Kind.ISSUE:
            issued[node.name] = node
        if node.kind is not Kind.WAIT:
            continue
        waited.add(node.collective)
        issue = issued.get(node.collective)
        if issue is None:
            yield f"node {node.name!r} waits for {node.collective!r}, which no earlier node issues"
        elif not set(graph.storages(node.reads)) <= set(graph.storages((*issue.makes, *issue.writes))):
            yield f"node {node.name!r} waits for {issue.name!r}, but reads what that does not make"
    for name in issued.keys() - waited:
        yield f"collective {name!r} ({issued[name].line}) is never waited for"


def _op_problems(graph: Graph) -> Iterator[str]:
    last = (0,) * len(graph.streams)
    own: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        what = f"operation {index} ({op.kind}, {op.line})"
        if len(op.epochs) != len(graph.streams):
            yield f"{what} knows {len(op.epochs)} epochs for {len(graph.streams)} streams"
            return
        if any(now < before for now, before in zip(op.epochs, last, strict=True)):
            yield f"{what} has epochs {op.epochs}, below those before it, {last}"
        last = op.epochs
        if op.stream is not None and not 0 <= op.stream < len(graph.streams):
            yield f"{what} is on stream {op.stream}, which is not listed"
            return
        if op.kind in {OpKind.RECORD, OpKind.WAIT} and (op.stream is None or op.event is None):
            yield f"{what} needs a stream and an event"
            return
        if op.kind is OpKind.SYNCHRONIZE and op.stream is not None and op.event is not None:
            yield f"{what} waits for a stream or for an event, not for both"
        if op.kind is OpKind.RECORD_STREAM and (op.stream is None or op.value not in graph.value):
            yield f"{what} needs a stream and a value"
        if op.kind in _ORDERS:
            raised = range(len(graph.streams)) if op.kind is OpKind.SYNCHRONIZE else (op.stream or 0,)
            for stream in raised:
                if op.epochs[stream] <= own.get(stream, -1):
                    yield f"{what} has epoch {op.epochs[stream]} on stream {stream}, as an operation before it"
                own[stream] = op.epochs[stream]


def _edge_problems(graph: Graph) -> Iterator[str]:
    for output in graph.outputs:
        if output.value not in graph.value:
            yield f"output {output.value!r} is not listed as a value"
    for back in graph.write_backs:
        target = graph.value.get(back.target)
        if target is None or target.origin is not Origin.INPUT:
            yield f"{back.target!r} ({back.line}) is written back, but is no input"
        if back.source not in graph.value or not 0 <= back.stream < len(graph.streams):
            yield f"{back.target!r} ({back.line}) is written back from {back.source!r} on stream {back.stream}"
    for gone in graph.dels:
        if gone.value not in graph.value or not 0 <= gone.stream < len(graph.streams):
            yield f"{gone.value!r} ({gone.line}) is deleted on stream {gone.stream}, but is not listed"
    for given in graph.given:
        if not 0 <= given.stream < len(graph.streams):
            yield f"event {given.event} was recorded on stream {given.stream}, which is not listed"


__all__ = [
    "FREE_OF_WORK",
    "OWN_STEP",
    "Del",
    "Given",
    "Graph",
    "Kind",
    "Node",
    "OpKind",
    "OrderOp",
    "Origin",
    "Output",
    "Stream",
    "Value",
    "WriteBack",
    "check",
]
