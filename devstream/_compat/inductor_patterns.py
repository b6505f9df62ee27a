"""Inductor's patterns for joint graphs, made only where one could match.

Inductor makes all of them before the first joint graph of a process. The ones for attention take longest by far,
and they match batched products alone. Where AOT Autograd's cache answers, Inductor makes none at all, but the
compiler's graphs are not in that cache: a compilation that finds its kernels ready would spend a good part of its
time on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any  # Any: Inductor's types are private

import torch
from torch._inductor.fx_passes import joint_graph
from torch._inductor.fx_passes.misc_patterns import _misc_patterns_init
from torch._inductor.fx_passes.pad_mm import _pad_mm_init
from torch._inductor.pattern_matcher import init_once_fakemode

_BATCHED = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default, torch.ops.aten.matmul.default)


@init_once_fakemode
def _others(input_device: torch.device | None = None) -> None:
    # Each is made once a device, so Inductor's own call after this one adds nothing twice.
    _pad_mm_init(input_device)
    _misc_patterns_init(input_device)


class Patterns:
    """What a compilation still has to make."""

    def __init__(self, whole: Callable[..., Any]) -> None:
        self._whole, self._thread = whole, threading.get_ident()
        self._asked: list[Any] = []

    def ask(self, *arguments: Any) -> None:
        """Take the place of Inductor's function; for other threads be it."""
        if threading.get_ident() != self._thread:
            self._whole(*arguments)
        else:
            self._asked.append(arguments)

    def make(self, graph: torch.fx.Graph) -> None:
        """Make those that could match in *graph*."""
        for arguments in self._asked:
            batched = any(graph.find_nodes(op="call_function", target=one) for one in _BATCHED)
            (self._whole if batched else _others)(*arguments)
        self._asked = []


@contextmanager
def when_needed() -> Iterator[Patterns]:
    """Yield what makes the patterns of the graphs that this thread compiles inside."""
    whole = joint_graph.lazy_init
    found = Patterns(whole)
    joint_graph.lazy_init = found.ask
    try:
        yield found
    finally:
        joint_graph.lazy_init = whole


__all__ = ["Patterns", "when_needed"]
