"""Dynamo's graph and the table beside it, as a backend sees them. Imports Dynamo."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any  # Any: a stream or an event of any class

import torch
from torch._dynamo import compiled_autograd as _compiled_autograd
from torch._dynamo import graph_bytecode_inputs as _table
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.source import SyntheticLocalSource

from devstream import _fork

#: What a node calls to read the object at its slot.
get_object = _table.get_external_object_by_index

#: The slot of the ambient stream of torch's accelerator, which torch 2.13 and later keep for it.
AMBIENT_SLOT: int | None = getattr(_table, "CURRENT_STREAM_INDEX", None)

#: What higher-order operators do with their subgraphs, by the operator's name.
INLINED = {"tag_activation_checkpoint": ("forward",), "autograd_function_apply": ("forward", "backward")}

_drop_lock = threading.RLock()
_fork.renew(globals(), "_drop_lock")


def ambient_slot() -> int | None:
    """Return the slot of the ambient stream, None where torch keeps none."""
    return AMBIENT_SLOT if torch.accelerator.is_available() else None


def is_event(node: torch.fx.Node) -> bool:
    """Say whether a node that reads the table reads an event."""
    return isinstance(node.meta.get("example_value"), torch.Event)


def operator_name(node: torch.fx.Node) -> str:
    """Return the name of the higher-order operator that *node* calls, empty for any other node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return ""
    return str(node.target.name())  # type: ignore[no-untyped-call]


def take(slots: Iterable[int]) -> list[Any]:
    """Return strong references to what stands at *slots*; the first action of a compiled call.

    The table is global to the process: another thread's call may replace it at any moment, so this is exact for
    one thread at a time only.
    """
    table = _table.index_to_external_object_weakref
    return [table[slot]() for slot in slots]


def drop(objects: Iterable[Any]) -> None:
    """Let go of objects that a call had made, which the table would otherwise keep until the next compilation."""
    kept = _table.keep_alive
    with _drop_lock:
        for gone in objects:
            # Others only append meanwhile, or clear the list.
            for i in range(len(kept) - 1, -1, -1):
                try:
                    if kept[i] is gone:
                        del kept[i]
                        break
                except IndexError:
                    continue


def give_source(placeholder: torch.fx.Node) -> None:
    """Give a new placeholder the source that AOT Autograd asks each for."""
    placeholder._dynamo_source = SyntheticLocalSource(placeholder.name)


def cause_of(error: BackendCompilerFailed) -> Exception:
    """Return what a backend raised, which Dynamo has wrapped."""
    cause: Exception = error.inner_exception
    return cause


def compiled_autograd_is_on() -> bool:
    """Say whether compiled autograd would replace the backward of what is compiled now."""
    return bool(
        _compiled_autograd.compiled_autograd_enabled
        or _compiled_autograd.in_compiled_autograd_region
        or torch._dynamo.config.compiled_autograd
    )


__all__ = [
    "INLINED",
    "BackendCompilerFailed",
    "Unsupported",
    "ambient_slot",
    "cause_of",
    "compiled_autograd_is_on",
    "drop",
    "get_object",
    "give_source",
    "is_event",
    "operator_name",
    "take",
]
