"""What the roofline says against what runs: ceilings, predictions, and the published facts of the field.

    python bench/roofline.py [--device cuda] [--json FILE] [--keep] [--quick] [PART ...]

Parts (default: all): measure, predict, classes, chain, multiply, batch. `predict` looks at sizes of which
`measure` has none. A time is the lower quartile of rounds by the device's own clock. ``--quick`` takes small
sizes, to see that it runs; its figures mean nothing. bench/roofline_judge.py holds the classes against counters
or doubled work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _models import bert_large, mlp
from _results import Row, Run

import devstream
from devstream.roofline import Ceilings, diagnose, measure
from devstream.roofline._clock import Clock
from devstream.roofline._plan import plan_for
from devstream.roofline.curves import attention_shape
from devstream.roofline.devices import find
from devstream.roofline.formulas import CONTRACTIONS, alignment_of
from devstream.roofline.model import Counts, predict_op
from devstream.roofline.tables import quantity

PARTS = ("measure", "predict", "classes", "chain", "multiply", "batch")


class Setup:
    """The device under test, its clock and its ceilings."""

    def __init__(self, device: str | None, *, quick: bool) -> None:
        backend = devstream.backend(device)
        self.quick = quick
        self.index = backend.current_index() if device is None or ":" not in device else int(device.split(":")[1])
        self.device = torch.device(backend.device_type, self.index)
        self.clock = Clock(backend, self.index, point_s=0.05)
        self.tensors = self.clock.tensors
        self.on_cpu = backend.device_type == "cpu"
        self.dtype = torch.float32 if self.on_cpu else torch.bfloat16
        self._ceilings: Ceilings | None = None

    @property
    def ceilings(self) -> Ceilings:
        """Measured the first time."""
        if self._ceilings is None:
            self._ceilings = measure(self.device)
        return self._ceilings


def main() -> int:
    """Run the parts that were asked for, print, and return 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--device", help="default: the current accelerator, else the CPU")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--keep", action="store_true", help="also write bench/results/roofline-DEVICE.md")
    chosen = parser.parse_args()
    setup = Setup(chosen.device, quick=chosen.quick)
    parts = chosen.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    run = Run("roofline", f"python bench/roofline.py --device {setup.device.type} {' '.join(parts)}", setup.device)
    for part in parts:
        started = time.perf_counter()
        run.rows += globals()[f"part_{part}"](setup)
        print(f"{part}: {time.perf_counter() - started:.1f} s", flush=True)
    return run.finish(chosen.json, chosen.keep)


# -- measure ---------------------------------------------------------------------------------------------


def part_measure(setup: Setup) -> list[Row]:
    """How long a measurement takes, and what it finds beside the datasheet."""
    started = time.perf_counter()
    setup._ceilings = found = measure(setup.device, refresh=True)
    took = time.perf_counter() - started
    rows = [Row("R1", "`measure()`, everything", took, "s", "", "under 60", took < 60)]
    sheet = find(found.name, memory_bytes=found.memory_bytes)
    for dtype in (key[7:] for key in found.curves if key.startswith("matmul ")):
        limit = quantity(sheet.matmul[dtype], "FLOP/s") if sheet is not None and dtype in sheet.matmul else ""
        peak = (found.matmul_peak(dtype) or 0.0) / 1e12
        rows.append(Row("", f"matmul {dtype}", peak, "TFLOP/s", _cut(found, dtype), limit))
    memory = found.memory_bytes_per_s or 0.0
    limit = quantity(sheet.memory_bytes_per_s, "B/s") if sheet is not None else ""
    rows.append(Row("", "memory", memory / 1e9, "GB/s", "", limit))
    rows += [Row("", f"vector {dtype}", rate / 1e12, "TFLOP/s") for dtype, rate in found.vector.items()]
    for key, curve in found.curves.items():
        if key.startswith(("link", "peer")):
            rows.append(Row("", key, curve.points[-1][0] / curve.points[-1][1] / 1e9, "GB/s"))
    rows += [
        Row("", "link, both ways at once", found.both_ways_bytes_per_s / 1e9, "GB/s"),
        Row("", "launch, host", found.launch_s * 1e6, "µs"),
        Row("", "launch, device", found.floor_s * 1e6, "µs"),
        Row("", "event record", found.event_record_s * 1e6, "µs"),
        Row("", "event wait", found.event_wait_s * 1e6, "µs"),
        Row("", "page-locked allocation", found.pinned_bytes_per_s / 1e9, "GB/s"),
        Row("", "streams at once", float(found.streams_at_once), ""),
        Row("", "matmul under a copy, over alone", found.copy_slowdown, "x"),
    ]
    rows += [Row("", f"not measured: {what}: {reason}", 0.0, "") for what, reason in found.missing.items()]
    return rows


def _cut(found: Ceilings, dtype: str) -> str:
    tiles = found.tiles.get(dtype)
    return (
        f"{tiles.error:.1%} off the tiles' times" if tiles is not None else f"{found.tilings[f'matmul {dtype}']}"
    )


# -- predict ---------------------------------------------------------------------------------------------

#: No side, row count or sequence of these is one of `measure`'s.
_SIDES = (448, 576, 704, 896, 1088, 1408, 1664, 1920, 2176, 2432, 2816, 3328, 3840, 4608, 5632, 7168)
_GPT_SHAPES = (
    (32000, 2304, 768),
    (32000, 3072, 768),
    (32000, 768, 3072),
    (16000, 6144, 2048),
    (16000, 2048, 8192),
    (2048, 8192, 16000),
    (8000, 7680, 2560),
    (3000, 5000, 700),
)


def part_predict(setup: Setup) -> list[Row]:
    """The model's time of single operations against the device's, for every size above 20 µs."""
    rows, detail = [], []
    for kind, cases in _cases(setup).items():
        errors = []
        for name, work, counts in cases:
            took = setup.clock.time(work).seconds
            expected = predict_op(counts, setup.ceilings)
            error = expected.seconds / took - 1
            if took < (1e-4 if setup.on_cpu else 2e-5):
                continue
            errors.append(abs(error))
            detail.append(
                f"{kind} {name}: {took * 1e6:.1f} µs, predicted {expected.seconds * 1e6:.1f} ({error:+.1%})"
            )
        if not errors:
            continue
        worst, middle = max(errors), statistics.median(errors)
        within = sum(error <= 0.15 for error in errors)
        what = f"predicted {kind}, {within} of {len(errors)} sizes within 15 %: worst"
        rows.append(Row("R2", what, 100 * worst, "%", f"median {middle:.1%}", "at most 15", worst <= 0.15))
    print("\n".join(detail), flush=True)
    return rows


Case = tuple[str, Callable[[], object], Counts]


def _cases(setup: Setup) -> dict[str, list[Case]]:
    device = setup.tensors
    found: dict[str, list[Case]] = {}
    dtypes = ["float32"] if setup.on_cpu else ["bfloat16", "float16", "tf32", "float32"]
    sides = _SIDES[:6] if setup.on_cpu or setup.quick else _SIDES
    shapes = [(side, side, side) for side in sides]
    shapes += [] if setup.on_cpu or setup.quick else list(_GPT_SHAPES)
    measured = set(plan_for(setup.device.type).shapes)
    assert not measured & {(1, *shape) for shape in shapes}
    for dtype in dtypes:
        made = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        found[f"matmul {dtype}"] = [_matmul_case(setup, shape, dtype, made) for shape in shapes]
    rows = (1100, 5000, 9000, 21000) if setup.on_cpu else (1100, 5000, 9000, 21000, 50000, 130000, 300000)
    for made in (torch.float32, torch.bfloat16):
        size = made.itemsize
        label = str(made).removeprefix("torch.")
        for count in rows[:2] if setup.quick else rows:
            x, y = (torch.rand(count, 1024, device=device).to(made) for _ in range(2))
            moved = float(x.numel() * size)
            binary = Counts(f"pointwise {size}", {}, {}, 2 * moved, moved)
            found.setdefault(f"pointwise {label}", []).extend(
                [
                    (f"add {count}x1024", lambda x=x, y=y: torch.add(x, y), binary),
                    (
                        f"relu {count}x1024",
                        lambda x=x: torch.relu(x),
                        Counts(f"pointwise {size} unary", {}, {}, moved, moved),
                    ),
                ]
            )
            weight = torch.ones(1024, device=device, dtype=made)
            norm = Counts(f"norm {size}", {}, {}, moved, moved)
            found.setdefault(f"norm {label}", []).append(
                (
                    f"{count}x1024",
                    lambda x=x, w=weight: torch.nn.functional.layer_norm(x, (1024,), w, w),
                    norm,
                )
            )
    found |= _attention_cases(setup)
    return found


def _matmul_case(setup: Setup, shape: tuple[int, int, int], dtype: str, made: torch.dtype) -> Case:
    m, n, k = shape
    a, b = torch.randn(m, k, device=setup.tensors).to(made), torch.randn(k, n, device=setup.tensors).to(made)
    out = torch.empty(m, n, device=setup.tensors, dtype=made)
    size = made.itemsize
    counts = Counts(
        f"matmul {dtype}",
        {dtype: 2.0 * m * n * k},
        {},
        float(size * (m * k + k * n)),
        float(size * m * n),
        shape=(1, m, n, k),
        alignment=alignment_of([a, b, out]),
    )

    def work() -> object:
        # Set for each call: a global of torch, which the other cases need otherwise.
        if torch.get_float32_matmul_precision() != ("high" if dtype == "tf32" else "highest"):
            torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        return torch.mm(a, b, out=out)

    return f"{m}x{n}x{k}", work, counts


def _attention_cases(setup: Setup) -> dict[str, list[Case]]:
    made, label = setup.dtype, str(setup.dtype).removeprefix("torch.")
    found: dict[str, list[Case]] = {}
    sequences = (96, 192, 320) if setup.on_cpu else (384, 768, 1536, 3072)
    heads = 8 if setup.on_cpu else 96
    for causal in (False, True):
        for head in (64,) if setup.on_cpu else (64, 128):
            for length in sequences[:2] if setup.quick else sequences:
                q, k, v = (
                    torch.randn(1, heads, length, head, device=setup.tensors).to(made).requires_grad_()
                    for _ in range(3)
                )
                flops = 4.0 * heads * length * length * head * (0.5 if causal else 1.0)
                moved = float(q.numel() * made.itemsize)
                with devstream.stream(setup.clock.stream):
                    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
                gradient = torch.ones_like(out)
                suffix = f"{head}{' causal' if causal else ''}"
                shape = attention_shape(heads, length, length)
                forward = Counts(
                    f"attention {label} forward {suffix}", {label: flops}, {}, 3 * moved, moved, shape=shape
                )
                backward = Counts(
                    f"attention {label} backward {suffix}",
                    {label: 2.5 * flops},
                    {},
                    5 * moved,
                    3 * moved,
                    shape=shape,
                )

                def run_forward(q=q, k=k, v=v, causal=causal) -> object:  # type: ignore[no-untyped-def]
                    with torch.no_grad():
                        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

                def run_backward(out=out, q=q, k=k, v=v, g=gradient) -> object:  # type: ignore[no-untyped-def]
                    return torch.autograd.grad(out, (q, k, v), g, retain_graph=True)

                found.setdefault("attention forward", []).append((f"{length} {suffix}", run_forward, forward))
                found.setdefault("attention backward", []).append((f"{length} {suffix}", run_backward, backward))
    return found


# -- the published facts ---------------------------------------------------------------------------------


def part_classes(setup: Setup) -> list[Row]:
    """BERT-large: share of FLOPs beside share of time, and FLOP/s of each class against matmul's."""
    small = setup.on_cpu or setup.quick
    step = bert_large(setup.tensors, setup.dtype, batch=2 if small else 32, layers=2 if small else 24)
    found = diagnose(step, device=setup.device, ceilings=setup.ceilings)
    whole = {one.name: one for one in found.by_class}
    share = sum(whole[name].flops_share for name in CONTRACTIONS if name in whole)
    rows = [Row("R3", "BERT-large step: matmuls' share of FLOPs", 100 * share, "%", "", "over 99", share > 0.99)]
    fast = whole["matmul"].flops_per_s
    published = {"normalisation": "published: about 250", "pointwise": "published: about 700"}
    for name, one in whole.items():
        what = f"BERT-large {name}: {one.flops_share:.2%} of FLOPs; share of time"
        rows.append(
            Row("", what, 100 * one.time_share, "%", f"{quantity(one.flops_per_s, 'FLOP/s')}, {one.bound}")
        )
        if name in published and one.flops_per_s:
            what = f"BERT-large: FLOP/s of matmul over {name}'s"
            rows.append(Row("R3", what, fast / one.flops_per_s, "x", "", published[name]))
    rows.append(
        Row("", "BERT-large step", found.wall_s * 1e3, "ms", f"idle {found.idle_share:.0%}, {found.bound}")
    )
    return rows


def part_chain(setup: Setup) -> list[Row]:
    """A chain of k pointwise operations: linear in k when each is a kernel, constant when they are one."""
    x = torch.rand(1 << (20 if setup.on_cpu or setup.quick else 26), device=setup.tensors)
    rows, times = [], {}
    for k in (1, 2, 4, 8, 16):

        def chain(x: torch.Tensor, k: int = k) -> torch.Tensor:
            for _ in range(k):
                x = x * 1.001
            return x

        torch.compiler.reset()  # each k is the same code object, of which only a few versions are compiled
        fused = torch.compile(chain, dynamic=False)
        eager_s, fused_s = setup.clock.time(lambda: chain(x)).seconds, setup.clock.time(lambda: fused(x)).seconds  # noqa: B023 - called at once
        times[k] = (eager_s, fused_s)
        rows.append(Row("", f"chain of {k}: one kernel each", eager_s * 1e6, "µs"))
        rows.append(Row("", f"chain of {k}: fused", fused_s * 1e6, "µs"))
    linear, constant = times[16][0] / times[1][0], times[16][1] / times[1][1]
    # A CPU's caches hold what its memory would have to move, so there the two are told and not judged.
    fused_ok, unfused_ok = (None, None) if setup.on_cpu else (constant <= 1.3, 12 <= linear <= 20)
    rows.append(Row("R3", "chain of 16 over one, unfused", linear, "x", "", "12 to 20", unfused_ok))
    rows.append(Row("R3", "chain of 16 over one, fused", constant, "x", "", "at most 1.3", fused_ok))
    return rows


def part_multiply(setup: Setup) -> list[Row]:
    """Repeated multiplication: where a pointwise kernel turns from memory- to compute-bound."""
    x = torch.rand(1 << (20 if setup.on_cpu or setup.quick else 26), device=setup.tensors)
    rows: list[Row] = []
    base, turned = 0.0, 0
    for k in (1, 2, 4, 8, 16, 32, 64, 128, 256):

        def multiply(x: torch.Tensor, k: int = k) -> torch.Tensor:
            for _ in range(k):
                x = x * 2
            return x

        torch.compiler.reset()  # each k is the same code object, of which only a few versions are compiled
        fused = torch.compile(multiply, dynamic=False)
        seconds = setup.clock.time(lambda: fused(x)).seconds  # noqa: B023 - called at once
        base = base or seconds
        if not turned and seconds > 1.5 * base:
            turned = k
        rate, moved = k * x.numel() / seconds, 8.0 * x.numel() / seconds
        rows.append(Row("", f"{k} multiplications: FLOP/s", rate / 1e12, "TFLOP/s", quantity(moved, "B/s")))
    memory, vector = setup.ceilings.memory_bytes_per_s or 0.0, setup.ceilings.vector.get("float32", 0.0)
    # A multiply-add counts as two; a multiplication alone uses half of the unit.
    expected = 8 * (vector / 2) / memory if memory else 0.0
    rows.append(
        Row(
            "R3",
            "compute-bound from k (first with 1.5 times the time)",
            float(turned),
            "",
            f"model: {expected:.0f}",
        )
    )
    return rows


def part_batch(setup: Setup) -> list[Row]:
    """Batch sweep: where a step stops being bound by overhead."""
    rows = []
    until = 0
    batches = (16, 64, 256) if setup.on_cpu or setup.quick else (16, 64, 256, 1024, 4096, 16384, 65536)
    for batch in batches:
        step = mlp(setup.tensors, setup.dtype, width=256 if setup.on_cpu else 1024, batch=batch, layers=8)
        found = diagnose(step, device=setup.device, ceilings=setup.ceilings)
        if found.bound == "overhead":
            until = batch
        what = f"MLP step, batch {batch}: a sample"
        detail = f"{found.bound}, idle {found.idle_share:.0%}, {found.wall_s * 1e3:.2f} ms a step"
        rows.append(Row("", what, found.wall_s / batch * 1e6, "µs", detail))
    rows.append(Row("R3", "overhead-bound up to batch", float(until), ""))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
