"""The verbs. Each resolves what the user passed, lets the backend act, and reports to the seam once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling as _is_tracing

from devstream import _handles, _observe, _registry, _tracing
from devstream._objects import Event, Stream, as_stream, create_stream, make_stream
from devstream.abc import AnyBackend, Capability, DeviceSpec, StreamArg, restore_streams
from devstream.exceptions import DeviceMismatchError, RecordStreamWarning, StreamTypeError, warning
from devstream.typing import DeviceArg

P = ParamSpec("P")
R = TypeVar("R")

_named: dict[tuple[AnyBackend, int, str], Any] = {}  # Any: a stream of any backend


# -- current and default ---------------------------------------------------------------------------------


def stream(s: StreamArg | None) -> AbstractContextManager[Any]:  # Any: the stream, of its backend's class
    """Return a context in which *s*, and its device, is current in this thread; a drop-in for torch.cuda.stream.

    Any nesting, of the same stream too and after an exception, restores what was current before. None is a
    block that changes nothing.

    Ordering: adds no edge. What is issued inside goes to *s*; nothing waits for it at the end.
    """
    if s is None:
        return nullcontext()
    if _is_tracing():
        return _tracing.block(s)  # type: ignore[no-any-return]
    if not isinstance(s, Stream):
        backend, s = as_stream(s)
        if not isinstance(s, Stream):
            return _switched(backend, s)
    if not _observe.subscribers or s._backend.context_reports:
        return s
    return _switched(s._backend, s)


@contextmanager
def _switched(backend: AnyBackend, s: Any) -> Iterator[Any]:  # Any: the backend's own class
    previous = backend.current_stream(None)
    here = backend.current_stream(backend.stream_index(s))  # what was current on the device that s is on
    try:
        _set(backend, s)  # inside, since an observer may raise after the switch
        yield s
    finally:
        # Both: s may be on another device, whose own current stream must come back as well.
        notices = _restore([(backend, here), (backend, previous)])
        if notices:
            _observe.publish(_observe.Switch(previous, notices[0].previous))


def _restore(before: Sequence[tuple[AnyBackend, Any]]) -> list[_observe.Switch]:  # Any: see _switched
    """Make all of *before* current again, and return the notices of it where somebody listens."""
    notices = []
    try:
        if _observe.subscribers:
            last: dict[AnyBackend, Any] = {}
            for backend, own in before:
                notices.append(_observe.Switch(own, last.get(backend) or backend.current_stream(None)))
                last[backend] = own
    finally:
        restore_streams(before)
    return notices


def _set(backend: AnyBackend, s: Any) -> None:  # Any: the backend's own class
    if _observe.subscribers:
        previous = backend.current_stream(None)
        backend.set_stream(s)
        _observe.publish(_observe.Switch(s, previous))
    else:
        backend.set_stream(s)


def set_stream(s: StreamArg) -> None:
    """Make *s*, and its device, current in this thread until something else is; prefer ``with stream(s)``."""
    if _is_tracing():
        _tracing.refuse("devstream.set_stream")
    backend, own = as_stream(s)
    _set(backend, own)


def current_stream(device: DeviceArg = None) -> Any:  # Any: a Stream, or a plug-in's own class
    """Return this thread's current stream of *device*; a new thread starts on the default stream.

    Ask at the moment of use: a stream kept from an earlier call may no longer be the current one.
    """
    if _is_tracing():
        return _tracing.current_stream(device)
    if device is None:
        backend = _registry._default or _registry.default_backend()
        return backend.current_stream(None)
    backend, index = _registry.resolve(device)
    return backend.current_stream(index)


def default_stream(device: DeviceArg = None) -> Any:  # Any: a Stream, or a plug-in's own class
    """Return the stream that *device*'s work goes to where nobody chose one."""
    if _is_tracing():
        return _tracing.default_stream(device)
    backend, index = _registry.resolve(device)
    found = backend.default_stream(backend.current_index() if index is None else index)
    _registry.note_owner(found, backend)
    return found


def synchronize(device: DeviceArg = None) -> None:
    """Block the host until all work of every stream of *device* is done."""
    if _is_tracing():
        _tracing.synchronize(device)
        return
    backend, index = _registry.resolve(device)
    index = backend.current_index() if index is None else index
    backend.synchronize_device(index)
    if _observe.subscribers:
        _observe.publish(_observe.Synchronize(torch.device(backend.device_type, index)))


def named_stream(purpose: str, device: DeviceArg = None) -> Any:  # Any: a Stream, or a plug-in's own class
    """Return the one stream of *device* for *purpose* (``"prefetch"``, ``"offload"``), made on the first call.

    Every fresh stream brings a memory pool of its own; code that makes one each epoch grows until the
    vendor's pool of streams wraps. A named stream is the same one each time.
    """
    if _is_tracing():
        return _tracing.named_stream(purpose, device)
    if not purpose or not isinstance(purpose, str):
        raise StreamTypeError(operation="named_stream", got=purpose, expected="a non-empty str as purpose")
    backend, index = _registry.resolve(device)
    index = backend.current_index() if index is None else index
    key = (backend, index, purpose)  # not its name: another backend may be registered under that one later
    if key not in _named:
        # Without a lock, see the note in `_registry`: of two threads that come at once, the first one's is kept.
        _named.setdefault(key, make_stream(backend, index, 0))
    return _named[key]


def carry_streams(function: Callable[P, R]) -> Callable[P, R]:
    """Return *function* made to run under the streams that are current here, in whatever thread calls it.

    A plain thread starts on the default stream of every device. Carries the streams of every backend in use, and
    restores the thread's own streams afterwards.
    """
    if _is_tracing():
        _tracing.refuse("devstream.carry_streams")
    here = _all_current()

    @wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_tracing():
            _tracing.refuse("devstream.carry_streams")
        before = _all_current()
        try:
            for backend, own in here:
                _set(backend, own)
            return function(*args, **kwargs)
        finally:
            for notice in _restore(before):
                _observe.publish(notice)

    return carried


def _all_current() -> list[tuple[AnyBackend, Any]]:  # Any: a stream of any backend
    """Return this thread's current streams, on each device of each backend in use, in the order to set them."""
    found = []
    for backend in _registry.in_use():
        found += [(backend, backend.current_stream(index)) for index in range(_registry.device_count(backend))]
        found.append((backend, backend.current_stream(None)))  # last, so that its device is the current one again
    return found


# -- memory ----------------------------------------------------------------------------------------------


def record_stream(tensor: torch.Tensor, s: StreamArg) -> None:
    """Tell the allocator that *s* uses *tensor*, so that its memory isn't handed out before *s* has passed.

    Warns (`RecordStreamWarning`) where *s* is known to be the stream that the tensor was allocated on.

    Raises:
        DeviceMismatchError: the tensor is on another device type than *s*.
        UnsupportedError: the backend's allocator can't be told.
    """
    if _is_tracing():
        _tracing.record_stream(tensor, s)
        return
    if not isinstance(tensor, torch.Tensor):
        raise StreamTypeError(operation="record_stream", got=tensor, expected="a tensor")
    backend, own = as_stream(s)
    if tensor.device.type != backend.device_type:
        raise DeviceMismatchError(
            operation="record_stream",
            first=f"the tensor is on {tensor.device}",
            second=f"the stream is on {backend.device_type}:{backend.stream_index(own)}",
            advice="record a stream of the tensor's own device",
        )
    home = backend.allocation_stream(tensor)
    if home is not None and backend.stream_key(home) == backend.stream_key(own):
        warnings.warn(warning(RecordStreamWarning, stream=own), stacklevel=2)
    backend.record_stream(tensor, own)
    if _observe.subscribers:
        _observe.publish(_observe.RecordStream(tensor, own))


# -- objects and facts -----------------------------------------------------------------------------------


def wrap(native_or_handle: StreamArg | int, device: DeviceArg = None) -> Any:  # Any: see current_stream
    """Return our stream for a native stream, an object with ``__cuda_stream__``, or a bare handle.

    Args:
        native_or_handle: the wrapped object is kept alive as long as the result. A bare handle isn't owned:
            its maker must keep the stream alive. Handle 0 is the default stream.
        device: where a bare handle lives (default: the current device); a native stream knows its own.

    Raises:
        DeviceMismatchError: *device* isn't the device of the native stream.
        UnsupportedError: the backend can't wrap handles.
    """
    if _is_tracing():
        if isinstance(native_or_handle, int):
            _tracing.refuse("devstream.wrap")
        return _tracing.known(native_or_handle)
    if isinstance(native_or_handle, int) and not isinstance(native_or_handle, bool):
        backend, index = _registry.resolve(device)
        return backend.wrap_handle(native_or_handle, backend.current_index() if index is None else index)
    backend, own = as_stream(cast("StreamArg", native_or_handle))
    if device is not None:
        wanted, index = _registry.resolve(device)
        if wanted is not backend or index not in (None, backend.stream_index(own)):
            raise DeviceMismatchError(
                operation="wrap",
                first=f"the stream is on {backend.device_type}:{backend.stream_index(own)}",
                second=f"device={device!r} was asked for",
                advice="leave device out: a native stream knows its own",
            )
    return own


def recorded(event: Any) -> bool | None:  # Any: ours or any vendor's event
    """Say whether *event* was ever recorded (``query()`` is True either way); None where the vendor can't tell."""
    if _is_tracing():
        _tracing.refuse("devstream.recorded")
    if isinstance(event, Event):
        return event.recorded
    backend = _registry.owner(event)
    return backend.is_recorded(backend.adopt_event(event))


def capabilities(device_or_stream: DeviceArg | StreamArg = None) -> Capability:
    """Return what a device, or one stream, can do; ask before using what not every vendor has."""
    if device_or_stream is None or isinstance(device_or_stream, int | str | torch.device):
        backend, index = _registry.resolve(device_or_stream)
        return backend.capabilities(backend.current_index() if index is None else index)
    backend, own = as_stream(device_or_stream)
    return backend.stream_capabilities(own)


def devices() -> list[DeviceSpec]:
    """Return every device that a backend serves here: the default accelerator's first, the CPU's last."""
    if _is_tracing():
        _tracing.refuse("devstream.devices")
    found = [_registry.default_backend()]
    cpu = _registry.for_type("cpu")
    if cpu is not found[0]:
        found.append(cpu)
    return [backend.spec(index) for backend in found for index in range(_registry.device_count(backend))]


def backend(device: DeviceArg = None, *, name: str | None = None) -> AnyBackend:
    """Return the backend of *device*, or the one called *name*.

    Raises:
        BackendNotFoundError, BackendUnavailableError, BackendLoadError, BackendConflictError: as their names say.
    """
    if name is not None:
        if device is not None:
            raise ValueError("backend() takes a device or a name, not both")
        return _registry.usable(name)
    return _registry.resolve(device)[0]


_handles.bind(sys.modules[__name__])


__all__ = [
    "Event",
    "Stream",
    "backend",
    "capabilities",
    "carry_streams",
    "create_stream",
    "current_stream",
    "default_stream",
    "devices",
    "named_stream",
    "record_stream",
    "recorded",
    "set_stream",
    "stream",
    "synchronize",
    "wrap",
]
