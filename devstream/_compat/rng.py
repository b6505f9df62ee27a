"""Random operators that a checkpoint repeats: torch's two wrappers, taken apart into ordinary operations.

The partitioner wraps a random operator that the backward repeats: the forward's wrapper gives the generator's
state besides the result, the backward's sets that state for the length of the operator. The wrappers carry neither
what they make nor where they came from, and the first gives memory of the host beside memory of the device.

From torch 2.14 on the operator may be the one that draws the seeds of Inductor's own random numbers. Then the
seeds are kept in the place of the state, and nothing is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # Any: what operators take and give

import torch


def state_of(device: str) -> torch.Tensor:
    """Return the state of the default generator of *device*, a type, as it is now: uint8, on the host."""
    found: torch.Tensor = _generators(device).get_rng_state()
    return found


def with_state(device: str, state: torch.Tensor, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run *operator* with the generator of *device* in *state*, and leave the generator as it was."""
    generators = _generators(device)
    before = generators.get_rng_state()
    generators.set_rng_state(state)
    try:
        return operator(*args, **kwargs)
    finally:
        generators.set_rng_state(before)


def _generators(device: str) -> Any:
    return torch if device == "cpu" else torch.get_device_module(device)


def uses_generator(node: torch.fx.Node) -> bool:
    """Say whether *node* is one of the operations that `take_apart` makes."""
    return node.op == "call_function" and node.target in (state_of, with_state)


def take_apart(graph: torch.fx.Graph, repeated: list[dict[str, Any]]) -> None:
    """Replace the wrappers in *graph*.

    Args:
        graph: a forward or a backward, as the partitioner gives it.
        repeated: what is known of each repeated operator. The forward adds to it, the backward, which comes with
            nothing of its own, reads it.
    """
    wrappers = torch._prims.rng_prims
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is wrappers.run_and_save_rng_state:
            _forward(graph, node, repeated)
    states = [one for one in graph.find_nodes(op="placeholder") if one.name.startswith("rng_state_output")]
    known = dict(zip(states, repeated, strict=False))
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is wrappers.run_with_rng_state:
            state, operator, *args = node.args
            meta = known[state]
            if _draws_seeds(operator):
                state.meta["val"] = meta["val"]
                node.replace_all_uses_with(state)
                graph.erase_node(node)
                continue
            with graph.inserting_before(node):
                made = graph.call_function(
                    with_state, (_device(meta["val"]), state, operator, *args), dict(node.kwargs)
                )
            made.meta = dict(meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _forward(graph: torch.fx.Graph, node: torch.fx.Node, repeated: list[dict[str, Any]]) -> None:
    operator, *args = node.args
    parts = {one.args[1]: one for one in node.users}
    assert callable(operator)
    meta = dict(parts[1].meta)
    # The name that it has in the backward, by which the two halves know what they share.
    name = f"rng_state_output_{len(repeated)}"
    repeated.append(meta)
    with graph.inserting_before(node):
        if _draws_seeds(operator):
            made = state = graph.create_node("call_function", operator, tuple(args), dict(node.kwargs), name=name)
        else:
            state = graph.create_node("call_function", state_of, (_device(meta["val"]),), name=name)
            made = graph.call_function(operator, tuple(args), dict(node.kwargs))
            state.meta = {**meta, **parts[0].meta}
            state.meta.pop("tensor_meta", None)
    made.meta = meta
    for number, new in ((0, state), (1, made)):
        parts[number].replace_all_uses_with(new)
        graph.erase_node(parts[number])
    graph.erase_node(node)


def _draws_seeds(operator: Any) -> bool:
    return "inductor_seeds" in str(operator)


def _device(value: Any) -> str:
    """Return the type of the device whose generator an operator draws from: that of what it makes."""
    tensors = [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
    return tensors[0].device.type


__all__ = ["state_of", "take_apart", "uses_generator", "with_state"]
