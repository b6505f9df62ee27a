"""Whether the roofline's classes are right: against ncu's counters, or against times under doubled work.

    python bench/roofline_judge.py [--device cuda] [--judge ncu|doubling] [--json FILE] [--keep] [--quick] [MODEL]

Models (default: all): gpt-small, gpt-large, conv-net, embedding-heavy, mlp; a training step each. The figure is
the part of the device's time whose class is the judge's. The judge is never our own model:

- ``ncu``: NVIDIA's profiler runs the same step (``--clock-control none``). A kernel is bound by compute or by
  memory, whichever unit the counters find busier; where neither is busy for a quarter of the time, by overhead.
- ``doubling`` (default where ncu can't read the counters): every distinct operation that takes a thousandth of the
  time or more is run again with twice the FLOPs or twice the bytes. The one that doubles the time binds; where
  neither does much, overhead. Copies to and from the host are taken as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _models import conv_net, embedding_heavy, gpt, mlp
from _results import Row, Run

import devstream
from devstream._compat import tree_leaves
from devstream.roofline import Ceilings, _diagnose, measure
from devstream.roofline._clock import Clock
from devstream.roofline.counting import Counter, Op
from devstream.roofline.diagnosis import bound_of_op

MODELS = ("gpt-small", "gpt-large", "conv-net", "embedding-heavy", "mlp")
GOAL = 0.95


def model_step(name: str, device: torch.device, *, quick: bool) -> Callable[[], object]:
    """Return the training step called *name*."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if name.startswith("gpt"):
        return gpt("tiny" if quick else name.removeprefix("gpt-"), device, dtype)
    if name == "conv-net":
        return conv_net(device, dtype, **({"batch": 4, "side": 32, "width": 8} if quick else {}))
    if name == "embedding-heavy":
        return embedding_heavy(device, **({"tables": 2, "rows": 1000, "batch": 64} if quick else {}))
    return mlp(device, dtype, **({"width": 128, "layers": 2} if quick else {}))


def main() -> int:
    """Judge the models that were asked for, print, and return 1 where one misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--device", help="default: the current accelerator, else the CPU")
    parser.add_argument("--judge", choices=["ncu", "doubling"], help="default: ncu where it can read counters")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--run-once", metavar="MODEL", help=argparse.SUPPRESS)  # what ncu starts
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--keep", action="store_true", help="also write bench/results/roofline-judge-DEVICE.md")
    chosen = parser.parse_args()
    backend = devstream.backend(chosen.device)
    device = torch.device(backend.device_type, backend.current_index())
    tensors = torch.device("cpu") if device.type == "cpu" else device
    if chosen.run_once:
        return _run_once(chosen.run_once, tensors, quick=chosen.quick)
    judge = chosen.judge or ("ncu" if device.type == "cuda" and _ncu_works() else "doubling")
    models = chosen.models or list(MODELS)
    if unknown := set(models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    names = " ".join(models)
    command = f"python bench/roofline_judge.py --device {device.type} --judge {judge} {names}"
    run = Run("roofline-judge", command, device)
    ceilings = measure(device)
    clock = Clock(backend, device.index, point_s=0.02)
    for name in models:
        found = _operations(model_step(name, tensors, quick=chosen.quick), device, backend)
        verdicts = _by_ncu(name, found, quick=chosen.quick) if judge == "ncu" else _by_doubling(found, clock)
        run.rows += _rows(name, judge, found, verdicts, ceilings)
    return run.finish(chosen.json, chosen.keep)


# -- what is judged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """What makes a tensor like another: sizes, strides, type, and below what its numbers are, if indexes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    below: int = 0

    def resized(self, shape: tuple[int, ...]) -> Spec:
        """Return the same with other sizes, its sides in the same order in memory."""
        order = sorted(range(len(shape)), key=lambda side: -self.stride[side])
        stride, step = [0] * len(shape), 1
        for side in reversed(order):
            stride[side], step = step, step * shape[side]
        return Spec(shape, tuple(stride), self.dtype, self.device, self.below)

    def make(self, *, widen: bool = False) -> torch.Tensor:
        dtype = WIDER.get(self.dtype, self.dtype) if widen else self.dtype
        out = torch.empty_strided(self.shape, self.stride, dtype=dtype, device=self.device)
        if self.below:
            return out.random_(0, self.below)
        return out.zero_() if not dtype.is_floating_point else out.fill_(0.5)


WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


class Recording(Counter):
    """Counts, and keeps what each operation was called with."""

    def __init__(self, around: Callable[[int], Any] | None = None) -> None:
        super().__init__(around)
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        specs = _specs(args), _specs(kwargs or {})
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # What is made of several operations came here with each of them already.
        if len(self.calls) < len(self.counted.ops):
            self.calls.append((func, *specs))
        return out


def _specs(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        below = 0
        if value.dtype in (torch.int64, torch.int32) and value.numel():
            below = 2 if value.device.type == "meta" else int(value.max()) + 1
        return Spec(tuple(value.shape), tuple(value.stride()), value.dtype, value.device, below)
    if isinstance(value, dict):
        return {key: _specs(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_specs(one) for one in value)
    return value


def _made(value: Any, change: Callable[[Spec], torch.Tensor]) -> Any:
    if isinstance(value, Spec):
        return change(value)
    if isinstance(value, dict):
        return {key: _made(one, change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_made(one, change) for one in value)
    return value


@dataclass
class Operations:
    """A step's operations, with their seconds and what they were called with."""

    ops: list[tuple[Op, float]]
    calls: list[tuple[Any, Any, Any]]
    kernels: list[tuple[Op, float]]


def _operations(step: Callable[[], object], device: torch.device, backend: Any) -> Operations:
    subject = _diagnose._Subject(step, (), device)
    subject.warm_up()
    on_host = device.type == "cpu"
    marked = _diagnose._counted(subject, backend, on_host=on_host)
    eager, kernels = _diagnose._timed(marked, on_host=on_host)
    with Recording() as recording:  # apart: looking for the limits of indexes launches kernels
        step()
    if len(recording.calls) != len(eager):
        raise RuntimeError(f"a run of {len(eager)} operations had {len(recording.calls)} the next time")
    return Operations(eager, recording.calls, kernels)


Verdicts = list[tuple[Op, float, str]]


def _rows(name: str, judge: str, found: Operations, verdicts: Verdicts, ceilings: Ceilings) -> list[Row]:
    total = sum(took for _, took, _ in verdicts)
    right = sum(took for op, took, verdict in verdicts if bound_of_op(op, ceilings) == verdict)
    all_s = sum(took for _, took in (found.kernels if judge == "ncu" else found.ops))
    share = right / total if total else 0.0
    print(f"\n{name}: judged {total / all_s:.1%} of {all_s * 1e3:.2f} ms")
    wrong: dict[tuple[str, str, str], float] = {}
    for op, took, verdict in verdicts:
        ours = bound_of_op(op, ceilings)
        if ours != verdict:
            key = (op.name[:70], ours, verdict)
            wrong[key] = wrong.get(key, 0.0) + took
    for (kernel, ours, verdict), took in sorted(wrong.items(), key=lambda one: -one[1])[:10]:
        print(f"  {took / total:6.2%} {kernel}: we say {ours}, the judge says {verdict}", flush=True)
    what = f"{name}: class as judged by {judge}, part of device time"
    detail = f"judged {total / all_s:.1%} of {all_s * 1e3:.2f} ms"
    return [Row("R4", what, 100 * share, "%", detail, "at least 95", share >= GOAL)]


# -- doubling --------------------------------------------------------------------------------------------


def _by_doubling(found: Operations, clock: Clock) -> Verdicts:
    total = sum(took for _, took in found.ops)
    groups: dict[str, list[int]] = {}
    for index, (func, args, kwargs) in enumerate(found.calls):
        groups.setdefault(f"{func} {args} {kwargs}", []).append(index)
    verdicts: Verdicts = []
    for indexes in groups.values():
        took = sum(found.ops[index][1] for index in indexes)
        op = found.ops[indexes[0]][0]
        func, args, kwargs = found.calls[indexes[0]]
        if took < 1e-3 * total or func is None:
            continue
        if op.what.operator_class == "link":
            verdict: str | None = "link"
        else:
            verdict = _doubled(op, func, args, kwargs, clock)
        if clock.device.type != "cpu":
            torch.accelerator.empty_cache()  # the variants' memory, which the next one may need in other sizes
        if verdict is not None:
            verdicts += [(found.ops[index][0], found.ops[index][1], verdict) for index in indexes]
    return verdicts


def _doubled(op: Op, func: Any, args: Any, kwargs: Any, clock: Clock) -> str | None:
    """Return what binds *op*: by a variant whose FLOPs and bytes grow by different factors."""
    base = _time(clock, func, args, kwargs, Spec.make)
    if base is None:
        return None
    counts = op.what.counts
    if counts.shape is not None and op.what.operator_class == "matmul":
        return _doubled_matmul(op, args, clock)
    if op.what.operator_class in ("attention", "convolution"):
        return _quadrupled(op, func, args, kwargs, clock, base)
    wide = _time(clock, func, args, kwargs, lambda spec: spec.make(widen=True))
    if wide is not None and wide > 1.4 * base:
        return "memory"  # the same FLOPs, twice the bytes
    twice = _time(clock, func, args, kwargs, _repeated)
    if twice is None:
        return None if wide is None else "overhead" if base < 2e-5 else "compute"
    if twice < 1.3 * base:
        return "overhead"
    return "memory" if wide is None else "compute"


def _quadrupled(op: Op, func: Any, args: Any, kwargs: Any, clock: Clock, base: float) -> str | None:  # noqa: PLR0917
    """Make four times the FLOPs of twice the bytes: a sequence twice as long, or twice the channels."""
    if op.what.operator_class == "attention":
        length = next(one.shape[2] for one in tree_leaves(args) if isinstance(one, Spec) and len(one.shape) == 4)
        grown_args, grown_kwargs = _longer(args, length), _longer(kwargs, length)
    else:
        fours = [one for one in tree_leaves(args) if isinstance(one, Spec) and len(one.shape) == 4]
        grown_args, grown_kwargs = _more_channels(args, fours[-1]), kwargs
    took = _time(clock, func, grown_args, grown_kwargs, Spec.make)
    if took is None:
        return None
    if took < 1.3 * base:
        return "overhead"
    return "compute" if took > math.sqrt(8) * base else "memory"


def _longer(value: Any, length: int) -> Any:
    if isinstance(value, Spec) and len(value.shape) > 2 and value.shape[2] == length:
        return value.resized((*value.shape[:2], 2 * length, *value.shape[3:]))
    if isinstance(value, dict):
        return {key: _longer(one, length) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_longer(one, length) for one in value)
    # The longest query and key, as numbers.
    return 2 * value if isinstance(value, int) and not isinstance(value, bool) and value == length else value


def _more_channels(value: Any, weight: Spec) -> Any:
    if isinstance(value, Spec):
        if value is weight:
            return value.resized((2 * value.shape[0], 2 * value.shape[1], *value.shape[2:]))
        if len(value.shape) == 4:
            return value.resized((value.shape[0], 2 * value.shape[1], *value.shape[2:]))
        return value.resized((2 * value.shape[0],)) if len(value.shape) == 1 else value
    if isinstance(value, list | tuple):
        return type(value)(_more_channels(one, weight) for one in value)
    return value


def _repeated(spec: Spec) -> torch.Tensor:
    """Return a tensor with twice the leading side, where it has more than one row."""
    if not spec.shape or spec.shape[0] < 2:
        return spec.make()
    return spec.resized((2 * spec.shape[0], *spec.shape[1:])).make()


def _doubled_matmul(op: Op, args: Any, clock: Clock) -> str:
    """Double the side that adds the fewest bytes: the time follows the FLOPs, the bytes, or neither."""
    assert op.what.counts.shape is not None
    batch, m, n, k = op.what.counts.shape
    moved = m * k + k * n + m * n
    sides = {
        "m": (2 * m * k + k * n + 2 * m * n) / moved,
        "n": (m * k + 2 * k * n + 2 * m * n) / moved,
        "k": (2 * m * k + 2 * k * n + m * n) / moved,
    }
    side, growth = min(sides.items(), key=lambda one: one[1])
    shape = {"m": m, "n": n, "k": k}
    shape[side] *= 2
    tensors = [one for one in tree_leaves(args) if isinstance(one, Spec)]
    a, b = tensors[-2:]

    def sized(spec: Spec, rows: int, columns: int) -> torch.Tensor:
        lead = (batch,) if len(spec.shape) == 3 else ()
        if spec.stride[-1] != 1 and spec.stride[-2] == 1:  # transposed, as it was
            made = torch.full((*lead, columns, rows), 0.5, dtype=spec.dtype, device=spec.device)
            return made.transpose(-1, -2)
        return torch.full((*lead, rows, columns), 0.5, dtype=spec.dtype, device=spec.device)

    first, second = sized(a, shape["m"], shape["k"]), sized(b, shape["k"], shape["n"])
    plain = torch.bmm if len(a.shape) == 3 else torch.mm
    before = sized(a, m, k), sized(b, k, n)
    # Both without what is added to the product: only the product grows.
    base = clock.time(lambda: plain(*before)).seconds
    ratio = clock.time(lambda: plain(first, second)).seconds / base
    if ratio < 1.15:
        return "overhead"
    # Nearer to twice (the FLOPs) or to the growth of the bytes?
    return "compute" if abs(math.log(ratio / 2)) < abs(math.log(ratio / growth)) else "memory"


def _time(clock: Clock, func: Any, args: Any, kwargs: Any, change: Callable[[Spec], torch.Tensor]) -> float | None:
    try:
        made, named = _made(args, change), _made(kwargs, change)
        with torch.no_grad():
            return clock.time(lambda: func(*made, **named)).seconds
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None  # this operation doesn't take what was changed


# -- ncu -------------------------------------------------------------------------------------------------

#: Busy parts of the multiprocessors (the tensor pipe is one of their units), of device memory, of the L2 cache.
METRICS = {
    "compute": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "memory": (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
}


def _ncu(*command: str) -> subprocess.CompletedProcess[str]:
    metrics = ",".join(one for names in METRICS.values() for one in names)
    options = ["--csv", "--page", "raw", "--clock-control", "none", "--metrics", metrics]
    options += ["--profile-from-start", "off", "--target-processes", "all"]
    return subprocess.run(
        ["ncu", *options, sys.executable, *command], capture_output=True, text=True, check=False, timeout=550
    )


def _ncu_works() -> bool:
    if shutil.which("ncu") is None:
        return False
    program = (
        "import torch; x = torch.ones(1 << 20, device='cuda'); torch.cuda.cudart().cudaProfilerStart(); x + 1; "
        "torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop()"
    )
    done = _ncu("-c", program)
    works = done.returncode == 0 and METRICS["compute"][0] in done.stdout
    if not works:
        reason = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
        print(f"ncu can't read the counters: {reason[0] if reason else done.returncode}", flush=True)
    return works


def _run_once(name: str, tensors: torch.device, *, quick: bool) -> int:
    step = model_step(name, tensors, quick=quick)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    return 0


def _by_ncu(name: str, found: Operations, *, quick: bool) -> Verdicts:
    """Return ncu's verdict on each kernel: the two lists of kernels are in one order, that of the launches."""
    done = _ncu(__file__, "--run-once", name, *(["--quick"] if quick else []))
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row["ID"]]
    if len(rows) < 0.9 * len(found.kernels):
        raise RuntimeError(f"ncu saw {len(rows)} kernels of {len(found.kernels)}: {done.stderr[-500:]}")
    by_name: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_name.setdefault(_plain(row["Kernel Name"]), []).append(row)
    verdicts: Verdicts = []
    for op, took in found.kernels:
        matching = by_name.get(_plain(op.name))
        if matching:
            # The n-th kernel of a name is the n-th of that name there.
            verdicts.append((op, took, _counters_say(matching.pop(0) if len(matching) > 1 else matching[0])))
    return verdicts


def _plain(name: str) -> str:
    """Return a kernel's name without arguments and spaces, which the two profilers write differently."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].strip()


def _counters_say(row: dict[str, str]) -> str:
    def busiest(names: Sequence[str]) -> float:
        return max(float(row[one].replace(",", "")) for one in names)

    compute, memory = busiest(METRICS["compute"]), busiest(METRICS["memory"])
    if max(compute, memory) < 25:
        return "overhead"
    return "compute" if compute > memory else "memory"


if __name__ == "__main__":
    raise SystemExit(main())
