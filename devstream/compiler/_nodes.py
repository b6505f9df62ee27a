"""What one node of Dynamo's graph says about streams: ours, torch's operators, or (torch 2.11) a method call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from devstream._compat import dynamo_graph
from devstream._trace_ops import NAMESPACE
from devstream.compiler._captured import Kind
from devstream.exceptions import UnsupportedError

#: Where our own frames lie, which a user's line is not.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Said:
    """What a stream node says, its streams and native events by slot, its events and tensors by node."""

    kind: Kind
    slot: int | None = None
    other: int | None = None
    event: torch.fx.Node | None = None
    native_event: int | None = None
    tensor: torch.fx.Node | None = None
    device: str | None = None


def name_of(node: torch.fx.Node) -> str:
    """Return ``"devstream.record"``, ``"streams.wait_event"``, ``".synchronize"``, ``"object"``, or ``""``."""
    if node.op == "call_method":
        about = node.args[0] if node.args else None
        return f".{node.target}" if isinstance(about, torch.fx.Node) and is_object(about) else ""
    if node.op != "call_function":
        return ""
    if is_object(node):
        return "object"
    # An operator or, from Dynamo's own rules, all overloads of one.
    found = re.match(rf"({NAMESPACE}|streams)[.:]+(\w+)", str(node.target))
    return f"{found[1]}.{found[2]}" if found else ""


def is_object(node: torch.fx.Node) -> bool:
    """Say whether *node* reads a stream or an event out of Dynamo's table."""
    return node.op == "call_function" and node.target is dynamo_graph.get_object


def read(node: torch.fx.Node, name: str) -> Said | None:
    """Return what a node called *name* says, None where it only names an object.

    Raises:
        UnsupportedError: it can't be captured.
    """
    if name in _SILENT:
        return None
    if name == ".record_event" and len(node.args) < 2:
        raise unsupported("stream.record_event() of a native stream", node, "its event", "pass an event to it")
    if name not in _READERS:
        advice = "ask outside the compiled function" if name == ".query" else ""
        raise unsupported(f"{name.lstrip('.')} of a native object", node, "a meaning for it in a graph", advice)
    return _READERS[name](*node.args)


def _native(kind: Kind) -> Callable[[int, int], Said]:
    return lambda event, slot: Said(kind, slot, native_event=event)


def _slot(node: Any) -> int:
    return int(node.args[0])


_READERS: dict[str, Callable[..., Said]] = {
    "devstream.record": lambda event, slot: Said("record", slot, event=event),
    "devstream.wait": lambda event, slot: Said("wait", slot, event=event),
    "devstream.wait_stream": lambda slot, other: Said("wait_stream", slot, other),
    "devstream.synchronize_event": lambda event: Said("synchronize_event", event=event),
    "devstream.synchronize_stream": lambda slot: Said("synchronize_stream", slot),
    "devstream.synchronize_device": lambda device: Said("synchronize_device", device=device),
    "devstream.record_stream": lambda tensor, slot: Said("record_stream", slot, tensor=tensor),
    "streams.record_event": _native("record"),
    "streams.wait_event": _native("wait"),
    "streams.wait_stream": lambda slot, other: Said("wait_stream", slot, other),
    "streams.synchronize_event": lambda event: Said("synchronize_event", native_event=event),
    "streams.synchronize_stream": lambda slot: Said("synchronize_stream", slot),
    "streams.synchronize_device": lambda kind, index: Said("synchronize_device", device=f"{kind}:{index}"),
    "streams.record_stream": lambda tensor, slot: Said("record_stream", slot, tensor=tensor),
    "streams.sync_dealloc": lambda event, slot, tensor: Said("free", slot, native_event=event, tensor=tensor),
    # Method calls, which torch 2.11 leaves in the graph.
    ".wait_event": lambda stream, event: Said("wait", _slot(stream), native_event=_slot(event)),
    ".wait_stream": lambda stream, other: Said("wait_stream", _slot(stream), _slot(other)),
    ".synchronize": lambda one: (
        Said("synchronize_event", native_event=_slot(one))
        if dynamo_graph.is_event(one)
        else Said("synchronize_stream", _slot(one))
    ),
    ".record_event": lambda stream, event: Said("record", _slot(stream), native_event=_slot(event)),
}
_SILENT = ("object", "devstream.bind", "devstream.give", "devstream.event")


def line_of(node: torch.fx.Node) -> str:
    """Return ``file:line in function`` of the user's code that made *node*; empty where torch doesn't know."""
    found = re.findall(r'File "(.+)", line (\d+), in (\S+)', node.stack_trace or "")
    for path, line, function in reversed(found):
        if not is_ours(path):
            return f"{path}:{line} in {function}"
    return ""


def is_ours(path: str) -> bool:
    """Say whether *path* is a file of devstream's."""
    return os.path.abspath(path).startswith(_HERE)


def unsupported(operation: str, node: torch.fx.Node, lacks: str, alternative: str = "") -> UnsupportedError:
    """Return the error for stream code that the compiler can't take, with the user's line."""
    line = line_of(node)
    return UnsupportedError(
        operation=f"{operation} ({line})" if line else operation,
        backend="devstream's compiler",
        capability=lacks,
        alternative=alternative or "move it out of the compiled function",
    )


__all__ = ["Said", "is_object", "is_ours", "line_of", "name_of", "read", "unsupported"]
