"""devstream/_streams.py: the verbs."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import devstream
from devstream import _observe, _registry
from devstream.backends.cpu import CpuBackend
from devstream.exceptions import DeviceMismatchError, StreamNotEnteredError, StreamTypeError


def cpu():
    return devstream.backend("cpu")


def native(stream_id, index=-1):
    return torch.Stream(stream_id=stream_id, device_index=index, device_type=cpu().torch_type)


@pytest.fixture
def base():
    """Return the stream that is current at the start, and see that it is so again at the end."""
    before = [devstream.current_stream("cpu:0"), devstream.current_stream("cpu:1")]
    yield devstream.current_stream("cpu")
    assert [devstream.current_stream("cpu:0"), devstream.current_stream("cpu:1")] == before
    assert cpu().current_index() == 0


def in_thread(function):
    """Run *function* in a new thread and return its result, or raise what it raised."""
    outcome = {}

    def run():
        try:
            outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


# -- current and default ---------------------------------------------------------------------------------


def test_a_block_makes_its_stream_current_and_gives_it(base):
    side = devstream.Stream("cpu")
    with devstream.stream(side) as inside:
        assert inside is side
        assert devstream.current_stream("cpu") is side
    assert devstream.current_stream("cpu") is base


def test_a_block_of_none_changes_nothing(base):
    with devstream.stream(None):
        assert devstream.current_stream("cpu") is base


def test_a_stream_of_another_device_makes_its_device_current(base):
    side = devstream.Stream("cpu:1")
    with devstream.stream(side):
        assert devstream.current_stream() is side
        assert devstream.current_stream("cpu:0") is base
        assert devstream.Stream().device == torch.device("cpu", 1)
    assert devstream.current_stream() is base


def test_nested_blocks_on_two_devices_restore_each_its_own(base):
    a0, b0 = devstream.Stream("cpu:0"), devstream.Stream("cpu:0")
    a1, b1 = devstream.Stream("cpu:1"), devstream.Stream("cpu:1")
    seen = []

    def look():
        return [devstream.current_stream("cpu:0"), devstream.current_stream("cpu:1"), devstream.current_stream()]

    with devstream.stream(a1):
        with devstream.stream(a0):
            with devstream.stream(b1):
                with devstream.stream(b0):
                    seen.append(look())
                seen.append(look())
            seen.append(look())
        seen.append(look())
    assert seen == [[b0, b1, b0], [a0, b1, b1], [a0, a1, a0], [base, a1, a1]]


def test_a_setter_holds_until_the_next_one(base):
    side = devstream.Stream("cpu")
    devstream.set_stream(side)
    try:
        assert devstream.current_stream("cpu") is side
        with devstream.stream(base):
            assert devstream.current_stream("cpu") is base
        assert devstream.current_stream("cpu") is side
    finally:
        devstream.set_stream(base)


def test_a_setter_inside_a_block_ends_with_the_block(base):
    with devstream.stream(devstream.Stream("cpu")):
        devstream.set_stream(devstream.Stream("cpu"))
    assert devstream.current_stream("cpu") is base


def test_the_default_stream_is_one_object_and_has_handle_zero():
    assert devstream.default_stream("cpu") is devstream.default_stream("cpu:0")
    assert devstream.default_stream("cpu").native_handle == 0
    assert devstream.default_stream("cpu:1") != devstream.default_stream("cpu:0")


@pytest.mark.parametrize("error", [KeyError("work"), KeyboardInterrupt(), SystemExit()])
def test_an_exception_leaves_a_block_as_it_found_it(base, error):
    with (
        pytest.raises(type(error)),
        devstream.stream(devstream.Stream("cpu:1")),
        devstream.stream(devstream.Stream("cpu")),
    ):
        raise error


# -- blocks that are left out of order -------------------------------------------------------------------


def block_of(stream):
    with devstream.stream(stream):
        yield devstream.current_stream("cpu")
    yield devstream.current_stream("cpu")


def test_generators_that_leave_their_blocks_in_any_order_leave_the_first_stream_current(base):
    streams = [devstream.Stream("cpu"), devstream.Stream("cpu:1"), devstream.Stream("cpu")]
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
        generators = [block_of(stream) for stream in streams]
        for generator in generators:
            next(generator)
        for i in order:
            next(generators[i])
        assert devstream.current_stream("cpu:0") is base, order
        assert devstream.current_stream() is base, order


def test_two_generators_with_one_stream_leave_the_first_stream_current(base):
    side = devstream.Stream("cpu")
    first, second = block_of(side), block_of(side)
    assert next(first) is side
    assert next(second) is side
    assert next(first) is side
    assert next(second) is base


def test_leaving_a_block_restores_what_was_current_before_it_though_a_later_one_is_open(base):
    outer, inner = devstream.Stream("cpu"), devstream.Stream("cpu")
    generator = block_of(inner)
    with devstream.stream(outer):
        next(generator)
    assert devstream.current_stream("cpu") is base
    assert next(generator) is base


def test_a_generator_that_is_dropped_inside_its_block_restores(base):
    generator = block_of(devstream.Stream("cpu"))
    next(generator)
    del generator
    gc.collect()
    assert devstream.current_stream("cpu") is base


def test_a_block_that_is_left_in_another_thread_is_an_error_that_names_the_thread(base):
    side = devstream.Stream("cpu")
    generator = block_of(side)
    next(generator)
    with pytest.raises(StreamNotEnteredError, match=r"Thread-\d+") as caught:
        in_thread(lambda: next(generator))
    assert repr(side) in str(caught.value)
    assert devstream.current_stream("cpu") is side
    side.__exit__(None, None, None)


def test_leaving_a_block_that_was_never_entered_is_an_error(base):
    with pytest.raises(StreamNotEnteredError, match="MainThread"):
        devstream.Stream("cpu").__exit__(None, None, None)


# -- threads ---------------------------------------------------------------------------------------------


def test_eight_threads_that_switch_and_fail_never_see_each_other():
    backend, rounds, problems = cpu(), 200, []
    start = threading.Barrier(8)
    shared = [devstream.Stream("cpu"), devstream.Stream("cpu:1")]

    def work():
        mine = [devstream.Stream("cpu"), devstream.Stream("cpu:1"), *shared]
        event = devstream.Event("cpu")
        start.wait()
        for i in range(rounds):
            a, b = mine[i % 4], mine[(i + i // 4) % 4]
            try:
                with devstream.stream(a):
                    before = devstream.current_stream()
                    try:
                        with devstream.stream(b):
                            if devstream.current_stream() is not b:
                                problems.append("inner")
                            own = devstream.Event("cpu")
                            own.record()
                            a.wait_event(own)
                            raise KeyError(i)
                    except KeyError:
                        pass
                    if devstream.current_stream() is not before:
                        problems.append("after an exception")
                    if i % 3 == 0:
                        raise ValueError(i)
            except ValueError:
                pass
            if devstream.current_stream("cpu:0").native_handle or devstream.current_stream("cpu:1").native_handle:
                problems.append("outer")
            if backend.current_index() != 0:
                problems.append("device")
        event.record()
        event.synchronize()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_two_threads_that_use_one_stream_lose_no_edge():
    side, source = devstream.Stream("cpu"), devstream.Stream("cpu")
    for _ in range(100):
        latch = cpu().hold(source)
        held = source.record_event()
        start = threading.Barrier(3)

        def records(start=start):
            start.wait()
            for _ in range(20):
                side.record_event()

        threads = [threading.Thread(target=records) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        side.wait_event(held)
        for thread in threads:
            thread.join()
        assert not side.query()
        latch.release()
        side.synchronize()


def test_a_stream_that_was_current_in_an_ended_thread_is_current_nowhere():
    side, source = devstream.Stream("cpu"), devstream.Stream("cpu")
    in_thread(lambda: devstream.set_stream(side))
    go = threading.Event()
    cpu().launch(go.wait, source)
    done = source.record_event()
    side.wait_event(done)  # would block for ever if a thread that is gone were thought to issue work to it
    assert not side.query()
    go.set()
    side.synchronize()


def test_what_a_thread_made_current_is_collected_with_the_thread():
    def use():
        side = devstream.Stream("cpu")
        devstream.set_stream(side)
        return weakref.ref(side)

    gone = in_thread(use)
    gc.collect()
    assert gone() is None


# -- carry_streams ---------------------------------------------------------------------------------------


def test_carried_streams_are_current_on_every_device_and_the_thread_gets_its_own_back():
    one, two = devstream.Stream("cpu:0"), devstream.Stream("cpu:1")

    def look():
        return [devstream.current_stream("cpu:0"), devstream.current_stream("cpu:1"), devstream.current_stream()]

    with devstream.stream(two), devstream.stream(one):
        carried = devstream.carry_streams(look)

    def run():
        own = devstream.Stream("cpu:1")
        with devstream.stream(own):
            inside = carried()
            return inside, look()[1:] == [own, own]

    inside, restored = in_thread(run)
    assert inside == [one, two, one]
    assert restored


def test_carried_streams_are_restored_after_an_exception():
    with devstream.stream(devstream.Stream("cpu:1")):

        def fail():
            raise KeyError("work")

        carried = devstream.carry_streams(fail)

    def run():
        with pytest.raises(KeyError):
            carried()
        return devstream.current_stream().native_handle, cpu().current_index()

    assert in_thread(run) == (0, 0)


def test_a_carried_function_keeps_its_name_its_arguments_and_its_result():
    def add(a, b=2):
        """Add."""
        return a + b

    carried = devstream.carry_streams(add)
    assert carried(1, b=4) == 5
    assert carried.__name__ == "add"
    assert list(inspect.signature(carried).parameters) == ["a", "b"]


def test_streams_of_every_backend_in_use_are_carried():
    class Other(CpuBackend):
        name = "other"
        device_type = "meta"  # some type of torch's that nobody else serves

    other = Other()
    _registry.register("meta", lambda: other)
    try:
        ours, theirs = devstream.Stream("cpu"), devstream.Stream("meta")
        with devstream.stream(theirs), devstream.stream(ours):
            carried = devstream.carry_streams(lambda: (devstream.current_stream("cpu"), other.current_stream(0)))
        assert in_thread(carried) == (ours, theirs)
        assert in_thread(lambda: other.current_stream(0)) is other.default_stream(0)
    finally:
        _registry.unregister("meta")


# -- named streams ---------------------------------------------------------------------------------------


def test_a_named_stream_is_one_a_purpose_and_device():
    first = devstream.named_stream("prefetch", "cpu")
    assert devstream.named_stream("prefetch", "cpu:0") is first
    others = [
        devstream.named_stream("offload", "cpu"),
        devstream.named_stream("prefetch", "cpu:1"),
        devstream.default_stream("cpu"),
        devstream.Stream("cpu"),
    ]
    assert first not in others


def test_a_named_stream_is_made_once_by_threads_that_ask_at_once():
    start = threading.Barrier(8)
    found = []

    def ask():
        start.wait()
        found.append(devstream.named_stream("eight at once", "cpu"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(stream) for stream in found}) == 1


def test_a_named_stream_belongs_to_the_backend_that_is_chosen_at_the_call():
    class Other(CpuBackend):
        name = "other"

    before = devstream.named_stream("a purpose", "cpu")
    for _ in range(2):  # the second backend under this name is another one
        _registry.register("other", Other)
        try:
            with _registry.chosen("other") as backend:
                inside = devstream.named_stream("a purpose", "cpu")
                assert inside._backend is backend
        finally:
            _registry.unregister("other")
    assert devstream.named_stream("a purpose", "cpu") is before


@pytest.mark.parametrize("purpose", ["", None, 3, b"copy", ["copy"]])
def test_a_purpose_that_is_no_text_is_a_type_error(purpose):
    with pytest.raises(StreamTypeError, match="a non-empty str as purpose"):
        devstream.named_stream(purpose, "cpu")


# -- memory, facts, wrap ---------------------------------------------------------------------------------


def test_recording_a_tensor_on_a_stream_reports_it(base):
    seen = []
    tensor, side = torch.ones(2), devstream.Stream("cpu")
    with _observe.subscribe(seen.append):
        devstream.record_stream(tensor, side)
    (notice,) = seen
    assert notice.tensor is tensor
    assert notice.stream is side


def test_recording_a_tensor_of_another_device_type_names_both():
    with pytest.raises(DeviceMismatchError, match=r"the tensor is on meta, but the stream is on cpu:0"):
        devstream.record_stream(torch.ones(2, device="meta"), devstream.Stream("cpu"))


def test_the_devices_of_the_cpu_come_last_and_are_two():
    found = devstream.devices()
    assert [spec.device for spec in found[-2:]] == [torch.device("cpu", 0), torch.device("cpu", 1)]
    assert all(spec.memory_bytes > 0 and spec.priority_range == (0, 0) for spec in found[-2:])


def test_capabilities_are_asked_of_a_device_or_of_a_stream():
    for item in ("cpu", torch.device("cpu", 1), devstream.Stream("cpu:1"), native(0)):
        assert devstream.Capability.TIMING in devstream.capabilities(item)
        assert devstream.Capability.IPC_EVENTS not in devstream.capabilities(item)


def test_a_native_stream_is_wrapped_as_the_queue_of_its_id(base):
    side = devstream.Stream("cpu")
    assert devstream.wrap(side) is side
    assert devstream.wrap(native(side.stream_id)) is side
    assert devstream.wrap(native(side.stream_id), "cpu:0") is side
    assert devstream.wrap(torch.Stream("cpu")) is devstream.default_stream("cpu")
    with devstream.stream(native(side.stream_id)):
        assert devstream.current_stream("cpu") is side


def test_a_native_stream_with_index_zero_is_the_same_queue_as_one_with_index_minus_one():
    side = devstream.Stream("cpu")
    assert devstream.wrap(native(side.stream_id, 0)) is side
    assert devstream.wrap(native(side.stream_id, 1)) is not side


def test_streams_are_equal_and_hash_alike_exactly_when_they_are_one_queue():
    one, two, far = devstream.Stream("cpu"), devstream.Stream("cpu"), devstream.Stream("cpu:1")
    assert one == native(one.stream_id)
    assert native(one.stream_id) == one
    assert hash(native(one.stream_id)) == hash(one)
    assert far == native(far.stream_id, 1)
    assert len({one, two, far, native(one.stream_id), native(two.stream_id), native(far.stream_id, 1)}) == 3
    assert one != two
    assert one != native(two.stream_id)
    assert one != far
    assert one != one.stream_id
    assert devstream.default_stream("cpu") == torch.Stream("cpu")


def test_a_native_stream_of_a_device_that_does_not_exist_is_an_error():
    with pytest.raises(DeviceMismatchError, match=r"it is on cpu:5.*the CPU has 2 virtual devices"):
        devstream.wrap(native(9, 5))


def test_a_handle_is_wrapped_while_its_stream_lives():
    side = devstream.Stream("cpu:1")
    handle = side.native_handle
    assert devstream.wrap(handle, "cpu:1") is side
    assert devstream.wrap(0, "cpu:1") is devstream.default_stream("cpu:1")
    with pytest.raises(ValueError, match=rf"no live stream of cpu:0 has the handle {handle}"):
        devstream.wrap(handle, "cpu:0")
    del side
    gc.collect()
    with pytest.raises(ValueError, match=rf"no live stream of cpu:1 has the handle {handle}"):
        devstream.wrap(handle, "cpu:1")


def test_wrapping_for_another_device_names_both():
    with pytest.raises(DeviceMismatchError, match=r"the stream is on cpu:1, but device='cpu:0' was asked for"):
        devstream.wrap(devstream.Stream("cpu:1"), "cpu:0")


def test_synchronize_waits_for_streams_that_nobody_holds_any_more():
    done, go = [], threading.Event()

    def task():
        go.wait()
        done.append(True)

    side = devstream.Stream("cpu")
    cpu().launch(task, side)
    del side
    gc.collect()
    go.set()
    devstream.synchronize("cpu")
    assert done == [True]


def test_synchronize_of_one_device_leaves_the_other_alone():
    latch = cpu().hold(far := devstream.Stream("cpu:1"))
    devstream.synchronize("cpu:0")
    assert not far.query()
    latch.release()
    devstream.synchronize("cpu:1")
    assert far.query()


FORKED_UNDER_LOCKS = """
import os, threading
from contextlib import ExitStack
import devstream, torch
from devstream import _observe, _registry, _trace_ops
from devstream._compat import dynamo, dynamo_graph
from devstream.backends import _cuda_latch
from devstream.overlap import _copy
from devstream.testing import _cpu, strict

taken, go_on = threading.Event(), threading.Event()

def hold():
    with ExitStack() as locks:
        for lock in (
            _registry._lock, _observe._lock, _copy._lock, _trace_ops._lock, dynamo._lock, dynamo_graph._drop_lock,
            _cuda_latch._words_lock, _cpu._depth_lock,
        ):
            locks.enter_context(lock)
        taken.set()
        go_on.wait()

devstream.current_stream("cpu")
threading.Thread(target=hold, daemon=True).start()
taken.wait()
child = os.fork()
if child == 0:
    devstream.named_stream("after the fork", "cpu")
    with _observe.subscribe(print):
        pass
    _registry.load("cpu")
    _copy.copy(torch.ones(2), "cpu")[1].synchronize()
    with strict():
        pass
    _trace_ops.namespace()
    dynamo.add_stream_classes([])
    free = (dynamo_graph._drop_lock.acquire(blocking=False), _cuda_latch._words_lock.acquire(blocking=False))
    os._exit(0 if free == (True, True) else 1)
pid, status = os.waitpid(child, 0)
go_on.set()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_child_forked_while_a_thread_held_the_locks_goes_on():
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED_UNDER_LOCKS],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.stdout.strip() == "0", found.stderr
