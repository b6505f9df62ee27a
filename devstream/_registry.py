"""Which backend serves which device: a name leads to a class, a device to a name.

Built-ins stand in a table in the same ``package.module:Class`` form as the entry points of the group
``devstream.backends``, and both go one loading path. An entry point is named like the device type that it
serves by default (``npu = "my_package:NpuBackend"``), or by any other name to be chosen by name. It is
imported only when that name or device type is asked for, so a broken plug-in hurts only who asks for it.

Selection, first match wins; the error says which step decided:

1. an explicit name, ``devstream.backend(name=...)``;
2. the name in ``DEVSTREAM_BACKEND``, read once, where it serves the device's type or no device is given;
3. the device's type: the first built-in that runs here, then the entry point of that name, then the generic
   ``accelerator`` backend if torch itself knows the type. Without a device, the type is torch's current
   accelerator, else ``cpu``.

[Note: No lock is held while others' code runs]
A plug-in's import, its constructor and its answers run without `_lock`. An import waits for the thread that
is importing the same module, and if that module's top level asks for a backend, each would wait for the other for
ever. So a backend is looked for without the lock, and noted under it unless the choice has changed meanwhile. Only
whoever makes the same backend at the same time waits, to get the same one; but not in the middle of an import.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch

from devstream import _compat, _fork, _objects
from devstream._compat import dynamo
from devstream.abc import AnyBackend, Backend, EventLike, StreamLike
from devstream.exceptions import (
    BackendConflictError,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    DeviceMismatchError,
    ForkedProcessError,
    StreamTypeError,
)
from devstream.typing import DeviceArg, HasCudaStream

R = TypeVar("R")

GROUP = "devstream.backends"
VARIABLE = "DEVSTREAM_BACKEND"

#: name -> (device type; "*" is any that torch.accelerator serves, where to find the class)
_BUILTINS: dict[str, tuple[str, str]] = {
    "cpu": ("cpu", "devstream.backends.cpu:CpuBackend"),
    "cuda": ("cuda", "devstream.backends.cuda:CudaBackend"),
    "rocm": ("cuda", "devstream.backends.rocm:RocmBackend"),
    "accelerator": ("*", "devstream.backends.accelerator:AcceleratorBackend"),
}

_lock = threading.RLock()
#: Held by who makes the backend of that name.
_making: dict[str, threading.RLock] = {}
_loaded: dict[str, AnyBackend] = {}
_by_type: dict[str, AnyBackend] = {}
_owners: dict[tuple[type, str], AnyBackend] = {}
_registered: dict[str, tuple[Callable[[], AnyBackend], str]] = {}
_entry_points: dict[str, list[importlib.metadata.EntryPoint]] | None = None
_chosen: str | None = None
_chosen_is_read = False
_default: AnyBackend | None = None
#: How often the choice has changed; what was selected before the last change isn't noted any more.
_changes = 0


# -- names -----------------------------------------------------------------------------------------------


def names() -> list[str]:
    """Return every backend name, built-ins first; imports nothing."""
    found = _found_entry_points()
    return [*_BUILTINS, *sorted(n for n in {*found, *_registered} if n not in _BUILTINS)]


def load(name: str, *, decided_by: str = "name=") -> AnyBackend:
    """Return the backend called *name*, importing it on the first call.

    Raises:
        BackendNotFoundError: there is none.
        BackendConflictError: two claim the name.
        BackendLoadError: it failed to import or to start.
    """
    if not isinstance(name, str):
        raise StreamTypeError(operation="a backend's name", got=name, expected="a str")
    backend = _loaded.get(name)
    if backend is not None:
        return backend
    maker = _maker(name, decided_by)
    with _lock:
        making = _making.setdefault(name, threading.RLock())
    # In an import, waiting may be for ever: see the note above. Then two are made, and the first is kept.
    alone = making.acquire(blocking=not _is_importing())
    try:
        backend = _loaded.get(name)
        if backend is None:
            backend = _make(name, maker)
            with _lock:
                # Under the name may stand another factory by now: what this one made is for this caller only.
                if maker.registered is _registered.get(name):
                    backend = _loaded.setdefault(name, backend)
        dynamo.add_stream_classes(_stream_classes(backend))
    finally:
        if alone:
            making.release()
    return backend


def usable(name: str, *, decided_by: str = "name=") -> AnyBackend:
    """Return the backend called *name*, or raise `BackendUnavailableError` with its reason."""
    backend = load(name, decided_by=decided_by)
    reason = _answer(name, backend.unavailable_reason)
    if reason is not None:
        raise BackendUnavailableError(name=name, reason=reason)
    return backend


def device_count(backend: AnyBackend) -> int:
    """Return the number of devices of *backend*.

    Raises:
        BackendUnavailableError: it doesn't say, or says no number.
    """
    count = _answer(backend.name, backend.device_count)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise BackendUnavailableError(name=backend.name, reason=f"it says that it has {count!r} devices")
    return count


def _answer(name: str, question: Callable[[], R]) -> R:
    """Return what the backend called *name* answers; who asked is told whose code failed."""
    try:
        return question()
    except ForkedProcessError:
        raise
    except (Exception, SystemExit) as error:  # as above
        reason = f"its {getattr(question, '__name__', 'answer')}() raised {type(error).__name__}: {error}"
        raise BackendUnavailableError(name=name, reason=reason) from error


def register(name: str, factory: Callable[[], AnyBackend]) -> None:
    """Add a backend from code, for tests and notebooks; packages use an entry point.

    Raises:
        StreamTypeError: *name* is no name, or *factory* can't be called.
        BackendConflictError: the name is taken.
    """
    if not name or not isinstance(name, str):
        raise StreamTypeError(operation="register(name)", got=name, expected="a non-empty str")
    if not callable(factory):
        raise StreamTypeError(
            operation="register(factory)", got=factory, expected="a callable that makes a backend"
        )
    with _lock:
        claim = f"{getattr(factory, '__module__', '?')}:{getattr(factory, '__qualname__', repr(factory))}"
        taken = _claims(name)
        if taken:
            raise BackendConflictError(name=name, first=taken[0], second=claim)
        _registered[name] = (factory, claim)


def unregister(name: str) -> None:
    """Take back what `register` added.

    Raises:
        BackendNotFoundError: nothing was registered under this name.
    """
    with _lock:
        if not isinstance(name, str) or name not in _registered:
            raise BackendNotFoundError(wanted=str(name), known=sorted(_registered), decided_by="unregister")
        del _registered[name]
        gone = _loaded.pop(name, None)
        for key in [key for key, backend in _owners.items() if backend is gone]:
            del _owners[key]
        _forget_choice()


@dataclass(frozen=True, slots=True)
class _Maker:
    """What makes a backend: *factory*, of *distribution*; *where* it stands, in words."""

    factory: Callable[[], object]
    where: str
    distribution: str
    registered: tuple[Callable[[], AnyBackend], str] | None


def _maker(name: str, decided_by: str) -> _Maker:
    """Return what makes the backend called *name*, which imports it."""
    claims = _claims(name)
    if not claims:
        raise BackendNotFoundError(wanted=name, known=names(), decided_by=decided_by)
    if len(claims) > 1:
        raise BackendConflictError(name=name, first=claims[0], second=claims[1])
    registered = _registered.get(name)
    if registered is not None:
        return _Maker(registered[0], claims[0], registered[1], registered)
    # Through an entry point of our own: no backend is loaded in a way that a plug-in's isn't.
    if name in _BUILTINS:
        point, distribution = importlib.metadata.EntryPoint(name, _BUILTINS[name][1], GROUP), "devstream"
    else:
        point = _found_entry_points()[name][0]
        distribution = _distribution(point)
    factory: Callable[[], object] = _run(point.load, name, distribution)
    return _Maker(factory, claims[0], distribution, None)


def _make(name: str, maker: _Maker) -> AnyBackend:
    backend = _run(maker.factory, name, maker.distribution)
    if not isinstance(backend, Backend):
        cause = f"{maker.where} makes no devstream.abc.Backend but an object of {type(backend).__name__}"
        raise BackendLoadError(name=name, distribution=maker.distribution, cause=cause)
    return backend


def _run(code: Callable[[], Any], name: str, distribution: str) -> Any:  # Any: a plug-in may return anything
    try:
        return code()
    except BackendError:
        raise
    except (Exception, SystemExit) as error:  # a plug-in's code may raise anything; re-raised with its name
        cause = f"{type(error).__name__}: {error}"
        raise BackendLoadError(name=name, distribution=distribution, cause=cause) from error


def _is_importing() -> bool:
    """Say whether this thread is in the middle of an import, so that another may be waiting for it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _stream_classes(backend: AnyBackend) -> list[type]:
    """Return the classes of *backend*'s streams that descend from ours."""
    found: list[type[_objects.Stream]] = [_objects.Stream]
    for cls in found:
        found += cls.__subclasses__()
    return [cls for cls in found if cls.__dict__.get("_backend") is backend]


def _claims(name: str) -> list[str]:
    """Return who claims *name*, in words."""
    claims = [f"devstream ({_BUILTINS[name][1]})"] if name in _BUILTINS else []
    claims += [f"{_distribution(point)} ({point.value})" for point in _found_entry_points().get(name, [])]
    if name in _registered:
        claims.append(_registered[name][1])
    return claims


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"


def _found_entry_points() -> dict[str, list[importlib.metadata.EntryPoint]]:
    global _entry_points
    if _entry_points is None:
        found: dict[str, list[importlib.metadata.EntryPoint]] = {}
        for point in importlib.metadata.entry_points(group=GROUP):
            same = found.setdefault(point.name, [])
            # One distribution seen twice on sys.path (a source tree beside its install) is one claim.
            if (_distribution(point), point.value) not in [(_distribution(p), p.value) for p in same]:
                same.append(point)
        _entry_points = found
    return _entry_points


# -- devices ---------------------------------------------------------------------------------------------


def resolve(device: DeviceArg = None) -> tuple[AnyBackend, int | None]:
    """Return the backend of *device* and the device's index, None where *device* doesn't say one.

    Raises:
        StreamTypeError: *device* is no device.
        DeviceMismatchError: there is no device of that index.
        BackendNotFoundError, BackendUnavailableError, BackendLoadError, BackendConflictError: see `load`.
    """
    if device is None:
        return default_backend(), None
    if isinstance(device, int) and not isinstance(device, bool):
        backend, index = default_backend(), device
    elif isinstance(device, str | torch.device):
        parsed = _parse(device)
        backend = for_type(parsed.type)
        named: int | None = parsed.index  # torch's stub forgets the None
        if named is None:
            return backend, None
        index = named
    else:
        raise StreamTypeError(operation="device=", got=device, expected="a torch.device, a str or an int")
    count = device_count(backend)
    if not 0 <= index < count:
        raise DeviceMismatchError(
            operation=f"device {backend.device_type}:{index}",
            first=f"index {index} was asked for",
            second=f"backend {backend.name!r} has {count} device(s)",
            advice=(
                f"use an index from 0 to {count - 1}"
                if count
                else "use another device; `python -m devstream info` lists what there is"
            ),
        )
    return backend, index


def _parse(device: str | torch.device) -> torch.device:
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except RuntimeError as error:
        kind = device.partition(":")[0]
        if kind in _found_entry_points():
            load(kind, decided_by="the device argument")  # the plug-in's import teaches torch the device type
            try:
                return torch.device(device)
            except RuntimeError as still:
                reason = f"torch doesn't take {device!r} for a device, even after the plug-in's import: {still}"
                raise BackendUnavailableError(name=kind, reason=reason) from still
        kinds = sorted({kind for kind, _ in _BUILTINS.values()} - {"*"} | set(_found_entry_points()))
        raise BackendNotFoundError(wanted=device, known=kinds, decided_by="the device argument") from error


def default_backend() -> AnyBackend:
    """Return the backend of the default device; decided once (see the module's docstring)."""
    global _default
    found = _default
    if found is None:
        changes, name = _changes, _chosen_name()
        if name is not None:
            found = usable(name, decided_by=VARIABLE)
        else:
            found = for_type(_compat.default_accelerator_type() or "cpu")
        with _lock:
            if changes == _changes:
                _default = found
    return found


def for_type(device_type: str) -> AnyBackend:
    """Return the backend that serves *device_type*; decided once a type."""
    backend = _by_type.get(device_type)
    if backend is None:
        changes, backend = _changes, _select(device_type)
        with _lock:
            if changes == _changes:
                _by_type[device_type] = backend
    return backend


def in_use() -> list[AnyBackend]:
    """Return the backends that serve a device type in this process so far, the default device's last."""
    default = default_backend()
    with _lock:
        return [*(backend for backend in _by_type.values() if backend is not default), default]


def _select(device_type: str) -> AnyBackend:
    name = _chosen_name()
    if name is not None:
        chosen = load(name, decided_by=VARIABLE)
        if chosen.device_type == device_type:
            return usable(name, decided_by=VARIABLE)
    tried: list[tuple[str, str]] = []
    for candidate, (kind, _) in _BUILTINS.items():
        if kind == device_type:
            backend = load(candidate, decided_by=f"device type {device_type!r}")
            reason = _answer(candidate, backend.unavailable_reason) or _answer(
                candidate, backend.not_automatic_reason
            )
            if reason is None:
                return backend
            tried.append((candidate, reason))
    if tried:
        raise BackendUnavailableError(name=tried[0][0], reason=tried[0][1])
    if device_type in _found_entry_points() or device_type in _registered:
        found = usable(device_type, decided_by=f"device type {device_type!r}")
        if found.device_type != device_type:
            reason = (
                f"it was found under the device type {device_type!r}, but its device_type is "
                f"{found.device_type!r}; its authors must give one of the two the other's name"
            )
            raise BackendUnavailableError(name=device_type, reason=reason)
        return found
    if device_type == _compat.default_accelerator_type():
        return usable("accelerator", decided_by=f"device type {device_type!r}")
    raise BackendNotFoundError(wanted=device_type, known=names(), decided_by=f"device type {device_type!r}")


def _chosen_name() -> str | None:
    global _chosen, _chosen_is_read
    if not _chosen_is_read:
        # Once: a look-up of the environment costs more than a whole verb.
        _chosen, _chosen_is_read = os.environ.get(VARIABLE) or None, True
    return _chosen


def _forget_choice() -> None:
    global _default, _changes
    _changes += 1
    _default = None
    _by_type.clear()


@contextmanager
def chosen(name: str) -> Iterator[AnyBackend]:
    """Choose the backend called *name* for this process inside the block, as ``DEVSTREAM_BACKEND`` would."""
    global _chosen, _chosen_is_read
    backend = usable(name)
    before = (_chosen, _chosen_is_read)
    try:
        with _lock:
            _chosen, _chosen_is_read = name, True
            _forget_choice()
        yield backend
    finally:
        with _lock:
            _chosen, _chosen_is_read = before
            _forget_choice()


# -- objects ---------------------------------------------------------------------------------------------


def owner(item: object) -> AnyBackend:
    """Return the backend that *item*, a stream or an event that isn't of our own classes, belongs to.

    Raises:
        StreamTypeError: it is neither.
    """
    device = getattr(item, "device", None)
    if isinstance(device, torch.device) and isinstance(item, StreamLike | EventLike):
        backend = _owners.get((type(item), device.type))
        return for_type(device.type) if backend is None else backend
    if isinstance(item, HasCudaStream):
        return for_type("cuda")
    if isinstance(item, torch.Event):  # a fresh torch.cuda.Event says no device
        return for_type(_compat.default_accelerator_type() or "cpu")
    raise StreamTypeError(
        operation="a stream argument",
        got=item,
        expected=(
            "a devstream.Stream, a torch.Stream, a vendor's stream or an object with __cuda_stream__ "
            "(for a bare handle use devstream.wrap(handle, device))"
        ),
    )


def note_owner(item: Any, backend: AnyBackend) -> None:  # Any: a stream of a plug-in's own class
    """Remember that streams of *item*'s class and device type come from *backend*."""
    # A class of torch's own is no sign: every backend of that device type hands it out.
    if not isinstance(item, _objects.Stream) and type(item).__module__.partition(".")[0] != "torch":
        _owners.setdefault((type(item), backend.device_type), backend)


_objects.bind(resolve, owner, note_owner)


_fork.renew(globals())
_fork.renew(globals(), "_making", dict)
