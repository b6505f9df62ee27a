"""Measures what is around the kernels: launches, events, streams, the host's link, other devices, collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from devstream._streams import Event, create_stream, synchronize
from devstream._streams import stream as switch
from devstream.abc import Capability
from devstream.roofline._clock import Clock, curve_of
from devstream.roofline._plan import Plan
from devstream.roofline.curves import AlphaBeta, Curve


def launch(clock: Clock) -> tuple[float, float]:
    """Return the host's seconds to issue a small operation, and the device's for one that has nothing to do."""
    tiny = torch.zeros(1, device=clock.tensors)
    host_s = clock.host_time(lambda: tiny.add_(1))
    return host_s, host_s if clock.inline else clock.time(lambda: tiny.add_(1)).seconds


def events(clock: Clock) -> tuple[float, float]:
    """Return the host's seconds for a record and for a wait."""
    event, other = Event(clock.device), create_stream(clock.device, 0)
    record_s = clock.host_time(lambda: event.record(clock.stream))
    return record_s, clock.host_time(lambda: event.wait(other))


def streams_at_once(clock: Clock, plan: Plan) -> int:
    """Return how many streams' small kernels truly run at once.

    Each stream gets one kernel that occupies a multiprocessor or two: running sums along two long rows, which
    torch does with one block of threads a row (one row alone it would spread over the device). As many run at
    once as the time of all of them is shorter than in turn.
    """
    if Capability.SIDE_STREAMS not in clock.backend.capabilities(clock.index) or clock.inline:
        return 1
    length = 1 << 16
    row, out = (torch.zeros(2, length, device=clock.tensors) for _ in range(2))
    while clock.wall(lambda: _cumulate([clock.stream], row, out)) < _LONG_S and length < 1 << 26:  # noqa: B023 - called at once
        length *= 4  # launching all of them must take no part of the time
        row, out = (torch.zeros(2, length, device=clock.tensors) for _ in range(2))
    alone = clock.wall(lambda: _cumulate([clock.stream], row, out))
    best = 1.0
    for count in plan.streams:
        streams = [create_stream(clock.device, 0) for _ in range(count)]
        together = clock.wall(lambda streams=streams: _cumulate(streams, row, out), rounds=3)  # type: ignore[misc]
        best = max(best, count * alone / together)
    return max(1, round(best))


#: How long a kernel runs by which streams that run at once are counted.
_LONG_S = 0.02


def _cumulate(streams: Sequence[object], row: torch.Tensor, out: torch.Tensor) -> None:
    for one in streams:
        with switch(one):  # type: ignore[arg-type]
            # All write to one tensor, and the same zeros: a result each would need memory for each.
            torch.cumsum(row, 1, out=out)


# -- the host's link -------------------------------------------------------------------------------------


def link(clock: Clock, plan: Plan) -> dict[str, Curve]:
    """Return the curves of copies to and from the host, by direction and kind of host memory."""
    pinned = Capability.PINNED_MEMORY in clock.backend.capabilities(clock.index)
    found = {}
    for kind in ("pinned", "pageable") if pinned else ("pageable",):
        for direction in ("h2d", "d2h"):
            points = []
            for size in plan.link_bytes:
                there, here = _pair(clock, size, pinned=kind == "pinned")
                target, source = (there, here) if direction == "h2d" else (here, there)
                points.append((float(size), _copy(clock, target, source)))
            # A pageable copy blocks the host until it is done.
            samples = clock.sweep(points, longest_s=plan.longest_s, queued=kind == "pinned")
            found[f"link {direction} {kind}"] = curve_of(samples)
    return found


def _pair(clock: Clock, size: int, *, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    there = torch.zeros(size, dtype=torch.uint8, device=clock.tensors)
    return there, torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)


def _copy(clock: Clock, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: clock.backend.copy(target, source, clock.stream)


def both_ways(clock: Clock, plan: Plan) -> float:
    """Return bytes a second over the link, both directions together, at once."""
    size = plan.link_bytes[-1]
    pinned = Capability.PINNED_MEMORY in clock.backend.capabilities(clock.index)
    there, here = _pair(clock, size, pinned=pinned)
    there_too, here_too = _pair(clock, size, pinned=pinned)
    up, down = create_stream(clock.device, 0), create_stream(clock.device, 0)

    def copies() -> None:
        for _ in range(4):
            clock.backend.copy(there, here, up)
            clock.backend.copy(here_too, there_too, down)

    return 8.0 * size / clock.wall(copies)


def pinned_allocation(plan: Plan) -> float:
    """Return bytes a second at which page-locked memory is allocated."""
    # Not a size that anybody frees into torch's cache of page-locked blocks, which rounds up to powers of two.
    size = plan.pinned_bytes
    while True:
        started = time.perf_counter()
        block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        rate = size / (time.perf_counter() - started)
        del block
        # Memory out of the cache costs nothing and says nothing: then a larger one, that isn't there yet.
        if rate < 50e9 or size > 8 * plan.pinned_bytes:
            return rate
        size *= 2


def copy_slowdown(clock: Clock, plan: Plan, shape_side: int) -> float:
    """Return the time of matmuls beside copies to the host over their time alone; 1.0: the copies cost nothing."""
    pinned = Capability.PINNED_MEMORY in clock.backend.capabilities(clock.index)
    there, here = _pair(clock, plan.link_bytes[-1], pinned=pinned)
    dtype = torch.float32 if clock.inline else torch.bfloat16
    a, b, c = (torch.randn(shape_side, shape_side, device=clock.tensors).to(dtype) for _ in range(3))
    side = create_stream(clock.device, 0)
    copy_s = clock.time(_copy(clock, here, there), queued=pinned).seconds
    matmul_s = clock.time(lambda: torch.mm(a, b, out=c)).seconds
    loops = max(1, min(50, int(0.01 / matmul_s)))

    def matmuls() -> None:
        for _ in range(loops):
            torch.mm(a, b, out=c)

    def beside() -> None:
        for _ in range(max(1, round(1.5 * loops * matmul_s / copy_s))):
            clock.backend.copy(here, there, side)
        matmuls()

    alone = clock.time(matmuls, longest_loops=1).seconds
    together = clock.time(beside, longest_loops=1, queued=False).seconds
    synchronize(clock.device)  # the last copies still read memory that is about to be given back
    return max(1.0, together / alone)


# -- other devices ---------------------------------------------------------------------------------------


def peer(clock: Clock, plan: Plan) -> Curve | None:
    """Return the curve of copies to the next device of this process; None where there is no other."""
    count = clock.backend.device_count()
    if count < 2 or Capability.PEER_ACCESS not in clock.backend.capabilities(clock.index):
        return None
    other = torch.device("cpu") if clock.inline else torch.device(clock.device.type, (clock.index + 1) % count)
    points = []
    for size in plan.link_bytes:
        source = torch.zeros(size, dtype=torch.uint8, device=clock.tensors)
        target = torch.zeros(size, dtype=torch.uint8, device=other)
        points.append((float(size), _copy(clock, target, source)))
    synchronize(torch.device(clock.device.type, (clock.index + 1) % count))
    # A copy between devices also occupies the current stream of the other one, which isn't held.
    return curve_of(clock.sweep(points, longest_s=plan.longest_s, queued=False))


def collectives(clock: Clock, plan: Plan) -> dict[str, AlphaBeta]:
    """Return latency and rate of the default group's collectives; every rank must call it, and all get the same.

    A collective is as slow as its slowest rank, so the longest time of all ranks counts.
    """
    ranks = dist.get_world_size()
    found = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        samples = []
        for size in plan.collective_bytes:
            elements = max(1, size // (4 * ranks))
            whole = torch.zeros(elements * ranks, device=clock.tensors)
            call = _collective(kind, whole, ranks)
            try:
                mine = clock.wall(call, rounds=7)
            except (RuntimeError, NotImplementedError):
                break  # not every library has every collective (Gloo: no reduce-scatter in some releases)
            slowest = torch.tensor(mine, dtype=torch.float64).to(clock.tensors)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            samples.append((4.0 * elements * ranks, float(slowest)))
        if len(samples) > 1:
            found[kind] = AlphaBeta.fit(samples, kind=kind, ranks=ranks)
    return found


def _collective(kind: str, whole: torch.Tensor, ranks: int) -> Callable[[], object]:
    part = whole[: whole.numel() // ranks].clone()
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    out = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(out, whole)


__all__ = [
    "both_ways",
    "collectives",
    "copy_slowdown",
    "events",
    "launch",
    "link",
    "peer",
    "pinned_allocation",
    "streams_at_once",
]
