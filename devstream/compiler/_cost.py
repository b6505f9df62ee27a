"""About how long a node takes on the device: only to decide where a region ends.

[Note: How good these figures have to be]
A region ends where it would hold another stream back by more than the launch of one more region costs, some 20
us. That asks for no more than the order of magnitude. The rates are rounded down from what devices of either kind
reach: an accelerator of the last years does 100 TFLOP/s of matrix products and 2 TB/s, a CPU's core 50 GFLOP/s and
10 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias  # Any: values of nodes

import torch
from torch.utils.flop_counter import flop_registry

from devstream.compiler._naming import tensors_of

#: Microseconds of one node; None where nothing is known.
Cost: TypeAlias = Callable[[torch.fx.Node], float | None]

#: FLOP and bytes per microsecond, by kind of device.
_RATES = {"cpu": (5e4, 1e4), "accelerator": (1e8, 2e6)}


def estimate(node: torch.fx.Node) -> float | None:
    """Return about how many microseconds *node* takes."""
    values = [
        *tensors_of(node.meta.get("val")),
        *(one for arg in node.all_input_nodes for one in tensors_of(arg.meta.get("val"))),
    ]
    if not values:
        return None
    flop_rate, byte_rate = _RATES["cpu" if all(one.device.type == "cpu" for one in values) else "accelerator"]
    moved = sum(_number(one.numel()) * one.element_size() for one in values) / byte_rate
    return max(moved, _flops(node) / flop_rate)


def _flops(node: torch.fx.Node) -> float:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    try:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        return float(_number(count(*args, **kwargs, out_val=node.meta["val"])))
    except (KeyError, TypeError, ValueError, AssertionError, IndexError):  # a formula for other arguments
        return 0.0


def _number(size: Any) -> float:
    """Return a size's value in the call that is compiled."""
    if not isinstance(size, torch.SymInt):
        return float(size)
    hint = getattr(size.node, "hint", None)
    return float(hint) if hint is not None else 0.0


__all__ = ["Cost", "estimate"]
