"""torch's modes and what autograd is doing, as the race checker and the schedules of the CPU need them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hooks untyped
    """A ``TorchDispatchMode`` without torch's guard against compiling it, which costs more than a small operation.

    For use under `compiled_runs_eagerly` only: there nothing is compiled.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Read at the definition of each subclass; a release that doesn't ask keeps its guard.
        return False


def current_backward_node() -> torch.autograd.graph.Node | None:
    """Return the node whose backward this thread runs, or None outside of a backward."""
    return torch._C._current_autograd_node()


def node_number(node: torch.autograd.graph.Node) -> int | None:
    """Return the place of *node* in the order in which its thread made nodes; None for an accumulation."""
    # C++'s largest number stands for "first of all", which accumulations are.
    number = int(node._sequence_nr()) if hasattr(node, "_sequence_nr") else -1
    return number if 0 <= number < 1 << 62 else None


def next_node_number() -> int:
    """Return the number that the next node made by this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())


def no_function_modes() -> AbstractContextManager[None]:
    """Return a context in which methods of tensors don't go through ``__torch_function__``."""
    return torch._C.DisableTorchFunction()


def compiled_runs_eagerly() -> AbstractContextManager[None]:
    """Return a context in which compiled functions run eagerly, in the whole process.

    Under a mode they would do so anyway, but for those with ``fullgraph=True``, which would raise.
    """
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def no_modes() -> AbstractContextManager[None]:
    """Return a context in which no mode of this thread, of whatever library, sees an operation."""
    return _disable_current_modes()


def below_autograd() -> AbstractContextManager[None]:
    """Return a context in which operations neither record gradients nor count as changes of their arguments."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def is_random(operation: Any) -> bool:  # Any: torch's OpOverload, a private class
    """Say whether *operation* draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def storage_uses(key: int) -> int:
    """Return how many objects hold the storage with this ``_cdata``, its Python object included."""
    return int(torch._C._storage_Use_Count(key))


def acts_for_itself(types: tuple[type, ...]) -> bool:
    """Say whether one of these classes of tensors runs its operations by its own ``__torch_dispatch__``."""
    return any(cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for cls in types)  # type: ignore[attr-defined]


__all__ = [
    "DispatchMode",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "acts_for_itself",
    "below_autograd",
    "compiled_runs_eagerly",
    "current_backward_node",
    "is_random",
    "next_node_number",
    "no_function_modes",
    "no_modes",
    "node_number",
    "storage_uses",
]
