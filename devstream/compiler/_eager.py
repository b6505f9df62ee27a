"""The graph of what eager mode would do: a captured program walked on fake tensors, operator by operator.

The graph that is compiled has no changes in place any more, AOT Autograd has taken them out, and a reader of old
contents has lost nothing there. In eager mode he has. So what eager mode would miss is asked of this graph, in
which each operator reads and changes the memory that it would, and nothing else is done to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any  # Any: values of a graph are of every type

import torch

from devstream._compat import TorchDispatchMode, inductor
from devstream._compat.dynamo_graph import operator_name
from devstream.compiler._captured import AMBIENT, Captured, Mark, Operation, mark_of
from devstream.compiler._graph import Del, Graph, Kind, Node, OpKind, OrderOp, Origin, Output, Stream, Value
from devstream.compiler._lower import COLLECTIVES, Queues
from devstream.compiler._naming import key_of, short, tensors_of, text
from devstream.compiler._nodes import line_of


def eager(captured: Captured, queues: Queues, example_inputs: Sequence[Any]) -> Graph:
    """Return the graph of one call in eager mode; `GraphError` says that it has no meaning."""
    trace = _Trace(captured, queues)
    with inductor.faked() as fake:
        inputs = [_input(source, example_inputs, fake) for source in captured.inputs]
        with torch.no_grad(), _Watch(trace.operator):
            found = _Walk(captured.module, trace, fake, "").run(*inputs)
    return trace.graph(found)


def _input(source: int | str, example_inputs: Sequence[Any], fake: Callable[[Any], Any]) -> Any:
    if isinstance(source, str):  # an event's handle
        return torch.zeros((), dtype=torch.int64)
    value = example_inputs[source]
    return fake(value) if isinstance(value, torch.Tensor) else value


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of each operator that runs, with its tensors and its results."""

    def __init__(self, note: Callable[[Any, list[Any], list[Any], list[Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, tensors_of((args, kwargs)), tensors_of(result), _changed(func, args, kwargs or {}))
        return result


class _Trace:
    """Collects the graph; storages are numbered as they appear."""

    def __init__(self, captured: Captured, queues: Queues) -> None:
        self.operations = captured
        self.devices, self.names = list(queues.devices), list(queues.names)
        self.own = len(self.devices)
        self.ambient: list[str] = []
        self.values: list[Value] = []
        self.storages: dict[Any, int] = {}
        self.kept: list[Any] = []  # so that no storage's identity comes twice
        self.nodes: list[Node] = []
        self.used: set[str] = set()
        self.issued: dict[int, str] = {}
        self.ops: list[OrderOp] = []
        self.dels: list[Del] = []
        self.epochs = [0] * self.own
        self.next_event = len(captured.events)
        self.mark, self.line = Mark(AMBIENT, 0), ""
        self.changed: set[int] = set()

    # -- operators ---------------------------------------------------------------------------------------

    def operator(
        self, func: Any, given: list[Any], made: list[Any], changed: list[Any], *, name: str = ""
    ) -> None:
        """Note one operator: what it is given, what it returns, and which of what it is given it changes."""
        space = str(getattr(func, "namespace", ""))
        stream = self._stream(given, made)
        reads = self._names(given)
        fresh = [one for one in made if key_of(one) not in self.storages]
        writes = self._names(changed)
        kind, collective = Kind.COMPUTE, ""
        if space in COLLECTIVES:
            kind = Kind.WAIT if "wait_tensor" in str(func) else Kind.ISSUE
            collective = next((self.issued[self._number(one)] for one in given if self._is_issued(one)), "")
            if kind is Kind.WAIT and not collective:
                return
        elif not fresh and not writes and made:
            return  # views touch nothing
        elif not made and not writes and not _reads_data(func):
            return
        name = self._called(name or str(func.overloadpacket.__name__))
        makes = tuple(dict.fromkeys(self._name(one, stream=stream, origin=Origin.PRODUCED) for one in fresh))
        if kind is Kind.ISSUE:
            self.issued.update((self._numbered(one), name) for one in (*makes, *writes))
        elif kind is Kind.WAIT:
            reads, writes = tuple(one for one in reads if self.issued.get(self._numbered(one)) == collective), ()
        else:
            touched = {self.values[self._numbered(one)].device for one in (*reads, *writes, *makes)}
            kind = Kind.COPY if touched - {self._device(stream)} else kind
        epoch = self.epochs[stream if stream < self.own else AMBIENT]
        self.nodes.append(Node(name, stream, epoch, reads, makes, writes, kind, self.line, collective=collective))
        self.changed.update(map(self._numbered, writes))

    def _called(self, name: str) -> str:
        found, count = name, 0
        while found in self.used:
            count += 1
            found = f"{name.removesuffix('_')}_{count}"
        self.used.add(found)
        return found

    def _is_issued(self, value: Any) -> bool:
        return key_of(value) in self.storages and self._number(value) in self.issued

    def _number(self, value: Any) -> int:
        return self.storages[key_of(value)]

    def _numbered(self, name: str) -> int:
        return int(name[1:])

    def _name(self, value: Any, *, stream: int = AMBIENT, origin: Origin = Origin.INPUT) -> str:
        key = key_of(value)
        if key not in self.storages:
            self.storages[key] = number = len(self.values)
            self.kept.append(value)
            self.values.append(Value(f"s{number}", number, stream, text(value.device), origin))
        return f"s{self.storages[key]}"

    def _names(self, values: Iterable[Any]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self._name, values)))

    def _stream(self, given: list[Any], made: list[Any]) -> int:
        """Return the stream of an operator; in a block of another device's it is the current one of its own."""
        devices = [one for one in (text(value.device) for value in (*given, *made)) if one != "cpu"]
        if not devices or devices[0] == self.devices[self.mark.stream] or self.devices[self.mark.stream] == "cpu":
            return self.mark.stream
        if devices[0] not in self.ambient:
            self.ambient.append(devices[0])
        return self.own + self.ambient.index(devices[0])

    def _device(self, stream: int) -> str:
        return self.devices[stream] if stream < self.own else self.ambient[stream - self.own]

    # -- the user's operations ---------------------------------------------------------------------------

    def operate(self, one: Operation, value: Callable[[str], Any]) -> None:
        """Note one operation on streams."""
        line = short(one.line)
        if one.kind == "record":
            self._op(OpKind.RECORD, line, one.stream, one.event)
        elif one.kind == "wait":
            self._op(OpKind.WAIT, line, one.stream, one.event)
        elif one.kind == "wait_stream" and one.stream != one.other:
            self._op(OpKind.RECORD, line, one.other, self.next_event)
            assert one.other is not None
            self.epochs[one.other] += 1
            self._op(OpKind.WAIT, line, one.stream, self.next_event)
            self.epochs[one.other] -= 1
            self.next_event += 1
        elif one.kind.startswith("synchronize"):
            event = one.event if one.kind == "synchronize_event" else None
            self._op(OpKind.SYNCHRONIZE, line, one.stream if event is None else None, event)
        elif one.kind == "record_stream" and one.tensor is not None:
            self._op(OpKind.RECORD_STREAM, line, one.stream, value=self._name(value(one.tensor)))
        elif one.kind == "free" and one.tensor is not None and one.stream is not None:
            gone = self._name(value(one.tensor))
            self.dels.append(Del(gone, one.stream, self.epochs[one.stream], line))
        for number, _ in one.ends:
            self.epochs[number] += 1

    def _op(self, kind: OpKind, line: str, stream: int | None, event: int | None = None, value: str = "") -> None:
        self.ops.append(OrderOp(kind, tuple(self.epochs), stream, event, value, line))

    # -- the whole ---------------------------------------------------------------------------------------

    def graph(self, results: Any) -> Graph:
        """Return what was collected; the caller takes *results*, and what was changed of his."""
        handed = dict.fromkeys(self._name(one) for one in tensors_of(results))
        given = {value.storage for value in self.values if value.origin is Origin.INPUT}
        handed.update(dict.fromkeys(f"s{number}" for number in sorted(self.changed & given)))
        landed = {node.collective for node in self.nodes if node.kind is Kind.WAIT}
        nodes = [
            Node(one.name, one.stream, one.epoch, one.reads, one.makes, one.writes, Kind.COMPUTE, one.line)
            if one.kind is Kind.ISSUE and one.name not in landed  # its end is no business of this function's
            else one
            for one in self.nodes
        ]
        extra = len(self.ambient)
        ops = tuple(
            OrderOp(op.kind, (*op.epochs, *([op.epochs[AMBIENT]] * extra)), op.stream, op.event, op.value, op.line)
            for op in self.ops
        )
        own = [Stream(device, name=name) for device, name in zip(self.devices, self.names, strict=True)]
        return Graph(
            streams=(*own, *(Stream(device, name=f"current of {device}") for device in self.ambient)),
            values=tuple(self.values),
            nodes=tuple(nodes),
            ops=ops,
            outputs=tuple(Output(name) for name in handed),
            dels=tuple(self.dels),
            name="eager",
        )


class _Walk(torch.fx.Interpreter):
    """Runs one graph of a captured program, or a subgraph, on fake tensors."""

    def __init__(self, module: torch.fx.GraphModule, trace: _Trace, fake: Callable[[Any], Any], path: str) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._trace, self._fake, self._path = trace, fake, path
        self._operations = trace.operations.in_graph(path)

    def run_node(self, n: torch.fx.Node) -> Any:
        for operation in self._operations.get(n.name, ()):
            self._trace.operate(operation, self._value)
        mark = mark_of(n)
        if mark is not None:
            self._trace.mark, self._trace.line = mark, short(line_of(n))
        operator = operator_name(n)
        if operator and operator not in ("tag_activation_checkpoint", "autograd_function_apply"):
            # One that runs as a whole: what it gives, Dynamo has found out.
            given, _ = self.fetch_args_kwargs_from_env(n)
            found = n.meta["example_value"]
            self._trace.operator(n.target, tensors_of(given), tensors_of(found), [], name=operator)
            return found
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.set_grad_enabled or getattr(target, "__name__", "") == "_set_grad_enabled":
            return None  # nothing here has gradients
        operator = getattr(target, "__name__", "")
        if operator == "tag_activation_checkpoint":
            body, *values = args
            return self._inner(body).run(*values)
        if operator == "autograd_function_apply":
            forward, _, *values = args
            output, _ = self._inner(forward).run(*values)
            return output
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = super().get_attr(target, args, kwargs)
        return self._fake(found) if isinstance(found, torch.Tensor) else found

    def _inner(self, body: torch.fx.GraphModule) -> _Walk:
        name = next(name for name, module in self.module.named_children() if module is body)
        return _Walk(body, self._trace, self._fake, f"{self._path}.{name}" if self._path else name)

    def _value(self, name: str) -> Any:
        return next(value for node, value in self.env.items() if node.name == name)


def _reads_data(func: Any) -> bool:
    """Whether an operator that gives no tensor reads contents: those that give sizes and devices don't."""
    schema = getattr(func, "_schema", None)
    return schema is None or not schema.returns or str(schema.name) in _DATA_TO_HOST


_DATA_TO_HOST = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that an operator changes: in place, or because they are where its result goes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return tensors_of([values.get(name) for name in written])


__all__ = ["eager"]
