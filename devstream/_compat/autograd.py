"""Which node autograd runs and makes, and what operators are: private in every release so far."""

from __future__ import annotations

from typing import Any

import torch

#: The class of an operator with its overload (``torch.ops.aten.add.Tensor``).
OpOverload = torch._ops.OpOverload


def next_sequence_number() -> int:
    """Return the number that this thread's next autograd node gets.

    While an operation is dispatched, the node of its backward has been made: it has the number before.
    """
    return int(torch._C._autograd._get_sequence_nr())


def running_sequence_number() -> int | None:
    """Return the number of the node whose backward runs in this thread, or None.

    A node that accumulates gradients has none of its own, and gives the largest number there is.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def decomposed(func: Any, args: Any, kwargs: Any) -> Any:  # Any: an operator, and what it takes and returns
    """Return the result of *func* made of smaller operations; NotImplemented where it isn't."""
    return func.decompose(*args, **kwargs)


def profiler_has_devices() -> bool:
    """Say whether torch was built with the profiler that sees device kernels (Kineto)."""
    return bool(torch._C._autograd.kineto_available())


__all__ = ["OpOverload", "decomposed", "next_sequence_number", "profiler_has_devices", "running_sequence_number"]
