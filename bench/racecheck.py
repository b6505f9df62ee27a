"""What the race checker costs, and what it finds, beside torch's own sanitizer in one run: goal E5.

    python bench/racecheck.py [--device cuda] [--json FILE] [--keep]

The step is four layers of 256 at batch 256, forward, backward and SGD. It is measured first in a process that has
never checked anything, which is what the limit is held against, and then in turns: off, devstream, torch's
sanitizer. On a GPU torch can't switch its trace off again, so off in these turns still carries its empty hooks.
The sanitizer exists for CUDA only; its hooks are taken out of torch's registries while the others run. A figure is
the median of the rounds. Each of the faulty programs of `devstream.testing.faulty` then runs 100 times under each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import warnings
from collections.abc import Callable, Iterator
from time import perf_counter_ns

import torch
from _results import Row, Run, median_and_spread
from torch import nn

import devstream
from devstream.testing.faulty import PROGRAMS, Program, one_process_group

ROUNDS, STEPS, OPERATIONS, TIMES = 15, 20, 500, 100


def main() -> int:
    """Measure, print, and return 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the current accelerator, else the CPU")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--keep", action="store_true", help="also write bench/results/racecheck-DEVICE.md")
    chosen = parser.parse_args()
    device = devstream.backend(chosen.device).spec(0).device
    logging.getLogger("devstream").setLevel(logging.ERROR)  # rings wait for unrecorded events on purpose
    run = Run("racecheck", f"python bench/racecheck.py --device {device.type}", device)
    step, operation = _step(device), _operation(device)
    before = [_alone(device, step, STEPS), _alone(device, operation, OPERATIONS)]
    run.rows += step_cost(device, step, before[0]) + operation_cost(device, operation, before[1]) + found(device)
    return run.finish(chosen.json, chosen.keep)


# -- cost ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Nothing is watched."""
    yield


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """devstream's checker."""
    with devstream.racecheck():
        yield


@contextlib.contextmanager
def sanitizer() -> Iterator[None]:
    """torch's sanitizer, whose hooks leave torch's registries again."""
    from torch.cuda import _gpu_trace  # noqa: PLC0415 - CUDA only
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode  # noqa: PLC0415

    lists = [one.callback_list for one in vars(_gpu_trace).values() if hasattr(one, "callback_list")]
    before = [list(one) for one in lists]
    try:
        with CUDASanitizerDispatchMode():
            yield
    finally:
        for one, kept in zip(lists, before, strict=True):
            one[:] = kept


def checkers(device: torch.device) -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return what is compared on this device."""
    names = {"off": off, "devstream": ours}
    return {**names, "torch's sanitizer": sanitizer} if device.type == "cuda" else names


def _in_turns(
    device: torch.device,
    call: Callable[[], object],
    count: int,
    under: dict[str, Callable[[], contextlib.AbstractContextManager[None]]],
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, checker in under.items():
            with checker():
                for _ in range(3):
                    call()
                devstream.synchronize(device)
                start = perf_counter_ns()
                for _ in range(count):
                    call()
                devstream.synchronize(device)
                times.setdefault(name, []).append((perf_counter_ns() - start) / count)
    return times


def _alone(device: torch.device, call: Callable[[], object], count: int) -> list[float]:
    """Return nanoseconds a call, in a process that has never checked anything."""
    return _in_turns(device, call, count, {"off": off})["off"]


def _step(device: torch.device) -> Callable[[], object]:
    torch.manual_seed(0)
    batch = torch.randn(256, 256, device=device)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def _operation(device: torch.device) -> Callable[[], object]:
    x = torch.ones(64, device=device)
    return lambda: x + 1


def step_cost(device: torch.device, step: Callable[[], object], before: list[float]) -> list[Row]:
    """The step of E5, under each checker."""
    times = {"never checked": before, **_in_turns(device, step, STEPS, checkers(device))}
    limit = 2 if device.type == "cpu" else 5
    rows = []
    for name, found_ns in times.items():
        value, spread = median_and_spread(found_ns, 1e6)
        rows.append(Row("E5", f"training step, {name}", value, "ms", spread))
    bare = statistics.median(before)
    value, spread = median_and_spread(times["devstream"], bare)
    what = "step, devstream over never checked"
    rows.append(Row("E5", what, value, "x", spread, f"at most {limit}", value <= limit))
    return rows


def operation_cost(device: torch.device, operation: Callable[[], object], before: list[float]) -> list[Row]:
    """One small operation, under each checker."""
    times = {"never checked": before, **_in_turns(device, operation, OPERATIONS, checkers(device))}
    bare = statistics.median(before)
    rows, added = [], {}
    for name, found_ns in times.items():
        value, spread = median_and_spread(found_ns, 1e3)
        rows.append(Row("E5", f"`x + 1`, {name}", value, "µs", spread))
        added[name] = [one - bare for one in found_ns]
    if "torch's sanitizer" in added:
        ratios = [
            theirs / mine for theirs, mine in zip(added["torch's sanitizer"], added["devstream"], strict=True)
        ]
        value, spread = median_and_spread(ratios)
        what = "added an operation, torch's sanitizer over devstream"
        rows.append(Row("E5", what, value, "x", spread, "at least 5", value >= 5))
    return rows


# -- what is found ---------------------------------------------------------------------------------------


def _ours_finds(program: Program, device: torch.device, broken: bool) -> bool:
    with devstream.racecheck(on_race="collect") as races:
        program.run(device, broken)
    return bool(races)


def _sanitizer_finds(program: Program, device: torch.device, broken: bool) -> bool:
    from torch.cuda._sanitizer import CUDASanitizerErrors  # noqa: PLC0415 - CUDA only

    try:
        with sanitizer(), contextlib.redirect_stderr(io.StringIO()):
            program.run(device, broken)
    except CUDASanitizerErrors:
        return True
    finally:
        devstream.synchronize(device)
    return False


def found(device: torch.device) -> list[Row]:
    """Every faulty program and its repair, 100 times under each checker."""
    tools: dict[str, Callable[[Program, torch.device, bool], bool]] = {"devstream": _ours_finds}
    if device.type == "cuda":
        tools["torch's sanitizer"] = _sanitizer_finds
    rows = []
    for name, program in PROGRAMS.items():
        if program.only not in ("", device.type):
            continue
        for tool, finds in tools.items():
            with warnings.catch_warnings(), one_process_group(device):
                warnings.simplefilter("ignore")
                faulty = sum(finds(program, device, True) for _ in range(TIMES))
                false = sum(finds(program, device, False) for _ in range(TIMES))
            mine = tool == "devstream"
            ok = (faulty == TIMES and false == 0) if mine else None
            limit = f"{TIMES} of {TIMES}, no false alarm" if mine else ""
            rows.append(Row("", f"{name}, {tool}", faulty, f"of {TIMES}", f"{false} false alarms", limit, ok))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
