"""`Stream` and `Event`: the two objects that a user holds, on every backend.

A stream *is* a ``torch.Stream``: each backend hands out its own subclass of `Stream`, whose methods order
with every class of event. An event is a small class around the backend's native one (`Event.native`), because
no native class keeps all laws: ``torch.Stream.wait_event`` of a ``torch.cuda.Event`` waits for nothing, in
silence; the generic class ignores ``blocking=`` and has no IPC; and none says whether it was ever recorded.

The constructors need the registry, which lies above this module, so it binds itself here once (`bind`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch.compiler import is_dynamo_compiling as _is_tracing

from devstream import _compat, _handles, _observe, _tracing
from devstream._compat import dynamo
from devstream._event_options import check_event_options
from devstream._mismatch import describe, same_device
from devstream._priority import clamp_priority
from devstream._unrecorded import tell_unrecorded_wait
from devstream.abc import AnyBackend, StreamArg
from devstream.exceptions import (
    DeviceMismatchError,
    EventNotReadyError,
    EventNotRecordedError,
    EventOverwrittenWarning,
    StreamTypeError,
    TimingDisabledError,
    warning,
)
from devstream.typing import DeviceArg, PriorityArg

#: Above 0 while `devstream.testing.strict` is entered: what torch lets pass in silence is then an error.
strict_depth = 0

_NO_SUBCLASS = "devstream.Stream itself to be called: each backend hands out a class of its own"

_NO_PICKLE = (
    "no stream, since a queue can't leave its process; keep its purpose and call "
    "devstream.named_stream(purpose, device) after loading"
)

_resolve: Callable[[DeviceArg], tuple[AnyBackend, int | None]]
_owner: Callable[[object], AnyBackend]
_note_owner: Callable[[Any, AnyBackend], None]


def bind(
    resolve: Callable[[DeviceArg], tuple[AnyBackend, int | None]],
    owner: Callable[[object], AnyBackend],
    note_owner: Callable[[Any, AnyBackend], None],
) -> None:
    """Let the registry say which backend serves a device (*resolve*) and whose an object is (*owner*)."""
    global _resolve, _owner, _note_owner
    _resolve, _owner, _note_owner = resolve, owner, note_owner


# -- streams ---------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """A queue of device work; ``torch.Stream`` with the same meaning on every backend.

    Args:
        device: the stream's device; None is the current accelerator, else the CPU.
        priority: lower runs first; clamped to the device's range (`priority` tells what was granted).
            ``"low"``, ``"normal"`` and ``"high"`` work on every backend.

    Ordering:
        A new stream is ordered after nothing. ``with stream:`` makes it current, and its device too.

    On CUDA and ROCm streams come from a pool of 32 a priority: the 33rd is the first again, and equal to it. Use
    `devstream.named_stream` for a stream that is asked for again and again.
    """

    _backend: ClassVar[AnyBackend]
    _handle: torch.Tensor | None = None
    #: What was asked for, before it was clamped; `priority` is what was granted.
    requested_priority: PriorityArg = 0

    def __new__(cls, device: DeviceArg = None, *, priority: PriorityArg = 0) -> Stream:  # noqa: PYI034 - see below
        """Return a stream of the class that the device's backend hands out."""
        if _is_tracing():
            return _tracing.new_stream(device, priority)  # type: ignore[no-any-return]
        if cls is not Stream:
            raise StreamTypeError(operation="Stream", got=cls.__name__, expected=_NO_SUBCLASS)
        made: Stream = create_stream(device, priority)
        return made

    def wait_event(self, event: Any) -> None:  # Any: ours or any vendor's; torch's stub names its own class
        """Make later work in this stream wait until *event* has happened.

        Ordering: adds an edge from the event's last record to all work issued here after this call. Doesn't
        block the host, except on the CPU where the work runs at once. Allowed during capture.
        """
        wait(self, event, self._backend)

    def wait_stream(self, stream: Any) -> None:  # Any: whatever `devstream.wrap` takes
        """Make later work in this stream wait for all work issued to *stream* so far."""
        if stream is None:
            raise StreamTypeError(operation="wait_stream", got=stream, expected="a stream")
        wait(self, record(None, stream), self._backend)

    def record_event(self, event: Any = None) -> Any:  # Any: see wait_event
        """Record *event*, or a new `Event`, at the end of the work issued so far, and return it."""
        return record(event, self, self._backend)

    def query(self) -> bool:
        """Say whether all work issued to this stream is done."""
        return _observe.answer(self, self._backend.query_stream(self))

    def synchronize(self) -> None:
        """Block the host until all work issued to this stream is done."""
        self._backend.synchronize_stream(self)
        if _observe.subscribers:
            _observe.publish(_observe.Synchronize(self))

    @property
    def priority(self) -> int:
        """The priority that was granted; lower runs first."""
        return self._backend.stream_priority(self)

    @property
    def native_handle(self) -> int:
        """The vendor's handle (``cudaStream_t``, ``hipStream_t``), which is not `stream_id`."""
        return self._backend.native_handle(self)

    _compiled_handle = _handles.handle

    def __copy__(self) -> Stream:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Stream:
        # A copied module goes on using the same queue, as it goes on using the same device.
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StreamTypeError(operation="pickle", got=describe(self, self._backend), expected=_NO_PICKLE)

    def __repr__(self) -> str:
        index = self._backend.stream_index(self)
        return f"<devstream.Stream {self.stream_id} on {self._backend.device_type}:{index}>"


def create_stream(device: DeviceArg, priority: PriorityArg) -> Any:  # Any: a plug-in's class may be its own
    """Return a new stream of *device*'s backend, its priority clamped."""
    backend, index = _resolve(device)
    return make_stream(backend, backend.current_index() if index is None else index, priority)


def make_stream(backend: AnyBackend, index: int, priority: PriorityArg) -> Any:  # Any: see create_stream
    """Return a new stream of *backend*, its priority clamped."""
    made = backend.create_stream(index, priority=clamp_priority(priority, backend.priority_range(index)))
    if isinstance(made, Stream):
        made.requested_priority = priority
    else:
        _note_owner(made, backend)
        dynamo.add_stream_classes((type(made),))
    return made


def as_stream(stream: StreamArg) -> tuple[AnyBackend, Any]:  # Any: the backend's own class
    """Return the backend of *stream* and the backend's own stream for it."""
    if isinstance(stream, Stream):
        return stream._backend, stream
    backend = _owner(stream)
    return backend, backend.adopt_stream(stream)


# -- events ----------------------------------------------------------------------------------------------


class Event:
    """A point in a stream's work, for other streams and the host to wait for.

    Args:
        device: where it will be recorded; without an index, the first record decides. Left out, it decides the
            backend too.
        enable_timing: keep the time, for `elapsed_time`.
        blocking: `synchronize` sleeps instead of spinning, at the price of a later wake-up.
        interprocess: `ipc_handle` lets another process of this host wait for it. Excludes *enable_timing*.

    Raises:
        UnsupportedError: the backend lacks what an option asks for.

    ``torch.Stream.wait_event`` and ``record_event`` of a stream that isn't ours refuse this class; call
    ``event.wait(stream)`` and ``event.record(stream)``, which take every stream.

    A `wait` orders streams and returns at once; only `synchronize` holds the host. A wait binds to the record that
    was the last at the call: a later record doesn't move it.
    """

    #: The class of an event that compiled code makes.
    _made_as: ClassVar[type[Event]]

    __slots__ = (
        "__weakref__",
        "_backend",
        "_blocking",
        "_cast_guard_1",
        "_cast_guard_2",
        "_handle",
        "_index",
        "_interprocess",
        "_recorded",
        "_timing",
        "_unbound",
        "_unseen",
        "native",
    )

    def __init__(
        self,
        device: DeviceArg = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        if _is_tracing():
            _tracing.install_rules()
        # A stream is a frequent slip for a device, and torch would take it for one.
        if isinstance(device, torch.Stream):
            raise StreamTypeError(operation="Event(device)", got=device, expected="a device, as stream.device is")
        backend, index = _resolve(device)
        self._setup(backend, index if device is not None else None, enable_timing, blocking, interprocess)
        self._unbound = device is None and not interprocess  # another process may know an interprocess one already

    def _setup(  # noqa: PLR0917 - the constructor's own arguments, of which two callers pass all
        self,
        backend: AnyBackend,
        index: int | None,
        timing: bool,
        blocking: bool,
        interprocess: bool,
        native: object = None,
    ) -> None:
        if timing or blocking or interprocess:
            check_event_options(backend, index or 0, timing, blocking, interprocess)
        self._cast_guard_1 = self._cast_guard_2 = _compat.CAST_GUARD  # see [Note: Why an event carries two guards]
        self._handle = None
        self._backend, self._index = backend, index
        self._timing, self._blocking, self._interprocess = timing, blocking, interprocess
        self._recorded = self._unseen = self._unbound = False
        #: The backend's own event (``torch.Event`` or ``torch.cuda.Event`` on CUDA), for other libraries. Wait for
        #: it by its own ``wait(stream)`` only: ``torch.Stream.wait_event`` of a ``torch.cuda.Event`` waits for
        #: nothing.
        self.native = (
            backend.create_event(index, enable_timing=timing, blocking=blocking, interprocess=interprocess)
            if native is None
            else native
        )

    @classmethod
    def _of(cls, backend: AnyBackend, index: int | None) -> Event:
        event = cls.__new__(cls)
        event._setup(backend, index, False, False, False)
        return event

    def _follow(self, backend: AnyBackend) -> None:
        """Become an event of *backend*, if neither the user nor a record has said whose it is."""
        if self._unbound:
            handle = self._handle
            self._setup(backend, None, self._timing, self._blocking, False)
            self._handle, self._unbound = handle, True

    def _renew(self, index: int) -> Any:  # Any: the backend's own class
        """Take a fresh native event; who waits for the old record is bound to the old one."""
        if self._interprocess:
            # Its handle is abroad, so it has to stay the same one: let the old record happen first.
            self._backend.synchronize_event(self.native)
        else:
            self.native = self._backend.create_event(
                index, enable_timing=self._timing, blocking=self._blocking, interprocess=False
            )
        return self.native

    @classmethod
    def from_ipc_handle(cls, device: DeviceArg, handle: bytes) -> Event:
        """Return the event that another process of this host made with ``interprocess=True``.

        Raises:
            UnsupportedError: the backend has no interprocess events.
            StreamError: this process made the event itself; a handle opens only elsewhere.
        """
        backend, index = _resolve(device)
        index = backend.current_index() if index is None else index
        event = cls.__new__(cls)
        event._setup(backend, index, False, False, True, native=backend.open_ipc_event(index, handle))
        event._recorded = True  # the maker's record can't be seen from here; the hand-shake says that it was
        return event

    def record(self, stream: StreamArg | None = None) -> None:
        """Let this event happen when all work issued to *stream* (default: the current one) is done.

        Raises:
            DeviceMismatchError: the event belongs to another device or backend.

        Ordering: the source of an edge. Doesn't block the host. Allowed during capture.
        """
        if _is_tracing():
            _tracing.record(self, stream)
            return
        record(self, stream, self._backend)

    def wait(self, stream: StreamArg | None = None) -> None:
        """Make later work in *stream* (default: the current one) wait for the last record; the host goes on.

        Waiting for an event that was never recorded is a no-op, logged once a line of code; under
        `devstream.testing.strict` it raises ``EventNotRecordedError``. The stream may be on another device of
        the same backend.
        """
        if _is_tracing():
            _tracing.wait(self, stream)
            return
        wait(stream, self, self._backend)

    def query(self) -> bool:
        """Say whether the last record has happened; True where there was none (see `recorded`)."""
        if _is_tracing():
            _tracing.refuse("Event.query()")
        happened = _observe.answer(self, self._backend.query_event(self.native))
        if happened:
            self._unseen = False
        return happened

    def synchronize(self) -> None:
        """Block the host until the last record has happened; returns at once where there was none."""
        if _is_tracing():
            _tracing.synchronize(self)
            return
        self._backend.synchronize_event(self.native)
        self._unseen = False
        if _observe.subscribers:
            _observe.publish(_observe.Synchronize(self))

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to *end_event*; negative where that one came first.

        Raises:
            TimingDisabledError: one was made without ``enable_timing=True``.
            EventNotRecordedError: one was never recorded.
            EventNotReadyError: one has not happened yet.
            DeviceMismatchError: they are on different devices.
        """
        if _is_tracing():
            _tracing.refuse("Event.elapsed_time()")
        if not isinstance(end_event, Event):
            raise StreamTypeError(operation="elapsed_time", got=end_event, expected="a devstream.Event")
        for event in (self, end_event):
            if not event._timing:
                raise TimingDisabledError(event=event)
            if not event._recorded:
                raise EventNotRecordedError(operation="elapsed_time", event=event)
        if self._backend is not end_event._backend or self._index != end_event._index:
            raise DeviceMismatchError(
                operation="elapsed_time",
                first=f"the first is {self!r}",
                second=f"the second is {end_event!r}",
                advice="record both on one device, since clocks of two devices don't agree",
            )
        for event in (self, end_event):
            if not event.query():
                raise EventNotReadyError(event=event)
        return self._backend.elapsed_ms(self.native, end_event.native)

    def ipc_handle(self) -> bytes:
        """Return the bytes that another process passes to `from_ipc_handle`; keep this event alive meanwhile."""
        if _is_tracing():
            _tracing.refuse("Event.ipc_handle()")
        if not self._interprocess:
            raise ValueError(f"{self!r} is not interprocess; make it with devstream.Event(interprocess=True)")
        return self._backend.ipc_handle(self.native)

    @property
    def recorded(self) -> bool:
        """Whether it was ever recorded; `query` is True either way, as in torch."""
        if _is_tracing():
            _tracing.refuse("Event.recorded")
        return self._recorded

    _compiled_handle = _handles.handle

    @property
    def device(self) -> torch.device:
        """The event's device; without an index until the first record binds it."""
        kind, index = self._backend.device_type, self._index
        return torch.device(kind) if index is None else torch.device(kind, index)

    def __copy__(self) -> Event:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Event:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StreamTypeError(
            operation="pickle",
            got=repr(self),
            expected="no event, since it can't leave its process; send Event.ipc_handle() to one on this host",
        )

    def __repr__(self) -> str:
        state = "recorded" if self._recorded else "never recorded"
        return f"<devstream.Event on {self.device}, {state}>"


class MadeEvent(Event):
    """An event that compiled code made: just a handle, until its first use in eager makes it a plain `Event`."""

    # A class of its own, since __getattr__ would slow down each attribute of every event.

    __slots__ = ()

    def __init__(self, device: DeviceArg = None, **options: bool) -> None:
        self._cast_guard_1 = self._cast_guard_2 = _compat.CAST_GUARD
        self._handle = _tracing.new_event(device, **options)

    def __getattr__(self, name: str) -> Any:  # Any: each slot has a type of its own
        if name not in Event.__slots__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _handles.fill(self)
        if not _compat.is_compiling_now():  # guards are about to be made for the class that it has
            self.__class__ = Event  # type: ignore[assignment]
        return getattr(self, name)


Event._made_as = MadeEvent
dynamo.made_classes.append(Event)

# -- the two edges ---------------------------------------------------------------------------------------


def record(event: Any, stream: Any, backend: AnyBackend | None = None) -> Any:  # Any: ours or a vendor's
    """Record *event* (None: a new one) on *stream* (None: the current one of *backend*), and return the event."""
    if stream is None:
        assert backend is not None
        owner, stream = backend, backend.current_stream(None)
    else:
        owner, stream = as_stream(stream)
    index = owner.stream_index(stream)
    if event is None:
        event = Event._of(owner, index)
    if isinstance(event, Event):
        if event._backend is not owner:
            event._follow(owner)
        native = event.native
        same_device("record", event._backend, event._index, event, owner, index, stream)
        if strict_depth and event._unseen:
            warnings.warn(warning(EventOverwrittenWarning, event=event), stacklevel=3)
        if event._recorded and not owner.rerecord_overwrites:
            native = event._renew(index)
        owner.record_event(native, stream)
        event._recorded = event._unseen = True
        event._index, event._unbound = index, False
    else:
        native = owner.adopt_event(event)
        same_device("record", owner, owner.event_index(native), event, owner, index, stream)
        owner.record_event(native, stream)
    if _observe.subscribers:
        _observe.publish(_observe.Record(event, stream))
    return event


def wait(stream: Any, event: Any, backend: AnyBackend | None = None) -> None:  # Any: ours or a vendor's
    """Make *stream* (None: the current one of *backend*) wait for *event*."""
    if stream is None:
        assert backend is not None
        owner, stream = backend, backend.current_stream(None)
    else:
        owner, stream = as_stream(stream)
    if isinstance(event, Event):
        if event._backend is not owner:
            event._follow(owner)
            same_device("wait", event._backend, None, event, owner, owner.stream_index(stream), stream)
        native, was_recorded = event.native, event._recorded
        event._unseen = False
    else:
        native = owner.adopt_event(event)
        was_recorded = owner.is_recorded(native) is not False
    if not was_recorded:
        tell_unrecorded_wait(event, strict=strict_depth > 0)
    owner.wait_event(stream, native)
    if _observe.subscribers:
        _observe.publish(_observe.Wait(stream, event, was_recorded))
