"""`diagnose`: run a function, look where its time goes, and say what would help."""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

from devstream import _registry
from devstream._compat import tree_leaves
from devstream._compat.autograd import profiler_has_devices
from devstream._streams import synchronize
from devstream.abc import AnyBackend, Capability
from devstream.exceptions import DiagnosisError, UnsupportedError
from devstream.report.timeline import Span, together
from devstream.roofline import _fused
from devstream.roofline._measure import OnProgress, measure
from devstream.roofline._memory import device_memory
from devstream.roofline.actions import Situation, actions, fused_counts
from devstream.roofline.ceilings import Ceilings
from devstream.roofline.counting import Counted, Counter, Op, count_with, run_backward, user_line_of
from devstream.roofline.diagnosis import Diagnosis, TimedOp, by_class, region, regions
from devstream.roofline.formulas import Described
from devstream.roofline.model import Counts
from devstream.roofline.profiled import COMPILED, PREFIX, Profiled, Work, parse
from devstream.typing import DeviceArg

_SECONDS_AT_LEAST = 0.2


def diagnose(
    function: Callable[..., Any],
    *args: Any,
    device: DeviceArg = None,
    ceilings: Ceilings | None = None,
    on_progress: OnProgress | None = None,
) -> Diagnosis:  # Any: whatever the function takes and returns
    """Return where the time of ``function(*args)`` goes, forward and backward, and what would help.

    Runs it about ten times: to warm up, to time it without any tool, with each operation counted and marked
    (compiled code uncompiled), and once more in the profiler. So what it changes (weights, a file) is changed that
    often. Where it returns something differentiable and has run no backward itself, the backward is run as
    well; gradients of leaves are then left as they were.

    Args:
        function: for instance a training step; use functools.partial for keyword arguments.
        args: its arguments.
        device: where it runs. Default: that of the first tensor among the arguments, or of the function's weights;
            else the current accelerator, else the CPU.
        ceilings: what to hold it against; default: those of the device, measured now if they were not before.
        on_progress: called before each part.

    Raises:
        DiagnosisError: the function raised; the cause is chained.
        UnsupportedError: torch's profiler is missing, in use, or doesn't see this device.
        MeasurementError: the ceilings could not be measured.
        BackendError: there is no such device.
    """
    backend, index = _resolve(function, args, device)
    if not profiler_has_devices():
        raise _no_profiler(backend, "this build of torch has none (Kineto)")
    subject = _Subject(function, args, torch.device(backend.device_type, index))
    parts = ("warm-up", "ceilings", "time", "counts", "profile")

    def tell(part: str) -> None:
        if on_progress is not None:
            on_progress(part, parts.index(part), len(parts))

    tell("warm-up")
    subject.warm_up()
    tell("ceilings")
    ceilings = measure(subject.device) if ceilings is None else ceilings
    tell("time")
    wall_s = subject.time()
    tell("counts")
    on_host = backend.device_type == "cpu"
    marked = _counted(subject, backend, on_host=on_host)
    tell("profile")
    plain = _profiled(subject, backend, on_host=on_host)
    if on_progress is not None:
        on_progress("done", len(parts), len(parts))
    if marked[0][1].ops and not (plain.work and marked[0][0].work):
        raise _no_profiler(backend, "it saw nothing run on the device; end other profilers that hold it")
    runs = _Runs(subject.name, backend, index, ceilings, wall_s, marked, plain)
    return _conclude(runs)


@dataclass(frozen=True, slots=True)
class _Runs:
    """What all runs of a function gave.

    Attributes:
        function: its name.
        backend, index: where it ran.
        ceilings: of the device.
        wall_s: of a run without tools.
        marked: the traces of runs whose operations were counted and marked, with what they did.
        plain: the trace of a plain run.
    """

    function: str
    backend: AnyBackend
    index: int
    ceilings: Ceilings
    wall_s: float
    marked: list[tuple[Profiled, Counted]]
    plain: Profiled

    @property
    def counted(self) -> Counted:
        """What the first marked run did."""
        return self.marked[0][1]


def _no_profiler(backend: AnyBackend, reason: str) -> UnsupportedError:
    return UnsupportedError(
        operation="diagnose",
        backend=backend.name,
        capability="torch's profiler",
        alternative=f"{reason}; devstream.roofline.counting.count needs no profiler",
    )


def _resolve(function: Callable[..., Any], args: Sequence[Any], device: DeviceArg) -> tuple[AnyBackend, int]:
    if device is None:
        owner = getattr(function, "__self__", function)
        weights = list(owner.parameters()) if isinstance(owner, torch.nn.Module) else []
        found = [leaf.device for leaf in (*tree_leaves(args), *weights) if isinstance(leaf, torch.Tensor)]
        device = next((one for one in found if one.type != "cpu"), found[0] if found else None)
    backend, index = _registry.resolve(device)
    return backend, backend.current_index() if index is None else index


# -- running ---------------------------------------------------------------------------------------------


class _Subject:
    """The function under diagnosis: runs it, with its backward, and says where it failed."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], device: torch.device) -> None:
        self._function, self._args, self.device = function, args, device
        inner = function.func if isinstance(function, functools.partial) else function
        self.name = getattr(inner, "__qualname__", None) or type(inner).__name__
        self._ours = True

    def warm_up(self) -> None:
        """Run it until everything is loaded, compiled and allocated; find out whether it runs its own backward."""
        counter = Counter()
        self._guard("in a first run", lambda: count_with(counter, self._function, *self._args))
        self._ours = not (counter.saw_backward and counter.called_backward)
        for _ in range(2):
            self.run("while warming up")
        synchronize(self.device)

    def run(self, phase: str = "while it was timed") -> None:
        """Run it once."""
        self._guard(phase, self._once)

    def _once(self) -> None:
        out = self._function(*self._args)
        if self._ours:
            run_backward(out)

    def count(self, counter: Counter) -> Counted:
        """Run it once under *counter*."""
        self._guard("while it was counted", lambda: count_with(counter, self._function, *self._args))
        return counter.counted

    def _guard(self, phase: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # a user's function may raise anything
            frames = traceback.extract_tb(error.__traceback__)
            cause = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise DiagnosisError(
                function=self.name, phase=phase, cause=cause, line=user_line_of(frames)
            ) from error

    def time(self) -> float:
        """Return the seconds of a run: the median of rounds of several runs, issued back to back."""
        started = time.perf_counter()
        self.run()
        synchronize(self.device)
        loops = max(1, min(20, int(_SECONDS_AT_LEAST / 5 / (time.perf_counter() - started))))
        found = []
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(loops):
                self.run()
            synchronize(self.device)
            found.append((time.perf_counter() - started) / loops)
        return statistics.median(found)


def _counted(subject: _Subject, backend: AnyBackend, *, on_host: bool) -> list[tuple[Profiled, Counted]]:
    """Count runs whose every operation is marked in a trace; more than one, since a run may be disturbed."""
    found = []
    for _ in range(3):
        counter = Counter(lambda index: record_function(f"{PREFIX}{index}"))
        trace = _traced(lambda counter=counter: subject.count(counter), subject.device, backend, shapes=False)  # type: ignore[misc]
        found.append((parse(trace, on_host=on_host), counter.counted))
    return found


def _profiled(subject: _Subject, backend: AnyBackend, *, on_host: bool) -> Profiled:
    """Profile a plain run."""
    trace = _traced(lambda: subject.run("in the profiler"), subject.device, backend, shapes=True)
    return parse(trace, on_host=on_host)


def _traced(
    call: Callable[[], object], device: torch.device, backend: AnyBackend, *, shapes: bool
) -> dict[str, Any]:  # Any: JSON
    activities = list(supported_activities())  # type: ignore[no-untyped-call]
    synchronize(device)
    with ExitStack() as stack:
        try:
            # acc_events: torch 2.11 warns of a loss of events over several cycles, of which there is one here.
            profiler = profile(activities=activities, record_shapes=shapes, acc_events=True)
            running = stack.enter_context(profiler)
        except RuntimeError as error:  # another profiler runs
            raise _no_profiler(backend, str(error).splitlines()[0]) from error
        call()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        running.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            trace: dict[str, Any] = json.load(file)
    return trace


# -- concluding ------------------------------------------------------------------------------------------


def _conclude(runs: _Runs) -> Diagnosis:
    plain, ceilings, inline = runs.plain, runs.ceilings, runs.backend.device_type == "cpu"
    eager, parts = _timed(runs.marked, on_host=inline)
    ops = eager
    if plain.compiled:
        ops = _with_rest(_kernel_ops(plain, ceilings), fused_counts(eager, runs.counted))
    busy_s = min(sum(took for _, took in ops) if inline else plain.busy_s, runs.wall_s)
    spans = tuple(plain.spans())
    all_s, all_flops = sum(took for _, took in ops), sum(op.what.counts.flops for op, _ in ops)
    now = Situation(
        eager,
        runs.counted,
        runs.wall_s,
        busy_s,
        ceilings,
        compiled=plain.compiled,
        # The CPU has graphs so that programs can be tried; they save it nothing.
        can_capture=Capability.GRAPH_CAPTURE in runs.backend.capabilities(runs.index)
        and not runs.backend.works_in_threads,
        exposed_link_s=_exposed_link_s(spans),
    )
    return Diagnosis(
        function=runs.function,
        device=str(runs.backend.spec(runs.index).device),
        ceilings=ceilings,
        wall_s=runs.wall_s,
        busy_s=busy_s,
        total=region("total", ops, ceilings, all_s=all_s, all_flops=all_flops),
        by_class=by_class(ops, ceilings, flops_of=eager if plain.compiled else None),
        # Compiled kernels belong to no module and no line; the code as it is written does.
        by_module=regions(eager, lambda op: op.module, ceilings),
        by_line=regions(eager, lambda op: op.line, ceilings),
        by_kernel=regions(ops if plain.compiled else parts, lambda op: op.name, ceilings),
        memory=device_memory(runs.backend, runs.index, runs.counted),
        actions=actions(now),
        spans=spans,
        compiled=plain.compiled,
        notes=_notes(plain),
    )


def _exposed_link_s(spans: Sequence[Span]) -> float:
    """Return the time in which copies to and from the host ran, and nothing else."""
    copies = {span.lane for span in spans} & {"h2d", "d2h"}
    others = {span.lane for span in spans} - copies
    return together(spans, copies, under=others).exposed_ms / 1e3 if copies else 0.0


def _timed(marked: Sequence[tuple[Profiled, Counted]], *, on_host: bool) -> tuple[list[TimedOp], list[TimedOp]]:
    """Return each operation with its kernels' seconds (on the CPU, its own), and each kernel as an operation.

    Of several runs the shortest time of each operation counts, where they did the same.
    """
    runs = [_seconds(trace, counted) for trace, counted in marked]
    first = marked[0][1]
    same = [took for took, (_, counted) in zip(runs, marked, strict=True) if len(counted.ops) == len(first.ops)]
    eager = [(op, min(took[op.index] for took in same)) for op in first.ops]
    if on_host:
        return eager, eager
    kernels = []
    for work in marked[0][0].work:
        if work.mark is None or work.mark >= len(first.ops):
            continue
        op, all_s = first.ops[work.mark], runs[0][work.mark]
        # An operation of several kernels: each does the part of it that it takes of its time.
        part = work.seconds / all_s if all_s else 1.0
        what = replace(op.what, counts=op.what.counts.scaled(part))
        kernels.append((replace(op, name=work.name, what=what), eager[work.mark][1] * part))
    return eager, kernels


def _seconds(trace: Profiled, counted: Counted) -> dict[int, float]:
    took = dict.fromkeys(range(len(counted.ops)), 0.0)
    for work in trace.work:
        if work.mark is not None and work.mark in took:
            took[work.mark] += work.seconds
    return took


def _kernel_ops(plain: Profiled, ceilings: Ceilings) -> list[TimedOp]:
    """Return the kernels of a run as operations, with what their names and shapes tell."""
    found = []
    for index, work in enumerate(plain.work):
        what = _bounded(_fused.described(work), work, ceilings)
        backward = any(op.backward or op.name.startswith("autograd::engine") for op in work.callers)
        found.append((Op(index, work.name, what, "", "", backward, (), ()), work.seconds))
    return found


def _with_rest(ops: list[TimedOp], rest: Counts) -> list[TimedOp]:
    """Return *ops*, with *rest* given to the kernels whose work nothing tells, by their time."""
    unknown_s = sum(took for op, took in ops if op.name == COMPILED)
    return [
        (replace(op, what=replace(op.what, counts=replace(rest.scaled(took / unknown_s), launches=1))), took)
        if op.name == COMPILED
        else (op, took)
        for op, took in ops
    ]


def _bounded(what: Described, work: Work, ceilings: Ceilings) -> Described:
    """Return *what* with no more bytes than the memory moves meanwhile: an operand may be only looked into."""
    rate, moved = ceilings.memory_bytes_per_s, what.counts.memory_bytes
    if not rate or what.operator_class in ("matmul", "attention") or moved <= rate * work.seconds:
        return what
    share = rate * work.seconds / moved
    counts = replace(
        what.counts, read_bytes=what.counts.read_bytes * share, write_bytes=what.counts.write_bytes * share
    )
    return replace(what, counts=counts)


def _notes(plain: Profiled) -> tuple[str, ...]:
    notes = []
    if plain.compiled:
        notes.append(
            "Compiled code ran. Its kernels are described by their names and the shapes of their operands. "
            "The tables by module and by line, and the actions, are of the same code run uncompiled."
        )
        dark = sum(work.seconds for work in plain.work if _fused.is_dark(work))
        if dark > 0.2 * sum(work.seconds for work in plain.work):
            notes.append(
                "Of much of that time only the kernels' names are known, as of a replayed graph: classes are "
                "guesses by name there. Diagnose the code without graphs to know more."
            )
    return tuple(notes)


__all__ = ["diagnose"]
