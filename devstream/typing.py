"""Public aliases for annotations."""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import torch

#: What every verb takes for a device. ``None`` is the default device: the current accelerator, else the CPU.
#: An ``int`` is an index on the default device's type.
DeviceArg: TypeAlias = torch.device | str | int | None
#: A priority: a number (lower runs first, clamped to the device's range) or a name that every vendor has.
PriorityArg: TypeAlias = int | str


@runtime_checkable
class HasCudaStream(Protocol):
    """An object of another library that answers CUDA's stream protocol (CuPy, cuda.core, Numba)."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the stream's native handle."""
        ...


__all__ = ["DeviceArg", "HasCudaStream", "PriorityArg"]
