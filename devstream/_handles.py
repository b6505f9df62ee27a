"""Handles: the 0-d CPU tensors by which compiled code knows streams and events.

A tensor can be an argument and a result of any graph, and one compiled function takes every tensor of a kind;
so one compiled function serves every event. A handle is made on the first use in compiled code, never in eager.
"""

from __future__ import annotations

import itertools
import weakref
from types import ModuleType
from typing import Any  # Any: streams and events of every backend

import torch

from devstream.exceptions import DevstreamError

#: The module of the verbs, which lies above; it binds itself here.
verbs: ModuleType

_numbers = itertools.count(1)
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(owner: Any, *, keep: bool = False) -> torch.Tensor:
    """Return a new handle of *owner*, a stream or an event; with *keep* it keeps the owner alive."""
    number = next(_numbers)
    # A guard looks at a handle's kind, so all are alike, whatever mode is on where one is made.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            handle = _number(number)
    else:
        handle = _number(number)
    _own(handle, owner, number, keep=keep)
    return handle


def _number(number: int) -> torch.Tensor:
    return torch.scalar_tensor(number, dtype=torch.int64, device="cpu")


def _own(handle: torch.Tensor, owner: Any, number: int, *, keep: bool) -> None:
    _owners[number] = owner
    handle.devstream_owner = (lambda: owner) if keep else weakref.ref(owner)  # type: ignore[attr-defined]


def owner_of(handle: torch.Tensor) -> Any:
    """Return the stream or event that *handle* stands for.

    Raises:
        DevstreamError: it is gone.
    """
    ref = getattr(handle, "devstream_owner", None)
    # Some wrappers of other compilers pass a new tensor object on, which has only the number.
    owner = _owners.get(int(handle)) if ref is None else ref()
    if owner is None:
        raise DevstreamError(reason="a stream or event that compiled code uses is gone")
    return owner


def rebind(handle: torch.Tensor, owner: Any) -> None:
    """Let *handle* stand for *owner* from now on, without keeping it alive."""
    _own(handle, owner, int(handle), keep=False)


def _handle(self: Any) -> Any:
    """What compiled code knows this object by: a 0-d tensor, made on the first use in compiled code."""
    if self._handle is None:
        self._handle = new_handle(self)
    return self._handle


#: The property of that name of streams and of events.
handle = property(_handle)


def fill(event: Any) -> None:
    """Give *event*, which compiled code made and returned, the state that its record in that code has."""
    made = owner_of(event._handle)
    for slot in type(made).__slots__:
        if slot not in ("__weakref__", "_handle"):
            setattr(event, slot, getattr(made, slot))
    rebind(event._handle, event)


def bind(module: ModuleType) -> None:
    """Let traced code and its operators call the verbs of *module*."""
    global verbs
    verbs = module


__all__ = ["bind", "fill", "handle", "new_handle", "owner_of", "rebind"]
