"""The kit itself is tested: a backend that breaks a law fails that law, with a message that names the culprit."""

from __future__ import annotations

import threading
import weakref

import pytest

from devstream import _registry
from devstream.abc import Capability
from devstream.backends.cpu import CpuBackend, CpuEvent
from devstream.exceptions import CaptureError
from devstream.testing.conformance import BackendConformance, laws, trial

#: Broken backends make the kit wait for what never happens; a backend that keeps the laws takes milliseconds.
PATIENCE_S = 0.5


class EmptyEvent(CpuBackend):
    """Its events do nothing, as stand-ins for CUDA's on other chips do."""

    def record_event(self, event, stream):
        event.index = self.stream_index(stream)

    def wait_event(self, stream, event):
        pass

    def query_event(self, event):
        return True

    def synchronize_event(self, event):
        pass


class WaitDoesNothing(CpuBackend):
    def wait_event(self, stream, event):
        pass


class WaitsOnTheHost(CpuBackend):
    def wait_event(self, stream, event):
        self.synchronize_event(event)


class WaitBindsLate(CpuBackend):
    """A wait follows its event to later records: the look-up happens when the waiting stream is next used."""

    def __init__(self):
        super().__init__()
        self.waits = weakref.WeakKeyDictionary()

    def wait_event(self, stream, event):
        if event.point is not None:
            self.waits.setdefault(stream, []).append(event)

    def record_event(self, event, stream):
        for waited in self.waits.pop(stream, []):
            super().wait_event(stream, waited)
        super().record_event(event, stream)


class WaitReachesTheFuture(CpuBackend):
    """A wait for an event that was never recorded waits for its first record."""

    def __init__(self):
        super().__init__()
        self.early = weakref.WeakKeyDictionary()

    def wait_event(self, stream, event):
        if event.point is None:
            self.early.setdefault(event, []).append(stream)
        super().wait_event(stream, event)

    def record_event(self, event, stream):
        super().record_event(event, stream)
        for waiting in self.early.pop(event, []):
            super().wait_event(waiting, event)


class FirstRecordStays(CpuBackend):
    def record_event(self, event, stream):
        if event.point is None:
            super().record_event(event, stream)


class EventSynchronizeReturnsEarly(CpuBackend):
    def synchronize_event(self, event):
        pass


class StreamSynchronizeReturnsEarly(CpuBackend):
    def synchronize_stream(self, stream):
        pass


class DeviceSynchronizeForgetsSideStreams(CpuBackend):
    def synchronize_device(self, index):
        self.synchronize_stream(self.default_stream(index))


class DeviceSynchronizeTakesAllDevices(CpuBackend):
    def synchronize_device(self, index):
        for each in range(self.device_count()):
            super().synchronize_device(each)


class EventQueryIsAlwaysTrue(CpuBackend):
    def query_event(self, event):
        return True


class EventQueryIsAlwaysFalse(CpuBackend):
    def query_event(self, event):
        return False


class StreamQueryIsAlwaysTrue(CpuBackend):
    def query_stream(self, stream):
        return True


class OneQueue(CpuBackend):
    """Every stream of a device is ordered after every other, though they look like several."""

    def __init__(self):
        super().__init__()
        self.last = None

    def record_event(self, event, stream):
        if self.last is not None:
            self.wait_event(stream, self.last)
        super().record_event(event, stream)
        self.last = CpuEvent(0)
        self.last.point = event.point


class GlobalCurrentStream(CpuBackend):
    """The current stream is the process's, not the thread's."""

    def __init__(self):
        super().__init__()
        self.everyones = {}
        self.device = 0

    def current_stream(self, index=None):
        index = self.device if index is None else index
        return self.everyones.get(index) or self.default_stream(index)

    def current_index(self):
        return self.device

    def set_stream(self, stream):
        self.device = self.stream_index(stream)
        self.everyones[self.device] = stream

    def push(self, stream):
        stream.kept = [
            *getattr(stream, "kept", []),
            (self.current_stream(self.stream_index(stream)), self.current_stream()),
        ]
        self.set_stream(stream)

    def pop(self, stream):
        for back in stream.kept.pop():
            self.set_stream(back)


class BlockRestoresTheDefault(CpuBackend):
    def pop(self, stream):
        super().pop(stream)
        self.set_stream(self.default_stream(self.stream_index(stream)))


class OneSlotForTheWayBack(CpuBackend):
    """The stream to go back to is kept in one slot of the stream object (pytorch/pytorch#176560)."""

    def push(self, stream):
        stream.slot = self.current_stream()
        self.set_stream(stream)

    def pop(self, stream):
        self.set_stream(stream.slot)


class BlockKeepsTheDevice(CpuBackend):
    """Leaving a block restores the device's stream, but not the device."""

    def pop(self, stream):
        super().pop(stream)
        self.set_stream(self.current_stream(self.stream_index(stream)))


class SetStreamForgetsTheDevice(CpuBackend):
    def set_stream(self, stream):
        before = self.current_stream()
        super().set_stream(stream)
        if self.stream_index(before) != self.stream_index(stream):
            super().set_stream(before)


class EqualByIdentity(CpuBackend):
    """One queue has several objects that aren't equal."""

    def __init__(self):
        super().__init__()
        plain = self._stream_class
        rules = {"__eq__": lambda a, b: a is b, "__ne__": lambda a, b: a is not b, "__hash__": plain.__hash__}
        tail = property(lambda twin: twin.real.tail, lambda twin, point: twin.set_tail(point))
        self._stream_class = type("ById", (plain,), rules)
        self.twin_class = type("Twin", (self._stream_class,), {"tail": tail, "real": None, "set_tail": set_tail})

    def wrap_handle(self, handle, index, owner=None):
        twin = self.twin_class(self, index, handle)
        twin.real = super().wrap_handle(handle, index, owner)
        return twin


def set_tail(twin, point):
    if twin.real is not None:
        twin.real.tail = point


class AllEqual(CpuBackend):
    def __init__(self):
        super().__init__()
        self._stream_class = type(
            "AllEqual",
            (self._stream_class,),
            {"__eq__": lambda a, b: True, "__ne__": lambda a, b: False, "__hash__": lambda a: 1},
        )


class OneKey(CpuBackend):
    def stream_key(self, stream):
        return (self.device_type, self.stream_index(stream), min(stream.stream_id, 1))


class ElapsedInSeconds(CpuBackend):
    def elapsed_ms(self, start, end):
        return super().elapsed_ms(start, end) / 1000


class ElapsedWithoutSign(CpuBackend):
    def elapsed_ms(self, start, end):
        return abs(super().elapsed_ms(start, end))


class ElapsedRunsBackwards(CpuBackend):
    def elapsed_ms(self, start, end):
        return min(super().elapsed_ms(start, end), -0.001) if start is not end else 0.0


class ClaimsTiming(CpuBackend):
    """Promises to keep time, and has no clock."""

    def elapsed_ms(self, start, end):
        raise self.lacks(Capability.TIMING, "elapsed_time")


class WaitForgetsOtherDevices(CpuBackend):
    def wait_event(self, stream, event):
        if event.index == self.stream_index(stream):
            super().wait_event(stream, event)


class OneDevice(CpuBackend):
    """Every stream is on device 0, whatever was asked for."""

    def create_stream(self, index, *, priority=0):
        return super().create_stream(0, priority=priority)


class PoolOfOne(CpuBackend):
    """Each new stream is the same queue, though SIDE_STREAMS promises others."""

    def create_stream(self, index, *, priority=0):
        return self.default_stream(index)


class PriorityIsNotClamped(CpuBackend):
    def priority_range(self, index):
        return (0, -1)

    def stream_priority(self, stream):
        return 0


class LateCopy(CpuBackend):
    """A copy runs on a thread that no event covers: pageable copies return early."""

    def __init__(self):
        super().__init__()
        self.now = threading.Event()

    def copy(self, destination, source, stream):
        def late():
            self.now.wait(20 * PATIENCE_S)
            destination.copy_(source)

        threading.Thread(target=late, daemon=True).start()


class CopyLeavesItsStreamCurrent(CpuBackend):
    def copy(self, destination, source, stream):
        self.set_stream(stream)
        destination.copy_(source)


class LatchHoldsNothing(CpuBackend):
    def hold(self, stream):
        latch = super().hold(stream)
        latch.release()
        return latch


class LatchIsNeverReleased(CpuBackend):
    def hold(self, stream):
        return NeverReleased(super().hold(stream))


class NeverReleased:
    kept = []  # noqa: RUF012 - for good: a latch that is dropped lets go

    def __init__(self, latch):
        self.kept.append(latch)

    def release(self):
        pass


class CaptureRunsAtOnce(CpuBackend):
    """What is captured runs, and never again."""

    def capture(self, issue, stream, *, pool=None):
        self._run(issue, stream)
        return super().capture(lambda: None, stream)


class CaptureForgetsForks(CpuBackend):
    """Only the first stream is captured; what others get in the capture runs."""

    def wait_event(self, stream, event):
        if (event.captured is not None) == self._captures.holds(stream):
            super().wait_event(stream, event)


class ReplayOvertakes(CpuBackend):
    """A replay goes to a stream of its own."""

    def capture(self, issue, stream, *, pool=None):
        graph = super().capture(issue, stream)
        graph.replay = lambda _: type(graph).replay(graph, self.create_stream(0))
        return graph


class OpenForksPass(CpuBackend):
    """A stream that is not joined is nobody's fault."""

    def capture(self, issue, stream, *, pool=None):
        try:
            return super().capture(issue, stream)
        except CaptureError:
            return super().capture(lambda: None, stream)


class AnswersInACapture(CpuBackend):
    """A question is answered, which ends a capture elsewhere."""

    def query_stream(self, stream):
        return True


#: Broken backend -> a law that it breaks, and what the failure must name.
BROKEN = [
    (EmptyEvent, "test_event_synchronize_blocks_until_the_record_has_happened", "Event.synchronize"),
    (EmptyEvent, "test_event_query_tells_whether_the_record_has_happened", "Event.query"),
    (EmptyEvent, "test_wait_orders_work_after_the_record", "Event.wait"),
    (WaitDoesNothing, "test_wait_orders_work_after_the_record", "Event.wait"),
    (WaitDoesNothing, "test_every_event_recorded_on_every_stream_is_waited_for", "record_event(Event())"),
    (WaitDoesNothing, "test_every_stream_waits_for_every_event", "wait_event(Event())"),
    (WaitDoesNothing, "test_record_event_without_an_event_returns_one_that_orders", "record_event()"),
    (WaitDoesNothing, "test_wait_stream_orders_every_pair_of_streams", "wait_stream("),
    (WaitDoesNothing, "test_order_is_transitive", "wait_stream"),
    (WaitDoesNothing, "test_a_stream_made_in_one_thread_orders_in_another", "Event.wait"),
    (WaitsOnTheHost, "test_a_wait_does_not_block_the_host", "Event.wait"),
    (WaitBindsLate, "test_a_wait_binds_to_the_record_that_was_last_at_the_call", "Event.wait"),
    (WaitReachesTheFuture, "test_a_wait_before_the_record_is_a_no_op_that_recorded_tells", "a wait from before"),
    (FirstRecordStays, "test_a_second_record_replaces_the_first", "Event.record"),
    (
        EventSynchronizeReturnsEarly,
        "test_event_synchronize_blocks_until_the_record_has_happened",
        "Event.synchronize",
    ),
    (StreamSynchronizeReturnsEarly, "test_stream_synchronize_blocks_until_all_work_is_done", "Stream.synchronize"),
    (DeviceSynchronizeForgetsSideStreams, "test_device_synchronize_covers_side_streams", "synchronize(device)"),
    (DeviceSynchronizeTakesAllDevices, "test_a_device_is_synchronized_alone", "synchronize(device 0)"),
    (EventQueryIsAlwaysTrue, "test_event_query_tells_whether_the_record_has_happened", "Event.query"),
    (EventQueryIsAlwaysFalse, "test_an_event_that_was_never_recorded_looks_done", "Event.query"),
    (StreamQueryIsAlwaysTrue, "test_stream_query_tells_whether_all_work_is_done", "Stream.query"),
    (OneQueue, "test_without_an_edge_nothing_is_ordered", "no edge"),
    (GlobalCurrentStream, "test_a_new_thread_starts_on_the_default_stream", "new thread"),
    (BlockRestoresTheDefault, "test_any_nesting_restores_exactly", "leaving a block"),
    (BlockRestoresTheDefault, "test_an_exception_leaves_no_state", "exception"),
    (BlockRestoresTheDefault, "test_a_block_restores_what_set_stream_set", "set_stream"),
    (OneSlotForTheWayBack, "test_any_nesting_restores_exactly", "leaving a block"),
    (BlockKeepsTheDevice, "test_a_block_restores_the_device_and_the_streams_of_both", "device"),
    (SetStreamForgetsTheDevice, "test_set_stream_changes_the_device", "set_stream"),
    (EqualByIdentity, "test_a_native_handle_wraps_to_the_same_queue", "=="),
    (AllEqual, "test_streams_are_equal_exactly_when_they_are_the_same_queue", "two queues"),
    (OneKey, "test_new_streams_are_distinct", "queue of its own"),
    (ElapsedInSeconds, "test_elapsed_time_is_in_milliseconds", "Event.elapsed_time"),
    (ElapsedWithoutSign, "test_elapsed_time_the_other_way_round_is_negative", "Event.elapsed_time"),
    (ElapsedRunsBackwards, "test_elapsed_time_never_runs_backwards", "Event.elapsed_time"),
    (ClaimsTiming, "test_elapsed_time_is_in_milliseconds", "elapsed_time"),
    (WaitForgetsOtherDevices, "test_a_stream_waits_for_an_event_of_another_device", "from device 0 to 1"),
    (OneDevice, "test_set_stream_changes_the_device", "device"),
    (PoolOfOne, "test_new_streams_are_distinct", "queue of its own"),
    (PriorityIsNotClamped, "test_priorities_are_clamped_and_have_names", "priority"),
    (LateCopy, "test_a_copy_is_done_when_an_event_after_it_has_happened", "Event.synchronize"),
    (LateCopy, "test_a_copy_is_waited_for_by_another_stream", "copy"),
    (CopyLeavesItsStreamCurrent, "test_a_copy_leaves_the_current_stream_alone", "Backend.copy"),
    (
        CaptureRunsAtOnce,
        "test_a_capture_runs_nothing_and_each_replay_runs_it_on_the_values_of_then",
        "a replay must read",
    ),
    (CaptureForgetsForks, "test_a_capture_takes_in_the_streams_that_wait_for_it", "the order between the streams"),
    (ReplayOvertakes, "test_a_replay_is_in_its_streams_order", "a replay must come behind"),
    (OpenForksPass, "test_a_stream_that_is_not_joined_is_named", "not joined"),
    (AnswersInACapture, "test_a_question_in_a_capture_is_refused_and_the_capture_goes_on", "must be refused"),
    (LatchHoldsNothing, "test_a_released_latch_lets_everything_go_on", "latch"),
    (LatchIsNeverReleased, "test_a_released_latch_lets_everything_go_on", "Latch.release"),
]


@pytest.mark.parametrize(("broken", "law", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_backend_fails_its_law_by_name(broken, law, words):
    with trial(broken(), patience_s=PATIENCE_S) as subject, pytest.raises(Exception) as caught:  # noqa: PT011
        getattr(BackendConformance(), law)(subject)
    assert not isinstance(caught.value, pytest.skip.Exception)
    assert words in str(caught.value)


@pytest.mark.parametrize("law", sorted({law for _, law, _ in BROKEN}))
def test_a_backend_that_keeps_the_laws_passes(law):
    """The control of the test above: the same call on the unbroken base class raises nothing."""
    with trial(CpuBackend(), patience_s=PATIENCE_S) as subject:
        getattr(BackendConformance(), law)(subject)


def test_a_trial_leaves_the_registry_and_the_current_stream_as_they_were():
    before = _registry.names(), _registry.load("cpu").current_stream()
    with trial(CpuBackend()) as subject:
        subject.backend.set_stream(subject.backend.create_stream(0))
    assert (_registry.names(), _registry.load("cpu").current_stream()) == before


def test_there_are_laws_and_each_says_what_it_demands():
    assert len(laws()) > 60
    for name, law in laws().items():
        assert law.__doc__, f"{name} has no docstring"


# -- known failures --------------------------------------------------------------------------------------


def test_a_known_failure_that_names_no_law_is_an_error():
    with pytest.raises(ValueError, match="test_no_such_law"):
        type("TestMine", (BackendConformance,), {"known_failures": {"test_no_such_law": "because"}})


def test_a_known_failure_without_a_reason_is_an_error():
    with pytest.raises(ValueError, match="reason"):
        type("TestMine", (BackendConformance,), {"known_failures": {"test_order_is_transitive": ""}})


SUITE = """
    import pytest
    from devstream.backends.cpu import CpuBackend
    from devstream.testing.conformance import BackendConformance

    class Broken(CpuBackend):
        def elapsed_ms(self, start, end):
            return super().elapsed_ms(start, end) / 1000

    class TestBroken(BackendConformance):
        known_failures = {KNOWN}

        @pytest.fixture
        def backend(self):
            return Broken()
"""


def test_a_known_failure_is_expected_to_fail(pytester):
    known = {"test_elapsed_time_is_in_milliseconds": "counts seconds"}
    pytester.makepyfile(SUITE.replace("{KNOWN}", repr(known)))
    result = pytester.runpytest("-p", "devstream.testing.plugin", "-rx")
    result.assert_outcomes(xfailed=1, passed=len(laws()) - 2, skipped=1)
    result.stdout.fnmatch_lines(["*counts seconds*"])


def test_a_known_failure_that_passes_is_a_failure(pytester):
    known = {"test_order_is_transitive": "it was broken once"}
    pytester.makepyfile(SUITE.replace("{KNOWN}", repr(known)))
    result = pytester.runpytest("-p", "devstream.testing.plugin", "-k", "transitive or milliseconds")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*XPASS(strict)*"])


def test_a_known_failure_of_one_class_is_not_one_of_another(pytester):
    type("TestMine", (BackendConformance,), {"known_failures": {"test_order_is_transitive": "because"}})
    assert not getattr(BackendConformance.test_order_is_transitive, "pytestmark", [])


def test_no_exception_is_taken_for_a_missing_capability():
    class RaisesUnsupported(CpuBackend):
        def hold(self, stream):
            raise self.lacks(Capability.TIMING, "hold")

    with trial(RaisesUnsupported()) as subject, pytest.raises(NotImplementedError):
        BackendConformance().test_order_is_transitive(subject)


def test_a_missing_capability_skips_the_laws_about_it():
    class NoTiming(CpuBackend):
        def capabilities(self, index):
            return super().capabilities(index) & ~Capability.TIMING

        def elapsed_ms(self, start, end):
            raise self.lacks(Capability.TIMING, "elapsed_time")

    with trial(NoTiming()) as subject:
        with pytest.raises(pytest.skip.Exception, match="TIMING"):
            BackendConformance().test_elapsed_time_is_in_milliseconds(subject)
        BackendConformance().test_a_backend_without_timing_says_so(subject)
