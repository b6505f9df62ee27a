"""What compiled stream code costs and gains, beside torch's own compiler in the same run: goals C2 to C4 and C6.

    python bench/compile.py [--device cuda] [--only C2,C3] [--json FILE] [--keep]

A figure is the median of interleaved rounds; the spread is their range. Compile times are of new processes, each
pair one after the other; *cold* starts with an empty cache, *warm* with the one that the run before it left.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _results import Row, Run, interleaved_ns, median_and_spread

import devstream
from devstream.compiler import backend as compiler
from devstream.compiler._emit import Plan
from devstream.compiler._program import Program, Record, Wait
from devstream.compiler._run import Runner, entered

ROUNDS = 15
processes = 3


def main() -> int:
    """Measure, print, and return 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the current accelerator, else the CPU")
    parser.add_argument("--only", default="", help="goals to measure, with commas between")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--keep", action="store_true", help="also write bench/results/compile*-DEVICE.md")
    parser.add_argument("--processes", type=int, default=3, help="pairs of processes that time the first step")
    parser.add_argument("--compile-once", metavar="WHAT", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    spec = devstream.backend(chosen.device).spec(0)
    device = spec.device.type
    if chosen.compile_once:
        print(json.dumps(compile_once(device, chosen.compile_once)))
        return 0
    parts: dict[str, Callable[[str], list[Row]]] = {
        "C2": region_cost,
        "C4": regions,
        "C6": hidden_copy,
        "memory": peak_memory,
        "overlap": overlap,
        "C3": one_stream,
    }
    global processes
    processes = chosen.processes
    wanted = chosen.only.split(",") if chosen.only else list(parts)
    command = f"python bench/compile.py --device {device}"
    missed = 0
    # Two tables, since the second takes minutes: a process for each first step.
    for name, goals in (("compile", [g for g in wanted if g != "C3"]), ("compile-time", ["C3"])):
        run = Run(name, command, spec.device)
        for goal in goals if set(goals) <= set(wanted) else []:
            print(f"{goal} ...", file=sys.stderr, flush=True)
            found = parts[goal](device)
            run.rows += found
            for row in found:
                figures = f"{row.value:.3g} {row.unit} ({row.spread}) {row.limit}"
                print(f"  {row.what}: {figures}", file=sys.stderr, flush=True)
        if run.rows:
            missed |= run.finish(chosen.json, chosen.keep)
    return missed


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="devstream", fullgraph=True, options=options)


@contextmanager
def watched() -> Iterator[list[tuple[str, Program]]]:
    found: list[tuple[str, Program]] = []

    def watch(name: str, program: Program) -> None:
        found.append((name, program))

    compiler.watchers.append(watch)
    try:
        yield found
    finally:
        compiler.watchers.remove(watch)


@contextmanager
def runners() -> Iterator[list[Runner]]:
    """The runners that are made inside."""
    found: list[Runner] = []
    before = compiler.Runner

    class Seen(Runner):
        def __init__(self, plan: Plan, *args: Any, **kwargs: Any) -> None:
            super().__init__(plan, *args, **kwargs)
            found.append(self)

    compiler.Runner = Seen  # type: ignore[misc]
    try:
        yield found
    finally:
        compiler.Runner = before  # type: ignore[misc]


def fork(device: str, *streams: Any) -> None:
    for stream in streams:
        stream.wait_stream(devstream.current_stream(device))


def join(device: str, *streams: Any) -> None:
    for stream in streams:
        devstream.current_stream(device).wait_stream(stream)


# -- C2: a region's cost ---------------------------------------------------------------------------------


def region_cost(device: str) -> list[Row]:
    """Host time of a program of 24 regions of one kernel, over that of its kernels called in a row."""
    one, two = devstream.Stream(device), devstream.Stream(device)

    def function(*inputs: torch.Tensor) -> torch.Tensor:
        fork(device, one)
        t = inputs[0]
        for number in range(24):
            here, there = (one, two) if number % 2 == 0 else (two, one)
            with devstream.stream(here):
                t = torch.sin(t + inputs[number % 7 + 1])
            there.wait_stream(here)
        join(device, one, two)
        return t

    inputs = [torch.randn(256, device=device) for _ in range(8)]
    with runners() as made:
        compiled(function)(*inputs)
    (runner,) = made
    program = runner.plan.program
    home = runner.backend.current_stream(None)
    streams = (home, *(runner.backend.create_stream(0) for _ in program.streams[1:]))
    codes = [(code.code, len(code.inputs)) for code in runner.plan.code.values()]
    t = torch.randn(256, device=device)
    records = sum(isinstance(step, Record) for step in program.steps)
    waits = sum(isinstance(step, Wait) for step in program.steps)
    event = runner.backend.create_event(0, enable_timing=False, blocking=False, interprocess=False)

    def whole() -> None:
        with entered(streams, ()):
            runner(list(inputs))

    def kernels() -> None:
        for code, count in codes:
            code([t] * count)

    def orders() -> None:
        for _ in range(records):
            runner.backend.record_event(event, streams[1])
        for _ in range(waits):
            runner.backend.wait_event(streams[2], event)

    loops = 20
    times = interleaved_ns([whole, kernels, orders], loops=loops, rounds=ROUNDS)
    devstream.synchronize(device)
    count = len(program.regions)
    costs = [(a - b - c) / count for a, b, c in zip(*times, strict=True)]
    cost, spread = median_and_spread(costs, 1000)
    order, order_spread = median_and_spread([c / count for c in times[2]], 1000)
    kernel, kernel_spread = median_and_spread([b / count for b in times[1]], 1000)
    limit = None if device == "cpu" else cost <= 5
    return [
        Row("C2", f"a region of {count}, switch of stream included", cost, "µs", spread, "at most 5", limit),
        Row("C2", f"its share of {records} records and {waits} waits", order, "µs", order_spread),
        Row("C2", "its kernel, called alone", kernel, "µs", kernel_spread),
    ]


# -- C3: one stream --------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model(device: str, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    width = 1024 if device != "cpu" else 128
    kind = torch.bfloat16 if device != "cpu" else torch.float32
    return torch.nn.Sequential(*(Block(width) for _ in range(layers))).to(device, kind)


def batch(device: str, rows: int = 4096) -> torch.Tensor:
    width = 1024 if device != "cpu" else 128
    rows = rows if device != "cpu" else 64
    kind = torch.bfloat16 if device != "cpu" else torch.float32
    return torch.randn(rows, width, device=device, dtype=kind)


def step_of(device: str, what: str, rows: int = 4096) -> Callable[[], torch.Tensor]:
    """A training step: ``plain`` through Inductor, ``ours`` with its whole body on one side stream.

    ``current`` has the body on the current stream, by name.
    """
    body, x, side = model(device, 4), batch(device, rows), devstream.Stream(device)

    def streams(x: torch.Tensor) -> torch.Tensor:
        fork(device, side)
        with devstream.stream(side):
            loss = body(x).square().mean()
        join(device, side)
        return loss

    def current(x: torch.Tensor) -> torch.Tensor:
        with devstream.stream(devstream.current_stream(device)):
            return body(x).square().mean()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return body(x).square().mean()

    fast = (
        torch.compile(plain, fullgraph=True)
        if what == "plain"
        else torch.compile(current if what == "current" else streams, backend="devstream", fullgraph=True)
    )

    def step() -> torch.Tensor:
        loss: torch.Tensor = fast(x)
        loss.backward()
        body.zero_grad(set_to_none=True)
        return loss

    return step


def compile_once(device: str, what: str) -> float:
    """Seconds of the first step, all imports done and the device warm."""
    torch.ones(8, device=device).sum().item()
    importlib.import_module("torch._inductor.compile_fx")  # both sides use it

    step = step_of(device, what)
    start = time.perf_counter()
    step()
    devstream.synchronize(device)
    return time.perf_counter() - start


#: Rows of a step that keeps an H200 busy, and of one whose launches take longer than its kernels.
_BUSY, _LAUNCH_BOUND = 16384, 512


def one_stream(device: str) -> list[Row]:
    """Step time and compile time of one model, its code on one stream, beside plain Inductor."""
    rows = one_stream_steps(device, "a step", _BUSY)
    if device != "cpu":
        rows += one_stream_steps(device, "a launch-bound step", _LAUNCH_BOUND)
    first: dict[tuple[str, str], list[float]] = {}
    for _ in range(processes):
        for what in ("plain", "ours"):
            with tempfile.TemporaryDirectory() as cache:
                for temperature in ("cold", "warm"):
                    first.setdefault((what, temperature), []).append(in_a_process(device, what, cache))
    for temperature, limit in (("cold", 1.15), ("warm", 1.5)):
        plain, ours = first["plain", temperature], first["ours", temperature]
        rows.append(
            Row("C3", f"first step, {temperature}, plain Inductor", *middle([1000 * t for t in plain], "ms"))
        )
        rows.append(
            Row("C3", f"first step, {temperature}, one side stream", *middle([1000 * t for t in ours], "ms"))
        )
        value, spread = ratio(ours, plain)
        rows.append(
            Row("C3", f"first step, {temperature}, ratio", value, "x", spread, f"at most {limit}", value <= limit)
        )
    return rows


def one_stream_steps(device: str, name: str, size: int) -> list[Row]:
    """A step of *size* rows through plain Inductor, with its body on the current stream, and on a side stream."""
    torch._dynamo.reset()
    steps = [step_of(device, what, size) for what in ("plain", "current", "ours")]
    losses = [float(step().detach()) for step in steps]
    times = timed(device, steps, loops=20 if device != "cpu" else 5)
    rows = [Row("C3", f"{name}, plain Inductor", *middle(times[0], "ms"))]
    for took, loss, where in zip(times[1:], losses[1:], ("the current stream", "a side stream"), strict=True):
        value, spread = ratio(took, times[0])
        agree = abs(losses[0] - loss) <= 1e-2 * abs(losses[0])
        rows.append(Row("C3", f"{name}, on {where}", *middle(took, "ms")))
        what = f"{name}, on {where}: ratio{'' if agree else ' (losses differ!)'}"
        reached = (value <= 1.02 and agree) if device != "cpu" else None
        rows.append(Row("C3", what, value, "x", spread, "at most 1.02", reached))
    return rows


def in_a_process(device: str, what: str, cache: str) -> float:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    command = [sys.executable, __file__, "--device", device, "--compile-once", what]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(json.loads(found.splitlines()[-1]))


# -- C4: how many regions --------------------------------------------------------------------------------


def regions(device: str) -> list[Row]:
    """Regions of micro-batch and multi-branch training, beside what the waits behind work make necessary."""
    one, two = devstream.Stream(device), devstream.Stream(device)
    first, second = model(device, 1), model(device, 1)

    def micro_batches(x: torch.Tensor) -> torch.Tensor:
        fork(device, one, two)
        parts = []
        for number, part in enumerate(x.chunk(4)):
            with devstream.stream(one if number % 2 == 0 else two):
                parts.append(second(first(part)))
        join(device, one, two)
        return torch.cat(parts).square().mean()

    def branches(x: torch.Tensor) -> torch.Tensor:
        fork(device, one)
        with devstream.stream(one):
            a = first(x)
        b = second(x)
        join(device, one)
        return (a * b).mean()

    rows = []
    for function in (micro_batches, branches):
        with watched() as found:
            compiled(function)(batch(device)).backward()
        for name, program in found:
            bound = 0
            for stream in range(len(program.streams)):
                worked = waits = 0
                for step in program.steps:
                    if getattr(step, "stream", None) == stream:
                        if step in program.regions:
                            worked = 1
                        elif isinstance(step, Wait) and worked:
                            waits += 1
                            worked = 0
                used = any(region.stream == stream for region in program.regions)
                bound += waits + 1 if used else 0
            count = len(program.regions)
            what = f"{function.__name__}, {name}: regions"
            rows.append(Row("C4", what, count, "", "", f"at most {bound}", count <= bound))
    return rows


# -- C6: a copy under compute ----------------------------------------------------------------------------


def hidden_copy(device: str) -> list[Row]:
    """The part of a copy to the device, on a side stream, that compute of twice its length hides."""
    if device == "cpu":
        return []
    side = devstream.Stream(device)
    host = torch.randn(64 << 20, pin_memory=True)
    size = 8192
    w = torch.randn(size, size, device=device, dtype=torch.bfloat16) / size**0.5

    def compute(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x @ w
        return x

    def copy(host: torch.Tensor) -> torch.Tensor:
        return host.to(device, non_blocking=True)

    def both(x: torch.Tensor, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fork(device, side)
        with devstream.stream(side):
            here = host.to(device, non_blocking=True)
        x = compute(x)
        join(device, side)
        return x, here

    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    fast = [compiled(compute), compiled(both)]
    with torch.no_grad():
        got = fast[1](x, host)
        right = torch.equal(got[1], host.to(device))
        calls: list[Callable[[], object]] = [lambda: fast[0](x), lambda: copy(host), lambda: fast[1](x, host)]
        times = timed(device, calls, loops=5)
    hidden = [100 * (1 - (c - a) / b) for a, b, c in zip(*times, strict=True)]
    value, spread = median_and_spread(hidden)
    return [
        Row("C6", "compute alone", *middle(times[0], "ms")),
        Row("C6", "copy of 256 MiB from pinned memory alone", *middle(times[1], "ms")),
        Row("C6", "both, compiled", *middle(times[2], "ms")),
        Row(
            "C6",
            "hidden" if right else "hidden (wrong bytes!)",
            value,
            "%",
            spread,
            "at least 90",
            value >= 90 and right,
        ),
    ]


# -- memory and overlap ----------------------------------------------------------------------------------


def peak_memory(device: str) -> list[Row]:
    """Peak of a two-branch training step, eager and compiled, over what the model and its input take."""
    if device == "cpu":
        return []
    side = devstream.Stream(device)
    first, second = model(device, 4), model(device, 4)
    x = batch(device)

    def function(x: torch.Tensor) -> torch.Tensor:
        fork(device, side)
        with devstream.stream(side):
            a = first(x)
        b = second(x)
        join(device, side)
        return (a * b).mean()

    def peak(step: Callable[..., torch.Tensor]) -> float:
        for _ in range(4):
            step(x).backward()
            for module in (first, second):
                module.zero_grad(set_to_none=True)
            devstream.synchronize(device)
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step(x).backward()
            for module in (first, second):
                module.zero_grad(set_to_none=True)
        devstream.synchronize(device)
        return (torch.cuda.max_memory_allocated() - base) / 2**20

    eager, plain = peak(function), peak(torch.compile(lambda x: (first(x) * second(x)).mean()))
    ours = peak(compiled(function))
    # Its two values that cross streams: the side branch's result, and the gradient that goes back there.
    crossing = 2 * x.numel() * x.element_size() / 2**20
    limit = eager + crossing
    return [
        Row("memory", "peak of a step, eager", eager, "MiB"),
        Row("memory", "peak of a step without streams, Inductor", plain, "MiB"),
        Row("memory", "peak of a step, compiled", ours, "MiB", "", f"at most {limit:.0f}", ours <= limit),
    ]


def overlap(device: str) -> list[Row]:
    """A program of matmuls on two streams beside the same on one."""
    one, two = devstream.Stream(device), devstream.Stream(device)
    size = 512 if device == "cpu" else 1024
    w = torch.randn(size, size, device=device) / size**0.5

    def branch(x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            x = x @ w
        return x

    def on(first: Any, second: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            fork(device, first)
            if second is not first:
                fork(device, second)
            with devstream.stream(first):
                a = branch(x)
            with devstream.stream(second):
                b = branch(x)
            join(device, first)
            if second is not first:
                join(device, second)
            return a + b

        return compiled(function)  # type: ignore[no-any-return]

    x = torch.randn(64 if device != "cpu" else size, size, device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            both, single = on(one, two), on(one, one)
            assert torch.allclose(both(x), single(x), atol=1e-3)
            times = timed(
                device, [lambda: both(x), lambda: single(x)], loops=3 if device == "cpu" else 20, rounds=5
            )
    finally:
        torch.set_num_threads(threads)
    value, spread = ratio(times[0], times[1])
    return [
        Row(
            "overlap",
            "matmuls on two streams over the same on one",
            value,
            "x",
            spread,
            "at most 0.7" if device == "cpu" else "",
            value <= 0.7 if device == "cpu" else None,
        ),
    ]


# -- times -----------------------------------------------------------------------------------------------


def timed(
    device: str, calls: list[Callable[[], object]], *, loops: int, rounds: int = ROUNDS
) -> list[list[float]]:
    """Return milliseconds a call, in turns, the device idle before and behind each turn."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(3):
            call()
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            devstream.synchronize(device)
            start = time.perf_counter()
            for _ in range(loops):
                call()
            devstream.synchronize(device)
            found.append(1000 * (time.perf_counter() - start) / loops)
    return times


def ratio(times: list[float], base: list[float]) -> tuple[float, str]:
    return median_and_spread([a / b for a, b in zip(times, base, strict=True)])


def middle(times: list[float], unit: str) -> tuple[float, str, str]:
    return statistics.median(times), unit, f"{min(times):.3g} to {max(times):.3g}"


if __name__ == "__main__":
    sys.exit(main())
