"""`cpu` and `strict`: let a test ask more of the program than hardware does.

[Note: Who made a tensor on the CPU]
torch has one CPU, so a tensor doesn't say on which virtual device it is. Under ``cpu(strict=True)`` a dispatch
mode looks at each operation's results in the calling thread and notes the stream that was current: its device is
the tensor's. Tensors from before the block, and from other threads, belong to nobody and may be used everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from devstream import _compat, _fork, _objects, _registry
from devstream.backends._cpu_stream import CpuStream
from devstream.backends.cpu import CpuBackend
from devstream.exceptions import DeviceMismatchError
from devstream.testing._deferred import Deferred

_depth_lock = threading.RLock()
_fork.renew(globals(), "_depth_lock")


@contextmanager
def strict() -> Iterator[None]:
    """Raise or warn, in every thread, where torch lets a faulty use of an event pass in silence.

    A wait for an event that was never recorded raises ``EventNotRecordedError``. A second record that nobody
    waited for, synchronized or saw happen in between warns with ``EventOverwrittenWarning``.
    """
    with _depth_lock:
        _objects.strict_depth += 1
    try:
        yield
    finally:
        with _depth_lock:
            _objects.strict_depth -= 1


@contextmanager
def cpu(
    *, schedule: str = "inline", seed: int = 0, profile: str = "cpu", devices: int = 2, strict: bool = False
) -> Iterator[CpuBackend]:
    """Change how the CPU backend behaves inside the block, in every thread, and return that backend.

    Args:
        schedule: ``"inline"`` runs work in the order of its issue. ``"lazy"`` runs it when somebody waits for it,
            and runs first whatever nothing orders after it; ``"random"`` draws lots. Both leave NaN, or every bit
            set, in what isn't written yet, so that a missing wait gives the same wrong answer each time, and a
            correct program the right one. For operations of the calling thread.
        seed: for schedules that draw lots.
        profile: whose limits apply. ``"cpu"`` has none. ``"hip"``: two priorities, and a warning where more than 4
            streams share queues. ``"mps"``: one stream, and little else. ``"external"``: a foreign handle can be
            wrapped, entered and synchronized, but neither recorded nor waited on.
        devices: number of virtual devices.
        strict: enter `devstream.testing.strict`, and note in the calling thread which stream makes each tensor:
            ``record_stream`` of that very stream then warns, and an operation on one virtual device that reads a
            tensor of another raises.

    Raises:
        UnsupportedError: *schedule* or *profile* isn't known.
        ValueError: fewer than two *devices*.
        DeviceMismatchError: from an operation inside the block, see *strict*.
    """
    backend = _registry.usable("cpu")
    assert isinstance(backend, CpuBackend)
    with ExitStack() as stack:
        stack.callback(setattr, backend, "options", backend.options)
        backend.change(schedule=schedule, seed=seed, profile=profile, devices=devices)
        if schedule != "inline":
            stack.enter_context(Deferred(backend, schedule, seed))
        if strict:
            # The argument shadows the function of the same name, which the user knows by that name too.
            stack.enter_context(_strict())
            stack.callback(backend.owners.clear)
            stack.enter_context(_Ownership(backend))
        yield backend


_strict = strict


class _Ownership(_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the hook untyped
    """Notes in `CpuBackend.owners` which stream makes each storage, and checks who reads it."""

    def __init__(self, backend: CpuBackend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend = backend

    def __torch_dispatch__(
        self,
        func: Any,  # Any: torch's OpOverload, a private class
        types: object,
        args: tuple[Any, ...] = (),  # Any: an operation's arguments are of every type; the same below
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in _compat.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        stream = self._backend.current_stream(None)
        if not _moves_or_views(func):
            for tensor in inputs:
                self._check(tensor, stream, func)
        result = func(*args, **kwargs)
        known = {_storage(tensor) for tensor in inputs}
        for leaf in _compat.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = _storage(leaf)
                if storage not in known:
                    self._backend.owners[storage] = stream
        return result

    def _check(self, tensor: torch.Tensor, stream: CpuStream, func: object) -> None:
        if tensor.device.type != "cpu":
            return
        owner = self._backend.owners.get(_storage(tensor))
        if owner is None:
            return
        home, here = self._backend.stream_index(owner), self._backend.stream_index(stream)
        if home != here:
            raise DeviceMismatchError(
                operation=str(func),
                first=f"the tensor was made on cpu:{home} by {owner!r}",
                second=f"the operation runs on cpu:{here}, in {stream!r}",
                advice="copy the tensor to that device first, or run the operation on its stream",
            )


def _moves_or_views(func: Any) -> bool:  # Any: see __torch_dispatch__
    """Say whether an operation may name a tensor of another device: a copy, or a view that reads nothing."""
    name = str(func.overloadpacket).removeprefix("aten.")
    return name in {"copy_", "_to_copy", "detach"} or bool(func.is_view)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


__all__ = ["cpu", "strict"]
