"""What devstream costs a call, beside torch's own calls in the same run: goals E1 to E4.

    python bench/overhead.py [--device cuda] [--json FILE] [--keep]

A figure is the median of interleaved rounds; the spread is their range. The cost of an empty call (the loop and
the lambda around each measured statement) is subtracted from every figure.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType

import torch
from _results import Row, Run, interleaved_ns, median_and_spread

import devstream
from devstream import _objects, _observe, _streams

LOOPS, ROUNDS = 20_000, 9


def main() -> int:
    """Measure, print, and return 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the current accelerator, else the CPU")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--keep", action="store_true", help="also write bench/results/overhead-DEVICE.md")
    chosen = parser.parse_args()
    spec = devstream.backend(chosen.device).spec(0)
    command = f"python bench/overhead.py --device {spec.device.type}"
    run = Run("overhead", command, spec.device)
    if spec.device.type == "cpu":
        run.rows += verbs(spec.device)
    else:
        run.rows += contexts_and_current(spec.device) + verbs(spec.device)
    run.rows += import_cost() + seam_cost(spec.device)
    return run.finish(chosen.json, chosen.keep)


def contexts_and_current(device: torch.device) -> list[Row]:
    """E1 and E2: the two calls that training code makes most."""
    stream = devstream.Stream(device)
    native = torch.Stream(device=device)
    vendor = getattr(torch, device.type)  # torch.cuda, torch.xpu: what the code was written with before
    vendor_stream = vendor.Stream()

    def ours() -> None:
        with devstream.stream(stream):
            pass

    def bare() -> None:
        with native:
            pass

    def theirs() -> None:
        with vendor.stream(vendor_stream):
            pass

    calls: list[Callable[[], object]] = [
        lambda: None,
        ours,
        bare,
        theirs,
        devstream.current_stream,
        torch.accelerator.current_stream,
        vendor.current_stream,
    ]
    times = interleaved_ns(calls, loops=LOOPS, rounds=ROUNDS)
    empty = statistics.median(times[0])
    names = [
        "`with devstream.stream(s):`",
        "`with s:`",
        f"`with torch.{device.type}.stream(s):`",
        "`devstream.current_stream()`",
        "`torch.accelerator.current_stream()`",
        f"`torch.{device.type}.current_stream()`",
    ]
    rows, medians = [], []
    for name, found in zip(names, times[1:], strict=True):
        value, spread = median_and_spread([time - empty for time in found], 1000)
        medians.append(value)
        rows.append(Row("E1" if "with" in name else "E2", name, value, "µs", spread))
    ours_us, bare_us, vendor_us, current_us, native_us, vendor_current_us = medians
    return [
        *rows,
        _ratio("E1", "ours over `with s:`", ours_us / bare_us, at_most=1.3),
        _ratio("E1", f"`torch.{device.type}.stream` over ours", vendor_us / ours_us, at_least=6),
        _ratio("E2", "ours over `torch.accelerator`", current_us / native_us, at_most=2),
        _ratio("E2", f"`torch.{device.type}` over ours", vendor_current_us / current_us, at_least=2),
    ]


def verbs(device: torch.device) -> list[Row]:
    """The other verbs, for scale; no limit of their own."""
    one, two = devstream.Stream(device), devstream.Stream(device)
    event = devstream.Event(device)
    event.record(one)

    def switch() -> None:
        with devstream.stream(one):
            pass

    calls: dict[str, Callable[[], object]] = {
        "`with devstream.stream(s):`": switch,
        "`event.record(s)`": lambda: event.record(one),
        "`event.wait(s)`": lambda: event.wait(two),
        "`s.wait_event(e)`": lambda: two.wait_event(event),
        "`s.wait_stream(t)`": lambda: two.wait_stream(one),
        "`devstream.Event()`": lambda: devstream.Event(device),
        "`devstream.named_stream(p)`": lambda: devstream.named_stream("bench", device),
    }
    times = interleaved_ns([lambda: None, *calls.values()], loops=LOOPS // 4, rounds=ROUNDS)
    empty = statistics.median(times[0])
    rows = []
    for name, found in zip(calls, times[1:], strict=True):
        value, spread = median_and_spread([time - empty for time in found], 1000)
        rows.append(Row("", name, value, "µs", spread))
    devstream.synchronize(device)
    return rows


IMPORT = """
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import devstream
took = time.perf_counter() - start
new = set(sys.modules) - before
core = {"devstream", *sys.stdlib_module_names}
foreign = sorted(m for m in new if m.split(".")[0] not in core)
rooms = {"backends", "cli", "compiler", "demo", "distributed", "offload", "overlap", "races", "report", "roofline"}
features = sorted(m for m in new if m.count(".") == 1 and m.split(".")[1] in rooms | {"testing"})
from devstream import _registry
print(took * 1000, ",".join(foreign + features) or "nothing", _registry._entry_points is None)
"""


def import_cost() -> list[Row]:
    """E3: import devstream after import torch, each time in a new process."""
    took, extra, unread = [], "nothing", True
    for _ in range(9):
        out = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
        milliseconds, modules, entry_points_unread = out.split()[-3:]
        took.append(float(milliseconds))
        extra, unread = modules, unread and entry_points_unread == "True"
    value, spread = median_and_spread(took)
    return [
        Row("E3", "`import devstream` after `import torch`", value, "ms", spread, "at most 30", value <= 30),
        Row("E3", f"other modules it imports: {extra}", 0.0, "", "", "no vendor, no feature", extra == "nothing"),
        Row("E3", "entry points read by the import", 0.0 if unread else 1.0, "", "", "none", unread),
    ]


def seam_cost(device: torch.device) -> list[Row]:
    """E4: each verb against a copy of itself without the lines of the seam, with nobody subscribed."""
    assert not _observe.subscribers
    one, two, event = devstream.Stream(device), devstream.Stream(device), devstream.Event(device)
    event.record(one)
    here = devstream.current_stream(device)
    backend = devstream.backend(device)
    verbs_of: list[tuple[str, ModuleType, FunctionType, tuple[object, ...]]] = [
        ("record", _objects, _objects.record, (event, one)),
        ("wait", _objects, _objects.wait, (two, event)),
        ("set_stream", _streams, _streams._set, (backend, here)),
    ]
    rows = []
    for name, module, verb, arguments in verbs_of:
        bare = _without_seam(module, verb)
        calls: list[Callable[[], object]] = [
            lambda verb=verb, arguments=arguments: verb(*arguments),  # type: ignore[misc]
            lambda bare=bare, arguments=arguments: bare(*arguments),  # type: ignore[misc]
        ]
        with_seam, without = interleaved_ns(calls, loops=LOOPS // 2, rounds=21)
        differences = [a - b for a, b in zip(with_seam, without, strict=True)]
        value, spread = median_and_spread(differences)
        rows.append(Row("E4", f"the seam in `{name}`", value, "ns", spread, "at most 50", value <= 50))
    devstream.synchronize(device)
    return rows


class _Strip(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if ast.unparse(node.test) == "_observe.subscribers":
            return node.orelse or ast.Pass()
        return self.generic_visit(node)


def _without_seam(module: ModuleType, verb: FunctionType) -> Callable[..., object]:
    tree = _Strip().visit(ast.parse(textwrap.dedent(inspect.getsource(verb))))
    names = dict(vars(module))
    exec(compile(ast.fix_missing_locations(tree), verb.__name__, "exec"), names)
    found: Callable[..., object] = names[verb.__name__]
    return found


def _ratio(goal: str, what: str, value: float, *, at_most: float = 0, at_least: float = 0) -> Row:
    if at_most:
        return Row(goal, what, value, "x", "", f"at most {at_most}", value <= at_most)
    return Row(goal, what, value, "x", "", f"at least {at_least}", value >= at_least)


if __name__ == "__main__":
    raise SystemExit(main())
