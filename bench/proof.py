"""What the proof of a program costs, and how that grows with the program: twice the steps, at most 2.3 times.

    python bench/proof.py [--json FILE] [--keep]

A round of the made-up program is four launches over three streams with a collective among them, so its steps grow
in step with its rounds, and so do the things in flight. Times are medians of interleaved calls; the spread is
their range.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from time import perf_counter_ns

import torch
from _results import Row, Run, median_and_spread

from devstream.compiler._build import build
from devstream.compiler._graph import Graph
from devstream.compiler._proof import prove
from devstream.testing.graphs import Capture

SIZES = (250, 500, 1000, 2000)
REPEATS = 11
LIMIT = 2.3


def main() -> int:
    """Measure, print, and return 1 where twice the program costs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--keep", action="store_true", help="also write bench/results/proof-cpu.md")
    chosen = parser.parse_args()
    run = Run("proof", "python bench/proof.py", torch.device("cpu"))
    graphs = [rounds(size) for size in SIZES]
    programs = [build(graph) for graph in graphs]
    times = in_turns([lambda program=program: prove(program) for program in programs])
    for program, found in zip(programs, times, strict=True):
        value, spread = median_and_spread(found, 1e6)
        run.rows.append(Row("", f"the proof of {len(program.steps):,} steps", value, "ms", spread))
    for at, program in enumerate(programs[1:], start=1):
        ratios = [now / before for now, before in zip(times[at], times[at - 1], strict=True)]
        value, spread = median_and_spread(ratios)
        what = f"{len(program.steps):,} steps over {len(programs[at - 1].steps):,}"
        run.rows.append(Row("twice", what, value, "x", spread, f"at most {LIMIT}", value <= LIMIT))
    built = in_turns([lambda: build(graphs[-1])], 5)
    share = statistics.median(times[-1]) / statistics.median(built[0])
    run.rows.append(Row("", f"that proof of {len(programs[-1].steps):,} steps over its build", share, "x"))
    return run.finish(chosen.json, chosen.keep)


def rounds(count: int) -> Graph:
    """Return *count* rounds over three streams, with a collective in each."""
    capture = Capture(streams=3)
    value = capture.input()
    for number in range(count):
        value = capture.node(number % 3, value)
        issued = capture.issue(number % 3, value)
        side = capture.node((number + 1) % 3, value)
        value = capture.node((number + 2) % 3, capture.land((number + 2) % 3, issued), side)
    capture.output(value)
    return capture.graph()


def in_turns(calls: list[Callable[[], object]], repeats: int = REPEATS) -> list[list[float]]:
    """Return nanoseconds of each call, measured in turns, with no collection of garbage in between."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    gc.disable()
    try:
        for _ in range(repeats):
            for call, found in zip(calls, times, strict=True):
                start = perf_counter_ns()
                call()
                found.append(perf_counter_ns() - start)
            gc.collect()
    finally:
        gc.enable()
    return times


if __name__ == "__main__":
    raise SystemExit(main())
