"""The tensors of a traced graph, and what they, devices and lines are called in plain data."""

from __future__ import annotations

from typing import Any  # Any: whatever identifies a storage

import torch

from devstream._compat import tree_leaves


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in *value*, however it holds them."""
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def key_of(value: torch.Tensor) -> Any:
    """Return what tells the storage of *value* from all others that are alive."""
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a layout without a storage
        return id(value)


def text(device: torch.device) -> str:
    """Return the text that stands for *device* in a graph."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def short(line: str) -> str:
    """Return ``file.py:12`` of what `line_of` says."""
    return line.partition(" in ")[0]


__all__ = ["key_of", "short", "tensors_of", "text"]
