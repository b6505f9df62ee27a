"""Predicted time of a graph of operations on several streams: who waits for whom, and who shares what. Pure.

The host issues the operations in their order, each at its cost (none where the graph was captured). An operation
starts when it is issued, the one before it on its stream is done, and what it waits for is done.

[Note: What streams share]
Two operations that run at once slow each other only where they ask together for more than there is. A kernel asks
for the part of the multiprocessors that its ideal time is of its own: one that reaches the ceiling leaves nothing
for others (two big matmuls gain nothing from two streams), a small one leaves most. A copy to or from the host
takes one direction of the link and no multiprocessor. A collective takes the link between devices, and the
part of the multiprocessors that its kernel occupies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from devstream.roofline.ceilings import Ceilings
from devstream.roofline.model import CLASSES, Counts, predict_op

#: The part of the multiprocessors that a collective's kernel occupies: 24 of 132, NCCL 2.28 on an H200.
COLLECTIVE_UNITS = 24 / 132


@dataclass(frozen=True, slots=True)
class Task:
    """One operation of a graph.

    Attributes:
        counts: what it does.
        stream: operations of one stream run in their order.
        after: indexes of earlier tasks that it waits for.
        seconds: its measured time alone; None: the model's.
        host_s: what issuing it costs; None: the device's launch cost for each launch.
    """

    counts: Counts
    stream: str = ""
    after: tuple[int, ...] = ()
    seconds: float | None = None
    host_s: float | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """When everything runs.

    Attributes:
        seconds: from the first issue to the last end.
        error: relative; that of the operations, weighted by their times.
        spans: start and end of each task, in seconds.
        class_s: seconds of the tasks of each class, run alone.
        idle_s: time in which nothing runs.
        bound: the class that takes the most of *class_s*, or overhead where the device idles longer.
    """

    seconds: float
    error: float
    spans: tuple[tuple[float, float], ...]
    class_s: dict[str, float]
    idle_s: float
    bound: str


def predict_graph(tasks: Sequence[Task], ceilings: Ceilings, *, captured: bool = False) -> Schedule:
    """Return the schedule of *tasks*.

    Args:
        tasks: in the order of their issue.
        ceilings: of the device.
        captured: the graph is replayed as a whole, so that issuing costs nothing.

    Raises:
        ValueError: a task waits for itself or for a later one.
    """
    own, demands, class_s, weighted = [], [], dict.fromkeys(CLASSES, 0.0), 0.0
    for index, task in enumerate(tasks):
        if any(not 0 <= other < index for other in task.after):
            raise ValueError(f"task {index} waits for {task.after}: a task waits for earlier ones")
        prediction = predict_op(task.counts, ceilings)
        seconds = prediction.seconds if task.seconds is None else task.seconds
        own.append(seconds)
        demands.append(_demands(task.counts, prediction.ideal_s, seconds))
        class_s[prediction.bound] += seconds
        weighted += seconds * (prediction.error if task.seconds is None else 0.0)
    issued, host = [], 0.0
    for task in tasks:
        if not (captured or ceilings.inline):
            host += ceilings.launch_s * task.counts.launches if task.host_s is None else task.host_s
        issued.append(host)
    spans = _run(tasks, own, demands, issued)
    end = max((stop for _, stop in spans), default=0.0)
    idle = end - _covered(spans)
    bound = max(CLASSES, key=lambda name: class_s[name])
    if idle > class_s[bound]:
        bound = "overhead"
    return Schedule(end, weighted / sum(own) if sum(own) else 0.0, tuple(spans), class_s, idle, bound)


def _demands(counts: Counts, ideal: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the part of each shared thing that an operation takes while it runs alone."""
    if counts.link_bytes:
        return {way.split()[0]: 1.0 for way in counts.link_bytes}
    if counts.collective_bytes:
        return {"communication": 1.0, "units": COLLECTIVE_UNITS}
    if not seconds:
        return {}
    return {"units": min(1.0, max(ideal["compute"], ideal["memory"]) / seconds)}


def _run(
    tasks: Sequence[Task], own: list[float], demands: list[dict[str, float]], issued: list[float]
) -> list[tuple[float, float]]:
    """Return the spans: a fluid simulation, in which what is asked for too often is shared in proportion."""
    before: dict[int, int] = {}
    last: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if task.stream in last:
            before[index] = last[task.stream]
        last[task.stream] = index
    waiting = set(range(len(tasks)))
    left: dict[int, float] = {}
    start, end, now = [0.0] * len(tasks), [math.inf] * len(tasks), 0.0
    while waiting or left:
        for index in sorted(waiting):
            needs = (*tasks[index].after, *((before[index],) if index in before else ()))
            if issued[index] <= now and all(end[other] <= now for other in needs):
                waiting.discard(index)
                left[index], start[index] = own[index], now
        speeds = _speeds(left, demands)
        finish = {index: now + rest / speeds[index] for index, rest in left.items()}
        later = [issued[index] for index in waiting if issued[index] > now]
        then = min([*finish.values(), *later])
        for index in list(left):
            # Rounding must not leave a rest that takes no time.
            if finish[index] <= then:
                del left[index]
                end[index] = then
            else:
                left[index] -= (then - now) * speeds[index]
        now = then
    return list(zip(start, end, strict=True))


def _speeds(left: dict[int, float], demands: list[dict[str, float]]) -> dict[int, float]:
    total: dict[str, float] = {}
    for index in left:
        for name, part in demands[index].items():
            total[name] = total.get(name, 0.0) + part
    return {index: 1 / max([1.0, *(total[name] for name in demands[index])]) for index in left}


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    covered, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


__all__ = ["COLLECTIVE_UNITS", "Schedule", "Task", "predict_graph"]
