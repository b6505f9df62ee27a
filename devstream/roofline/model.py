"""The model: from counts (FLOPs, bytes, launches) and a device's ceilings to times and classes. Pure.

Three things take time, and knowing which one does rules out most cures: *compute* (the FLOPs asked for), *memory*
(moving tensors between the device's memory and its units), and *overhead* (all the rest; here, launching). Two
more move data further: the *link* to the host and *communication* between ranks.

[Note: Ideal times and predicted times]
An operation's ideal time for a ceiling is its amount over the best rate that the device ever showed. The largest
of the ideal times names its class: that is the ceiling it sits under, however close it comes. Its predicted time
is read from the curve of its kind at its own size, since a kernel that is small, or cut into tiles that don't
fill the device, reaches less than the best rate. So a prediction is never below the ideal of a kind that was
measured at that size, and the ratio of the two says how far from the ceiling it has to stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from devstream.roofline.ceilings import Ceilings
from devstream.roofline.curves import AlphaBeta, Curve, Shape, steps_and_share
from devstream.roofline.tiles import ALIGNED

#: The classes, in the order in which equals win.
CLASSES = ("compute", "memory", "overhead", "link", "communication")

#: What a prediction may be off by where nothing of its kind was measured.
UNKNOWN_ERROR = 1.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What one operation, or a sum of them, does.

    Attributes:
        kind: the curve to read its time from (see `Ceilings.curves`); ``""`` for a sum of several kinds.
        matmul_flops: FLOPs of the matrix units by dtype; a multiply-add counts as two.
        vector_flops: all other FLOPs by dtype.
        read_bytes: read from device memory, each element of an operand once.
        write_bytes: written to device memory.
        link_bytes: between host and device, by ``"h2d pinned"``, ``"d2h pageable"``, ...
        collective_bytes: sizes of the whole tensors of collectives, by kind.
        launches: kernels.
        shape: of a single matmul or attention; see `Shape` and `attention_shape`.
        alignment: bytes at multiples of which the rows of a matmul's tensors begin.
    """

    kind: str = ""
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    vector_flops: Mapping[str, float] = field(default_factory=dict)
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    link_bytes: Mapping[str, float] = field(default_factory=dict)
    collective_bytes: Mapping[str, float] = field(default_factory=dict)
    launches: int = 1
    shape: Shape | None = None
    alignment: int = ALIGNED

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            kind=self.kind if self.kind == other.kind else "",
            matmul_flops=_added(self.matmul_flops, other.matmul_flops),
            vector_flops=_added(self.vector_flops, other.vector_flops),
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
            link_bytes=_added(self.link_bytes, other.link_bytes),
            collective_bytes=_added(self.collective_bytes, other.collective_bytes),
            launches=self.launches + other.launches,
        )

    def scaled(self, factor: float) -> Counts:
        """Return *factor* times these FLOPs and bytes, in as many launches; a part of a matmul has no shape."""
        return Counts(
            kind=self.kind,
            matmul_flops={key: factor * value for key, value in self.matmul_flops.items()},
            vector_flops={key: factor * value for key, value in self.vector_flops.items()},
            read_bytes=factor * self.read_bytes,
            write_bytes=factor * self.write_bytes,
            link_bytes={key: factor * value for key, value in self.link_bytes.items()},
            collective_bytes={key: factor * value for key, value in self.collective_bytes.items()},
            launches=self.launches,
            shape=self.shape if factor == 1.0 else None,
            alignment=self.alignment,
        )

    @classmethod
    def nothing(cls) -> Self:
        """Return the sum of no operations."""
        return cls(launches=0)

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return sum(self.matmul_flops.values()) + sum(self.vector_flops.values())

    @property
    def memory_bytes(self) -> float:
        """Bytes read from and written to device memory."""
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte of device memory; None where nothing is moved."""
        return self.flops / self.memory_bytes if self.memory_bytes else None


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {
        key: one.get(key, 0.0) + other.get(key, 0.0) for key in (*one, *(key for key in other if key not in one))
    }


@dataclass(frozen=True, slots=True)
class Prediction:
    """A time, the relative error that it may have, and the ideal seconds under each ceiling."""

    seconds: float
    error: float
    ideal_s: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The class: the ceiling whose ideal time is the largest."""
        return bound_of(self.ideal_s)


def bound_of(ideal_s: Mapping[str, float]) -> str:
    """Return the class with the largest ideal time; overhead where all are 0."""
    if not any(ideal_s.values()):
        return "overhead"
    return max(CLASSES, key=lambda name: ideal_s.get(name, 0.0))


def ideal_times(counts: Counts, ceilings: Ceilings) -> dict[str, float]:
    """Return the ideal seconds of *counts* under each ceiling that was measured; see the note above.

    Matrix and vector units work side by side, so the longer of the two counts as compute.
    """
    memory_rate = ceilings.memory_bytes_per_s
    matmul_s = vector_s = 0.0
    for dtype, flops in counts.matmul_flops.items():
        peak = ceilings.matmul_peak(dtype)
        matmul_s += flops / peak if peak else 0.0
    for dtype, flops in counts.vector_flops.items():
        rate = ceilings.vector.get(dtype) or ceilings.vector.get("float32")
        vector_s += flops / rate if rate else 0.0
    times = {
        "compute": max(matmul_s, vector_s),
        "memory": counts.memory_bytes / memory_rate if memory_rate else 0.0,
        "overhead": ceilings.floor_s * counts.launches,
        "link": 0.0,
        "communication": _communication(counts, ceilings)[0],
    }
    for way, size in counts.link_bytes.items():
        curve = ceilings.curve(f"link {way}")
        times["link"] += size / curve.peak if curve else 0.0
    return times


def predict_op(counts: Counts, ceilings: Ceilings) -> Prediction:
    """Return the device time of one operation that has the device to itself.

    The larger of what its kind's curve says and of the ideal times beside memory; where there is no such curve,
    the largest ideal time. The error is that of the curve that it was read from; `UNKNOWN_ERROR` where its kind
    was never measured.
    """
    ideal = ideal_times(counts, ceilings)
    seconds, error = max(ideal.values()), UNKNOWN_ERROR
    read = _from_curve(counts, ceilings)
    if read is not None:
        # Not the ideal memory time: what fits into a cache is faster, and the curve knows it.
        others = (time for name, time in ideal.items() if name != "memory")
        seconds, error = max(read[0], *others), read[1]
    elif seconds and bound_of(ideal) in ("link", "communication"):
        error = _communication(counts, ceilings)[1]
    for way, size in counts.link_bytes.items():
        curve = ceilings.curve(f"link {way}")
        if curve is not None:
            seconds, error = max(seconds, curve.seconds(size)), curve.error_at(size)
    return Prediction(seconds, error, ideal)


def amount_of(counts: Counts, ceilings: Ceilings) -> tuple[Curve, float] | None:
    """Return the curve of these counts' kind and where to read it; None where there is none."""
    kind = counts.kind.partition(" ")[0]
    curve = ceilings.curve(counts.kind) if kind else None
    if curve is None:
        return None
    if kind not in ("matmul", "attention"):
        amount = counts.memory_bytes
    else:
        key = next(name for name, one in ceilings.curves.items() if one is curve)
        tiling = ceilings.tilings.get(key) if counts.shape is not None and all(counts.shape) else None
        amount = counts.flops * (tiling.inflation(counts.shape) if tiling is not None and counts.shape else 1.0)
    return (curve, amount) if amount > 0 else None


def _from_curve(counts: Counts, ceilings: Ceilings) -> tuple[float, float] | None:
    found = amount_of(counts, ceilings)
    if found is None:
        return None
    curve, amount = found
    tiles = ceilings.tiles.get(counts.kind.removeprefix("matmul "))
    if tiles is not None and counts.shape is not None:
        times = [(tiles.seconds(counts.shape, alignment=counts.alignment), tiles.error)]
    else:
        times = [(curve.seconds(amount), curve.error_at(amount))]
    if counts.kind.startswith(("matmul", "attention")):
        # A thin matmul waits for memory, which its own curve, measured on square ones, doesn't know.
        copy = ceilings.curve("pointwise") or ceilings.curve("copy")
        if copy is not None and counts.memory_bytes > 0:
            times.append((copy.seconds(counts.memory_bytes), copy.error_at(counts.memory_bytes)))
    return max(times)


def _communication(counts: Counts, ceilings: Ceilings) -> tuple[float, float]:
    seconds, error = 0.0, 0.0
    for kind, size in counts.collective_bytes.items():
        link = ceilings.collectives.get(kind)
        if link is not None and ceilings.ranks > 1:
            seconds += link.seconds(kind, size, ceilings.ranks, algorithm="ring")
            error = max(error, link.error)
    return seconds, error


def predict_transfer(size_bytes: float, ceilings: Ceilings, *, direction: str, pinned: bool = True) -> Prediction:
    """Return the time of one copy between host and device.

    Args:
        size_bytes: of the copy.
        ceilings: of the device.
        direction: ``"h2d"`` or ``"d2h"``.
        pinned: whether the host memory is page-locked.

    Raises:
        ValueError: an unknown direction, or a link that wasn't measured in this way.
    """
    if direction not in ("h2d", "d2h"):
        raise ValueError(f"direction={direction!r}: 'h2d' or 'd2h'")
    way = f"{direction} {'pinned' if pinned else 'pageable'}"
    if f"link {way}" not in ceilings.curves:
        measured = ", ".join(sorted(key for key in ceilings.curves if key.startswith("link "))) or "none"
        raise ValueError(f"the ceilings of {ceilings.device} have no curve 'link {way}'; they have: {measured}")
    return predict_op(Counts(link_bytes={way: size_bytes}, launches=0), ceilings)


def predict_collective(
    kind: str, size_bytes: float, ceilings: Ceilings, *, ranks: int, algorithm: str | None = None
) -> Prediction:
    """Return the time of a collective of *ranks* ranks, from the latency and rate that were measured.

    Args:
        kind: one of `devstream.roofline.curves.COLLECTIVES`; where it was not measured, another's link serves.
        size_bytes: of the whole tensor.
        ceilings: with collectives, of any number of ranks, or with a curve ``peer``.
        ranks: that take part.
        algorithm: ``"ring"`` or ``"tree"``; None: the faster one, which is what libraries choose.

    Raises:
        ValueError: unknown kind or algorithm, or no link between devices was measured.
    """
    link = ceilings.collectives.get(kind) or next(iter(ceilings.collectives.values()), None)
    error = UNKNOWN_ERROR
    if link is not None:
        known = kind in ceilings.collectives and ranks == ceilings.ranks
        # Another kind or number of ranks than was measured: the formula holds, its constants drift.
        error = link.error if known else max(2 * link.error, 0.25)
    else:
        peer = ceilings.curves.get("peer")
        if peer is None:
            raise ValueError(f"no link between devices was measured on {ceilings.device}")
        link = AlphaBeta(peer.latency, peer.peak, peer.error)
    algorithms = ("ring", "tree") if algorithm is None else (algorithm,)
    seconds = min(link.seconds(kind, size_bytes, ranks, algorithm=one) for one in algorithms)
    share = min(steps_and_share(kind, ranks, one)[1] for one in algorithms)
    return Prediction(seconds, error, {"communication": share * size_bytes / link.bytes_per_s})


@dataclass(frozen=True, slots=True)
class Achieved:
    """How a measured time compares with the ceilings.

    Attributes:
        bound: the class.
        shares: of each ceiling, the ideal time over the measured: 1.0 is at the ceiling. A share above 1 says that
            the counts are too high (bytes that came from a cache, for instance).
        flops_per_s, bytes_per_s: what was reached.
    """

    bound: str
    shares: Mapping[str, float]
    flops_per_s: float
    bytes_per_s: float


def achieved(counts: Counts, seconds: float, ceilings: Ceilings) -> Achieved:
    """Return what *counts* reached in *seconds* of device time.

    Raises:
        ValueError: *seconds* is not above 0.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: a time above 0")
    ideal = ideal_times(counts, ceilings)
    shares = {name: time / seconds for name, time in ideal.items()}
    return Achieved(bound_of(ideal), shares, counts.flops / seconds, counts.memory_bytes / seconds)


def ridge(ceilings: Ceilings, dtype: str) -> float | None:
    """Return the FLOPs a byte at which matmuls of *dtype* become compute-bound; None: not measured."""
    peak, rate = ceilings.matmul_peak(dtype), ceilings.memory_bytes_per_s
    return peak / rate if peak and rate else None


__all__ = [
    "CLASSES",
    "UNKNOWN_ERROR",
    "Achieved",
    "Counts",
    "Prediction",
    "achieved",
    "amount_of",
    "bound_of",
    "ideal_times",
    "predict_collective",
    "predict_op",
    "predict_transfer",
    "ridge",
]
