"""Calls of a compiled function as device graphs: which one a call is, or why it is launched step by step.

The first call of each size is launched: kernels are loaded, choices are made. The next one is captured, then
replayed, as are all later ones. A program that can't be captured is launched for good, and one warning says why.
"""

from __future__ import annotations

import linecache
import logging
import re
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias  # Any: arguments and results of every kind

import torch

from devstream import _fork, _handles
from devstream.abc import Capability
from devstream.compiler._obstacles import hosts, line_of, obstacle_of
from devstream.compiler._program import Program
from devstream.compiler._run import CallRecord, Runner, calls_streams
from devstream.compiler._take import Half, Shape, Take, lanes
from devstream.exceptions import DevstreamError, GraphCaptureWarning, warning

log = logging.getLogger("devstream.compiler")

#: Results up to this size are always copied: a loss is kept longer than its step, and a copy is one small kernel.
SMALL_BYTES = 4096

#: One capture at a time: they share their streams.
_capturing = threading.RLock()
_fork.renew(globals(), "_capturing")


@dataclass(slots=True)
class Limits:
    """How much is captured.

    Attributes:
        sizes: for how many sizes of the arguments, each with graphs of its own.
        calls: for how many calls of one size whose backwards are still to come, each with memory of its own.
        rebinds: how often a parameter may move before its value is copied at each call instead.
    """

    sizes: int = 16
    calls: int = 4
    rebinds: int = 2


@dataclass(slots=True)
class Graphs:
    """What the forward and the backward of one compiled function share."""

    limits: Limits
    #: Gradients were still in use when the next forward came.
    apart: bool = False
    told: set[str] = field(default_factory=set)

    def tell(self, what: str, reason: str) -> None:
        """Say once that *what* is launched."""
        log.info("%s is launched: %s", what, reason)
        if not self.told:
            self.told.add(reason)
            warnings.warn(warning(GraphCaptureWarning, what=what, reason=reason), stacklevel=4)


class Replayed:
    """Runs one program, as graphs where it can.

    Args:
        runner: launches it.
        static: names of inputs whose memory stays where it is, such as parameters.
        random: names of nodes that draw random numbers.
        returned: how many of the results are the user's; None for all.
        obstacle: why it can't be captured, as far as is known already.
    """

    def __init__(
        self,
        runner: Runner,
        graphs: Graphs,
        *,
        static: frozenset[str],
        random: Sequence[str],
        returned: int | None,
        obstacle: str | None = None,
    ) -> None:
        self._boxed_call = True  # on the instance: see Runner
        self.runner, self.graphs, self.backend = runner, graphs, runner.backend
        plan = replace(runner.plan, graph=True)
        self.name = plan.program.name
        self.shape = Shape(plan, returned)
        self._static = frozenset(number for number, name in enumerate(plan.parameters) if name in static)
        self._hosts = [
            (number, name) for number, name in enumerate(plan.parameters) if name in hosts(plan.program)
        ]
        #: Arguments that are no tensors: sizes, mostly.
        self._plain: list[int] | None = None
        #: Arguments that move from call to call, and how often each one did.
        self._moves: dict[int, int] = {}
        #: By size: the memory of the first call's arguments, for as long as it is that.
        self._warm: dict[tuple[Any, ...], list[_Place]] = {}
        self._takes: dict[tuple[Any, ...], list[Take]] = {}
        self._copied: frozenset[int] = frozenset()
        self._lock = threading.RLock()
        self._obstacle = obstacle or obstacle_of(plan.program, random)
        if Capability.GRAPH_CAPTURE not in self.backend.capabilities(0):
            self._obstacle = f"backend {self.backend.name!r} has no Capability.GRAPH_CAPTURE"

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        """Issue the program; *args* is emptied."""
        if self._obstacle is not None:
            self.graphs.tell(self.name, self._obstacle)
            return self.runner(args)
        if self.backend.is_capturing():  # the user captures more than this program
            return self.runner(args)
        if self.runner.holds:
            self.runner.holds.sweep()
        with self._lock:
            return self._backward(args) if self.runner.backward else self._forward(args)

    # -- forward -----------------------------------------------------------------------------------------

    def _forward(self, args: list[Any]) -> tuple[Any, ...]:
        streams, events = calls_streams()
        if self._plain is None:
            self._plain = [number for number, one in enumerate(args) if not isinstance(one, torch.Tensor)]
        key = (torch.is_inference_mode_enabled(), *[args[number] for number in self._plain])
        if key not in self._warm:
            if len(self._warm) >= self.graphs.limits.sizes:
                self.graphs.tell(self.name, f"graphs for {len(self._warm)} sizes are there, and this is another")
            else:
                self._warm[key] = [_place(one) for one in args]
            return self.runner(args)
        reason = self._not_now(args, events)
        if reason is not None:
            self.graphs.tell(self.name, reason)
            return self.runner(args)
        take = self._free_take(key, args)
        if take is None:
            return self.runner(args)
        half = take.forward or self._captured(take, args, self._bound(args, self._warm[key]))
        if half is None:
            return self.runner(args)
        if take.forward is None:
            take.forward = half
            self._takes.setdefault(key, []).append(take)
        record, token = None, None
        if self.runner.plan.token is not None:
            record = CallRecord(streams, take=take)
            token = _handles.new_handle(record, keep=True)
            take.call = weakref.ref(record)
        self._issue(take, half, args, streams, events)
        results = half.results(args, token, self._copied)
        args.clear()
        return results

    def _not_now(self, args: Sequence[Any], events: Sequence[Any]) -> str | None:
        """Return what keeps this call from being a replay."""
        for number, name in self._hosts:
            if not args[number].is_pinned():
                return f"{name} is copied from pageable memory ({line_of(self.shape.plan.program, name)})"
        for step in self.shape.recorded.values():
            event = events[step.event]
            if getattr(event, "_timing", False) or getattr(event, "enable_timing", False):
                return f"an event that keeps time is recorded in it ({step.line})"
        return None

    def _free_take(self, key: tuple[Any, ...], args: Sequence[Any]) -> Take | None:
        """Return memory that no call uses, a new one while there are few, None if this call shall be launched."""
        takes = self._takes.setdefault(key, [])
        waiting = 0
        for take in list(takes):
            assert take.forward is not None
            if take.under_way():
                waiting += 1
                continue
            held = take.forward.held()
            if held - self._copied:
                self._copied |= held  # from now on: whoever keeps one call's will keep the next one's
                return None
            if held:
                waiting += 1
            elif take.overlaps():
                self.graphs.apart = True
                takes.remove(take)
            elif take.forward.fits(args):
                return take
            else:
                takes.remove(take)
                self._note_moves(take.forward, args)
        if waiting >= self.graphs.limits.calls:
            self.graphs.tell(self.name, f"{waiting} calls are under way or have their results kept")
            return None
        return Take(self.graphs.apart)

    def _note_moves(self, half: Half, args: Sequence[Any]) -> None:
        moved = half.elsewhere(args)
        if moved - self._static:  # of all that lay still by chance, one more would move each time
            moved |= set(half.bound) - self._static
        for number in moved:
            self._moves[number] = self._moves.get(number, 0) + 1

    def _bound(self, args: Sequence[Any], warm: Sequence[_Place]) -> frozenset[int]:
        """Return the arguments to read where they lie: what stays there, or did so from the first call to this."""
        limit = self.graphs.limits.rebinds
        pinned = {number for number, _ in self._hosts}
        return frozenset(
            number
            for number, one in enumerate(args)
            if isinstance(one, torch.Tensor)
            if number in pinned
            or (number in self._static and self._moves.get(number, 0) <= limit)
            or (number not in self._moves and _lies_at(one, warm[number]))
        )

    # -- backward ----------------------------------------------------------------------------------------

    def _backward(self, args: list[Any]) -> tuple[Any, ...]:
        assert self.shape.token is not None
        record: CallRecord = _handles.owner_of(args[self.shape.token])
        take: Take | None = record.take
        key = tuple(one for one in args if not isinstance(one, torch.Tensor))
        if take is None or key not in self._warm:
            self._warm.setdefault(key, [])
            return self.runner(args)
        halves = take.backwards.setdefault(id(self), [])
        half = next((one for one in halves if one.fits(args) and not one.held()), None)
        if half is None and len(halves) < self.graphs.limits.calls:
            half = self._captured(take, args, self._saved(take, args))
            halves += [half] if half is not None else []
        if half is None:
            return self.runner(args)
        backend, home = self.backend, record.streams[0]
        here = backend.current_stream(backend.stream_index(home))
        final = half

        def issue() -> tuple[Any, ...]:
            self._issue(take, final, args, record.streams, ())
            return final.results(args, None, frozenset())

        results: tuple[Any, ...]
        if backend.stream_key(here) == backend.stream_key(home):
            results = issue()
        else:
            outside = [one for one in args if isinstance(one, torch.Tensor)]
            results = self.runner.elsewhere(issue, home, here, outside)
        args.clear()
        return results

    def _saved(self, take: Take, args: Sequence[Any]) -> frozenset[int]:
        assert take.forward is not None
        known = take.forward.static()
        return frozenset(
            number
            for number, one in enumerate(args)
            if isinstance(one, torch.Tensor) and number != self.shape.token and one.data_ptr() in known
        )

    # -- both --------------------------------------------------------------------------------------------

    def _captured(self, take: Take, args: Sequence[Any], bound: frozenset[int]) -> Half | None:
        """Capture the program for *take*; None where it can't be."""
        backend = self.backend
        index = backend.current_index()
        # The second of two backwards doesn't: what the first one gave is still in use.
        shares = take.forward is not None and not take.apart and not take.backwards[id(self)]
        pool = take.forward.graph.pool if take.forward is not None and shares else None
        with _capturing:
            own = lanes(backend, index, len(self.shape.plan.program.streams))
            try:
                backend.before_capture(own)
                half = Half(self.runner, self.shape, args, bound=bound, lanes=own, pool=pool)
            except (RuntimeError, DevstreamError) as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                line = _line_of(error, self.shape.plan.program)
                self._obstacle = f"its capture failed{line}: {text}"
                log.info("capture failed", exc_info=True)
                self.graphs.tell(self.name, self._obstacle)
                return None
        return half

    def _issue(
        self, take: Take, half: Half, args: Sequence[Any], streams: Sequence[Any], events: Sequence[Any]
    ) -> None:
        """Replay on the call's stream, behind what all its streams hold and before what they get later."""
        backend, home = self.backend, streams[0]
        key = backend.stream_key(home)
        if take.done is not None and take.stream != key:
            backend.wait_event(home, take.done)
        if not take.events or not backend.rerecord_overwrites:
            take.events = [self.runner.fresh(stream) for stream in streams]
        for stream, event in zip(streams[1:], take.events[1:], strict=True):
            backend.record_event(event, stream)
            backend.wait_event(home, event)
        for step in self.shape.awaited:
            self.runner.user_wait(home, events[step.event])
        half.replay(args, home)
        take.done, take.stream = take.events[0], key
        backend.record_event(take.done, home)
        for stream in streams[1:]:
            backend.wait_event(stream, take.done)
        for last in self.shape.recorded.values():
            self.runner.user_record(events[last.event], streams[last.stream])
        if half is take.forward and not self._copied:
            self._copied = frozenset(
                number
                for number, (kind, _, saved) in enumerate(self.shape.results)
                if kind == "made" and not saved and half.bytes_of(number) <= SMALL_BYTES
            )


#: A tensor's memory, which it doesn't keep, and its address.
_Place: TypeAlias = tuple[weakref.ref[torch.UntypedStorage], int] | None


def _place(value: Any) -> _Place:
    return (weakref.ref(value.untyped_storage()), value.data_ptr()) if isinstance(value, torch.Tensor) else None


def _lies_at(value: torch.Tensor, place: _Place) -> bool:
    """Say whether it is the same memory as before; another one may have come to the same address."""
    return place is not None and place[0]() is value.untyped_storage() and place[1] == value.data_ptr()


def _line_of(error: BaseException, program: Program) -> str:
    """Return the line of the step that raised *error*, in brackets."""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith("<devstream program"):
            step = re.search(r"\bf(\d+)\(", linecache.getline(file, trace.tb_lineno))
            if step is not None:
                line = getattr(program.steps[int(step[1])], "line", "")
                return f" ({line})" if line else ""
        trace = trace.tb_next
    return ""


__all__ = ["SMALL_BYTES", "Graphs", "Limits", "Replayed"]
