"""What a capture gives: a pure graph, and beside it the stream code as plain data.

Streams and events are numbered in the order in which the graph names them; stream 0 is the *ambient* one, what the
caller's thread has current at each call. Two names of one queue have one number.

[Note: What an epoch is]
A stream's epoch counts the operations that order it with others, or with the host, that it has seen. A node's mark
holds the epoch in which it was issued, an operation the epochs that it ends (`Operation.ends`). Work may be moved
to before a record or after a wait of its stream, never the other way. So an operation that ends epoch *n* of a
stream comes after that stream's nodes of epochs up to *n* where it records, before those of later epochs where it
waits, and between the two where the host is synchronized, which ends an epoch of every stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

#: The key of our marks in a node's ``meta["custom"]``; AOT Autograd carries them to the backward nodes.
MARK = "devstream"

#: The key of torch's own marks there.
TORCHS_MARK = "stream"

#: The stream that is current when the compiled function is called.
AMBIENT = 0

Kind: TypeAlias = Literal[
    "record", "wait", "wait_stream", "synchronize_stream", "synchronize_event", "synchronize_device",
    "record_stream", "free",
]  # fmt: skip


class Mark(NamedTuple):
    """Where a node runs: the number of its stream, and that stream's epoch when it was issued."""

    stream: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StreamSource:
    """How a stream is found at each call.

    Attributes:
        slot: its place in Dynamo's table; -1 for the ambient stream.
        argument: the argument of the graph that is its handle; None where there is none.
        call: the verb that gives it, for instance ``"named_stream('copy', None)"``; None where there is none.
        line: where the program names it first.
    """

    slot: int
    argument: int | None = None
    call: str | None = None
    line: str = ""

    @property
    def made(self) -> bool:
        """Whether each call makes a new one."""
        return self.call is not None and self.call.startswith("create_stream(")


@dataclass(frozen=True, slots=True)
class EventSource:
    """How an event is found at each call: by handle, made anew, or (a native one) by its place in Dynamo's table.

    Attributes:
        argument: the argument of the graph that is its handle.
        make: device and options of an event that each call makes.
        slot: the place of a native event.
        line: where the program names it first.
    """

    argument: int | None = None
    make: tuple[str, bool, bool, bool] | None = None
    slot: int | None = None
    line: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on streams, taken out of the graph.

    Attributes:
        kind: what it does. ``free`` is the user's ``del`` of a tensor that another stream uses.
        graph: name of the (sub)graph that it stood in; ``""`` is the graph itself.
        before: name of the node of that graph that it stood before; several operations may share one.
        stream: which stream records, waits or is synchronized; which uses the tensor.
        other: ``wait_stream``: which stream it waits for.
        event: number of the event.
        tensor: name of the node whose value ``record_stream`` or ``free`` is about.
        device: what ``synchronize_device`` waits for.
        ends: the marks (stream, epoch) that this operation ends; see the note above.
        line: the user's file, line and function.
        backward: it stood in the backward of an autograd.Function, which runs later.
    """

    kind: Kind
    graph: str
    before: str
    stream: int | None = None
    other: int | None = None
    event: int | None = None
    tensor: str | None = None
    device: str | None = None
    ends: tuple[Mark, ...] = ()
    line: str = ""
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """A pure graph with the stream code that was taken out of it.

    Attributes:
        module: the graph, of compute nodes only, each marked (`mark_of`); its subgraphs are pure and marked too.
        inputs: for each placeholder, what it takes: an argument's number, or ``"event 2"`` for an event's handle
            that a subgraph still names.
        outputs: for each output of the compiled function, the number of the pure graph's output, or ``"event 2"``.
        operations: in program order.
        streams: one source for each name that the graph has for a stream; the first is the ambient one.
        queues: for each of them the number of its stream. The capture is valid while these names are one queue.
        events: by number.
    """

    module: torch.fx.GraphModule
    inputs: tuple[int | str, ...]
    outputs: tuple[int | str, ...]
    operations: tuple[Operation, ...]
    streams: tuple[StreamSource, ...]
    queues: tuple[int, ...]
    events: tuple[EventSource, ...]

    @property
    def has_streams(self) -> bool:
        """Whether there is any stream code in it."""
        return len(self.streams) > 1 or bool(self.operations or self.events)

    def in_graph(self, graph: str) -> dict[str, list[Operation]]:
        """Return the operations of one (sub)graph by the node that they stand before."""
        found: dict[str, list[Operation]] = {}
        for operation in self.operations:
            if operation.graph == graph:
                found.setdefault(operation.before, []).append(operation)
        return found


def mark_of(node: torch.fx.Node) -> Mark | None:
    """Return the mark of *node*, None where it has none."""
    custom: dict[str, Any] | None = node.meta.get("custom")  # Any: values of every owner of a key
    found = custom.get(MARK) if custom else None
    return None if found is None else Mark(*found)


def set_mark(node: torch.fx.Node, mark: Mark | None) -> None:
    """Give *node* this mark, or none, and take torch's own mark away."""
    # A new dict each time: nodes that were made together share one.
    custom = {
        key: value for key, value in (node.meta.get("custom") or {}).items() if key not in (TORCHS_MARK, MARK)
    }
    if mark is not None:
        custom[MARK] = tuple(mark)
    if custom or "custom" in node.meta:
        node.meta["custom"] = custom


__all__ = [
    "AMBIENT",
    "MARK",
    "TORCHS_MARK",
    "Captured",
    "EventSource",
    "Kind",
    "Mark",
    "Operation",
    "StreamSource",
    "mark_of",
    "set_mark",
]
