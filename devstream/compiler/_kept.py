"""What the forward saves of an input that it changes: a copy of what it was.

[Note: Saved, then changed]
AOT Autograd makes a functional graph and writes an input's change back at its end. The partitioner lets the
backward have the input itself where that spares a saved value, and the backward would then read what was written
back (torch 2.11 to 2.15 do so, and no error tells). Whoever changes the input is on a stream, so the copy is made
there, right before the change: what orders the change behind all earlier work on the input orders the copy too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any  # Any: whatever identifies a storage

import torch

from devstream._compat import inductor
from devstream.compiler._captured import AMBIENT, Mark, mark_of, set_mark
from devstream.compiler._naming import key_of
from devstream.compiler._nodes import unsupported

#: The key of the name that the backward knows a copy by, in its node's ``meta``.
SAVED_AS = "devstream_saved_as"

_CALLERS = Mark(AMBIENT, 0)


def keep_saved(module: torch.fx.GraphModule, *, returns: int, outside: Sequence[int]) -> None:
    """Copy the saved values that share memory with an input that the forward changes: [Note: Saved, then changed].

    Args:
        module: a forward graph; its outputs from number *returns* on are saved for the backward.
        returns: how many outputs are not saved values.
        outside: for each of the first outputs, the number of the input that it is written back to after the graph.

    Raises:
        UnsupportedError: a copy would not have the saved value's strides.
    """
    changes = _changes(module, outside)
    graph = module.graph
    results = list(inductor.outputs_of(module))
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for number in range(returns, len(results)):
        saved = results[number]
        change = changes.get(_storage(saved)) if isinstance(saved, torch.fx.Node) else None
        if change is not None:
            if saved not in made:
                made[saved] = _copied(graph, saved, change)
            results[number] = made[saved]
    if made:
        graph.output_node().args = (tuple(results),)


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of an input: the node *before* which it still is what it was, what it becomes, and where."""

    before: torch.fx.Node
    becomes: torch.fx.Node
    mark: Mark


def _changes(module: torch.fx.GraphModule, outside: Sequence[int]) -> dict[Any, _Change]:
    """Return the change of each storage that is changed."""
    found: dict[Any, _Change] = {}
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    results = inductor.outputs_of(module)
    for number, target in enumerate(outside):
        becomes = results[number]
        found[_storage(inputs[target])] = _Change(graph.output_node(), becomes, mark_of(becomes) or _CALLERS)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            becomes = node.args[1]
            own = mark_of(node) or _CALLERS
            epoch = (mark_of(becomes) if becomes.op == "call_function" else None) or own
            found[_storage(node.args[0])] = _Change(node, becomes, Mark(own.stream, epoch.epoch))
    found.pop(None, None)
    return found


def _copied(graph: torch.fx.Graph, saved: torch.fx.Node, change: _Change) -> torch.fx.Node:
    value: torch.Tensor = saved.meta["val"]
    with graph.inserting_before(change.before):
        copy = graph.call_function(torch.ops.aten.clone.default, (saved,))
    with inductor.mode_of(value):
        copy.meta["val"] = value.clone()
    if copy.meta["val"].stride() != value.stride():
        raise unsupported(
            f"a backward that needs {saved.name!r}, with strides {tuple(value.stride())}, as it was before the "
            f"forward changed it in place",
            change.becomes,
            "a copy of a tensor with gaps",
            "change a contiguous tensor, or use a .clone() of it before the change",
        )
    copy.meta.update({key: saved.meta[key] for key in ("stack_trace", "nn_module_stack") if key in saved.meta})
    copy.meta[SAVED_AS] = saved.name
    set_mark(copy, change.mark)
    return copy


def _storage(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return key_of(value) if isinstance(value, torch.Tensor) else None


__all__ = ["SAVED_AS", "keep_saved"]
