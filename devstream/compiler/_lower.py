"""From a graph of AOT Autograd, its streams known, to the plain `Graph` that order and proof are derived from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any  # Any: values of nodes

import torch

from devstream._compat import inductor, rng
from devstream.compiler._captured import AMBIENT, Mark, Operation, mark_of
from devstream.compiler._cost import Cost
from devstream.compiler._graph import (
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
from devstream.compiler._joint import is_item, is_number
from devstream.compiler._kept import SAVED_AS
from devstream.compiler._naming import key_of, short, tensors_of, text
from devstream.compiler._nodes import line_of, unsupported

COLLECTIVES = ("_c10d_functional", "c10d_functional")
_BETWEEN_DEVICES = ("aten::_to_copy", "prims::device_put", "aten::copy")


@dataclass(frozen=True, slots=True)
class Queues:
    """The streams of a compiled function, by number, as the call that is compiled has them.

    Attributes:
        devices: the device of each as text, ``"cuda:0"``; of the CPU always ``"cpu"``.
        names: what each is called in listings.
    """

    devices: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(slots=True)
class Saved:
    """What the forward keeps: by name, a value's storage, its stream, and whether the caller has it as well."""

    values: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    storages: int = 0


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph as plain data, with the way back to its nodes.

    Attributes:
        graph: what the program is built from.
        nodes: the nodes of torch's graph by name.
        ambient: for each stream beyond the function's own, the device whose current stream it is.
        token: name of the value that is the call's token, None without one.
        parameters: names of the graph's inputs.
        results: what each output is: a value, the token, a number that the host works out, or a constant.
        random: names of the nodes that draw random numbers.
    """

    graph: Graph
    nodes: dict[str, torch.fx.Node]
    ambient: tuple[str, ...]
    token: str | None
    parameters: tuple[str, ...]
    results: tuple[tuple[str, Any], ...]
    random: tuple[str, ...] = ()


#: Stands for the host's random numbers; no node of torch's is called so.
GENERATOR = "(random numbers)"


def in_turn(lowered: Lowered) -> Graph:
    """Return the graph with its random numbers drawn one node after the other, for work in threads.

    An accelerator's are given out by the host as it issues the nodes, so there the order of issue is enough.
    """
    graph = lowered.graph
    if len(lowered.random) < 2:
        return graph
    storage = 1 + max(value.storage for value in graph.values)
    nodes = [
        replace(node, writes=(*node.writes, GENERATOR)) if node.name in lowered.random else node
        for node in graph.nodes
    ]
    generator = Value(GENERATOR, storage, AMBIENT, "cpu", Origin.INPUT)
    return replace(graph, values=(*graph.values, generator), nodes=tuple(nodes))


def lower(
    module: torch.fx.GraphModule,
    queues: Queues,
    *,
    name: str,
    token: str | None,
    operations: Sequence[Operation] = (),
    visible: frozenset[int] = frozenset(),
    returns: int | None = None,
    outside: Sequence[int] = (),
    saved: Saved | None = None,
    backward: bool = False,
    cost: Cost | None = None,
) -> Lowered:
    """Return *module* as plain data.

    Args:
        module: one graph behind the partitioner, its marks complete.
        queues: the streams.
        name: what the graph is called in errors and listings.
        token: the node that stands for the call's token.
        operations: the user's, of this graph.
        visible: events that the user has outside of the graph; what he records there he orders himself.
        returns: how many outputs are not saved values; None where all are not.
        outside: for each of the first outputs, the number of the input that AOT writes it back to.
        saved: filled in by the forward, read by the backward.
        backward: whether this is one.
        cost: how long a node takes, in microseconds.

    Raises:
        UnsupportedError: it holds what has no place in a program.
    """
    lowering = _Lowering(module, queues, token, saved, backward=backward, cost=cost)
    return lowering.run(name, operations, visible, returns, tuple(outside))


class _Lowering:
    def __init__(
        self,
        module: torch.fx.GraphModule,
        queues: Queues,
        token: str | None,
        saved: Saved | None,
        *,
        backward: bool,
        cost: Cost | None,
    ) -> None:
        self.module, self.queues, self.token = module, queues, token
        self.saved, self.backward, self.cost = saved or Saved(), backward, cost
        self.ambient: list[str] = []
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.backs: list[WriteBack] = []
        #: The first value of each storage.
        self.owner: dict[int, Value] = {}
        #: The identity of each value's fake storage.
        self.keys: dict[str, Any] = {}
        self.count = self.saved.storages if backward else 0
        self.issued: dict[int, str] = {}
        self.renamed: dict[str, str] = {}
        self.random: list[str] = []
        self.accelerator = next((device for device in queues.devices if device != "cpu"), "cpu")

    def run(
        self,
        name: str,
        operations: Sequence[Operation],
        visible: frozenset[int],
        returns: int | None,
        outside: tuple[int, ...],
    ) -> Lowered:
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            self._placeholder(node)
        for node in self.module.graph.nodes:
            if node.op == "call_function" and not is_number(node) and node.name != self.token:
                self._node(node)
            elif node.op not in ("placeholder", "get_attr", "output", "call_function"):
                raise unsupported(f"a node of kind {node.op}", node, "a place for it in a program")
        ops, records = self._operations(operations, visible)
        outputs = self._outputs(placeholders, returns, outside, records)
        streams = [
            Stream(device, self._peers(device), name)
            for device, name in zip(
                (*self.queues.devices, *self.ambient),
                (*self.queues.names, *(f"current of {device}" for device in self.ambient)),
                strict=True,
            )
        ]
        owners = {value.stream for value in self.values.values() if value.origin is Origin.SAVED}
        graph = Graph(
            streams=tuple(streams),
            values=tuple(self.values.values()),
            nodes=tuple(self.nodes),
            ops=tuple(ops),
            outputs=tuple(outputs),
            write_backs=tuple(self.backs),
            given=tuple(Given(stream, stream) for stream in sorted(owners) if stream != AMBIENT),
            name=name,
        )
        return Lowered(
            graph,
            {node.name: node for node in self.module.graph.nodes},
            tuple(self.ambient),
            self.token,
            tuple(node.name for node in placeholders),
            tuple(map(self._result, inductor.outputs_of(self.module))),
            tuple(self.random),
        )

    def _result(self, node: Any) -> tuple[str, Any]:
        if not isinstance(node, torch.fx.Node):
            return ("constant", node)
        if node.name == self.token:
            return ("token", None)
        if node.op == "call_function" and is_number(node):
            return ("number", node.name)
        if node.op == "get_attr":
            raise unsupported(f"the constant {node.target} as a result", node, "a value for it")
        return ("value", self.renamed.get(node.name, node.name))

    def _peers(self, device: str) -> tuple[str, ...]:
        # What a kernel reads of host memory are scalars, and every accelerator's kernels may do so.
        return () if device == "cpu" else ("cpu",)

    # -- values ------------------------------------------------------------------------------------------

    def _placeholder(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or node.name == self.token:
            return
        known = self.saved.values.get(node.name) if self.backward else None
        if known is not None:
            storage, stream, given = known
            self._add(node, storage, stream, Origin.INPUT if given else Origin.SAVED)
            return
        tangent = self.backward and "tangents" in str(node.target)
        # Inputs may be parts of one storage. Where one is changed, they are apart: AOT Autograd gives overlapping
        # ones to the graph as one. So each counts as a storage of its own.
        self._add(node, self._fresh(), AMBIENT, Origin.TANGENT if tangent else Origin.INPUT)

    def _add(self, node: torch.fx.Node, storage: int, stream: int, origin: Origin = Origin.PRODUCED) -> None:
        value = self.values[node.name] = Value(node.name, storage, stream, _device(node), origin)
        self.owner.setdefault(storage, value)
        made = tensors_of(node.meta["val"])
        self.keys[node.name] = key_of(made[0]) if len({key_of(one) for one in made}) == 1 else None

    # -- nodes -------------------------------------------------------------------------------------------

    def _node(self, node: torch.fx.Node) -> None:
        if _schema_name(node) == "aten::copy_":
            self._write_back(node)
            return
        reads = tuple(dict.fromkeys(self.renamed.get(one.name, one.name) for one in self._tensors(node)))
        stream, mark = self._stream(node)
        kind = self._kind(node, reads)
        made = tensors_of(node.meta.get("val"))
        if kind is Kind.EFFECT and _is_random(node):
            self.random.append(node.name)
        if kind in (Kind.VIEW, Kind.ITEM, Kind.WAIT):
            storage = self.values[reads[0]].storage
        else:
            base = next((one for one in reads if self._aliases(made, one)), None)
            storage = self._fresh() if base is None else self.values[base].storage
        makes = (node.name,) if made else ()
        if makes:
            self._add(node, storage, self.owner[storage].stream if storage in self.owner else stream)
        if kind is Kind.ISSUE:
            self.issued[storage] = node.name
        self.nodes.append(
            Node(
                name=node.name,
                stream=stream,
                epoch=0 if self.backward else mark.epoch,
                reads=reads,
                makes=makes,
                kind=kind,
                line=short(line_of(node)),
                cost_us=self.cost(node) if self.cost is not None and kind is Kind.COMPUTE else None,
                collective=self.issued.get(storage, "") if kind is Kind.WAIT else "",
                group=str(node.args[-1]) if kind is Kind.ISSUE else "",
            )
        )

    def _fresh(self) -> int:
        self.count += 1
        return self.count - 1

    def _tensors(self, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """Yield the values that *node* reads; sizes that it takes are the host's."""
        for other in node.all_input_nodes:
            if self.renamed.get(other.name, other.name) in self.values:
                yield other
            elif other.op == "call_function" and not is_number(other):
                raise unsupported(f"the use of {other.name!r}", node, "a value for it")

    def _stream(self, node: torch.fx.Node) -> tuple[int, Mark]:
        mark = mark_of(node)
        assert mark is not None
        made = tensors_of(node.meta.get("val"))
        device = text(made[0].device) if made else None
        inputs = [one for one in map(_device, self._tensors(node)) if one != "cpu"]
        # A copy to the host is its source's; one between devices its target's, whose memory it takes.
        if inputs and device in (None, "cpu"):
            device = inputs[0]
        if device is None or device in ("cpu", self.queues.devices[mark.stream]):
            return mark.stream, mark
        if self.queues.devices[mark.stream] == "cpu" and self.accelerator == "cpu":
            raise unsupported(f"work on {device} under a stream of the CPU", node, f"a stream of {device} there")
        # Its current stream at the call, as in eager: a block of another device's stream doesn't change it.
        if device not in self.ambient:
            self.ambient.append(device)
        return len(self.queues.devices) + self.ambient.index(device), mark

    def _kind(self, node: torch.fx.Node, reads: tuple[str, ...]) -> Kind:
        if is_item(node):
            return Kind.ITEM
        name = _schema_name(node)
        space = name.partition("::")[0]
        if space in COLLECTIVES:
            return Kind.WAIT if name.endswith("wait_tensor") else Kind.ISSUE
        made = tensors_of(node.meta.get("val"))
        if not made:
            return Kind.EFFECT
        if name in _BETWEEN_DEVICES:
            source = next(
                (one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)), None
            )
            if source is not None and source.meta["val"].device != made[0].device:
                return Kind.COPY
        if _is_random(node):
            return Kind.EFFECT  # random numbers are eager's only in eager's order
        if len(reads) == 1 and (_is_view(node) or self._aliases(made, reads[0])):
            return Kind.VIEW
        return Kind.COMPUTE

    def _aliases(self, made: list[torch.Tensor], base: str) -> bool:
        """Say whether what is made is the memory of *base*, whatever the operator declares."""
        key = self.keys[base]
        return bool(made) and key is not None and all(key_of(one) == key for one in made)

    def _write_back(self, node: torch.fx.Node) -> None:
        target, source = node.args[0], node.args[1]
        if not isinstance(target, torch.fx.Node) or target.op != "placeholder":
            raise unsupported("a change in place that is not an input's", node, "a place for it in a program")
        assert isinstance(source, torch.fx.Node)
        self.renamed[node.name] = target.name
        mark = mark_of(source) if source.op == "call_function" else None
        stream, own = self._stream(node)
        self.backs.append(
            WriteBack(
                target=target.name,
                source=self.renamed.get(source.name, source.name),
                stream=stream,
                epoch=0 if self.backward else (mark or own).epoch,
                line=short(line_of(source) or line_of(node)),
            )
        )

    # -- operations and outputs --------------------------------------------------------------------------

    def _operations(
        self, operations: Sequence[Operation], visible: frozenset[int]
    ) -> tuple[list[OrderOp], dict[int, int]]:
        """Return the user's operations, and for each stream the last epoch that a visible event of it covers."""
        count = len(self.queues.devices)
        epochs = [0] * count
        following = 1 + max((one.event for one in operations if one.event is not None), default=-1)
        found: list[OrderOp] = []
        records: dict[int, int] = {}

        def add(kind: OpKind, line: str, stream: int | None = None, event: int | None = None) -> None:
            now = (*epochs, *(epochs[AMBIENT] for _ in self.ambient))
            found.append(OrderOp(kind, now, stream=stream, event=event, line=short(line)))

        for one in operations:
            if one.kind == "record":
                add(OpKind.RECORD, one.line, one.stream, one.event)
                if one.event in visible and one.stream is not None:
                    records[one.stream] = epochs[one.stream]
            elif one.kind == "wait":
                add(OpKind.WAIT, one.line, one.stream, one.event)
            elif one.kind == "wait_stream" and one.stream != one.other:
                assert one.other is not None
                add(OpKind.RECORD, one.line, one.other, following)
                epochs[one.other] += 1
                add(OpKind.WAIT, one.line, one.stream, following)
                epochs[one.other] -= 1
                following += 1
            elif one.kind.startswith("synchronize"):
                event = one.event if one.kind == "synchronize_event" else None
                add(OpKind.SYNCHRONIZE, one.line, one.stream if event is None else None, event)
            for number, _ in one.ends:
                epochs[number] += 1
        return found, records

    def _outputs(
        self,
        placeholders: Sequence[torch.fx.Node],
        returns: int | None,
        outside: tuple[int, ...],
        records: dict[int, int],
    ) -> list[Output]:
        results = inductor.outputs_of(self.module)
        found: list[Output] = []
        epochs = {node.name: node.epoch for node in self.nodes}
        for number, node in enumerate(results):
            if not isinstance(node, torch.fx.Node):
                continue
            name = self.renamed.get(node.name, node.name)
            value = self.values.get(name)
            if value is None:
                continue
            kept = returns is not None and number >= returns
            if kept:
                owner = self.owner[value.storage]
                self.saved.values[node.meta.get(SAVED_AS, node.name)] = (
                    value.storage,
                    owner.stream,
                    owner.origin is Origin.INPUT,
                )
            ordered = value.stream in records and epochs.get(name, 0) <= records[value.stream]
            # AOT reads what it writes back on the caller's stream.
            joined = number < len(outside) or value.stream == AMBIENT or not ordered
            found.append(Output(name, joined=joined and not kept, saved=kept))
            if number < len(outside):
                mark = mark_of(node) or Mark(AMBIENT, 0)
                self.backs.append(
                    WriteBack(
                        target=placeholders[outside[number]].name,
                        source=name,
                        stream=self._stream(node)[0] if node.op == "call_function" else AMBIENT,
                        epoch=mark.epoch,
                        line=short(line_of(node)),
                        outside=True,
                    )
                )
        if not self.backward:
            self.saved.storages = self.count
        return found


def _device(node: torch.fx.Node) -> str:
    return text(tensors_of(node.meta["val"])[0].device)


def _schema_name(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name) if schema is not None else str(node.target)


def _is_random(node: torch.fx.Node) -> bool:
    if rng.uses_generator(node):
        return True
    # Inductor draws its own from seeds that one node makes.
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return seeded and "inductor" not in str(node.target)


def _is_view(node: torch.fx.Node) -> bool:
    """Say whether the operator gives views of its argument by its declaration."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return bool(schema.returns) and all(one.alias_info is not None for one in schema.returns)


__all__ = [
    "COLLECTIVES",
    "GENERATOR",
    "Lowered",
    "Queues",
    "Saved",
    "in_turn",
    "lower",
]
