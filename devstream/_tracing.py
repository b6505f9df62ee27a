"""What the verbs mean while ``torch.compile`` traces: each puts one call of an operator of ours into the graph.

The graph holds no stream and no event, only numbers. A stream is its *slot*, a place in Dynamo's table of objects
that is filled anew at each call. An event of ours is its *handle* (see `devstream._handles`). A stream of ours has
a handle too, which tells whose slot it is without that table. `devstream.compiler` reads the operators out of the
graph again; under any other compiler they run as they are.

What has no meaning inside a graph is refused: with ``fullgraph=True`` an error that says what to do, else a graph
break, after which the frame runs in eager.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn  # Any: Dynamo's variables, streams and events of every backend

import torch

from devstream import _handles, _trace_ops
from devstream._compat.dynamo import Traced, tell
from devstream.exceptions import CompileWarning, DevstreamError, warning

if TYPE_CHECKING:
    from devstream._compat.dynamo_variables import Trace

# -- rules -----------------------------------------------------------------------------------------------


def _eager_only(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("only traced code calls this")


def _rule(name: str) -> Callable[[Callable[..., Any]], Traced]:
    return lambda function: Traced(name, function, _eager_only)


def _is_event(trace: Trace, variable: Any) -> bool:
    return issubclass(trace.kind(variable), _handles.verbs.Event)


def _handle_of(self: Any) -> Any:
    return self._handle


def _event_handle(trace: Trace, event: Any) -> Any:
    if getattr(event, "source", None) is not None:
        return trace.attribute(event, "_compiled_handle")
    return trace.inline(_handle_of, event)


_warned = False


def _tell(trace: Trace) -> None:
    """Warn, once in the process, that this graph goes to a compiler that doesn't keep the order."""
    global _warned
    if not _warned and trace.under_inductor:
        _warned = True
        warnings.warn(warning(CompileWarning, compiler="inductor"), stacklevel=2)


def _slot(trace: Trace, stream: Any, operation: str) -> int:
    found = trace.slot(stream)
    _tell(trace)
    if found is None:
        trace.refuse(
            operation,
            f"it takes a stream that torch knows, not {trace.kind(stream).__name__}",
            "Make a stream of it outside the compiled function: devstream.wrap(object, device).",
        )
    return found


def _constant(trace: Trace, variable: Any, operation: str) -> Any:
    if not variable.is_python_constant():
        trace.refuse(
            operation, "its arguments must be constants inside a graph", "Call it outside the compiled function."
        )
    value = variable.as_python_constant()
    return str(value) if isinstance(value, torch.device) else value


class _LookedUp(threading.local):
    """The streams that the graph which this thread traces has looked up already."""

    def __init__(self) -> None:
        self.graph: Callable[[], Any] = lambda: None
        self.known: dict[tuple[Any, ...], Any] = {}

    def of(self, graph: Any) -> dict[tuple[Any, ...], Any]:
        if self.graph() is not graph:
            self.graph, self.known = weakref.ref(graph), {}
        return self.known


_here = _LookedUp()


def _looked_up(trace: Trace, function: str, *arguments: Any) -> Any:
    """Return the variable of the stream that a verb of ours gives at each call: the current one, a named one."""
    known = _here.of(trace.graph)
    key = (function, *arguments)
    if key not in known:
        try:
            value = getattr(_handles.verbs, function)(*arguments)
        except (DevstreamError, ValueError) as error:
            trace.refuse(f"devstream.{function}", str(error), "Correct the call.")
        known[key] = trace.made_stream(value, _handles.verbs.__name__, function, *arguments)
        _declare(trace, known[key], function, *arguments)
    return known[key]


def _declare(trace: Trace, variable: Any, function: str, *arguments: Any) -> None:
    words = [repr(argument) for argument in arguments]
    trace.emit(_trace_ops.namespace().give.default, trace.slot(variable), f"{function}({', '.join(words)})")


@_rule("current_stream")
def current_stream(trace: Trace, device: Any) -> Any:
    """Return the stream whose block is entered in the graph, else the caller's current one at each call."""
    return _current(trace, _constant(trace, device, "devstream.current_stream(device)"))


def _current(trace: Trace, device: Any) -> Any:
    backend, index = _handles.verbs._registry.resolve(device)
    entered = trace.entered(backend.device_type, index)
    return _looked_up(trace, "current_stream", device) if entered is None else entered


@_rule("named_stream")
def named_stream(trace: Trace, purpose: Any, device: Any) -> Any:
    """Return the named stream, looked up at each call."""
    arguments = [_constant(trace, one, "devstream.named_stream") for one in (purpose, device)]
    return _looked_up(trace, "named_stream", *arguments)


@_rule("default_stream")
def default_stream(trace: Trace, device: Any) -> Any:
    """Return the default stream, looked up at each call."""
    return _looked_up(trace, "default_stream", _constant(trace, device, "devstream.default_stream"))


@_rule("Stream")
def new_stream(trace: Trace, device: Any, priority: Any) -> Any:
    """Return a stream that is made anew at each call."""
    arguments = [_constant(trace, one, "devstream.Stream") for one in (device, priority)]
    try:
        value = _handles.verbs.create_stream(*arguments)
    except (DevstreamError, ValueError) as error:
        trace.refuse("devstream.Stream", str(error), "Correct the call.")
    made = trace.made_stream(value, _handles.verbs.__name__, "create_stream", *arguments)
    _declare(trace, made, "create_stream", *arguments)
    return made


@_rule("Event")
def new_event(trace: Trace, device: Any, **options: Any) -> Any:
    """Return the handle of an event that is made anew at each call."""
    names = ("enable_timing", "blocking", "interprocess")
    given = {name: _constant(trace, value, "devstream.Event") for name, value in options.items()}
    arguments = [_constant(trace, device, "devstream.Event"), *(given.pop(name, False) for name in names)]
    if given:
        trace.refuse("devstream.Event", f"it has no argument {next(iter(given))!r}", "Correct the call.")
    try:  # an example, whose errors are those of the call
        example = _handles.verbs.Event(
            arguments[0], enable_timing=arguments[1], blocking=arguments[2], interprocess=arguments[3]
        )
    except (DevstreamError, ValueError) as error:
        trace.refuse("devstream.Event", str(error), "Correct the call.")
    where = arguments[0]
    if not isinstance(where, str):
        where = str(example.device)
    return trace.emit(_trace_ops.namespace().event.default, where, *arguments[1:])


@_rule("device_type")
def device_type(trace: Trace, stream: Any) -> Any:
    """Return the device type of *stream*."""
    return trace.constant(stream.device.type)


@_rule("install_rules")
def install_rules(trace: Trace) -> None:
    """Do nothing: to be met is enough (see the note in `devstream._compat.dynamo`)."""


@_rule("record")
def record(trace: Trace, event: Any, stream: Any) -> None:
    """Record *event*, ours or native, on *stream*, None being the current one."""
    _order(trace, event, stream, "record")


@_rule("wait")
def wait(trace: Trace, event: Any, stream: Any) -> None:
    """Let *stream*, None being the current one, wait for *event*, ours or native."""
    _order(trace, event, stream, "wait")


def _order(trace: Trace, event: Any, stream: Any, operation: str) -> Any:
    ops = _trace_ops.namespace()
    if _is_event(trace, event):
        if trace.is_none(stream):
            stream = _current(trace, _device_of(event))
        slot = _slot(trace, stream, operation)
        handle = _event_handle(trace, event)
        return trace.emit(getattr(ops, operation).default, handle, slot)
    native = trace.slot(event)
    if native is None:
        trace.refuse(
            operation, f"{trace.kind(event).__name__} is no event that can be traced", "Use a devstream.Event."
        )
    # Torch's operator of the same meaning, which every release has.
    return trace.emit(trace.native_order(operation), native, _slot(trace, stream, operation))


def _device_of(event: Any) -> Any:
    """Return the device type of an event of ours; None, the default, where it is made in the graph."""
    value = getattr(event, "value", None)
    return value.device.type if isinstance(value, _handles.verbs.Event) and event.source is not None else None


@_rule("wait_stream")
def wait_stream(trace: Trace, stream: Any, other: Any) -> Any:
    """Let *stream* wait for all work issued to *other* so far."""
    slots = [_slot(trace, one, "wait_stream") for one in (stream, other)]
    return trace.emit(_trace_ops.namespace().wait_stream.default, *slots)


@_rule("synchronize")
def synchronize(trace: Trace, target: Any) -> Any:
    """Block the host at this place of the graph until *target* is done: a stream, an event, or a device."""
    if _is_event(trace, target):
        return trace.emit(_trace_ops.namespace().synchronize_event.default, _event_handle(trace, target))
    slot = trace.slot(target)
    if slot is not None:
        return trace.emit(_trace_ops.namespace().synchronize_stream.default, slot)
    device = _constant(trace, target, "devstream.synchronize")
    try:
        backend, index = _handles.verbs._registry.resolve(device)
    except DevstreamError as error:
        trace.refuse("devstream.synchronize", str(error), "Correct the call.")
    name = backend.device_type if index is None else f"{backend.device_type}:{index}"
    return trace.emit(_trace_ops.namespace().synchronize_device.default, name)


@_rule("record_stream")
def record_stream(trace: Trace, tensor: Any, stream: Any) -> Any:
    """Tell the allocator at this place of the graph that *stream* uses *tensor*."""
    return trace.emit(
        _trace_ops.namespace().record_stream.default, tensor, _slot(trace, stream, "devstream.record_stream")
    )


@_rule("known")
def known(trace: Trace, stream: Any) -> Any:
    """Return *stream* itself where torch knows it for a stream."""
    _slot(trace, stream, "devstream.stream")
    return stream


@_rule("block")
def block(trace: Trace, stream: Any) -> Any:
    """Return a block of *stream*."""
    _slot(trace, stream, "devstream.stream")
    return trace.block(stream)


# -- methods of streams: Dynamo inlines these in place of those of the class -------------------------------------


def _wait_event(self: Any, event: Any) -> None:
    wait(event, self)


def _record_event(self: Any, event: Any = None) -> Any:
    if event is None:
        event = _handles.verbs.Event(device_type(self))
    record(event, self)
    return event


def _query(self: Any) -> None:
    refuse("Stream.query()")


def _synchronize(self: Any) -> None:
    synchronize(self)


def _wait_stream(self: Any, stream: Any) -> None:
    wait_stream(self, stream)


tell(
    {
        "wait_event": _wait_event,
        "wait_stream": _wait_stream,
        "record_event": _record_event,
        "query": _query,
        "synchronize": _synchronize,
    },
    lambda: _trace_ops.namespace().bind.default,
)

# -- what is refused -------------------------------------------------------------------------------------

_REASONS = {
    "query": ("its answer would be baked into the compiled code", "Ask before or after the compiled function."),
    "set_stream": (
        "a current stream that outlives its block can't be seen in a graph",
        "Use `with devstream.stream(s):` instead, or call it outside the compiled function.",
    ),
    "elapsed_time": ("its answer would be baked into the compiled code", "Call it after the compiled function."),
    "recorded": ("its answer would be baked into the compiled code", "Ask before or after the compiled function."),
    "carry_streams": (
        "it looks at this thread's streams, of every backend, when it is called",
        "Carry the function outside the compiled one.",
    ),
    "ipc_handle": ("bytes for another process are no part of a graph", "Call it outside the compiled function."),
    "devices": ("it looks at the machine", "Call it outside the compiled function."),
    "wrap": ("a bare handle has no owner that a graph could name", "Wrap it outside the compiled function."),
}


@_rule("refuse")
def refuse(trace: Trace, operation: Any) -> None:
    """Say that *operation* can't be traced, why, and what to do."""
    name = operation.as_python_constant()
    trace.refuse(name, *_REASONS[name.rpartition(".")[2].removesuffix("()")])


__all__ = [
    "block",
    "current_stream",
    "default_stream",
    "install_rules",
    "known",
    "named_stream",
    "new_event",
    "new_stream",
    "record",
    "record_stream",
    "refuse",
    "synchronize",
    "wait",
    "wait_stream",
]
