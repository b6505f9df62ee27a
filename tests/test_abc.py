"""devstream/abc.py: a backend is twelve methods."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import devstream
from devstream import _registry
from devstream.abc import Backend, Capability, EventLike, StreamLike


class PlainStream:
    """A stream that has nothing to do with torch's class."""

    def __init__(self, index, stream_id):
        self.device, self.stream_id, self.work = torch.device("cpu", index), stream_id, 0

    def query(self):
        return True

    def synchronize(self):
        pass


class PlainEvent:
    def __init__(self, index):
        self.device, self.stamp = None if index is None else torch.device("cpu", index), None

    def query(self):
        return True

    def synchronize(self):
        pass


class MinimalBackend(Backend[PlainStream, PlainEvent]):
    """Has the twelve methods and no more; keeps a log of what was asked of it."""

    name = "minimal"
    device_type = "cpu"

    def __init__(self):
        self.log, self.made = [], 0
        self.defaults = [PlainStream(0, 0), PlainStream(1, 0)]
        self.thread = threading.local()

    def unavailable_reason(self):
        return None

    def device_count(self):
        return 2

    def create_stream(self, index, *, priority=0):
        self.made += 1
        return PlainStream(index, self.made)

    def current_stream(self, index=None):
        state = self.thread.__dict__.setdefault("state", SimpleNamespace(index=0, streams=list(self.defaults)))
        return state.streams[state.index if index is None else index]

    def default_stream(self, index):
        return self.defaults[index]

    def set_stream(self, stream):
        self.current_stream()
        self.thread.state.streams[stream.device.index] = stream
        self.thread.state.index = stream.device.index

    def create_event(self, index, *, enable_timing, blocking, interprocess):
        return PlainEvent(index)

    def record_event(self, event, stream):
        event.stamp = (stream, stream.work)
        self.log.append(("record", stream))

    def wait_event(self, stream, event):
        self.log.append(("wait", stream, event.stamp))

    def query_event(self, event):
        return True

    def synchronize_event(self, event):
        self.log.append(("synchronize", event.stamp))

    def synchronize_device(self, index):
        self.log.append(("device", index))


@pytest.fixture
def minimal():
    backend = MinimalBackend()
    _registry.register("minimal", lambda: backend)
    try:
        with _registry.chosen("minimal"):
            yield backend
    finally:
        _registry.unregister("minimal")


def test_a_backend_has_a_dozen_abstract_methods_at_most():
    assert len(Backend.__abstractmethods__) <= 12
    assert set(Backend.__abstractmethods__) <= set(vars(MinimalBackend))


def test_a_backend_that_leaves_one_out_can_not_be_made():
    for left_out in Backend.__abstractmethods__:
        names = set(Backend.__abstractmethods__) - {left_out}
        partly = type("Partly", (Backend,), {name: vars(MinimalBackend)[name] for name in names})
        with pytest.raises(TypeError, match=left_out):
            partly()


def test_the_verbs_work_with_a_backend_of_just_the_abstract_methods(minimal):
    side, far = devstream.Stream(), devstream.Stream("cpu:1")
    event = devstream.Event()
    with devstream.stream(side):
        assert devstream.current_stream() is side
        event.record()
        with pytest.raises(KeyError), devstream.stream(far):
            raise KeyError("work")
        assert devstream.current_stream() is side
    assert devstream.current_stream() is devstream.default_stream()
    assert devstream.current_stream("cpu:1") is devstream.default_stream("cpu:1")
    event.wait(far)
    event.synchronize()
    devstream.synchronize("cpu:1")
    assert event.query()
    assert event.recorded
    stamp = (side, 0)
    assert minimal.log == [("record", side), ("wait", far, stamp), ("synchronize", stamp), ("device", 1)]
    assert devstream.named_stream("copy") is devstream.named_stream("copy")
    assert devstream.wrap(minimal.default_stream(0)) is minimal.default_stream(0)


def test_what_a_minimal_backend_lacks_is_unsupported_and_names_the_capability(minimal):
    side = devstream.Stream()
    assert devstream.capabilities() == Capability(0)
    for call, capability in [
        (lambda: devstream.Event(enable_timing=True), "TIMING"),
        (lambda: devstream.Event(blocking=True), "BLOCKING_EVENTS"),
        (lambda: devstream.Event(interprocess=True), "IPC_EVENTS"),
        (lambda: devstream.wrap(7, "cpu"), "EXTERNAL_STREAMS"),
        (lambda: devstream.record_stream(torch.ones(1), side), "RECORD_STREAM"),
        (lambda: minimal.native_handle(side), "NATIVE_HANDLE"),
        (lambda: minimal.hold(side), "hold"),
    ]:
        with pytest.raises(devstream.UnsupportedError, match=rf"'minimal'.*{capability}"):
            call()


def test_a_stream_of_a_backends_own_class_finds_its_backend_after_the_choice_ended():
    backend = MinimalBackend()
    _registry.register("minimal", lambda: backend)
    try:
        with _registry.chosen("minimal"):
            side = devstream.Stream()
        assert devstream.backend("cpu") is not backend
        with devstream.stream(side):
            assert backend.current_stream() is side
    finally:
        _registry.unregister("minimal")


def test_a_stream_key_tells_queues_apart():
    backend = MinimalBackend()
    keys = {
        backend.stream_key(s) for s in (PlainStream(0, 0), PlainStream(1, 0), PlainStream(0, 1), PlainStream(0, 1))
    }
    assert keys == {("cpu", 0, 0), ("cpu", 1, 0), ("cpu", 0, 1)}


@pytest.mark.parametrize(
    "make", [lambda: devstream.Stream("cpu"), lambda: torch.Stream("cpu"), lambda: PlainStream(0, 0)]
)
def test_streams_of_every_maker_are_stream_like(make):
    assert isinstance(make(), StreamLike)


@pytest.mark.parametrize(
    "make", [lambda: devstream.Event("cpu"), lambda: torch.Event("cpu"), lambda: PlainEvent(0)]
)
def test_events_of_every_maker_are_event_like(make):
    assert isinstance(make(), EventLike)


def test_the_default_copy_restores_the_current_stream_of_both_devices() -> None:
    cpu = devstream.backend("cpu")
    here, there = cpu.current_stream(0), cpu.current_stream(1)
    target = torch.zeros(4)
    Backend.copy(cpu, target, torch.ones(4), cpu.create_stream(1))
    assert target.eq(1).all()
    assert cpu.current_stream(None) == here
    assert cpu.current_stream(1) == there
