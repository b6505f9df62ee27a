"""A trace of torch's profiler as plain data: what occupied the device when, and which operation launched it. Pure.

The trace is what ``torch.profiler.profile.export_chrome_trace`` writes: the profiler's public form, the same on
all vendors. A kernel carries the number of the operation that launched it; that one lies, on its thread, inside
of others, and inside a mark of ours where there was one. Where no operation launched it, the call to the driver
stands for it; its time is by another clock, which may be a little off.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from devstream.report.timeline import Intervals, Span, intersection, measure, union

#: Marks of ours are named ``devstream::NUMBER``.
PREFIX = "devstream::"
#: What a compiled graph on the CPU did in kernels that the profiler doesn't know.
COMPILED = "compiled"
#: What torch calls a region whose kernels a compiler made.
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph", "CompiledFxGraph")
_GRAPH_CALL = "## Call CompiledFxGraph"
_ENGINE = "autograd::engine::evaluate_function"

#: Bytes of an element by the profiler's name of its type, and torch's name of it.
TYPES = {
    "float": (4, "float32"),
    "double": (8, "float64"),
    "c10::BFloat16": (2, "bfloat16"),
    "c10::Half": (2, "float16"),
    "c10::Float8_e4m3fn": (1, "float8_e4m3fn"),
    "c10::Float8_e5m2": (1, "float8_e5m2"),
    "long int": (8, "int64"),
    "long": (8, "int64"),
    "int": (4, "int32"),
    "short int": (2, "int16"),
    "signed char": (1, "int8"),
    "unsigned char": (1, "uint8"),
    "bool": (1, "bool"),
}


@dataclass(frozen=True, slots=True)
class HostOp:
    """An operation as the host saw it.

    Attributes:
        name: for instance ``aten::mm``, or a compiled kernel's.
        start_us, end_us: on the host.
        thread: that issued it.
        tensors: sizes and type (a key of `TYPES`) of each operand that is a tensor.
        backward: whether autograd's engine ran it.
        number: the profiler's own, which the kernels that it launched carry too.
    """

    name: str
    start_us: float
    end_us: float
    thread: object
    tensors: tuple[tuple[tuple[int, ...], str], ...] = ()
    backward: bool = False
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Something that occupied the device: a kernel, a copy, a fill; on the CPU an operation.

    Attributes:
        name: the kernel's.
        start_us, end_us: by the device's clock, which the profiler maps to the host's.
        lane: the stream.
        way: ``"h2d"``, ``"d2h"``, ``"d2d"`` for copies by copy engines; empty for all else.
        size_bytes: of a copy.
        mark: number of the mark inside of which it was launched; None outside of all.
        callers: the operations that launched it, the outermost first.
    """

    name: str
    start_us: float
    end_us: float
    lane: str
    way: str = ""
    size_bytes: float = 0.0
    pinned: bool = True
    mark: int | None = None
    callers: tuple[HostOp, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_us - self.start_us) / 1e6


@dataclass(slots=True)
class Profiled:
    """A whole trace.

    Attributes:
        work: what occupied the device, in the order of its start.
        marks: start and end of each mark on the host, in µs.
        compiled: whether compiled code ran.
    """

    work: list[Work] = field(default_factory=list)
    marks: dict[int, tuple[float, float]] = field(default_factory=dict)
    compiled: bool = False

    @property
    def busy_s(self) -> float:
        """Time in which anything ran on the device; what ran at once counts once."""
        return measure(union((one.start_us, one.end_us) for one in self.work)) / 1e6

    def spans(self) -> list[Span]:
        """Return the work as spans of `devstream.report`, in ms from the first start."""
        first = min((one.start_us for one in self.work), default=0.0)
        return [
            Span(one.lane, one.name, (one.start_us - first) / 1e3, (one.end_us - first) / 1e3) for one in self.work
        ]


def parse(document: Mapping[str, Any], *, on_host: bool) -> Profiled:  # Any: JSON
    """Return what *document*, a Chrome trace, says.

    Args:
        document: as json.loads gives it.
        on_host: the device is the CPU: its work is the operations themselves.
    """
    events = [one for one in document.get("traceEvents", ()) if one.get("ph") == "X"]
    found = Profiled()
    host = _host_ops(events)
    found.compiled = any(event["name"].startswith(_COMPILED) for event in events)
    marks = _marks(events)
    found.marks = {number: (start, end) for threads in marks.values() for start, end, number in threads}
    work = _on_host(host, marks) if on_host else _on_device(events, host, marks)
    found.work = sorted(work, key=lambda one: one.start_us)
    return found


def _host_ops(events: Iterable[Mapping[str, Any]]) -> dict[object, list[HostOp]]:
    """Return the operations of each thread, in the order of their start, outer ones before inner ones."""
    found: dict[object, list[HostOp]] = defaultdict(list)
    for event in events:
        if event.get("cat") not in ("cpu_op", "user_annotation") or event["name"].startswith(PREFIX):
            continue
        arguments = event.get("args", {})
        tensors = tuple(
            (tuple(sizes), kind)
            for sizes, kind in zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False)
            if kind in TYPES and not any(isinstance(size, list) for size in sizes)
        )
        end = event["ts"] + event.get("dur", 0.0)
        number = arguments.get("External id")
        op = HostOp(event["name"], event["ts"], end, event["tid"], tensors, number=number)
        found[event["tid"]].append(op)
    for ops in found.values():
        ops.sort(key=lambda op: (op.start_us, -op.end_us))
    return found


class _Nesting:
    """Which operations of one thread a moment lies in."""

    def __init__(self, ops: list[HostOp]) -> None:
        self._ops = ops
        self._starts = [op.start_us for op in ops]
        self._outer: list[int | None] = []
        stack: list[int] = []
        for index, op in enumerate(ops):
            while stack and ops[stack[-1]].end_us < op.end_us:
                stack.pop()
            self._outer.append(stack[-1] if stack else None)
            stack.append(index)

    def at(self, moment_us: float) -> tuple[HostOp, ...]:
        """Return the operations around *moment_us*, the outermost first."""
        index: int | None = bisect_right(self._starts, moment_us) - 1
        if index is not None and index < 0:
            return ()
        found: list[HostOp] = []
        while index is not None:
            if self._ops[index].end_us >= moment_us:
                found.append(self._ops[index])
            index = self._outer[index]
        return tuple(reversed(found))


# -- accelerators ----------------------------------------------------------------------------------------


def _marks(events: Iterable[Mapping[str, Any]]) -> dict[object, list[tuple[float, float, int]]]:
    """Return start, end and number of our marks, by the thread that set them."""
    found: dict[object, list[tuple[float, float, int]]] = defaultdict(list)
    for event in events:
        number = event["name"].removeprefix(PREFIX)
        if event.get("cat") == "user_annotation" and number != event["name"] and number.isdigit():
            found[event["tid"]].append((event["ts"], event["ts"] + event.get("dur", 0.0), int(number)))
    for marks in found.values():
        marks.sort()
    return found


def _on_device(
    events: Iterable[Mapping[str, Any]],
    host: Mapping[object, list[HostOp]],
    marks: Mapping[object, list[tuple[float, float, int]]],
) -> list[Work]:
    launches: dict[int, tuple[object, float]] = {}
    for event in events:
        category = event.get("cat", "")
        if category.endswith(("_runtime", "_driver")) and "correlation" in event.get("args", {}):
            launches.setdefault(event["args"]["correlation"], (event["tid"], event["ts"]))
    numbered = {
        op.number: (op.thread, op.start_us) for ops in host.values() for op in ops if op.number is not None
    }
    nesting = {thread: _Nesting(ops) for thread, ops in host.items()}
    found = []
    for event in events:
        category = event.get("cat", "")
        if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        arguments = event.get("args", {})
        launched = launches.get(arguments.get("correlation", -1), (None, 0.0))
        thread, moment = numbered.get(arguments.get("External id"), launched)
        way, pinned = _way(event["name"]) if category == "gpu_memcpy" else ("", True)
        callers = nesting[thread].at(moment) if thread in nesting else ()
        found.append(
            Work(
                event["name"],
                event["ts"],
                event["ts"] + event.get("dur", 0.0),
                f"stream {arguments.get('stream', '?')}" if way in ("", "d2d") else way,
                way,
                float(arguments.get("bytes", 0.0)),
                pinned,
                _mark_at(marks.get(thread, []), moment),
                callers,
            )
        )
    return found


def _mark_at(marks: list[tuple[float, float, int]], moment_us: float) -> int | None:
    index = bisect_right(marks, (moment_us, float("inf"), 0)) - 1
    if index >= 0 and marks[index][1] >= moment_us:
        return marks[index][2]
    return None


_WAYS = {"HtoD": "h2d", "DtoH": "d2h", "PtoP": "p2p"}


def _way(name: str) -> tuple[str, bool]:
    """Return direction and kind of host memory of a copy, by the name that the profiler gives it."""
    way = next((short for word, short in _WAYS.items() if word in name), "d2d")
    return way, "Pageable" not in name


# -- the CPU ---------------------------------------------------------------------------------------------


def _on_host(
    host: Mapping[object, list[HostOp]], marks: Mapping[object, list[tuple[float, float, int]]]
) -> list[Work]:
    """Return the outermost operations that compute, and what compiled code did beside them.

    A compiled graph's own kernels have no operation of their own: what is left of its call, when the operations
    inside are taken out, is theirs. In a marked run an operation shows twice, around its mark, where autograd
    takes it, and inside, where it computes; only what is inside counts.
    """
    found = []
    for thread, ops in host.items():
        if marks:
            ops = [op for op in ops if _mark_at(marks.get(thread, []), op.start_us) is not None]  # noqa: PLW2901
        backward = [(op.start_us, op.end_us) for op in _outermost(ops, lambda name: name.startswith(_ENGINE))]
        named = [(op.name, op.start_us, op.end_us, op.tensors) for op in _outermost(ops, _is_operator)]
        taken = union((start, end) for _, start, end, _ in named)
        for graph in _outermost(ops, lambda name: name.startswith(_GRAPH_CALL)):
            for start, end in _difference((graph.start_us, graph.end_us), taken):
                named.append((COMPILED, start, end, ()))
        for name, start, end, tensors in named:
            in_backward = bool(intersection(backward, [(start, end)]))
            caller = HostOp(name, start, end, thread, tensors, in_backward)
            mark = _mark_at(marks.get(thread, []), start)
            found.append(Work(name, start, end, f"thread {thread}", mark=mark, callers=(caller,)))
    return [one for one in found if one.end_us > one.start_us]


def _is_operator(name: str) -> bool:
    """Say whether an operator of torch, or of a library, is called so; the engine's own entries are none."""
    return "::" in name and not name.startswith(("autograd::", "torch::"))


def _outermost(ops: Iterable[HostOp], wanted: Callable[[str], bool]) -> list[HostOp]:
    found: list[HostOp] = []
    for op in ops:
        if wanted(op.name) and not (found and op.start_us < found[-1].end_us):
            found.append(op)
    return found


def _difference(piece: tuple[float, float], taken: Intervals) -> Intervals:
    found, at = [], piece[0]
    for start, end in taken:
        if end <= at or start >= piece[1]:
            continue
        if start > at:
            found.append((at, start))
        at = max(at, end)
    if at < piece[1]:
        found.append((at, piece[1]))
    return found


__all__ = ["COMPILED", "PREFIX", "TYPES", "HostOp", "Profiled", "Work", "parse"]
