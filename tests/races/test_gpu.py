"""devstream/races/gpu.py and _compat/gpu_trace.py: what torch itself tells of a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

import devstream
from devstream._compat import gpu_trace
from devstream.races.checker import Checker, Work
from devstream.races.collectives import Collectives
from devstream.races.gpu import GpuListener
from devstream.races.lanes import Lanes
from devstream.races.order import HOST
from devstream.races.sites import NOWHERE


@pytest.fixture
def checker():
    return Checker(lambda race: None)


@pytest.fixture
def listener(checker):
    """A listener whose GPU is the CPU: its handles are the ids of streams."""
    lanes = Lanes(checker.order)
    return GpuListener("cpu", checker, lanes, Collectives(checker, lanes, lanes.of_tensor))


def test_a_native_record_and_wait_are_an_edge(checker, listener):
    one, two = (listener._lanes.of_handle("cpu", 0, handle) for handle in (71, 72))
    stamp = checker.order.tick(one)
    listener.gpu_record(5, 71)
    listener.gpu_wait(5, 72)
    assert checker.order.clocks.knows(two, stamp)


def test_a_destroyed_event_orders_nothing_when_its_handle_comes_again(checker, listener):
    one, two = (listener._lanes.of_handle("cpu", 0, handle) for handle in (71, 72))
    stamp = checker.order.tick(one)
    listener.gpu_record(5, 71)
    listener.gpu_forget_event(5)
    listener.gpu_wait(5, 72)
    assert not checker.order.clocks.knows(two, stamp)


@pytest.mark.parametrize(
    "block", [lambda g: g.gpu_sync_event(5), lambda g: g.gpu_sync_stream(71), lambda g: g.gpu_sync_device()]
)
def test_a_native_synchronization_holds_the_host(checker, listener, block):
    lane = listener._lanes.of_handle("cpu", 0, 71)
    stamp = checker.order.tick(lane)
    listener.gpu_record(5, 71)
    block(listener)
    assert checker.order.clocks.knows(HOST, stamp)


def test_a_handle_and_a_stream_object_of_one_queue_are_one_lane(listener):
    side = devstream.Stream("cpu")
    assert listener._lanes.of_handle("cpu", 0, side.native_handle) == listener._lanes.of_stream(side)
    assert listener._lanes.of_handle("cpu", 0, 0) == listener._lanes.of_stream(devstream.default_stream("cpu"))


def test_a_collective_is_on_the_stream_whose_event_its_issue_records(checker, listener):
    collectives = listener._collectives
    here, other = (listener._lanes.of_handle("cpu", 0, handle) for handle in (71, 72))
    x = torch.ones(4)
    collectives._issuing = ([(x, True)], "allreduce_", NOWHERE, here)
    listener.gpu_record(4, 71)  # the issuer's own event comes first
    listener.gpu_wait(4, 72)
    listener.gpu_record(5, 72)
    memory = checker.memory_of(x.untyped_storage())
    assert [one.stamp.lane for one in memory.history.writes] == [other]
    listener.gpu_wait(5, 71)  # work.wait()
    checker.touch(x, x.untyped_storage(), Work(checker.order, here, "add", NOWHERE), write=False)
    assert checker.races == []


def test_every_torch_that_we_support_has_the_hooks():
    assert gpu_trace.has_gpu_trace()


def test_the_hooks_are_taken_out_again():
    module = importlib.import_module("torch.cuda._gpu_trace")
    told = []

    class Listener:
        def __getattr__(self, name):
            return lambda *handles: told.append((name, handles))

    before = [list(getattr(module, name).callback_list) for name in gpu_trace._HOOKS]
    trace = gpu_trace.GpuTrace(Listener())
    module.EventRecordCallbacks.fire_callbacks(3, 4)
    module.DeviceSynchronizationCallbacks.fire_callbacks()
    trace.close()
    trace.close()
    module.EventRecordCallbacks.fire_callbacks(5, 6)
    assert told == [("gpu_record", (3, 4)), ("gpu_sync_device", ())]
    assert [list(getattr(module, name).callback_list) for name in gpu_trace._HOOKS] == before


# -- on a GPU --------------------------------------------------------------------------------------------


def racy_on_cuda(edge):
    """Run a native producer and consumer with *edge* between them, and return the races."""
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with devstream.racecheck(on_race="collect") as races:
        torch.cuda.synchronize()
        with torch.cuda.stream(producer):
            x = torch.ones(1 << 10, device="cuda")
        edge(producer, consumer)
        with torch.cuda.stream(consumer):
            y = x * 2
        torch.cuda.synchronize()
    del x, y
    return races


def cuda_event(producer, consumer):
    event = torch.cuda.Event()
    event.record(producer)
    event.wait(consumer)


def generic_event(producer, consumer):
    event = torch.Event(device="cuda")
    event.record(producer)
    event.wait(consumer)


NATIVE_EDGES = {
    "torch.cuda.Event": cuda_event,
    "torch.Event": generic_event,
    "wait_stream": lambda producer, consumer: consumer.wait_stream(producer),
    "stream.synchronize": lambda producer, consumer: producer.synchronize(),
    "event.synchronize": lambda producer, consumer: producer.record_event().synchronize(),
    "torch.cuda.synchronize": lambda producer, consumer: torch.cuda.synchronize(),
}


@pytest.mark.cuda
@pytest.mark.parametrize("edge", NATIVE_EDGES.values(), ids=NATIVE_EDGES)
def test_native_edges_are_seen(edge):
    assert racy_on_cuda(edge) == []


@pytest.mark.cuda
def test_a_missing_native_edge_is_found():
    (race,) = racy_on_cuda(lambda producer, consumer: None)
    assert race.notes == ()


@pytest.mark.cuda
def test_the_lines_of_a_backward_in_autograd_s_thread_are_the_caller_s():
    side = devstream.Stream("cuda")
    with devstream.racecheck(on_race="collect") as races:
        x = torch.ones(1 << 10, device="cuda", requires_grad=True)
        y = (x * 2).sum()
        y.backward()
        with devstream.stream(side):
            x.grad * 1
    assert [race.first.site.text for race in races] == ["y.backward()"]


@pytest.mark.cuda
def test_a_captured_graph_is_checked_while_it_is_captured():
    x = torch.ones(1 << 10, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with devstream.racecheck(), torch.cuda.graph(graph):
        y = x * 2
    graph.replay()
    assert y.sum().item() == 2 << 10
