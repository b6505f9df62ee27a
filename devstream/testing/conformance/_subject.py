"""What a law is given: the backend under test, and the ways to look at it without sleeping."""

from __future__ import annotations

import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

from devstream import _registry
from devstream import _streams as verbs
from devstream.abc import AnyBackend, Capability
from devstream.exceptions import BackendWarning, DevstreamError
from devstream.testing._latch import latch

#: How long a law waits for what must happen before it calls it lost. Only a broken backend gets there.
PATIENCE_S = 20.0
#: How long a law gives a call that must block the chance to return early. Every backend pays it.
GLANCE_S = 0.05
#: How long a law looks at an event that must not happen. An idle stream gets to an event within some 20 µs, so
#: what is still to happen after this long is held.
HELD_S = 0.003

Maker = Callable[[], object]
E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True)
class Made:
    """A stream or an event, and how it was got, in the words of a failure's message.

    Attributes:
        ours: the backend hands it out, so it has our methods; otherwise it is only an argument.
    """

    how: str
    item: Any  # Any: of the backend's, torch's or a vendor's class
    ours: bool = True


class Background:
    """A call in a thread of its own, which may block for ever if the backend is broken."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._over = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name="devstream-law").start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # handed to the law's own thread
            self._error = error
        self._over.set()

    def over(self, within_s: float) -> bool:
        """Say whether the call has returned, waiting so long for it; raise what it raised."""
        over = self._over.wait(within_s)
        if self._error is not None:
            raise self._error
        return over


@dataclass
class Subject:
    """The backend under test, chosen for the process while a law looks at it."""

    backend: AnyBackend
    foreign_streams: Mapping[str, Maker] = field(default_factory=dict)
    foreign_events: Mapping[str, Maker] = field(default_factory=dict)
    patience_s: float = PATIENCE_S

    # -- devices -----------------------------------------------------------------------------------------

    def device(self, index: int = 0) -> torch.device:
        """Return device *index*."""
        return torch.device(self.backend.device_type, index)

    def needs(self, capability: Capability) -> None:
        """Skip the law where device 0 lacks *capability*: the only reason, with `needs_devices`, to skip one."""
        if capability not in self.backend.capabilities(0):
            pytest.skip(f"backend {self.backend.name!r} has no Capability.{capability.name}")

    def needs_devices(self, count: int) -> None:
        """Skip the law where there are fewer devices."""
        if self.backend.device_count() < count:
            pytest.skip(f"backend {self.backend.name!r} has fewer than {count} devices")

    # -- streams and events ------------------------------------------------------------------------------

    def key(self, stream: object) -> tuple[str, int, int]:
        """Return what the backend says identifies the stream's queue."""
        return self.backend.stream_key(verbs.wrap(stream))  # type: ignore[arg-type]

    def side_stream(self, index: int = 0, *, beside: tuple[object, ...] = ()) -> Any:  # Any: the backend's class
        """Return a new stream whose queue is none of *beside* and not the default one.

        A pool of streams hands out one again after some 32; the kit asks on until it has another.
        """
        self.needs(Capability.SIDE_STREAMS)
        taken = {self.key(stream) for stream in (*beside, verbs.default_stream(self.device(index)))}
        for _ in range(64):
            made = verbs.create_stream(self.device(index), 0)
            if self.key(made) not in taken:
                return made
        pytest.fail("Stream() gave 64 times a queue that was in use; is Capability.SIDE_STREAMS true?")

    def streams(self, index: int = 0) -> list[Made]:
        """Return a stream from every way there is to get one."""
        device, side = self.device(index), self.side_stream(index)
        with verbs.stream(side):
            current = verbs.current_stream(device)
        found = [
            Made("Stream()", self.side_stream(index)),
            Made("current_stream()", current),
            Made("default_stream()", verbs.default_stream(device)),
            Made("named_stream()", verbs.named_stream("devstream conformance kit", device)),
            Made("wrap(Stream())", verbs.wrap(self.side_stream(index))),
        ]
        has = self.backend.capabilities(index)
        if Capability.EXTERNAL_STREAMS in has and Capability.NATIVE_HANDLE in has:
            handle = self.backend.native_handle(side)
            # `side` is kept by the current_stream() entry: a bare handle keeps nothing alive.
            found.append(Made("wrap(handle)", verbs.wrap(handle, device)))
        if index == 0:
            for how, make in self.foreign_streams.items():
                native: Any = make()  # Any: a vendor's class
                found.append(Made(how, native, ours=False))
                found.append(Made(f"wrap({how})", verbs.wrap(native)))
        return found

    def events(self, index: int = 0) -> list[Made]:
        """Return a new event of every kind there is."""
        device, has = self.device(index), self.backend.capabilities(index)
        found = [Made("Event()", verbs.Event()), Made("Event(device)", verbs.Event(device))]
        if Capability.TIMING in has:
            found.append(Made("Event(enable_timing=True)", verbs.Event(enable_timing=True)))
        if Capability.BLOCKING_EVENTS in has:
            found.append(Made("Event(blocking=True)", verbs.Event(blocking=True)))
        if Capability.IPC_EVENTS in has:
            found.append(Made("Event(interprocess=True)", verbs.Event(interprocess=True)))
        if index == 0:
            found += [Made(how, make(), ours=False) for how, make in self.foreign_events.items()]
        return found

    # -- looking -----------------------------------------------------------------------------------------

    def finishes(self, call: Callable[[], object]) -> bool:
        """Say whether *call*, which must return soon, does."""
        return Background(call).over(self.patience_s)

    def mark(self, stream: object) -> verbs.Event:
        """Return an event of our own class, recorded now on *stream*."""
        event = verbs.Event()
        event.record(stream)  # type: ignore[arg-type]
        return event

    def stays(self, event: verbs.Event) -> bool:
        """Say whether *event*, which must be behind a latch, doesn't happen while the law looks at it."""
        # One look is not enough: on hardware an event that nothing holds takes its time as well.
        deadline = time.perf_counter() + HELD_S
        while time.perf_counter() < deadline:
            if event.query():
                return False
        return not event.query()

    def same_queue(self, first: object, second: object) -> bool:
        """Say whether two streams are one queue, by holding the one and looking at the other."""
        with latch(first):  # type: ignore[arg-type]
            mark = self.mark(second)
            # What isn't held happens soon, but on hardware not at once: so give it time before calling it held.
            held = not Background(mark.synchronize).over(GLANCE_S)
        assert self.finishes(mark.synchronize), "a released latch must let its stream go on"
        return held

    def error(self, kind: type[E], call: Callable[[], object], *words: str) -> E:
        """Return the error of class *kind* that *call* raises; it must have *words* and survive pickling."""
        with pytest.raises(kind) as caught:
            call()
        text = str(caught.value)
        for word in words:
            assert word in text, f"{kind.__name__} must say {word!r}, but says: {text}"
        if isinstance(caught.value, DevstreamError):
            copied = pickle.loads(pickle.dumps(caught.value))
            assert type(copied) is type(caught.value), f"{kind.__name__} must be picklable"
            assert str(copied) == text, f"{kind.__name__} must say the same after pickling"
        return caught.value


@contextmanager
def trial(
    backend: AnyBackend | str,
    *,
    foreign_streams: Mapping[str, Maker] | None = None,
    foreign_events: Mapping[str, Maker] | None = None,
    patience_s: float = PATIENCE_S,
) -> Iterator[Subject]:
    """Choose *backend* for the process inside the block, and bring this thread's current streams back after it.

    Args:
        backend: an instance, or the name of a registered one.
        foreign_streams: what else the backend takes for a stream: how it is got, and a function that gets it.
        foreign_events: the same for events.
        patience_s: how long a law waits for what must happen.
    """
    with _known(backend) as name, _registry.chosen(name) as own:
        before = [own.current_stream(index) for index in range(own.device_count())]
        before.append(own.current_stream(None))
        try:
            with warnings.catch_warnings():
                # The kit makes more streams than a vendor advises, and that isn't what a law looks at.
                warnings.simplefilter("ignore", BackendWarning)
                yield Subject(own, foreign_streams or {}, foreign_events or {}, patience_s)
        finally:
            for stream in before:
                own.set_stream(stream)


@contextmanager
def _known(backend: AnyBackend | str) -> Iterator[str]:
    """Give the registry's name of *backend*; an instance that it doesn't know is registered for the block."""
    if isinstance(backend, str):
        yield backend
    elif backend.name in _registry.names() and _registry.load(backend.name) is backend:
        yield backend.name
    else:
        name = f"{backend.name}-under-test-{id(backend):x}"
        _registry.register(name, lambda: backend)
        try:
            yield name
        finally:
            _registry.unregister(name)


__all__ = ["GLANCE_S", "PATIENCE_S", "Background", "Made", "Maker", "Subject", "trial"]
