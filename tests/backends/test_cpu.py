"""devstream/backends/cpu.py: the CPU is a device."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import devstream
from devstream.backends.cpu import CpuBackend, CpuOptions
from devstream.exceptions import LatchDroppedWarning, StreamInUseError, UnsupportedError
from devstream.overlap import copy
from devstream.testing import strict

ROOT = Path(devstream.__file__).resolve().parents[1]


@pytest.fixture
def cpu():
    return devstream.backend("cpu")


@pytest.fixture
def side():
    return devstream.Stream("cpu")


class Gate:
    """A task that waits until it is let go."""

    def __init__(self):
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self):
        self.started.set()
        self.go.wait()


def test_what_is_recorded_behind_a_latch_has_not_happened_until_it_is_released(cpu, side):
    before = side.record_event()
    latch = cpu.hold(side)
    after = side.record_event()
    assert (before.query(), after.query(), side.query()) == (True, False, False)
    latch.release()
    latch.release()
    assert (after.query(), side.query()) == (True, True)


def test_a_wait_binds_to_the_record_that_was_the_last_at_the_call(cpu, side):
    waiter, event = devstream.Stream("cpu"), devstream.Event("cpu")
    event.record(side)
    waiter.wait_event(event)
    latch = cpu.hold(side)
    event.record(side)
    assert waiter.query()
    waiter.wait_event(event)
    assert not waiter.query()
    latch.release()
    assert waiter.query()


def test_a_wait_crosses_devices(cpu):
    near, far = devstream.Stream("cpu:0"), devstream.Stream("cpu:1")
    latch = cpu.hold(near)
    far.wait_stream(near)
    assert not far.query()
    latch.release()
    far.synchronize()


def test_entering_a_stream_waits_for_its_copy(cpu, side):
    source, destination, gate = torch.ones(4), torch.zeros(4), Gate()
    cpu.launch(gate, side)
    cpu.copy(destination, source, side)
    assert destination.tolist() == [0] * 4
    threading.Thread(target=lambda: (gate.started.wait(), gate.go.set())).start()
    with devstream.stream(side):
        assert destination.tolist() == [1] * 4


def test_entering_waits_for_a_copy_though_a_latch_was_in_between_and_is_open_now(cpu, side):
    destination, gate, other = torch.zeros(4), Gate(), devstream.Stream("cpu")
    latch = cpu.hold(other)
    cpu.launch(gate, side)
    cpu.copy(destination, torch.ones(4), side)
    side.wait_stream(other)
    latch.release()
    gate.go.set()
    with devstream.stream(side):
        assert destination.tolist() == [1] * 4


def test_nobody_blocks_on_a_latch_just_to_issue_work(cpu, side):
    latch = cpu.hold(side)
    current = devstream.Stream("cpu")
    with devstream.stream(current):
        current.wait_stream(side)
        with devstream.stream(side):
            value = torch.ones(2).sum()
    assert value == 2
    assert not current.query()
    latch.release()
    current.synchronize()


def test_work_launched_on_the_current_stream_of_some_thread_runs_at_once(cpu, side):
    seen, entered, leave = [], threading.Event(), threading.Event()

    def keep_current():
        with devstream.stream(side):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=keep_current)
    thread.start()
    entered.wait()
    cpu.launch(lambda: seen.append(threading.current_thread()), side)
    assert seen == [threading.main_thread()]
    leave.set()
    thread.join()


def test_a_task_finds_its_own_stream_current_and_may_use_it(cpu):
    side, seen = devstream.Stream("cpu:1"), []

    def task():
        seen.append(cpu.current_stream(None))
        with devstream.stream(side):
            side.record_event()
        side.wait_event(devstream.default_stream("cpu").record_event())
        seen.append(cpu.current_stream(None))

    cpu.launch(task, side)
    side.synchronize()
    assert seen == [side, side]


@pytest.mark.parametrize("early", [True, False])
def test_the_error_of_a_task_meets_who_enters_its_stream_and_leaves_the_current_one(cpu, side, early):
    base, gate = devstream.current_stream("cpu"), Gate()

    def fail():
        gate()
        raise KeyError("in the task")

    cpu.launch(fail, side)
    gate.go.set()
    if early:
        cpu_point = side.tail
        while not cpu_point.happened:
            gate.started.wait()
    with pytest.raises(KeyError, match="in the task"):
        side.__enter__()
    with pytest.raises(KeyError), devstream.stream(side):
        pass
    assert devstream.current_stream("cpu") is base
    with pytest.raises(KeyError):
        side.synchronize()
    side.synchronize()  # it was told
    with devstream.stream(side):
        assert devstream.current_stream("cpu") is side


def test_an_error_travels_along_events_and_stays_with_them(cpu, side):
    other, seen = devstream.Stream("cpu"), []

    def fail():
        raise KeyError("in the task")

    cpu.launch(fail, side)
    done = side.record_event()
    other.wait_event(done)
    cpu.launch(lambda: seen.append("ran"), other)
    for synchronize in (done.synchronize, done.synchronize, other.synchronize):
        with pytest.raises(KeyError, match="in the task"):
            synchronize()
    assert seen == []
    assert done.query()
    with pytest.raises(KeyError):
        side.synchronize()


def test_synchronizing_the_device_waits_for_all_raises_the_first_error_and_clears_it(cpu):
    failing, slow, gate = devstream.Stream("cpu:1"), devstream.Stream("cpu:1"), Gate()

    def fail():
        raise KeyError("in the task")

    cpu.launch(fail, failing)
    cpu.launch(gate, slow)
    gate.go.set()
    with pytest.raises(KeyError, match="in the task"):
        devstream.synchronize("cpu:1")
    assert slow.query()
    devstream.synchronize("cpu:1")


def test_an_error_that_the_stream_told_is_not_told_by_the_device_again(cpu):
    failing = devstream.Stream("cpu:1")

    def fail():
        raise KeyError("in the task")

    cpu.launch(fail, failing)
    with pytest.raises(KeyError, match="in the task"):
        failing.synchronize()
    devstream.synchronize("cpu:1")


def test_the_error_of_a_dropped_stream_is_told_by_the_device(cpu):
    failing, gate = devstream.Stream("cpu:1"), Gate()

    def fail():
        gate()
        raise KeyError("in the task")

    cpu.launch(fail, failing)
    del failing
    gc.collect()
    gate.go.set()
    with pytest.raises(KeyError, match="in the task"):
        devstream.synchronize("cpu:1")
    devstream.synchronize("cpu:1")


def test_a_current_stream_that_waits_for_a_failed_copy_raises(cpu, side):
    cpu.copy(torch.zeros(2), torch.ones(3), side)
    done = side.record_event()
    current = devstream.Stream("cpu")
    with devstream.stream(current), pytest.raises(RuntimeError, match="size"):
        current.wait_event(done)
    for stream in (side, current):
        with pytest.raises(RuntimeError, match="size"):
            stream.synchronize()


def test_a_new_stream_never_takes_the_queue_of_a_native_one(cpu):
    ahead = devstream.Stream("cpu").stream_id + 1
    native = torch.Stream(stream_id=ahead, device_index=-1, device_type=cpu.torch_type)
    adopted = devstream.wrap(native)
    assert devstream.Stream("cpu") != adopted


def test_each_of_two_equal_native_streams_keeps_the_queue_alive(cpu):
    def native():
        return torch.Stream(stream_id=77_000_001, device_index=-1, device_type=cpu.torch_type)

    one, two = native(), native()
    latch = cpu.hold(devstream.wrap(one))
    devstream.wrap(two)
    del one
    gc.collect()
    assert not devstream.wrap(two).query()
    latch.release()
    assert devstream.wrap(two).query()
    gone = weakref.ref(devstream.wrap(two))
    del two
    gc.collect()
    assert gone() is None


def test_streams_events_and_threads_are_collected(cpu):
    streams = [devstream.Stream("cpu") for _ in range(20)]
    events = [stream.record_event() for stream in streams]
    for stream in streams:
        cpu.launch(lambda: None, stream)
        stream.synchronize()
    names = {f"devstream-cpu-0-{stream.stream_id}_0" for stream in streams}
    workers = [thread for thread in threading.enumerate() if thread.name in names]
    assert len(workers) == 20
    gone = [weakref.ref(item) for item in (*streams, *events)]
    del streams, stream, events
    gc.collect()
    for thread in workers:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert [ref() for ref in gone] == [None] * 40


def test_a_hundred_thousand_events_take_bounded_memory(side):
    def make(count):
        for _ in range(count):
            event = devstream.Event("cpu")
            event.record(side)
            side.wait_event(event)

    make(1000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        make(100_000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def test_a_finalizer_that_makes_a_stream_does_not_block_its_thread(cpu):
    class Finalized:
        def __init__(self):
            self.me = self

        def __del__(self):
            devstream.Stream("cpu")
            devstream.named_stream("made by a finalizer", "cpu")

    done = []

    def run():
        for _ in range(300):
            Finalized()
            devstream.Stream("cpu")
            gc.collect(0)
        done.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert done == [True]


FORK = """
import os, threading, traceback, torch, devstream
from devstream.exceptions import ForkedProcessError
cpu = devstream.backend("cpu")
side, busy, go = devstream.Stream("cpu"), devstream.Stream("cpu"), threading.Event()
far, dropped, seen = devstream.Stream("cpu:1"), devstream.Stream("cpu:1"), []
cpu.copy(torch.zeros(2), torch.ones(2), side)
side.synchronize()
cpu.launch(go.wait, busy)
cpu.launch(go.wait, dropped)
del dropped
pending = busy.record_event()
with devstream.stream(side):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert devstream.current_stream("cpu") is side
            assert not busy.query()
            # Each is told of its own; then it can be used.
            for lost in (pending.synchronize, busy.synchronize, lambda: devstream.synchronize("cpu:1")):
                try:
                    lost()
                except ForkedProcessError as error:
                    seen.append(str(error))
            assert len(seen) == 3 and len(set(seen)) == 1, seen
            devstream.synchronize("cpu:0")
            target = torch.zeros(2)
            for stream in (busy, devstream.Stream("cpu:1"), far):
                cpu.copy(target, torch.ones(2), stream)
                done = stream.record_event()
                done.synchronize()
                assert target.tolist() == [1, 1] and stream.query() and done.query()
            devstream.synchronize("cpu")
            for use in (pending.synchronize, lambda: side.wait_event(pending)):
                try:
                    use()
                except ForkedProcessError:
                    pass
                else:
                    raise AssertionError("work of the parent never happens here")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
go.set()
busy.synchronize()
assert pending.query()
print("child:", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_works_on_the_cpu_and_waits_for_nothing_of_its_parent():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.stdout.strip() == "child: 0", done.stderr


def test_a_second_backend_of_the_cpu_is_collected_though_it_listens_for_forks():
    def make():
        return weakref.ref(CpuBackend())

    gone = make()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("options", [{"schedule": "chaos"}, {"profile": "abacus"}])
def test_an_option_that_is_not_built_is_unsupported_and_lists_what_is(options):
    with pytest.raises(UnsupportedError, match="use one of"):
        CpuOptions(**options)


def test_one_virtual_device_is_refused():
    with pytest.raises(ValueError, match="two virtual devices or more"):
        CpuOptions(devices=1)


# -- two threads ------------------------------------------------------------------------------------------


def in_thread(work):
    """Run *work* in a thread; return the thread and what it raised, once it is done."""
    raised = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("kept", [True, False], ids=["a stream of another block", "the default stream"])
def test_what_two_threads_launch_on_a_current_stream_runs_one_after_the_other(cpu, kept):
    stream = devstream.Stream("cpu") if kept else devstream.default_stream("cpu")
    first, seen = Gate(), []
    with devstream.stream(stream):
        one, _ = in_thread(lambda: cpu.launch(first, stream))
        assert first.started.wait(30)
        launching = threading.Event()

        def second():
            launching.set()
            cpu.launch(lambda: seen.append(first.go.is_set()), stream)

        two, _ = in_thread(second)
        assert launching.wait(30)
        event = stream.record_event()
        assert not event.query()  # it comes after the first, which runs
        first.go.set()
        for thread in (one, two):
            thread.join(30)
            assert not thread.is_alive()
    assert seen == [True]
    event.synchronize()


def test_who_makes_a_stream_current_comes_after_what_another_thread_runs_on_it(cpu, side):
    gate, entered, leave, seen = Gate(), threading.Event(), threading.Event(), []

    def keep_current():
        with devstream.stream(side):
            entered.set()
            leave.wait(30)

    keeper, _ = in_thread(keep_current)
    assert entered.wait(30)
    launcher, _ = in_thread(lambda: cpu.launch(gate, side))
    assert gate.started.wait(30)

    def enter():
        with devstream.stream(side):
            seen.append(gate.go.is_set())

    late, _ = in_thread(enter)
    gate.go.set()
    leave.set()
    for thread in (keeper, launcher, late):
        thread.join(30)
        assert not thread.is_alive()
    assert seen == [True]


def test_an_inline_task_may_launch_on_its_own_stream_and_enter_it(cpu, side):
    seen = []

    def inner():
        with devstream.stream(side):
            seen.append("inner")

    with devstream.stream(side):
        thread, raised = in_thread(lambda: cpu.launch(lambda: cpu.launch(inner, side), side))
        thread.join(30)
    assert not thread.is_alive()
    assert raised == []
    assert seen == ["inner"]
    side.synchronize()


def test_the_error_of_an_inline_task_is_its_callers_and_not_the_streams(cpu, side):
    def fail():
        raise KeyError("in the task")

    with devstream.stream(side):
        with pytest.raises(KeyError, match="in the task"):
            cpu.launch(fail, side)
        cpu.launch(lambda: None, side)
    side.synchronize()


def test_under_strict_a_copy_on_a_stream_that_another_thread_computes_on_is_refused(side):
    entered, leave, x = threading.Event(), threading.Event(), torch.ones(4)

    def compute():
        with devstream.stream(side):
            entered.set()
            leave.wait(30)

    computing, _ = in_thread(compute)
    assert entered.wait(30)
    with strict():
        with pytest.raises(StreamInUseError, match=rf"'{re.escape(computing.name)}'.*stream of its own"):
            copy(x, "cpu", stream=side)
        copy(x, "cpu")[1].synchronize()
        leave.set()
        computing.join(30)
        there, ready = copy(x, "cpu", stream=side)
        with devstream.stream(side):
            copy(x, "cpu", stream=side)
    ready.synchronize()
    assert there.tolist() == [1] * 4


# -- the end of a process, of a latch, of an error ---------------------------------------------------------

LATE = """
import threading, torch, devstream
from devstream.overlap import copy

def late(warm):
    threading.main_thread().join()
    stream = devstream.Stream("cpu") if warm is None else warm
    there, ready = copy(torch.ones(2), "cpu", stream=stream)
    again, done = copy(there, "cpu", stream=stream)
    done.synchronize()
    try:
        copy(torch.ones(2), "cpu", stream=stream)
        devstream.backend("cpu").launch(lambda: 1 / 0, stream)
    except ZeroDivisionError:
        told.append((again.tolist(), ready.query(), stream.query()))

told, warm = [], devstream.Stream("cpu")
copy(torch.ones(2), "cpu", stream=warm)[1].synchronize()
late_ones = [threading.Thread(target=late, args=(one,)) for one in (warm, None)]

def tell():
    for thread in late_ones:
        thread.join()
    print(told)

for thread in (*late_ones, threading.Thread(target=tell)):
    thread.start()
"""


def test_a_thread_that_outlives_the_main_one_still_copies():
    done = subprocess.run(
        [sys.executable, "-c", LATE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.stdout.strip() == str([([1.0, 1.0], True, True)] * 2), done.stderr


def test_a_dropped_latch_lets_its_stream_go_on_and_says_so(cpu, side):
    latches = [cpu.hold(side)]
    event = side.record_event()
    with pytest.warns(LatchDroppedWarning, match=r"release\(\)"):
        latches.clear()
    thread, raised = in_thread(event.synchronize)
    thread.join(30)
    assert not thread.is_alive()
    assert raised == []


def test_a_released_latch_is_dropped_in_silence(cpu, side):
    latch = cpu.hold(side)
    latch.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del latch
        gc.collect()


def length(error):
    trace, count = error.__traceback__, 0
    while trace is not None:
        trace, count = trace.tb_next, count + 1
    return count


def test_an_error_that_is_raised_again_and_again_keeps_its_traceback(cpu, side):
    def fail():
        raise KeyError("in the task")

    cpu.launch(fail, side)
    done, lengths = side.record_event(), set()
    for _ in range(5):
        with pytest.raises(KeyError, match="in the task") as caught:
            done.synchronize()
        lengths.add(length(caught.value))
        assert any(entry.name == "fail" for entry in caught.traceback)
        with pytest.raises(KeyError), devstream.stream(side):
            pass
    assert len(lengths) == 1
    with pytest.raises(KeyError):
        side.synchronize()


# -- one queue, one stream ---------------------------------------------------------------------------------


def test_streams_of_two_backends_of_the_cpu_are_never_equal(cpu):
    other = CpuBackend()
    for index in range(2):
        ours, theirs = cpu.default_stream(index), other.default_stream(index)
        assert ours != theirs
        assert not ours == theirs  # noqa: SIM201 - the other operator
        assert len({ours, theirs}) == 2
    native = torch.Stream(stream_id=77_000_002, device_index=-1, device_type=cpu.torch_type)
    adopted = devstream.wrap(native)
    assert adopted == native
    assert native == adopted
    assert not adopted != native  # noqa: SIM202 - the other operator
    assert hash(native) == hash(adopted)
    assert adopted != "a stream"
