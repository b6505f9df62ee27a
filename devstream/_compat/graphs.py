"""Device graphs, and whose memory a tensor has, as private parts of torch know it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any  # Any: torch's classes of graphs differ by release and build

import torch

#: ``torch.accelerator.Graph`` exists. Needless once the floor is torch 2.12.
HAS_ACCELERATOR_GRAPH = hasattr(torch.accelerator, "Graph")

#: Other threads may go on using the device: only what this thread does can spoil its capture.
_MODE: Any = "thread_local"


class NativeGraph:
    """One graph of torch's, of the class that its device type has."""

    def __init__(self, device_type: str, pool: Any) -> None:
        self._device_type, self._pool = device_type, pool
        self._graph: Any
        if device_type == "cuda":  # HIP's as well
            self._graph = torch.cuda.CUDAGraph()
            # Chosen now: a graph whose capture failed doesn't tell its pool.
            self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        else:
            self._graph = torch.accelerator.Graph(pool=pool, capture_error_mode=_MODE)

    @property
    def pool(self) -> Any:
        """The pool that its memory comes from."""
        return self._pool if self._device_type == "cuda" else self._graph.pool()

    def begin(self) -> None:
        """Start to capture the current stream."""
        if self._device_type == "cuda":
            self._graph.capture_begin(pool=self._pool, capture_error_mode=_MODE)
        else:
            self._graph.capture_begin()

    def end(self) -> None:
        """End the capture; one of no work is valid.

        Raises:
            RuntimeError: it is not valid.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The (CUDA|HIP) Graph is empty")
            self._graph.capture_end()

    def replay(self) -> None:
        """Issue the graph to the current stream."""
        self._graph.replay()

    def abandon(self, index: int) -> None:
        """Bring torch back from a capture that failed: its error skips the allocator and the random numbers."""
        if self._device_type != "cuda":
            return
        with contextlib.suppress(RuntimeError):  # it was done
            torch._C._cuda_endAllocateToPool(index, self._pool)
        # The device's generator still waits for the end of the capture. One that succeeds sets it right.
        one = torch.empty(1, device=torch.device("cuda", index))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode=_MODE)
        one.zero_()
        graph.capture_end()


def clear_workspaces(device_type: str) -> None:
    """Let cuBLAS or hipBLAS take its scratch memory anew, so that a graph's is of the graph's own pool."""
    if device_type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


def uses(tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """Return what counts, for each of *tensors*, who refers to its memory."""
    keys = [tensor.untyped_storage()._cdata for tensor in tensors]
    count: Callable[[int], int] = torch._C._storage_Use_Count
    return lambda: [count(key) for key in keys]


def _same_addresses(values: Sequence[Any], addresses: Sequence[int | None], numbers: Sequence[int]) -> bool:
    return all(values[number].data_ptr() == addresses[number] for number in numbers)


#: Say whether the tensors at *numbers* among *values* lie at these *addresses*; builds without CUDA lack torch's.
same_addresses: Callable[[Sequence[Any], Sequence[int | None], Sequence[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _same_addresses
)

__all__ = ["HAS_ACCELERATOR_GRAPH", "NativeGraph", "clear_workspaces", "same_addresses", "uses"]
