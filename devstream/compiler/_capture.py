"""`capture`: read the stream code out of a graph of Dynamo's.

What stays is a pure graph: nothing in it for later passes to drop, move or stumble over. Each node's stream is a
mark of ours; torch's own mark is removed, so that torch's own passes for streams find nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devstream._compat import dynamo_graph
from devstream.compiler._captured import (
    AMBIENT,
    TORCHS_MARK,
    Captured,
    EventSource,
    Mark,
    Operation,
    StreamSource,
    set_mark,
)
from devstream.compiler._nodes import Said, line_of, name_of, read, unsupported
from devstream.compiler._resolve import adopted, pattern
from devstream.exceptions import UnsupportedError

_NO_COMPUTE = ("placeholder", "output", "get_attr")


def capture(graph_module: torch.fx.GraphModule, queues: Sequence[int] | None = None) -> Captured:
    """Return the pure form of *graph_module*, which is left as it is.

    *queues* says which names are one queue (see `Captured.queues`); by default it is as in the call traced now.

    Raises:
        UnsupportedError: it holds stream code that has no meaning in a graph, or compiled autograd is on.
    """
    if dynamo_graph.compiled_autograd_is_on():
        raise UnsupportedError(
            operation="compiled autograd",
            backend="devstream's compiler",
            capability="a backward pass that follows the streams of the forward pass there",
            alternative="turn compiled autograd off; the backward pass is compiled without it as well",
        )
    return _Capture(_clone(graph_module), queues).run()


class _Capture:
    """One capture in progress, over a graph and its subgraphs."""

    def __init__(self, module: torch.fx.GraphModule, queues: Sequence[int] | None) -> None:
        self.module = module
        self.names = _Names(module)
        self.queues = (
            tuple(queues) if queues is not None else pattern(*adopted(self.names.examples()), self.names.streams)
        )
        self.count = max(self.queues) + 1
        self.epochs = [0] * self.count
        self.late = False
        self.events: list[EventSource] = []
        self.event_numbers: dict[tuple[str, int], int] = {}
        self.operations: list[Operation] = []
        self.made = {id(node): node for node in module.graph.nodes if name_of(node) == "devstream.event"}
        self.made_by_value = {id(node.meta.get("example_value")): node for node in self.made.values()}

    def run(self) -> Captured:
        self._walk(self.module, "")
        inputs, outputs = self._interface()
        self.module.graph.lint()
        self.module.recompile()
        return Captured(
            module=self.module,
            inputs=inputs,
            outputs=outputs,
            operations=tuple(self.operations),
            streams=tuple(self.names.streams),
            queues=self.queues,
            events=tuple(self.events),
        )

    # -- the walk ----------------------------------------------------------------------------------------

    def _walk(self, module: torch.fx.GraphModule, path: str) -> None:
        """Mark the nodes of one graph in program order and take its operations out."""
        waiting: list[Said | None] = []
        lines: list[str] = []
        gone: list[torch.fx.Node] = []
        for node in module.graph.nodes:
            name = name_of(node)
            if name:
                gone.append(node)
                said = read(node, name)
                if said is not None:
                    waiting.append(said)
                    lines.append(line_of(node))
                continue
            if node.op == "get_attr":
                continue
            for said, line in zip(waiting, lines, strict=True):
                assert said is not None
                self._add(said, path, node.name, line)
            waiting, lines = [], []
            stream = self._stream(node)
            set_mark(node, None if node.op in _NO_COMPUTE else Mark(stream, self.epochs[stream]))
            if dynamo_graph.operator_name(node):
                self._enter(node, module, path)
        for node in reversed(gone):
            if not node.users:
                module.graph.erase_node(node)
            elif node not in self.made.values():
                user = next(iter(node.users))
                raise unsupported("a stream or event used as a value", user, "a meaning for it in a graph")
        if path:
            module.recompile()

    def _stream(self, node: torch.fx.Node) -> int:
        slot = (node.meta.get("custom") or {}).get(TORCHS_MARK)
        return AMBIENT if slot is None else self._number(slot)

    def _number(self, slot: int) -> int:
        return self.queues[self.names.index[slot]]

    def _add(self, said: Said, path: str, before: str, line: str) -> None:
        stream = None if said.slot is None else self._number(said.slot)
        other = None if said.other is None else self._number(said.other)
        if said.kind.startswith("synchronize"):
            ended = list(range(self.count))  # the host waits, so nothing that it issues later comes before
        elif said.kind in ("record_stream", "free"):
            ended = []
        else:
            ended = [number for number in (stream, other) if number is not None]
        ends = tuple(Mark(number, self.epochs[number]) for number in dict.fromkeys(ended))
        for number, _ in ends:
            self.epochs[number] += 1
        self.operations.append(
            Operation(
                kind=said.kind,
                graph=path,
                before=before,
                stream=stream,
                other=other,
                event=self._event(said, line),
                tensor=None if said.tensor is None else said.tensor.name,
                device=said.device,
                ends=ends,
                line=line,
                backward=self.late,
            )
        )

    def _event(self, said: Said, line: str) -> int | None:
        if said.native_event is not None:
            return self._event_number(("slot", said.native_event), EventSource(slot=said.native_event, line=line))
        return None if said.event is None else self._event_of(said.event, line)

    def _event_of(self, node: torch.fx.Node, line: str) -> int:
        """Return the number of the event whose handle *node* is, in whatever subgraph."""
        value = id(node.meta.get("example_value"))
        made = self.made.get(id(node)) or self.made_by_value.get(value)
        if made is None and name_of(node) == "devstream.event":
            raise unsupported(
                "devstream.Event() inside checkpoint or autograd.Function",
                node,
                "a place for it",
                "make it before",
            )
        if made is not None:
            return self._event_number(("made", id(made)), EventSource(make=made.args, line=line_of(made)))
        argument = self.names.arguments.get(value)
        if argument is None:
            raise unsupported("an event whose origin is unknown", node, "a way to find it at each call")
        return self._event_number(("argument", argument), EventSource(argument=argument, line=line))

    def _event_number(self, key: tuple[str, int], source: EventSource) -> int:
        if key not in self.event_numbers:
            self.event_numbers[key] = len(self.events)
            self.events.append(source)
        return self.event_numbers[key]

    # -- subgraphs ---------------------------------------------------------------------------------------

    def _enter(self, node: torch.fx.Node, module: torch.fx.GraphModule, path: str) -> None:
        operator = dynamo_graph.operator_name(node)
        subgraphs = _subgraphs(node, module)
        roles = dynamo_graph.INLINED.get(operator)
        if roles is None:
            self._whole(node, operator, [sub for _, sub in subgraphs])
            return
        for (name, subgraph), role in zip(subgraphs, roles, strict=True):
            before, late = list(self.epochs), self.late
            self.late = late or role == "backward"
            self._walk(subgraph, f"{path}.{name}" if path else name)
            self.late = late
            if role == "backward":  # runs later, when this graph is done
                self.epochs = before

    def _whole(self, node: torch.fx.Node, operator: str, subgraphs: list[torch.fx.GraphModule]) -> None:
        """Capture an operator that runs as one: all of it on one stream."""
        found: set[int] = set()
        for subgraph in subgraphs:
            gone = []
            for inner in _every_node(subgraph):
                name = name_of(inner)
                if name:
                    if read(inner, name) is not None:
                        raise unsupported(f"a stream operation inside {operator}", inner, "an order inside of it")
                    gone.append(inner)
                elif inner.op not in _NO_COMPUTE:
                    found.add(self._stream(inner))
                    if len(found) > 1:
                        raise unsupported(f"{operator} over more than one stream", inner, "an order inside of it")
            for inner in reversed(gone):
                inner.graph.erase_node(inner)
        stream = found.pop() if found else self._stream(node)
        mark = Mark(stream, self.epochs[stream])
        set_mark(node, mark)
        for subgraph in subgraphs:
            for inner in _every_node(subgraph):
                set_mark(inner, None if inner.op in _NO_COMPUTE else mark)
            subgraph.recompile()

    # -- inputs and outputs ------------------------------------------------------------------------------

    def _interface(self) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
        graph = self.module.graph
        output = graph.output_node()
        outputs: list[int | str] = []
        kept: list[Any] = []
        results: Any = output.args[0]
        for value in results:
            if isinstance(value, torch.fx.Node) and id(value) in self.made:
                outputs.append(f"event {self._event_of(value, line_of(value))}")
            else:
                outputs.append(len(kept))
                kept.append(value)
        output.args = (tuple(kept),)
        inputs: list[int | str] = []
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        handles = self.names.handles | {source.argument for source in self.events}
        last = None
        for number, node in enumerate(placeholders):
            if number in handles and not node.users:
                graph.erase_node(node)
            else:
                inputs.append(number)
                last = node
        for made in self.made.values():
            if not made.users:
                if made in graph.nodes:
                    graph.erase_node(made)
                continue
            # A subgraph still has a place for it.
            with graph.inserting_after(last) if last is not None else graph.inserting_before(None):
                last = graph.placeholder(f"handle_{made.name}")
            last.meta.update(made.meta)
            dynamo_graph.give_source(last)
            set_mark(last, None)
            inputs.append(f"event {self._event_of(made, line_of(made))}")
            made.replace_all_uses_with(last)
            graph.erase_node(made)
        return tuple(inputs), tuple(outputs)


class _Names:
    """What the graph calls streams: each slot, in order of its first use, with how to find it at a call."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        #: By the identity of its example value, which a subgraph's placeholder shares: an argument's number.
        self.arguments = {
            id(node.meta["example_value"]): number
            for number, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder")
            if isinstance(node.meta.get("example_value"), torch.Tensor)
        }
        self.streams = [StreamSource(slot=-1)]
        self.index: dict[int, int] = {}
        #: The arguments that are handles of streams.
        self.handles: set[int] = set()
        ambient = dynamo_graph.ambient_slot()
        if ambient is not None:
            self.index[ambient] = AMBIENT
        for node in _every_node(module):
            self._look(node)

    def _look(self, node: torch.fx.Node) -> None:
        name = name_of(node)
        if name == "devstream.bind":
            handle: Any
            slot: Any
            handle, slot = node.args
            assert isinstance(handle, torch.fx.Node)
            argument = self.arguments.get(id(handle.meta.get("example_value")))
            if argument is not None:
                self.handles.add(argument)
            self._name(slot, StreamSource(slot, argument=argument, line=line_of(node)))
        elif name == "devstream.give":
            slot, call = node.args
            self._name(slot, StreamSource(slot, call=str(call), line=line_of(node)))
        elif name == "object" and not dynamo_graph.is_event(node):
            place: Any = node.args[0]
            following = node.next
            # Ours say right after what they are.
            if name_of(following) not in ("devstream.bind", "devstream.give") or place not in following.args:
                self._name(place, StreamSource(place, line=line_of(node)))

    def _name(self, slot: Any, source: StreamSource) -> None:  # Any: an argument of a node
        if slot not in self.index:
            self.index[slot] = len(self.streams)
            self.streams.append(source)

    def examples(self) -> list[Any]:  # Any: a stream of any class
        """Return the streams of the call that is traced now."""
        return dynamo_graph.take([source.slot for source in self.streams[1:]])


def _subgraphs(node: torch.fx.Node, module: torch.fx.GraphModule) -> list[tuple[str, torch.fx.GraphModule]]:
    """Return the subgraphs that *node* is given, by name."""
    found = []
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            inner = getattr(module, str(argument.target), None)
            if isinstance(inner, torch.fx.GraphModule):
                found.append((str(argument.target), inner))
    return found


def _every_node(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return all nodes of a graph, each operator's subgraphs before what comes after it."""
    found = []
    for node in module.graph.nodes:
        found.append(node)
        if dynamo_graph.operator_name(node):
            for _, inner in _subgraphs(node, module):
                found += _every_node(inner)
    return found


def _clone(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy that shares tensors and modules, but no graph and no subgraph."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    for old, new in copies.items():  # what Dynamo has written on a node beside its meta
        for key, value in vars(old).items():
            if key not in vars(new):
                setattr(new, key, value)
    output = graph.output(result)
    output.meta = dict(module.graph.output_node().meta)
    inner = {name: _clone(sub) for name, sub in module.named_children() if isinstance(sub, torch.fx.GraphModule)}
    root = torch.nn.Module()
    root.__dict__.update({key: value for key, value in module.__dict__.items() if key not in _OWN})
    root._modules = {**module._modules, **inner}
    root.training = module.training
    copied = torch.fx.GraphModule(root, graph, class_name=type(module).__name__)
    copied.meta = dict(module.meta)
    for key, value in module.__dict__.items():  # Dynamo's notes for its backends
        copied.__dict__.setdefault(key, value)
    return copied


_OWN = ("_graph", "_code", "_modules", "_tracer_cls", "_tracer_extras", "meta")

__all__ = ["capture"]
