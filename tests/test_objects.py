"""devstream/_objects.py: streams and events as objects."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch

import devstream
from devstream import _objects, _registry
from devstream.abc import Backend
from devstream.backends.cpu import CpuBackend
from devstream.exceptions import (
    DeviceMismatchError,
    EventNotReadyError,
    EventNotRecordedError,
    EventOverwrittenWarning,
    TimingDisabledError,
    UnsupportedError,
)
from devstream.testing import latch


@pytest.fixture
def cpu():
    return devstream.backend("cpu")


@pytest.fixture
def side():
    return devstream.Stream("cpu")


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(_objects, "strict_depth", 1)


# -- streams ---------------------------------------------------------------------------------------------


def test_a_stream_is_a_torch_stream_and_ours(side):
    assert isinstance(side, torch.Stream)
    assert isinstance(side, devstream.Stream)
    assert side.device == torch.device("cpu")
    assert repr(side) == f"<devstream.Stream {side.stream_id} on cpu:0>"


def test_new_streams_differ_from_each_other_and_from_the_default_one():
    streams = [devstream.Stream("cpu") for _ in range(100)]
    assert len({devstream.default_stream("cpu"), *streams}) == 101


def test_every_pair_of_native_and_own_orders(cpu, side):
    def native(stream):
        return torch.Stream(stream_id=stream.stream_id, device_index=-1, device_type=cpu.torch_type)

    for make_event in (devstream.Event, torch.Event):
        for as_given in (lambda stream: stream, native):
            waiter, event = devstream.Stream("cpu"), make_event("cpu")
            latch = cpu.hold(side)
            devstream.wrap(as_given(side)).record_event(event)
            devstream.wrap(as_given(waiter)).wait_event(event)
            assert not waiter.query()
            latch.release()
            assert waiter.query()


def test_own_events_take_native_streams(cpu, side):
    waiter = devstream.Stream("cpu")
    given = [
        torch.Stream(stream_id=s.stream_id, device_index=-1, device_type=cpu.torch_type) for s in (side, waiter)
    ]
    latch = cpu.hold(side)
    event = devstream.Event("cpu")
    event.record(given[0])
    event.wait(given[1])
    assert not waiter.query()
    latch.release()
    assert waiter.query()


def test_waiting_for_a_stream_orders_after_all_that_it_was_given_so_far(cpu, side):
    waiter = devstream.Stream("cpu")
    waiter.wait_stream(side)
    latch = cpu.hold(side)
    assert waiter.query()
    waiter.wait_stream(side)
    assert not waiter.query()
    latch.release()
    assert waiter.query()


def test_recording_an_event_gives_it_or_a_new_one(side):
    event = devstream.Event("cpu")
    assert side.record_event(event) is event
    made = side.record_event()
    assert isinstance(made, devstream.Event)
    assert made.recorded


@pytest.mark.parametrize(
    ("priority", "limits", "granted"),
    [
        (10, (0, -3), 0),
        (-100, (0, -3), -3),
        (-1, (0, -3), -1),
        ("low", (0, -3), 0),
        ("normal", (0, -3), 0),
        ("high", (0, -3), -3),
        ("low", (1, -1), 1),
        ("normal", (1, -1), 0),
        ("high", (0, 0), 0),
    ],
)
def test_a_priority_is_clamped_to_the_range(priority, limits, granted):
    assert _objects.clamp_priority(priority, limits) == granted


def test_a_clamp_is_logged_with_both_numbers_and_the_range(caplog):
    with caplog.at_level(logging.INFO, "devstream"):
        assert _objects.clamp_priority(-100, (0, -3)) == -3
        assert _objects.clamp_priority(-3, (0, -3)) == -3
    assert caplog.messages == ["priority -100 clamped to -3, the device's range being 0 to -3"]


def test_streams_and_events_are_shared_by_copies_and_refuse_pickling(side):
    event = devstream.Event("cpu")
    for item in (side, event):
        assert copy.copy(item) is item
        assert copy.deepcopy({"a": [item]})["a"][0] is item
        with pytest.raises(TypeError, match="pickle takes no"):
            pickle.dumps(item)


# -- events ----------------------------------------------------------------------------------------------


def test_a_new_event_is_unrecorded_and_bound_by_its_first_record(side):
    event = devstream.Event("cpu")
    assert event.device == torch.device("cpu")
    assert repr(event) == "<devstream.Event on cpu, never recorded>"
    event.record(devstream.Stream("cpu:1"))
    assert event.device == torch.device("cpu", 1)
    assert repr(event) == "<devstream.Event on cpu:1, recorded>"
    with pytest.raises(DeviceMismatchError, match="the event is on cpu:1"):
        event.record(side)


def test_an_event_without_a_device_takes_the_current_stream():
    event = devstream.Event()
    with devstream.stream(devstream.Stream("cpu:1")):
        event = devstream.Event("cpu")
        event.record()
    assert event.device == torch.device("cpu", 1)


def test_times_are_positive_in_order_and_negative_the_other_way_round(side):
    start, end = (devstream.Event("cpu", enable_timing=True) for _ in range(2))
    start.record(side)
    end.record(side)
    assert 0 <= start.elapsed_time(end) < 1000
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    assert start.elapsed_time(start) == 0


def test_a_time_that_can_not_be_told_is_an_error_that_says_why(cpu, side):
    timed, untimed = devstream.Event("cpu", enable_timing=True), devstream.Event("cpu")
    fresh, far = (devstream.Event("cpu", enable_timing=True) for _ in range(2))
    timed.record(side)
    untimed.record(side)
    far.record(devstream.Stream("cpu:1"))
    for pair in ((timed, untimed), (untimed, timed)):
        with pytest.raises(TimingDisabledError, match=r"keeps no time; make both.*enable_timing=True"):
            pair[0].elapsed_time(pair[1])
    for pair in ((timed, fresh), (fresh, timed)):
        with pytest.raises(EventNotRecordedError, match=r"elapsed_time on an event that was never recorded"):
            pair[0].elapsed_time(pair[1])
    with pytest.raises(DeviceMismatchError, match=r"cpu:0.*cpu:1"):
        timed.elapsed_time(far)
    latch = cpu.hold(side)
    fresh.record(side)
    for pair in ((timed, fresh), (fresh, timed)):
        with pytest.raises(EventNotReadyError, match=r"event\.synchronize\(\)"):
            pair[0].elapsed_time(pair[1])
    latch.release()
    assert timed.elapsed_time(fresh) >= 0


def test_an_event_recorded_again_tells_of_its_last_record(cpu, side):
    event = devstream.Event("cpu")
    event.record(side)
    latch = cpu.hold(side)
    event.record(side)
    assert not event.query()
    latch.release()
    assert event.query()


@pytest.mark.parametrize("look", ["wait", "synchronize", "query"])
def test_strict_lets_an_event_be_recorded_again_once_somebody_looked(strict, side, look, recwarn):
    event = devstream.Event("cpu")
    event.record(side)
    {"wait": lambda: event.wait(side), "synchronize": event.synchronize, "query": event.query}[look]()
    event.record(side)
    assert not recwarn.list


def test_strict_warns_at_the_line_that_records_an_event_again(strict, side):
    event = devstream.Event("cpu")
    event.record(side)
    for again in (lambda: event.record(side), lambda: side.record_event(event)):
        with pytest.warns(EventOverwrittenWarning, match="recorded again before anyone waited") as caught:
            again()
        assert [item.filename for item in caught] == [__file__]


def test_strict_refuses_a_wait_without_a_record_and_changes_nothing(strict, side):
    for event in (devstream.Event("cpu"), torch.Event("cpu")):
        with pytest.raises(EventNotRecordedError, match="wait on an event that was never recorded"):
            side.wait_event(event)
    assert side.query()


def test_a_wait_without_a_record_is_logged_once_a_line_with_the_callers_line(caplog, side):
    event = devstream.Event("cpu")
    with caplog.at_level(logging.WARNING, "devstream"):
        for _ in range(3):
            event.wait(side)
            side.wait_event(event)
    assert len(caplog.messages) == 2
    assert all(line.startswith(f"{__file__}:") for line in caplog.messages)


def test_an_event_is_collected(side):
    event = side.record_event()
    gone = weakref.ref(event)
    side.wait_event(event)
    del event
    gc.collect()
    assert gone() is None


def test_the_cpu_has_no_interprocess_events():
    with pytest.raises(devstream.UnsupportedError, match=r"interprocess=True\) is not supported by backend 'cpu'"):
        devstream.Event("cpu", interprocess=True)
    with pytest.raises(devstream.UnsupportedError, match="from_ipc_handle"):
        devstream.Event.from_ipc_handle("cpu", b"handle")
    with pytest.raises(ValueError, match=r"is not interprocess; make it with"):
        devstream.Event("cpu").ipc_handle()


def test_a_stream_that_is_not_ours_refuses_an_event_of_ours():
    event = devstream.Event("cpu")
    event.record()
    theirs = torch.Stream("cpu")
    for call in (theirs.wait_event, theirs.record_event):
        with pytest.raises((RuntimeError, TypeError)):
            call(event)


def test_a_class_of_ones_own_over_stream_is_refused_and_not_replaced():
    class Mine(devstream.Stream):
        pass

    with pytest.raises(TypeError, match="Stream itself"):
        Mine("cpu")


def test_the_priority_that_was_asked_for_is_recorded_beside_the_granted_one():
    stream = devstream.Stream("cpu", priority=-5)
    assert (stream.requested_priority, stream.priority) == (-5, 0)
    assert devstream.Stream("cpu").requested_priority == 0


def test_a_stream_has_no_handle_that_could_be_taken_for_the_vendors() -> None:
    """B34 of the bug log, on every device."""
    assert not hasattr(devstream.Stream("cpu"), "handle")
    assert not hasattr(devstream.Event("cpu"), "handle")


# -- whose event it is -------------------------------------------------------------------------------------


class PlainStream:
    """A stream of a class of its own, as a plug-in may have it."""

    def __init__(self, inner):
        self.inner, self.device, self.stream_id = inner, torch.device("meta", 0), inner.stream_id

    def query(self):
        return self.inner.query()

    def synchronize(self):
        self.inner.synchronize()

    def record_event(self):
        event = devstream.Event()
        event.record(self)
        return event


class PlainBackend(Backend):
    """Streams of the CPU in objects of a plain class."""

    name = "plain"
    device_type = "meta"

    def __init__(self):
        self.cpu = CpuBackend()
        self.default = PlainStream(self.cpu.default_stream(0))

    def unavailable_reason(self):
        return None

    def device_count(self):
        return 1

    def create_stream(self, index, *, priority=0):
        return PlainStream(self.cpu.create_stream(0))

    def current_stream(self, index=None):
        return self.default

    def default_stream(self, index):
        return self.default

    def set_stream(self, stream):
        self.default = stream

    def create_event(self, index, **options):
        return self.cpu.create_event(0, **options)

    def query_event(self, event):
        return self.cpu.query_event(event)

    def synchronize_event(self, event):
        self.cpu.synchronize_event(event)

    def record_event(self, event, stream):
        self.cpu.record_event(event, stream.inner)

    def wait_event(self, stream, event):
        self.cpu.wait_event(stream.inner, event)

    def synchronize_device(self, index):
        self.cpu.synchronize_device(0)

    def hold(self, stream):
        return self.cpu.hold(stream.inner)


@pytest.fixture
def plain():
    _registry.register("meta", PlainBackend)
    yield devstream.backend("meta")
    _registry.unregister("meta")


def test_an_event_of_no_device_is_of_the_backend_that_records_it_first(plain):
    assert devstream.backend().name != "plain"
    one, two = devstream.Stream("meta"), devstream.Stream("meta")
    with latch(one) as held:
        event = one.record_event()
        event.wait(two)
        later = two.record_event()
        assert event.device == torch.device("meta", 0)
        assert not event.query()
        assert not later.query()
        held.release()
    later.synchronize()
    with pytest.raises(DeviceMismatchError, match="meta"):
        event.record(devstream.Stream("cpu"))


def test_an_event_of_no_device_may_be_waited_for_before_its_first_record(plain):
    event = devstream.Event()
    event.wait(devstream.Stream("meta"))
    event.wait(devstream.Stream("cpu"))
    event.record(devstream.Stream("meta"))
    assert event.device.type == "meta"


def test_an_event_whose_device_was_given_stays_there(plain):
    event = devstream.Event("cpu")
    with pytest.raises(DeviceMismatchError, match="meta"):
        event.record(devstream.Stream("meta"))


def test_an_event_does_not_follow_to_a_backend_that_lacks_its_options(plain):
    event = devstream.Event(enable_timing=True)
    with pytest.raises(UnsupportedError, match="TIMING"):
        event.record(devstream.Stream("meta"))
    event.record(devstream.Stream("cpu"))
    assert event.device.type == "cpu"
