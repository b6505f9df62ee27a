"""A diagnosis as plain data: regions, their classes and shares, made from operations and their times. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from devstream.report.timeline import Span
from devstream.roofline.ceilings import Ceilings
from devstream.roofline.counting import Op
from devstream.roofline.formulas import CONTRACTIONS, OPERATOR_CLASSES
from devstream.roofline.model import CLASSES, Counts, bound_of, ideal_times

#: An operation and the seconds that it occupied the device.
TimedOp = tuple[Op, float]


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the work: a module, a line, a kernel, a class of operators, or all of it.

    Attributes:
        name: of the part.
        seconds: that it occupied the device, summed over its operations.
        time_share, flops_share: of all operations.
        counts: what it did.
        bound: the class under which most of its time falls.
        class_s: its seconds by class.
        shares: of each ceiling, what its operations reached: the ideal time over the time taken.
    """

    name: str
    seconds: float
    time_share: float
    flops_share: float
    counts: Counts
    bound: str
    class_s: Mapping[str, float]
    shares: Mapping[str, float]

    @property
    def flops_per_s(self) -> float:
        """FLOP/s reached."""
        return self.counts.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of device memory a second reached."""
        return self.counts.memory_bytes / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return this as plain JSON data."""
        return {
            "name": self.name,
            "seconds": self.seconds,
            "time_share": self.time_share,
            "flops_share": self.flops_share,
            "matmul_flops": dict(self.counts.matmul_flops),
            "vector_flops": dict(self.counts.vector_flops),
            "read_bytes": self.counts.read_bytes,
            "write_bytes": self.counts.write_bytes,
            "link_bytes": dict(self.counts.link_bytes),
            "launches": self.counts.launches,
            "intensity": self.counts.intensity,
            "flops_per_s": self.flops_per_s,
            "bytes_per_s": self.bytes_per_s,
            "class": self.bound,
            "class_s": dict(self.class_s),
            "ceiling_shares": dict(self.shares),
        }


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do, and what it is estimated to gain.

    Attributes:
        kind: ``compile``, ``capture``, ``batch``, ``overlap``, ``recompute``, ``offload``, ``dtype``.
        where: module, line or tensor.
        gain_s: seconds of a run; below 0 what it costs.
        gain_bytes: of device memory at the peak.
        text: what to do, in a sentence.
    """

    kind: str
    where: str
    gain_s: float
    gain_bytes: float
    text: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory, in bytes; on the CPU the process's. None: the device can't tell.

    Attributes:
        capacity: of the device.
        used: by tensors now.
        peak: the most that tensors used so far.
        reserved: by torch's allocator.
        largest: the largest block that the run made.
        largest_where: operation and line that made it.
    """

    capacity: float | None = None
    used: float | None = None
    peak: float | None = None
    reserved: float | None = None
    largest: float | None = None
    largest_where: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where a function's time goes, and what would help.

    Attributes:
        function: its name.
        device: where it ran.
        ceilings: what it is held against.
        wall_s: seconds a run, without a profiler, runs issued back to back.
        busy_s: seconds of it in which anything ran on the device.
        total: all of it.
        by_class: by class of operators; by_module, by_line, by_kernel: the longest first.
        memory: of the device.
        actions: the largest gain first.
        spans: what ran when, in one run.
        compiled: whether compiled code ran.
        notes: what a reader must know about these figures.
    """

    function: str
    device: str
    ceilings: Ceilings
    wall_s: float
    busy_s: float
    total: Region
    by_class: tuple[Region, ...]
    by_module: tuple[Region, ...]
    by_line: tuple[Region, ...]
    by_kernel: tuple[Region, ...]
    memory: Memory
    actions: tuple[Action, ...]
    spans: tuple[Span, ...] = ()
    compiled: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def idle_share(self) -> float:
        """The part of a run in which nothing ran on the device, 0 to 1."""
        return max(0.0, 1 - self.busy_s / self.wall_s) if self.wall_s else 0.0

    @property
    def bound(self) -> str:
        """The class under which most of the run falls; idle time is overhead."""
        return bound_of(self.class_s)

    @property
    def class_s(self) -> dict[str, float]:
        """Seconds of a run by class: of the operations, and idle time as overhead."""
        found = dict(self.total.class_s)
        found["overhead"] = found.get("overhead", 0.0) + max(0.0, self.wall_s - self.busy_s)
        return found

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return this as plain JSON data, without the spans."""
        return {
            "function": self.function,
            "device": self.device,
            "device_name": self.ceilings.name,
            "versions": dict(self.ceilings.versions),
            "wall_s": self.wall_s,
            "busy_s": self.busy_s,
            "idle_share": self.idle_share,
            "class": self.bound,
            "class_s": self.class_s,
            "compiled": self.compiled,
            "total": self.total.as_json(),
            **{
                name: [region.as_json() for region in getattr(self, name)]
                for name in ("by_class", "by_module", "by_line", "by_kernel")
            },
            "memory": asdict(self.memory),
            "actions": [asdict(action) for action in self.actions],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from devstream.roofline.tables import as_text  # noqa: PLC0415 - tables knows diagnoses, not the reverse

        return as_text(self)


# -- regions ---------------------------------------------------------------------------------------------


def region(name: str, ops: Sequence[TimedOp], ceilings: Ceilings, *, all_s: float, all_flops: float) -> Region:
    """Return the region of *ops*."""
    counts, seconds = Counts.nothing(), 0.0
    class_s = dict.fromkeys(CLASSES, 0.0)
    ideal = dict.fromkeys(CLASSES, 0.0)
    for op, took in ops:
        counts += op.what.counts
        seconds += took
        times = ideal_times(op.what.counts, ceilings)
        class_s[bound_of_op(op, ceilings)] += took
        for one, time in times.items():
            ideal[one] += time
    return Region(
        name,
        seconds,
        seconds / all_s if all_s else 0.0,
        counts.flops / all_flops if all_flops else 0.0,
        counts,
        bound_of(class_s),
        class_s,
        {one: time / seconds if seconds else 0.0 for one, time in ideal.items()},
    )


def bound_of_op(op: Op, ceilings: Ceilings) -> str:
    """Return the class of one operation: links and collectives by what they are, all others by the model."""
    if op.what.operator_class == "link":
        return "link"
    if op.what.operator_class == "collective":
        return "communication"
    counts = op.what.counts
    if not (counts.flops or counts.memory_bytes):
        # Nothing tells what it does (a kernel of a replayed graph, for instance) but its name.
        return "compute" if op.what.operator_class in CONTRACTIONS else "memory"
    return bound_of(ideal_times(op.what.counts, ceilings))


def regions(
    ops: Sequence[TimedOp], key: Callable[[Op], str], ceilings: Ceilings, *, order: Iterable[str] | None = None
) -> tuple[Region, ...]:
    """Return the regions of *ops* by *key* (empty: left out), in *order*, or the longest first."""
    all_s, all_flops = sum(took for _, took in ops), sum(op.what.counts.flops for op, _ in ops)
    grouped: dict[str, list[TimedOp]] = {}
    for op, took in ops:
        name = key(op)
        if name:
            grouped.setdefault(name, []).append((op, took))
    found = {
        name: region(name, group, ceilings, all_s=all_s, all_flops=all_flops) for name, group in grouped.items()
    }
    if order is not None:
        return tuple(found[name] for name in order if name in found)
    return tuple(sorted(found.values(), key=lambda one: -one.seconds))


def by_class(
    ops: Sequence[TimedOp], ceilings: Ceilings, *, flops_of: Sequence[TimedOp] | None = None
) -> tuple[Region, ...]:
    """Return the regions by class of operators, in the order of tables.

    Args:
        ops: with their times.
        ceilings: of the device.
        flops_of: operations that did the same FLOPs and know them: those of the uncompiled code, where *ops* are
            compiled kernels that don't.
    """
    found = regions(ops, lambda op: op.what.operator_class, ceilings, order=OPERATOR_CLASSES)
    if flops_of is None:
        return found
    known = regions(flops_of, lambda op: op.what.operator_class, ceilings, order=OPERATOR_CLASSES)
    by_name = {one.name: one for one in known}
    merged = []
    for one in found:
        true = by_name.pop(one.name, None)
        if true is not None:
            counts = replace(
                one.counts, matmul_flops=true.counts.matmul_flops, vector_flops=true.counts.vector_flops
            )
            one = replace(one, counts=counts, flops_share=true.flops_share)  # noqa: PLW2901
        merged.append(one)
    # What was fused into a kernel of another class has no time of its own.
    gone = [
        replace(region(name, [], ceilings, all_s=0.0, all_flops=0.0), flops_share=one.flops_share)
        for name, one in by_name.items()
    ]
    return (*merged, *gone)


__all__ = [
    "Action",
    "Diagnosis",
    "Memory",
    "Region",
    "TimedOp",
    "bound_of_op",
    "by_class",
    "region",
    "regions",
]
