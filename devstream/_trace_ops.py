"""The operators that traced verbs put into a graph, and what each does where some compiler leaves it there.

They are defined on first use, which takes a few milliseconds that an eager program needn't spend.
"""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from devstream import _fork, _handles

NAMESPACE = "devstream"

#: name -> schema
_SCHEMAS = {
    "bind": "(Tensor handle, int slot) -> ()",
    "give": "(int slot, str call) -> ()",
    "event": "(str device, bool timing, bool blocking, bool interprocess) -> Tensor",
    "record": "(Tensor event, int slot) -> ()",
    "wait": "(Tensor event, int slot) -> ()",
    "wait_stream": "(int slot, int other) -> ()",
    "synchronize_event": "(Tensor event) -> ()",
    "synchronize_stream": "(int slot) -> ()",
    "synchronize_device": "(str device) -> ()",
    "record_stream": "(Tensor tensor, int slot) -> ()",
}

_library: Any = None  # Any: the methods of torch.library.Library are untyped
_lock = threading.RLock()
_fork.renew(globals())


def namespace() -> Any:  # Any: torch's class of operator namespaces is private
    """Return ``torch.ops.devstream``, its operators defined."""
    global _library
    with _lock:
        if _library is None:
            _library = _define()
    return torch.ops.devstream


def _define() -> Any:  # Any: see _library
    library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _RUN[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake_event if name == "event" else _fake, lib=library)
        # Else a compiler drops them, since nobody reads what they return.
        torch.fx.has_side_effect(getattr(torch.ops.devstream, name).default)
    return library


def _fake(*args: object) -> None:
    return None


def _fake_event(*args: object) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def make_event(device: str, timing: bool, blocking: bool, interprocess: bool) -> torch.Tensor:
    """Return the handle of a new event, which it keeps alive."""
    event = _handles.verbs.Event(device, enable_timing=timing, blocking=blocking, interprocess=interprocess)
    return _handles.new_handle(event, keep=True)


def give(call: str) -> Any:  # Any: a stream of any backend
    """Return the stream that a verb gives now, *call* being its name and arguments."""
    name, arguments = _parsed(call)
    return getattr(_handles.verbs, name)(*arguments)


@functools.lru_cache(maxsize=1024)
def _parsed(call: str) -> tuple[str, tuple[Any, ...]]:
    name, _, arguments = call.partition("(")
    return name, ast.literal_eval(f"({arguments[:-1]},)")


def _stream(slot: int) -> Any:  # Any: a stream of any backend
    from devstream._compat.dynamo_graph import get_object  # noqa: PLC0415 - it is loaded where this code runs

    return get_object(slot)


def _record(event: torch.Tensor, slot: int) -> None:
    _handles.owner_of(event).record(_stream(slot))


def _wait(event: torch.Tensor, slot: int) -> None:
    _handles.owner_of(event).wait(_stream(slot))


_RUN: dict[str, Callable[..., Any]] = {
    "bind": lambda handle, slot: None,
    "give": lambda slot, call: None,
    "event": make_event,
    "record": _record,
    "wait": _wait,
    "wait_stream": lambda slot, other: _handles.verbs.wrap(_stream(slot)).wait_stream(_stream(other)),
    "synchronize_event": lambda event: _handles.owner_of(event).synchronize(),
    "synchronize_stream": lambda slot: _stream(slot).synchronize(),
    "synchronize_device": lambda device: _handles.verbs.synchronize(device),  # noqa: PLW0108 - bound late
    "record_stream": lambda tensor, slot: _handles.verbs.record_stream(tensor, _stream(slot)),
}

__all__ = ["NAMESPACE", "give", "make_event", "namespace"]
