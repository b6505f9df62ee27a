"""Fills memory that nobody has written, so that whoever reads it sees that."""

from __future__ import annotations

from typing import Any

import torch

from devstream import _streams
from devstream._compat import modes


def poison(tensor: torch.Tensor) -> None:
    """Fill *tensor* with what no program means: NaN, or every bit set; on the stream that is current."""
    with modes.no_function_modes(), torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        elif tensor.numel():
            tensor.fill_(-1 if tensor.dtype.is_signed else torch.iinfo(tensor.dtype).max)


def poison_freed(size_bytes: int, device: torch.device, stream: Any) -> None:  # Any: a stream of any backend
    """Fill the block of this size that *stream*'s allocator has just taken back.

    The allocator is asked for it again, and hands out the block that fits best: mostly the one freed last.
    """
    with modes.no_function_modes(), torch.no_grad(), _streams.stream(stream):
        torch.empty(size_bytes, dtype=torch.uint8, device=device).fill_(0xFF)


__all__ = ["poison", "poison_freed"]
