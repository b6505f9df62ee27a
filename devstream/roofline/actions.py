"""What would help, and by how much: estimates from operations, their times and the ceilings. Pure.

Each estimate takes one cure alone; two cures of the same time don't add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from devstream.roofline.ceilings import Ceilings
from devstream.roofline.counting import Counted, Op
from devstream.roofline.diagnosis import Action, TimedOp, bound_of_op
from devstream.roofline.formulas import CONTRACTIONS
from devstream.roofline.model import Counts, predict_op, predict_transfer
from devstream.roofline.tables import duration, size

#: An action that gains less than this part of a run, and frees less than this part of what is kept, is left out.
_WORTH = 0.01
#: Of the tensors that could be made again or moved away, so many of the largest are told.
_MOST_TENSORS = 4


@dataclass(frozen=True, slots=True)
class Situation:
    """What the estimates start from.

    Attributes:
        ops: with the seconds that each occupied the device.
        counted: what a run did, with what it kept.
        wall_s: of a run.
        busy_s: of it, in which the device was busy.
        ceilings: of the device.
        compiled: whether compiled code ran.
        can_capture: whether the device captures graphs.
        exposed_link_s: time of copies to and from the host under which nothing else ran.
    """

    ops: Sequence[TimedOp]
    counted: Counted
    wall_s: float
    busy_s: float
    ceilings: Ceilings
    compiled: bool = False
    can_capture: bool = False
    exposed_link_s: float = 0.0


def actions(now: Situation) -> tuple[Action, ...]:
    """Return what is worth doing, the largest gain of time first, then the largest of memory."""
    found = [*_fuse(now), *_capture(now), *_batch(now), *_overlap(now), *_dtype(now), *_memory(now)]
    kept = sum(one.size_bytes for one in now.counted.kept)
    worth = [one for one in found if one.gain_s > _WORTH * now.wall_s or one.gain_bytes > _WORTH * max(kept, 1.0)]
    return tuple(sorted(worth, key=lambda one: (-one.gain_s, -one.gain_bytes)))


# -- fuse ------------------------------------------------------------------------------------------------


def chains(ops: Iterable[TimedOp]) -> list[list[TimedOp]]:
    """Return the runs of two or more operations that follow each other, can be fused, and share a tensor."""
    found: list[list[TimedOp]] = []
    run: list[TimedOp] = []
    touched: set[int] = set()
    for op, took in ops:
        if op.what.fusable and (not run or touched & {*op.reads, *op.writes}):
            run.append((op, took))
            touched |= {*op.reads, *op.writes}
            continue
        if len(run) > 1:
            found.append(run)
        run = [(op, took)] if op.what.fusable else []
        touched = {*op.reads, *op.writes} if run else set()
    if len(run) > 1:
        found.append(run)
    return found


def fused_bytes(chain: Sequence[TimedOp], needed: set[int], sizes: dict[int, float]) -> float:
    """Return the bytes that *chain* moves as one kernel: what comes from outside, and what is *needed* outside.

    Never more than it moves now: an operation may touch only a part of a storage.
    """
    written: set[int] = set()
    outside: dict[int, float] = {}
    for op, _ in chain:
        for number in op.reads:
            if number not in written:
                # Of a storage that is only looked into, no more is read than the operation reads.
                part = min(sizes.get(number, 0.0), op.what.counts.read_bytes)
                outside[number] = max(outside.get(number, 0.0), part)
        written |= set(op.writes)
    stored = sum(sizes.get(number, 0.0) for number in written & needed)
    now = sum(op.what.counts.memory_bytes for op, _ in chain)
    return min(now, sum(outside.values()) + stored)


def fused_counts(ops: Sequence[TimedOp], counted: Counted) -> Counts:
    """Return what all fusable operations do when each chain of them is one kernel."""
    total = Counts.nothing()
    in_chains: set[int] = set()
    for chain in chains(ops):
        moved = fused_bytes(chain, _needed(chain, ops, counted), counted.sizes)
        flops = Counts.nothing()
        for op, _ in chain:
            flops += op.what.counts
            in_chains.add(op.index)
        total += replace(flops, read_bytes=moved / 2, write_bytes=moved / 2, launches=1)
    for op, _ in ops:
        if op.what.fusable and op.index not in in_chains:
            total += op.what.counts
    return replace(total, kind="pointwise 4", shape=None)


def _needed(chain: Sequence[TimedOp], ops: Sequence[TimedOp], counted: Counted) -> set[int]:
    """Return the storages that are read after *chain*, or kept for the backward."""
    end = chain[-1][0].index
    later = {number for op, _ in ops if op.index > end for number in op.reads}
    # The end of a chain is somebody's result.
    return later | {one.storage for one in counted.kept} | set(chain[-1][0].writes)


def _fuse(now: Situation) -> list[Action]:
    if now.compiled:
        return []
    gains: dict[str, tuple[float, int]] = {}
    for chain in chains(now.ops):
        needed = _needed(chain, now.ops, now.counted)
        took = sum(seconds for _, seconds in chain)
        moved = sum(op.what.counts.memory_bytes for op, _ in chain)
        fused = fused_bytes(chain, needed, now.counted.sizes)
        floor_s = min(took, now.ceilings.floor_s)
        gain = took - max(took * fused / moved if moved else floor_s, floor_s)
        # On a device that waits for the host, each launch that goes away is the host's time.
        if now.busy_s < 0.5 * now.wall_s:
            gain += (len(chain) - 1) * now.ceilings.launch_s
        where = _place(chain[0][0])
        so_far, count = gains.get(where, (0.0, 0))
        gains[where] = (so_far + gain, count + len(chain))
    return [
        Action(
            "compile",
            where,
            gain,
            0.0,
            f"fuse the {count} small operations at {where} with torch.compile: they move the same tensors again "
            "and again",
        )
        for where, (gain, count) in gains.items()
    ]


def _place(op: Op) -> str:
    return op.line or op.module or op.name


# -- launch ----------------------------------------------------------------------------------------------


def _capture(now: Situation) -> list[Action]:
    idle_s = now.wall_s - now.busy_s
    if not now.can_capture or idle_s <= 0:
        return []
    launches = sum(op.what.counts.launches for op, _ in now.ops)
    # Between two kernels of a replayed graph a device still takes a moment.
    gain = idle_s - launches * min(now.ceilings.floor_s, 1e-6)
    syncs = [op for op, _ in now.ops if "_local_scalar_dense" in op.name]
    text = (
        f"capture the run as a graph: the device waits {duration(idle_s)} of {duration(now.wall_s)} for the host "
        f"to launch {launches} operations"
    )
    if syncs:
        text += f"; first take out what reads a value on the host, at {_place(syncs[0])}"
    return [Action("capture", "the whole run", gain, 0.0, text)]


def _batch(now: Situation) -> list[Action]:
    """Estimate what a sample costs in a batch of twice the size: overhead is shared, matmuls fill the device."""
    gain = 0.5 * max(0.0, now.wall_s - now.busy_s)
    for op, took in now.ops:
        counts = op.what.counts
        if bound_of_op(op, now.ceilings) == "overhead":
            gain += 0.5 * took
        elif op.what.operator_class == "matmul" and counts.shape is not None:
            once, twice = predict_op(counts, now.ceilings), predict_op(_doubled(counts), now.ceilings)
            if once.seconds > 0:
                gain += max(0.0, took * (1 - 0.5 * twice.seconds / once.seconds))
    if gain <= 0.1 * now.wall_s:
        return []
    text = "raise the batch: of twice the size, a sample costs about " + duration(gain) + " less"
    return [Action("batch", "the whole run", gain, 0.0, text)]


def _doubled(counts: Counts) -> Counts:
    if counts.shape is None:
        return counts + counts
    batch, rows, columns, depth = counts.shape
    # Which side is the batch isn't known; the longest is most often.
    sides = [rows, columns, depth]
    longest = sides.index(max(sides))
    sides[longest] *= 2
    return replace(
        counts,
        matmul_flops={dtype: 2 * flops for dtype, flops in counts.matmul_flops.items()},
        read_bytes=2 * counts.read_bytes,
        write_bytes=2 * counts.write_bytes,
        shape=(batch, sides[0], sides[1], sides[2]),
    )


# -- copies ----------------------------------------------------------------------------------------------


def _overlap(now: Situation) -> list[Action]:
    copies: dict[str, tuple[float, float, bool]] = {}
    for op, took in now.ops:
        if op.what.operator_class != "link":
            continue
        where = _place(op)
        seconds, moved, pageable = copies.get(where, (0.0, 0.0, False))
        links = op.what.counts.link_bytes
        copies[where] = (
            seconds + took,
            moved + sum(links.values()),
            pageable or any("pageable" in way for way in links),
        )
    total = sum(seconds for seconds, _, _ in copies.values())
    others = now.busy_s - total
    found = []
    for where, (seconds, moved, pageable) in copies.items():
        # No more hides than is exposed, and than there is work to hide it under.
        gain = min(seconds, now.exposed_link_s, max(0.0, others))
        how = "; its host memory is pageable: pin it, or use devstream.overlap.copy, which does"
        text = (
            f"overlap the copy of {size(moved)} at {where} with compute, on a side stream{how if pageable else ''}"
        )
        found.append(Action("overlap", where, gain, 0.0, text))
    return found


# -- dtype -----------------------------------------------------------------------------------------------

_NARROWER = {"float64": ("float32",), "float32": ("tf32", "bfloat16"), "tf32": ("bfloat16",)}


def _dtype(now: Situation) -> list[Action]:
    gains: dict[tuple[str, str], float] = {}
    for op, took in now.ops:
        if op.what.operator_class not in CONTRACTIONS or bound_of_op(op, now.ceilings) != "compute":
            continue
        for dtype in op.what.counts.matmul_flops:
            peak = now.ceilings.matmul_peak(dtype)
            for narrower in _NARROWER.get(dtype, ()):
                other = now.ceilings.matmul_peak(narrower)
                if peak and other and other > peak:
                    key = (dtype, narrower)
                    gains[key] = gains.get(key, 0.0) + took * (1 - peak / other)
    how = {
        "tf32": 'torch.set_float32_matmul_precision("high")',
        "bfloat16": "torch.autocast, or bfloat16 weights",
        "float32": "float32 tensors",
    }
    return [
        Action(
            "dtype",
            f"{dtype} matmuls",
            gain,
            0.0,
            f"let {dtype} matmuls run in {narrower} ({how[narrower]}), where its precision is enough",
        )
        for (dtype, narrower), gain in gains.items()
    ]


# -- memory ----------------------------------------------------------------------------------------------


def _memory(now: Situation) -> list[Action]:
    """Say of the largest tensors kept for the backward what they would cost to make again, or to move away."""
    took = {op.index: (op, seconds) for op, seconds in now.ops}
    forward_s = sum(seconds for op, seconds in now.ops if not op.backward)
    groups: dict[tuple[str, str, str], list[float]] = {}
    for one in now.counted.kept:
        if one.maker not in took:
            continue
        op, seconds = took[one.maker]
        cheap = bound_of_op(op, now.ceilings) != "compute"
        key = ("recompute" if cheap else "offload", _place(op), op.name)
        group = groups.setdefault(key, [0.0, 0.0])
        group[0] += one.size_bytes
        group[1] += seconds
    found = []
    for (kind, where, name), (kept, seconds) in groups.items():
        if kind == "recompute":
            text = (
                f"recompute the {size(kept)} of {name} at {where} in the backward instead of keeping them: making "
                f"them again takes {duration(seconds)}"
            )
            found.append(Action(kind, where, -seconds, kept, text))
            continue
        move_s = _move_s(kept, now.ceilings)
        if move_s is None:
            continue
        hidden = move_s <= forward_s
        text = (
            f"offload the {size(kept)} of {name} at {where} to the host: moving takes {duration(move_s)}, which "
            f"{'fits under' if hidden else 'is longer than'} the forward's {duration(forward_s)}"
        )
        found.append(Action(kind, where, min(0.0, forward_s - move_s), kept, text))
    return sorted(found, key=lambda one: -one.gain_bytes)[:_MOST_TENSORS]


def _move_s(moved: float, ceilings: Ceilings) -> float | None:
    if ceilings.inline or "link d2h pinned" not in ceilings.curves:
        return None
    return predict_transfer(moved, ceilings, direction="d2h").seconds


__all__ = ["Situation", "actions", "chains", "fused_bytes", "fused_counts"]
