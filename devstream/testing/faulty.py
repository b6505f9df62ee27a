"""Small programs that each have one missing edge, and their repaired twins: what a race checker is measured with.

Each takes a device and says with *broken* which of the two it is. It returns numbers: the repaired one always
those of `Program.right`, the broken one whatever the order of its streams makes of it. The two lines that race are
marked ``first`` and ``second``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import devstream

_N = 4096


@dataclass(frozen=True, slots=True)
class Program:
    """A program with a fault.

    Attributes:
        fault: the value of the `devstream.races.Fault` that a checker should name.
        run: takes the device and *broken*.
        right: what the repaired program returns.
        only: the device type that it can run on; empty for all.
    """

    name: str
    fault: str
    run: Callable[[torch.device, bool], list[float]]
    right: list[float]
    only: str = ""


PROGRAMS: dict[str, Program] = {}


def _program(fault: str, right: list[float], *, only: str = "") -> Callable[..., Callable[..., list[float]]]:
    def add(run: Callable[[torch.device, bool], list[float]]) -> Callable[[torch.device, bool], list[float]]:
        name = run.__name__
        PROGRAMS[name] = Program(name, fault, run, right, only)
        return run

    return add


def _host_buffer(device: torch.device) -> torch.Tensor:
    """Return memory that the host reads: page-locked where the device is no CPU."""
    return torch.zeros(_N, pin_memory=device.type != "cpu")


def _values(device: torch.device, *tensors: torch.Tensor) -> list[float]:
    devstream.synchronize(device)
    return [float(tensor.sum().item()) / tensor.numel() for tensor in tensors]


@_program("read before write", [2.0])
def read_before_write(device: torch.device, broken: bool) -> list[float]:
    """Nothing makes the reader wait for the stream that writes."""
    here, side = devstream.current_stream(device), devstream.Stream(device)
    x = torch.ones(_N, device=device)
    side.wait_stream(here)
    with devstream.stream(side):
        y = x * 2  # first
    if not broken:
        here.wait_stream(side)
    z = y + 0  # second
    return _values(device, z)


@_program("overwrite while read", [1.0])
def overwrite_while_read(device: torch.device, broken: bool) -> list[float]:
    """The writer doesn't wait until the reader has read."""
    here, side = devstream.current_stream(device), devstream.Stream(device)
    x = torch.ones(_N, device=device)
    side.wait_stream(here)
    with devstream.stream(side):
        y = x * 1  # first
    if not broken:
        here.wait_stream(side)
    x.fill_(5)  # second
    return _values(device, y)


@_program("two writers", [3.0])
def two_writers(device: torch.device, broken: bool) -> list[float]:
    """Two streams write the same buffer, and who is last is left to chance."""
    here, side = devstream.current_stream(device), devstream.Stream(device)
    x = torch.zeros(_N, device=device)
    side.wait_stream(here)
    with devstream.stream(side):
        x.fill_(2)  # first
    if not broken:
        here.wait_stream(side)
    x.fill_(3)  # second
    return _values(device, x)


@_program("read before write", [2.0])
def recorded_too_early(device: torch.device, broken: bool) -> list[float]:
    """The event is recorded before the work that it should stand for."""
    here, side, done = devstream.current_stream(device), devstream.Stream(device), devstream.Event(device)
    x = torch.ones(_N, device=device)
    side.wait_stream(here)
    with devstream.stream(side):
        if broken:
            done.record()
        y = x * 2  # first
        if not broken:
            done.record()
    done.wait(here)
    z = y + 0  # second
    return _values(device, z)


@_program("overwrite while read", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
def ring_without_free_event(device: torch.device, broken: bool) -> list[float]:
    """A producer fills two slots in turn and doesn't wait until the consumer is done with one."""
    here, producer = devstream.current_stream(device), devstream.Stream(device)
    slots = [torch.zeros(_N, device=device) for _ in range(2)]
    ready = [devstream.Event(device) for _ in slots]
    free = [devstream.Event(device) for _ in slots]
    producer.wait_stream(here)
    results = []
    for step in range(6):
        at = step % 2
        with devstream.stream(producer):
            if not broken:
                free[at].wait()  # in the first round nobody has recorded it, and that is meant
            slots[at].fill_(step)  # second
            ready[at].record()
        ready[at].wait(here)
        results.append(slots[at] * 1)  # first
        free[at].record(here)
    return _values(device, *results)


def _host_read(device: torch.device, broken: bool, read: Callable[[torch.Tensor], float]) -> list[float]:
    here, side, done = devstream.current_stream(device), devstream.Stream(device), devstream.Event(device)
    host, y = _host_buffer(device), torch.full((_N,), 7.0, device=device)
    side.wait_stream(here)
    with devstream.stream(side):
        host.copy_(y, non_blocking=True)  # first
        done.record()
    if not broken:
        done.synchronize()
    return [read(host)]


def _float_at(address: int) -> float:
    return ctypes.c_float.from_address(address).value


def _float_of(capsule: object) -> float:
    # Deep in the other library: it goes by the address, which the capsule holds.
    return _float_at(torch.utils.dlpack.from_dlpack(capsule).untyped_storage().data_ptr())


@_program("read before write", [7.0])
def host_read_item(device: torch.device, broken: bool) -> list[float]:
    """The host reads by ``item()`` without waiting for the copy."""
    return _host_read(device, broken, lambda host: float(host[3].item()))  # second


@_program("read before write", [7.0])
def host_read_tolist(device: torch.device, broken: bool) -> list[float]:
    """The host reads by ``tolist()`` without waiting for the copy."""
    return _host_read(device, broken, lambda host: float(host.tolist()[3]))  # second


@_program("read before write", [7.0])
def host_read_numpy(device: torch.device, broken: bool) -> list[float]:
    """The host reads by ``numpy()`` without waiting for the copy."""
    return _host_read(device, broken, lambda host: float(host.numpy()[3]))  # second


@_program("read before write", [7.0])
def host_read_data_ptr(device: torch.device, broken: bool) -> list[float]:
    """The address goes to something that torch doesn't see, without waiting for the copy."""
    return _host_read(device, broken, lambda host: _float_at(host.data_ptr()))  # second


@_program("read before write", [7.0])
def host_read_dlpack(device: torch.device, broken: bool) -> list[float]:
    """Another library gets the memory by DLPack without waiting for the copy."""
    return _host_read(device, broken, lambda host: _float_of(host.__dlpack__()))  # second


@_program("read before write", [7.0])
def host_read_print(device: torch.device, broken: bool) -> list[float]:
    """The tensor is printed without waiting for the copy."""
    return _host_read(device, broken, lambda host: 7.0 if "7." in repr(host) else 0.0)  # second


@_program("read before write", [6.0])
def one_worker_not_joined(device: torch.device, broken: bool) -> list[float]:
    """Three streams write a third each; the reader waits for two of them."""
    here = devstream.current_stream(device)
    workers = [devstream.Stream(device) for _ in range(3)]
    buffer = torch.zeros(3 * _N, device=device)
    for number, worker in enumerate(workers):
        worker.wait_stream(here)
        with devstream.stream(worker):
            buffer[number * _N : (number + 1) * _N].fill_(number + 1)  # first
    for worker in workers[: 2 if broken else 3]:
        here.wait_stream(worker)
    total = buffer * 3  # second
    return _values(device, total)


@_program("read before write", [3.0])
def event_reused_by_two_producers(device: torch.device, broken: bool) -> list[float]:
    """Two producers record the same event; the wait stands for the later record only."""
    here = devstream.current_stream(device)
    one, two = devstream.Stream(device), devstream.Stream(device)
    shared = devstream.Event(device)
    first = shared if broken else devstream.Event(device)
    one.wait_stream(here)
    two.wait_stream(here)
    with devstream.stream(one):
        a = torch.ones(_N, device=device)  # first
        first.record()
    with devstream.stream(two):
        b = torch.full((_N,), 2.0, device=device)
        shared.record()
    first.wait(here)
    shared.wait(here)
    c = a + b  # second
    return _values(device, c)


@_program("read before write", [4.0])
def broken_link_in_a_chain(device: torch.device, broken: bool) -> list[float]:
    """The last of three streams waits for the one in the middle, which didn't wait for the first."""
    here = devstream.current_stream(device)
    one, two = devstream.Stream(device), devstream.Stream(device)
    x = torch.ones(_N, device=device)
    one.wait_stream(here)
    with devstream.stream(one):
        y = x * 4  # first
    if not broken:
        two.wait_stream(one)
    marker = devstream.Event(device)
    marker.record(two)
    marker.wait(here)
    z = y + 0  # second
    return _values(device, z)


@_program("read before write", [14.0])
def missing_host_wait(device: torch.device, broken: bool) -> list[float]:
    """The host computes with a buffer that a copy is still writing."""
    here, side = devstream.current_stream(device), devstream.Stream(device)
    host, y = _host_buffer(device), torch.full((_N,), 7.0, device=device)
    side.wait_stream(here)
    with devstream.stream(side):
        host.copy_(y, non_blocking=True)  # first
    if not broken:
        side.synchronize()
    doubled = host * 2  # second
    return _values(device, doubled)


def _dropped(device: torch.device, told: Callable[[torch.Tensor, object, object], None]) -> list[float]:
    here, side = devstream.current_stream(device), devstream.Stream(device)
    x = torch.ones(_N, device=device)
    side.wait_stream(here)
    with devstream.stream(side):
        y = x * 1  # first
    told(x, side, here)
    del x  # freed
    again = torch.full((_N,), 9.0, device=device)  # second
    here.wait_stream(side)
    total = y + 0 * again
    return _values(device, total)


@_program("memory reused while another stream uses it", [1.0])
def freed_while_in_use(device: torch.device, broken: bool) -> list[float]:
    """A tensor is dropped while another stream reads it, and the allocator isn't told."""
    return _dropped(device, lambda x, side, _: None if broken else devstream.record_stream(x, side))  # type: ignore[arg-type]


@_program("memory reused while another stream uses it", [1.0])
def wrong_stream_recorded(device: torch.device, broken: bool) -> list[float]:
    """The allocator is told of a stream, but not of the one that reads."""
    other = devstream.Stream(device)
    return _dropped(device, lambda x, side, _: devstream.record_stream(x, other if broken else side))  # type: ignore[arg-type]


@_program("overwrite while read", [1.0])
def pinned_buffer_refilled(device: torch.device, broken: bool) -> list[float]:
    """The host fills a buffer again while the copy to the device still reads it."""
    side, done = devstream.Stream(device), devstream.Event(device)
    host = _host_buffer(device)
    host.fill_(1)
    batch = torch.empty(_N, device=device)
    side.wait_stream(devstream.current_stream(device))
    with devstream.stream(side):
        batch.copy_(host, non_blocking=True)  # first
        done.record()
    if not broken:
        done.synchronize()
    host.fill_(8)  # second
    return _values(device, batch)


@contextmanager
def one_process_group(device: torch.device) -> Iterator[None]:
    """Give this process a group of its own for the block, where it has none: making NCCL's takes a second."""
    alone = not dist.is_initialized()
    if alone:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the list of exports
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        if alone:
            dist.destroy_process_group()


@_program("read before write", [2.0])
def collective_not_waited_for(device: torch.device, broken: bool) -> list[float]:
    """The result of an asynchronous all-gather is read without ``work.wait()``. One process is enough."""
    with one_process_group(device):
        x = torch.full((_N,), 2.0, device=device)
        gathered = torch.zeros(_N, device=device)
        work = dist.all_gather([gathered], x, async_op=True)  # first
        if not broken:
            work.wait()
        y = gathered + 0  # second
        if broken:
            work.wait()
        return _values(device, y)


@_program("overwrite while read", [1.0])
def wait_on_an_event_never_recorded(device: torch.device, broken: bool) -> list[float]:
    """The wait is issued before the record, so it waits for nothing."""
    here, side, done = devstream.current_stream(device), devstream.Stream(device), devstream.Event(device)
    x = torch.ones(_N, device=device)
    side.wait_stream(here)
    if broken:
        done.wait(here)
    with devstream.stream(side):
        y = x * 1  # first
        done.record()
    if not broken:
        done.wait(here)
    x.fill_(6)  # second
    return _values(device, y)


@_program("read before write", [6.0])
def record_overwritten(device: torch.device, broken: bool) -> list[float]:
    """One event stands for three chunks, so the last record is all that is waited for."""
    here = devstream.current_stream(device)
    workers = [devstream.Stream(device) for _ in range(3)]
    shared = devstream.Event(device)
    chunks, events = [], []
    for number, worker in enumerate(workers):
        done = shared if broken else devstream.Event(device)
        worker.wait_stream(here)
        with devstream.stream(worker):
            chunks.append(torch.full((_N,), float(number + 1), device=device))  # first
            done.record()
        events.append(done)
    events[-1].wait(here)
    if not broken:
        for event in events:
            event.wait(here)
    total = chunks[0] + chunks[1] + chunks[2]  # second
    return _values(device, total)


@_program("read before write", [2.0], only="cuda")
def generic_stream_waits_for_a_cuda_event(device: torch.device, broken: bool) -> list[float]:
    """``torch.Stream.wait_event`` of a ``torch.cuda.Event`` waits for nothing, in silence."""
    native = torch.Stream(device=device)
    here = devstream.current_stream(device)
    x = torch.ones(_N, device=device)
    done = devstream.Event(device, enable_timing=True)  # its native event is a torch.cuda.Event
    done.record(here)
    if broken:
        native.wait_event(done.native)  # type: ignore[arg-type]  # the class of the backend
    else:
        done.wait(native)
    with native:
        y = x * 2  # second
    here.wait_stream(native)
    return _values(device, y)


__all__ = ["PROGRAMS", "Program", "one_process_group"]
