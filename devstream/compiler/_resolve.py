"""Which stream and which event a name is: found anew at each call.

Nothing is remembered from call to call. A handle tells its object by itself, so two threads that run one compiled
function each find their own. Objects of torch's own classes have no handle, nor have streams that a call makes.
They are read out of Dynamo's table, as the first action of a call, and that table is one for the whole process:
while two threads are in compiled functions with such objects, one may read what the other put there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any  # Any: streams and events of every backend

import torch

from devstream import _handles, _registry, _trace_ops
from devstream._compat import dynamo_graph
from devstream._objects import as_stream
from devstream.abc import AnyBackend
from devstream.compiler._captured import AMBIENT, Captured, EventSource, StreamSource
from devstream.exceptions import UnsupportedError


@dataclass(frozen=True, slots=True)
class Call:
    """The objects of one call. Keep it until the call's work is issued, since it keeps them alive.

    Attributes:
        streams: by number; None for the ambient one.
        events: by number.
        handles: by number, of the events that the call made.
    """

    streams: tuple[Any, ...]
    events: tuple[Any, ...]
    handles: tuple[torch.Tensor | None, ...]


class _Last(threading.local):
    """What this thread's last call of one compiled function made."""

    def __init__(self) -> None:
        self.made: list[Any] = []


class Resolver:
    """Finds the objects of each call of one compiled function."""

    def __init__(self, streams: Sequence[StreamSource]) -> None:
        self._streams = tuple(streams[1:])
        # Those with a handle, and those that a verb gives, need no table.
        self._tabled = [source.slot for source in self._streams if source.argument is None]
        self._last = _Last()

    def streams(self, arguments: Sequence[Any], events: Sequence[EventSource] = ()) -> tuple[list[Any], list[Any]]:
        """Return the streams by name, the ambient one left out, and the native events; call it first."""
        natives = [source.slot for source in events if source.slot is not None]
        taken = dynamo_graph.take([*self._tabled, *natives])
        tabled = iter(taken)
        found = []
        dropped = []
        for source in self._streams:
            if source.argument is not None:
                found.append(_handles.owner_of(arguments[source.argument]))
                continue
            item = next(tabled)
            if source.call is not None:
                dropped.append(item)
            # Of the verbs only this one gives another stream each time.
            found.append(item if source.call is None or source.made else _trace_ops.give(source.call))
        # The code after this call may still ask the table for what it returns; the next call won't.
        dynamo_graph.drop(self._last.made)
        self._last.made = dropped
        return found, list(tabled)


def pattern(backend: AnyBackend, streams: Sequence[Any], sources: Sequence[StreamSource]) -> tuple[int, ...]:
    """Return for each source the number of its queue; *streams* are *backend*'s, of all but the ambient one."""
    numbers: dict[tuple[str, int, int], int] = {}
    found = [AMBIENT]
    here = backend.stream_key(backend.current_stream(None))
    for stream in streams:
        key = backend.stream_key(stream)
        found.append(AMBIENT if key == here else numbers.setdefault(key, len(numbers) + 1))
    assert len(found) == len(sources)
    return tuple(found)


def adopted(streams: Sequence[Any]) -> tuple[AnyBackend, list[Any]]:
    """Return the backend of *streams*, the default one where there are none, and its own objects for them.

    Raises:
        UnsupportedError: they are of more than one.
    """
    pairs = [as_stream(one) for one in streams]
    backend = pairs[0][0] if pairs else _registry.default_backend()
    if any(one is not backend for one, _ in pairs):
        names = sorted({one.name for one, _ in pairs})
        raise UnsupportedError(
            operation=f"streams of {' and '.join(names)} in one compiled function",
            backend="devstream's compiler",
            capability="an order between streams of two backends",
            alternative="compile the parts apart",
        )
    return backend, [stream for _, stream in pairs]


def resolve(captured: Captured, streams: Sequence[Any], natives: Sequence[Any], arguments: Sequence[Any]) -> Call:
    """Return the objects of a call whose *streams* (see `adopted`) and native events are known; make the rest."""
    by_number: list[Any] = [None] * (max(captured.queues) + 1)
    for number, stream in zip(captured.queues[1:], streams, strict=True):
        if number != AMBIENT and by_number[number] is None:
            by_number[number] = stream
    remaining = iter(natives)
    events: list[Any] = []
    handles: list[torch.Tensor | None] = []
    for source in captured.events:
        handle = None
        if source.argument is not None:
            events.append(_handles.owner_of(arguments[source.argument]))
        elif source.make is not None:
            handle = _trace_ops.make_event(*source.make)
            events.append(_handles.owner_of(handle))
        else:
            events.append(next(remaining))
        handles.append(handle)
    return Call(tuple(by_number), tuple(events), tuple(handles))


def ambient() -> Any:
    """Return the calling thread's current stream, which the ambient name stands for."""
    return _registry.default_backend().current_stream(None)


__all__ = ["Call", "Resolver", "adopted", "ambient", "pattern", "resolve"]
