"""What CUDA adds to the laws of the kit: other libraries, handles, processes, graphs. Runs on ROCm's build too."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devstream
from devstream.backends.cuda import CudaBackend
from devstream.exceptions import CaptureError, ForkedProcessError, IpcHandleError, StreamTypeError

pytestmark = pytest.mark.cuda

N = 1 << 16


@pytest.fixture
def cuda() -> Iterator[CudaBackend]:
    backend = devstream.backend("cuda")
    assert isinstance(backend, CudaBackend)
    # The first launch of a kernel loads it, which waits for the whole device: not behind a latch.
    torch.zeros(N, device="cuda").fill_(1).mul_(2).add_(1).sum().item()
    yield backend
    torch.accelerator.synchronize()


class External:
    """A stream made by CUDA's runtime directly, as another library would make it."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        create = self._find("cudaStreamCreateWithFlags")
        assert create(ctypes.byref(handle), 1) == 0
        assert handle.value is not None
        self.handle = handle.value

    def _find(self, name: str) -> Any:
        for path in (None, "libcudart.so.13", "libcudart.so.12"):
            try:
                return getattr(ctypes.CDLL(path), name)
            except (OSError, AttributeError):
                continue
        pytest.fail("CUDA's runtime library is loaded by torch but can't be found")

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


# -- handles ---------------------------------------------------------------------------------------------


def test_handle_0_is_the_default_stream(cuda: CudaBackend) -> None:
    """B33 of the bug log."""
    assert devstream.wrap(0, "cuda") == devstream.default_stream("cuda")
    assert devstream.wrap(0, "cuda").native_handle == 0


def test_the_handle_is_cudas_and_not_the_id(cuda: CudaBackend) -> None:
    """B34 of the bug log."""
    native = torch.cuda.Stream()
    stream = devstream.wrap(native)
    assert stream.native_handle == native.cuda_stream == stream.cuda_stream
    assert devstream.default_stream("cuda").native_handle == 0
    assert not hasattr(stream, "handle")


def test_one_queue_is_one_stream_whatever_it_came_as(cuda: CudaBackend) -> None:
    native = torch.cuda.Stream()
    seen = [
        devstream.wrap(native),
        devstream.wrap(native.cuda_stream, "cuda"),
        devstream.wrap(torch.cuda.ExternalStream(native.cuda_stream)),
        devstream.wrap(torch.Stream(stream_id=native.stream_id, device_index=0, device_type=native.device_type)),
    ]
    with devstream.stream(native):
        seen.append(devstream.current_stream())
    assert all(one == other for one in seen for other in seen)
    assert len(set(seen)) == 1
    assert devstream.Stream("cuda") not in seen


def test_an_external_stream_is_equal_to_itself_and_orders(cuda: CudaBackend) -> None:
    maker = External()
    one, two = devstream.wrap(maker.handle, "cuda"), devstream.wrap(maker)
    assert one == two
    assert hash(one) == hash(two)
    assert one.native_handle == maker.handle
    values = torch.zeros(N, device="cuda")
    torch.accelerator.synchronize()
    latch = cuda.hold(one)
    with devstream.stream(one):
        values.fill_(3)
    done = two.record_event()
    side = devstream.Stream("cuda")
    side.wait_event(done)
    with devstream.stream(side):
        total = values.sum()
    assert not side.query()
    latch.release()
    side.synchronize()
    assert total.item() == 3 * N


def test_a_wrapped_object_lives_as_long_as_its_stream(cuda: CudaBackend) -> None:
    maker = External()
    alive = weakref.ref(maker)
    stream = devstream.wrap(maker)
    del maker
    gc.collect()
    assert alive() is not None
    del stream
    gc.collect()
    assert alive() is None


def test_another_version_of_the_stream_protocol_is_refused(cuda: CudaBackend) -> None:
    class Later:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (7, 0)

    with pytest.raises(StreamTypeError, match="version 7"):
        devstream.wrap(Later())


def test_our_stream_answers_the_stream_protocol(cuda: CudaBackend) -> None:
    stream = devstream.Stream("cuda")
    assert stream.__cuda_stream__() == (0, stream.native_handle)


# -- native objects of torch and other libraries ---------------------------------------------------------


def _producer(cuda: CudaBackend) -> tuple[Any, torch.Tensor, Any]:
    producer, values = devstream.Stream("cuda"), torch.zeros(N, device="cuda")
    torch.accelerator.synchronize()
    latch = cuda.hold(producer)
    with devstream.stream(producer):
        values.fill_(1)
    return producer, values, latch


EVENTS = {
    "ours": lambda: devstream.Event("cuda"),
    "ours, timed": lambda: devstream.Event("cuda", enable_timing=True),
    "ours, blocking": lambda: devstream.Event("cuda", blocking=True),
    "ours, interprocess": lambda: devstream.Event("cuda", interprocess=True),
    "torch.Event": lambda: torch.Event("cuda"),
    "torch.cuda.Event": torch.cuda.Event,
    "torch.cuda.Event, timed": lambda: torch.cuda.Event(enable_timing=True),
}
STREAMS = {
    "ours": lambda: devstream.Stream("cuda"),
    "current": lambda: devstream.current_stream("cuda"),
    "torch.Stream": lambda: torch.Stream("cuda"),
    "torch.cuda.Stream": torch.cuda.Stream,
    "external": External,
}


@pytest.mark.parametrize("event_kind", EVENTS)
@pytest.mark.parametrize("stream_kind", STREAMS)
@pytest.mark.parametrize("way", ["stream.wait_event", "event.wait"])
def test_every_pair_of_a_stream_and_an_event_orders(
    cuda: CudaBackend, stream_kind: str, event_kind: str, way: str
) -> None:
    consumer, event = STREAMS[stream_kind](), EVENTS[event_kind]()
    if way == "event.wait" and (stream_kind == "external" and not event_kind.startswith("ours")):
        consumer = devstream.wrap(consumer)  # a native event knows nothing of the stream protocol
    producer, values, latch = _producer(cuda)
    producer.record_event(event)
    if way == "event.wait":
        event.wait(consumer)
    else:
        devstream.wrap(consumer).wait_event(event)
    with devstream.stream(consumer):
        total = values.sum()
    behind = devstream.wrap(consumer).record_event()
    assert not behind.query()
    latch.release()
    behind.synchronize()
    assert total.item() == N


def test_without_an_edge_nothing_waits(cuda: CudaBackend) -> None:
    consumer = devstream.Stream("cuda")
    _, values, latch = _producer(cuda)
    with devstream.stream(consumer):
        total = values.sum()
    consumer.synchronize()
    assert total.item() == 0
    latch.release()


@pytest.mark.parametrize("kind", [k for k in STREAMS if k != "external"])
def test_wait_stream_takes_every_stream(cuda: CudaBackend, kind: str) -> None:
    producer, values, latch = _producer(cuda)
    consumer = STREAMS[kind]()
    consumer.wait_stream(producer)
    behind = devstream.wrap(consumer).record_event()
    assert not behind.query()
    latch.release()
    behind.synchronize()
    assert values.sum().item() == N


def test_a_torch_stream_refuses_our_event_and_takes_its_wait(cuda: CudaBackend) -> None:
    native, event = torch.Stream("cuda"), devstream.Event("cuda")
    event.record()
    for _ in range(100):
        with pytest.raises(RuntimeError):
            native.wait_event(event)
    event.wait(native)


def test_cupy_takes_our_stream_and_we_take_cupys(cuda: CudaBackend) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not among the test packages of every machine")
    float(cupy.from_dlpack(torch.ones(N, device="cuda")).sum())  # loads its kernels, which waits for all streams
    producer, values, latch = _producer(cuda)
    theirs = cupy.cuda.ExternalStream(producer.native_handle)
    with theirs:
        total = cupy.from_dlpack(values).sum()
    latch.release()
    theirs.synchronize()
    assert float(total) == N
    foreign = cupy.cuda.Stream(non_blocking=True)
    assert devstream.wrap(foreign).native_handle == foreign.ptr


def test_cuda_core_takes_our_stream_and_we_take_its(cuda: CudaBackend) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not among the test packages of every machine")
    device = core.Device(0)
    device.set_current()
    stream = devstream.Stream("cuda")
    assert int(device.create_stream(stream).handle) == stream.native_handle
    foreign = device.create_stream()
    assert devstream.wrap(foreign).native_handle == int(foreign.handle)


def test_dlpack_on_a_side_stream_orders_as_its_protocol_says(cuda: CudaBackend) -> None:
    """B37 of the bug log: the consumer says its stream's number, the producer makes that stream wait."""
    producer, values, latch = _producer(cuda)
    consumer = devstream.Stream("cuda")
    with devstream.stream(producer):
        capsule = values.__dlpack__(stream=cuda.dlpack_stream(consumer))
    with devstream.stream(consumer):
        total = torch.from_dlpack(capsule).sum()
    assert not consumer.query()
    latch.release()
    consumer.synchronize()
    assert total.item() == N
    default = cuda.dlpack_stream(devstream.default_stream("cuda"))
    assert default == (0 if cuda.name == "rocm" else 1)


def test_triton_launches_on_our_current_stream(cuda: CudaBackend) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds on Linux only")
    compiled = torch.compile(lambda x: x * 2 + 1)
    values = torch.ones(N, device="cuda")
    compiled(values)
    torch.accelerator.synchronize()
    side = devstream.Stream("cuda")
    latch = cuda.hold(side)
    with devstream.stream(side):
        result = compiled(values)
    assert not side.query()
    latch.release()
    side.synchronize()
    assert result.sum().item() == 3 * N


def test_torch_distributed_takes_our_current_stream(cuda: CudaBackend, tmp_path: Any) -> None:
    dist = torch.distributed
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        values = torch.ones(4, device="cuda")
        dist.all_reduce(values)  # the first one opens the communicator
        side = devstream.Stream("cuda")
        side.wait_stream(devstream.current_stream())
        with devstream.stream(side):
            values.mul_(3)
            dist.all_reduce(values)
        side.synchronize()
        assert values.tolist() == [3.0] * 4
    finally:
        dist.destroy_process_group()


def test_the_profiler_sees_the_kernel_on_our_stream(cuda: CudaBackend) -> None:
    side = devstream.Stream("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler warns about its own cycles
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.ones(N, device="cuda").mul_(2)
            with devstream.stream(side):
                torch.ones(N, device="cuda").mul_(2)
            devstream.synchronize("cuda")
        used = {event.device_resource_id for event in profile.events() if "elementwise" in event.name}
    assert len(used) == 2


# -- graphs ----------------------------------------------------------------------------------------------


def test_a_capture_follows_our_streams_and_events(cuda: CudaBackend) -> None:
    values, side = torch.ones(8, device="cuda"), devstream.Stream("cuda")
    graph = torch.cuda.CUDAGraph()
    fork, join = devstream.Event("cuda"), devstream.Event("cuda")
    with torch.cuda.graph(graph, stream=devstream.Stream("cuda")):
        fork.record()
        with devstream.stream(side):
            fork.wait()
            doubled = values * 2
            join.record()
        devstream.current_stream().wait_event(join)
        result = doubled + 1
    values.fill_(5)
    graph.replay()
    devstream.synchronize("cuda")
    assert result.tolist() == [11.0] * 8


def test_a_question_during_a_capture_is_refused_and_the_capture_survives(cuda: CudaBackend) -> None:
    """B59 of the bug log."""
    values, other, event = torch.ones(8, device="cuda"), devstream.Stream("cuda"), devstream.Event("cuda")
    event.record(other)
    devstream.synchronize("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = values + 1
        for question in (event.query, event.synchronize, other.query, other.synchronize):
            with pytest.raises(CaptureError, match="capture"):
                question()
    graph.replay()
    devstream.synchronize("cuda")
    assert result.tolist() == [2.0] * 8


# -- events ----------------------------------------------------------------------------------------------


def test_wait_returns_at_once_and_synchronize_holds(cuda: CudaBackend) -> None:
    """B29 of the bug log."""
    side, event = devstream.Stream("cuda"), devstream.Event("cuda", blocking=True)
    latch = cuda.hold(side)
    event.record(side)
    event.wait(devstream.Stream("cuda"))  # returns though the event can't happen before the release below
    assert not event.query()
    released = threading.Event()

    def release() -> None:
        released.set()
        latch.release()

    threading.Thread(target=release).start()
    event.synchronize()
    assert released.is_set()


def test_a_blocking_event_burns_no_processor_time(cuda: CudaBackend) -> None:
    side, event = devstream.Stream("cuda"), devstream.Event("cuda", blocking=True)
    clock = [devstream.Event("cuda", enable_timing=True) for _ in range(2)]
    clock[0].record(side)
    with devstream.stream(side):
        torch.cuda._sleep(400_000_000)
    event.record(side)
    clock[1].record(side)
    before = os.times()
    event.synchronize()
    after = os.times()
    clock[1].synchronize()
    worked_ms = (after.user + after.system - before.user - before.system) * 1000
    assert worked_ms < 0.5 * clock[0].elapsed_time(clock[1])


def test_elapsed_time_says_what_to_do_and_then_tells_milliseconds(cuda: CudaBackend) -> None:
    """B25 of the bug log."""
    side = devstream.Stream("cuda")
    start, end = (devstream.Event("cuda", enable_timing=True, blocking=b) for b in (False, True))
    native = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    latch = cuda.hold(side)
    with devstream.stream(side):
        native[0].record()
        start.record()
        torch.cuda._sleep(50_000_000)
        end.record()
        native[1].record()
    with pytest.raises(RuntimeError, match="synchronize"):
        start.elapsed_time(end)
    latch.release()
    end.synchronize()
    native[1].synchronize()
    assert start.elapsed_time(end) == pytest.approx(native[0].elapsed_time(native[1]), rel=0.2)


def test_opening_ones_own_interprocess_event_is_refused(cuda: CudaBackend) -> None:
    """B78 of the bug log."""
    event = devstream.Event("cuda", interprocess=True)
    with pytest.raises(IpcHandleError, match="another"):
        devstream.Event.from_ipc_handle("cuda", event.ipc_handle())
    assert torch.ones(3, device="cuda").sum().item() == 3.0  # the driver's error doesn't stick


def _wait_abroad(handle: bytes, pipe: Any) -> None:
    event = devstream.Event.from_ipc_handle("cuda", handle)
    side = devstream.Stream("cuda")
    side.wait_event(event)
    behind = side.record_event()
    pipe.send(behind.query())
    pipe.recv()
    behind.synchronize()
    pipe.send(behind.query())


def test_another_process_waits_for_an_interprocess_event(cuda: CudaBackend) -> None:
    event, side = devstream.Event("cuda", interprocess=True), devstream.Stream("cuda")
    handle = event.ipc_handle()
    latch = cuda.hold(side)
    event.record(side)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_wait_abroad, args=(handle, there))
    process.start()
    assert here.recv() is False
    latch.release()
    here.send("released")
    assert here.recv() is True
    process.join()
    assert process.exitcode == 0


# -- many ------------------------------------------------------------------------------------------------


def test_priorities_are_clamped_to_the_devices_range(cuda: CudaBackend) -> None:
    """B35 of the bug log."""
    lowest, highest = cuda.priority_range(0)
    assert (lowest, highest) == ((0, -1) if cuda.name == "rocm" else (0, -3))
    assert devstream.Stream("cuda", priority=10).priority == lowest
    assert devstream.Stream("cuda", priority=-100).priority == highest
    assert devstream.Stream("cuda", priority="high").priority == highest


def test_40_epochs_through_a_named_stream_reserve_one_block(cuda: CudaBackend) -> None:
    """B11 of the bug log."""
    torch.accelerator.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(40):
        with devstream.stream(devstream.named_stream("prefetch", "cuda")):
            block = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        del block
    assert torch.cuda.memory_reserved() - before <= 64 << 20


def test_8_threads_switch_streams_without_meeting(cuda: CudaBackend) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        streams = [devstream.Stream("cuda") for _ in range(3)]
        default = devstream.default_stream("cuda")
        for turn in range(2000):
            mine = streams[turn % 3]
            try:
                with devstream.stream(mine):
                    if devstream.current_stream() != mine:
                        wrong.append(f"thread {number} turn {turn}")
                    if turn % 5 == 0:
                        raise KeyError(turn)
            except KeyError:
                pass
            if devstream.current_stream() != default:
                wrong.append(f"thread {number} after turn {turn}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_100_000_events_made_and_dropped_leave_nothing(cuda: CudaBackend) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    side = devstream.Stream("cuda")

    def many(count: int) -> None:
        for _ in range(count):
            devstream.Event("cuda").record(side)
        side.synchronize()

    many(20_000)
    before = resident()
    many(100_000)
    gc.collect()
    assert resident() - before < 16 << 20


def test_a_forked_child_that_touches_the_device_is_told_so(cuda: CudaBackend) -> None:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks of threaded programs
        child = os.fork()
    if child == 0:
        try:
            devstream.Stream("cuda")
            text = "no error"
        except ForkedProcessError as error:
            text = str(error)
        except BaseException as error:  # the child must end here whatever comes
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reading, 4096).decode()
    assert "spawn" in text
    assert text.startswith("create_stream") or "forked child" in text
    assert devstream.Stream("cuda").query()  # the parent isn't affected
