"""Fills memory that nobody has written, so that whoever reads it sees that."""

from __future__ import annotations

from typing import Self

import torch

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


class Poison:
    """A context; called with a tensor whose memory is new."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def __call__(self, tensor: torch.Tensor) -> None:
        """Fill *tensor*."""
        poison(tensor)


__all__ = ["Poison", "poison"]
