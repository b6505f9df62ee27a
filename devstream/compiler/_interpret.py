"""`interpret`: a backend of ``torch.compile`` that captures, then runs the pure graph node by node.

Each node runs under its own stream and each operation at its own place, in program order: so what it does is
what the captured program means, with no compiler in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any  # Any: values of a graph are of every type

import torch

from devstream import _objects, _streams
from devstream.compiler._capture import capture
from devstream.compiler._captured import AMBIENT, Captured, Operation, mark_of
from devstream.compiler._resolve import Call, Resolver, adopted, ambient, pattern, resolve


def interpret(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Capture *graph_module* and return a function that runs the result; give it to ``torch.compile(backend=)``.

    Raises:
        UnsupportedError: see `capture`.
    """
    captured = capture(graph_module)
    known = {captured.queues: captured}
    resolver = Resolver(captured.streams)

    def run(*arguments: Any) -> Any:
        found, natives = resolver.streams(arguments, captured.events)
        backend, streams = adopted(found)
        queues = pattern(backend, streams, captured.streams)
        program = known.get(queues)
        if program is None:  # other names are one queue than in the calls before
            program = known[queues] = capture(graph_module, queues)
        call = resolve(program, streams, natives, arguments)
        return _run(program, call, arguments)

    return run


def _run(program: Captured, call: Call, arguments: Sequence[Any]) -> tuple[Any, ...]:
    def value(source: int | str) -> Any:
        return arguments[source] if isinstance(source, int) else call.handles[int(source.split()[1])]

    found = _Interpreter(program.module, program, call, "").run(*map(value, program.inputs))
    return tuple(found[one] if isinstance(one, int) else value(one) for one in program.outputs)


class _Interpreter(torch.fx.Interpreter):
    """Runs one graph, or subgraph, of a captured program."""

    def __init__(self, module: torch.fx.GraphModule, program: Captured, call: Call, path: str) -> None:
        super().__init__(module)
        self._program, self._call, self._path = program, call, path
        self._operations = program.in_graph(path)

    def run_node(self, n: torch.fx.Node) -> Any:
        for operation in self._operations.get(n.name, ()):
            self._operate(operation)
        mark = mark_of(n)
        if mark is None or mark.stream == AMBIENT:
            return super().run_node(n)
        with _streams.stream(self._call.streams[mark.stream]):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = getattr(target, "__name__", "")
        if operator == "tag_activation_checkpoint":  # recomputes nothing, which changes no value
            body, *values = args
            return self._inner(body).run(*values)
        if operator == "autograd_function_apply":
            forward, backward, *values = args
            return _apply(self._inner(forward), self._inner(backward), values, kwargs["non_differentiable_idx"])
        return super().call_function(target, args, kwargs)

    def _inner(self, body: torch.fx.GraphModule) -> _Interpreter:
        name = next(name for name, module in self.module.named_children() if module is body)
        return _Interpreter(body, self._program, self._call, f"{self._path}.{name}" if self._path else name)

    def _operate(self, one: Operation) -> None:
        stream = self._stream(one.stream)
        event = None if one.event is None else self._call.events[one.event]
        if one.kind == "record":
            _objects.record(event, stream)
        elif one.kind == "wait":
            _objects.wait(stream, event)
        elif one.kind == "wait_stream":
            stream.wait_stream(self._stream(one.other))
        elif one.kind == "synchronize_stream":
            stream.synchronize()
        elif one.kind == "synchronize_event":
            assert event is not None
            event.synchronize()
        elif one.kind == "synchronize_device":
            _streams.synchronize(one.device)
        elif one.kind == "record_stream":
            assert one.tensor is not None
            _streams.record_stream(self._value(one.tensor), stream)

    def _stream(self, number: int | None) -> Any:
        if number is None:
            return None
        return ambient() if number == AMBIENT else self._call.streams[number]

    def _value(self, name: str) -> Any:
        return next(value for node, value in self.env.items() if node.name == name)


def _apply(
    forward: torch.fx.Interpreter, backward: torch.fx.Interpreter, values: list[Any], without_gradient: list[int]
) -> Any:
    """Run an ``autograd.Function`` whose two halves are captured graphs."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Any) -> Any:
            output, ctx.kept = forward.run(*values)
            ctx.mark_non_differentiable(*(output[i] for i in without_gradient))
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward.run(*gradients, *ctx.kept)

    return Function.apply(*values)  # type: ignore[no-untyped-call]


__all__ = ["interpret"]
