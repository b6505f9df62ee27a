"""One program as a device graph, with the memory that it reads and writes.

[Note: Whose memory a graph's is]
A graph works on the same memory at each replay. So what a call got from it must be over before it is replayed
again. The saved values of a call are, when its record is gone, which they share their life with; what the user was
given is, when nobody refers to its memory but the graph. Each of these goes out as a tensor of its own over the
graph's memory, and torch counts who refers to that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any  # Any: arguments and results of every kind, streams and events of every backend

import torch

from devstream._compat import graphs
from devstream.abc import AnyBackend, DeviceGraph
from devstream.compiler._emit import Plan, emit
from devstream.compiler._program import Record, Wait, Work, WorkKind
from devstream.compiler._run import CallRecord, Runner


class Shape:
    """What a program's text says about its calls, whatever their sizes."""

    def __init__(self, plan: Plan, returned: int | None) -> None:
        program, parameters = plan.program, plan.parameters
        self.plan, self.source = plan, emit(plan)
        place = {name: number for number, name in enumerate(parameters)}
        self.token = None if plan.token is None else place.get(plan.token)
        self.written = tuple(
            place[step.target]
            for step in program.steps
            if isinstance(step, Work) and step.kind is WorkKind.WRITE_BACK
        )
        made = {name: number for number, name in enumerate(plan.made())}
        #: Each result: where it comes from, and whether it is saved for the backward.
        self.results: list[tuple[str, Any, bool]] = []
        for number, (kind, value) in enumerate(plan.results):
            saved = returned is not None and number >= returned
            if kind != "value":
                self.results.append((kind, value, saved))
            elif value in made:
                self.results.append(("made", made[value], saved))
            else:
                self.results.append(("given", place[value], saved))
        #: The user's last record of each event, and his waits for what was recorded before the call.
        self.recorded: dict[int, Record] = {}
        self.awaited: list[Wait] = []
        for step in program.steps:
            if isinstance(step, Record | Wait) and step.op is not None and step.event < plan.user_events:
                if isinstance(step, Record):
                    self.recorded[step.event] = step
                elif step.event not in self.recorded:
                    self.awaited.append(step)


@dataclass(slots=True)
class Take:
    """The graphs of one call under way, and their memory: a forward, and backwards of each compilation of it.

    Attributes:
        apart: backwards have pools of their own, so that gradients may outlive the next forward.
        backwards: by compilation; several where gradients are still in use when the next ones come.
        call: the record of the last call, for as long as its backward may come.
        done: behind this event the last replay is over, on the stream with that key.
        events: what the other streams record before a replay.
    """

    apart: bool
    forward: Half | None = None
    backwards: dict[int, list[Half]] = field(default_factory=dict)
    call: weakref.ref[CallRecord] | None = None
    done: Any = None
    stream: Any = None
    events: list[Any] = field(default_factory=list)

    def under_way(self) -> bool:
        """Say whether the backward of the last call may still come."""
        return self.call is not None and self.call() is not None

    def overlaps(self) -> bool:
        """Say whether gradients are in use that lie where the forward works."""
        return any(half.shares and half.held() for halves in self.backwards.values() for half in halves)


class Half:
    """One program, captured.

    Args:
        shape: the program.
        arguments: of a call; those in *bound* are read where they lie, all others from memory of the graph's own.
        pool: whose memory to use again, None for a pool of its own.
    """

    def __init__(
        self,
        runner: Runner,
        shape: Shape,
        arguments: Sequence[Any],
        *,
        bound: frozenset[int],
        lanes: Sequence[Any],
        pool: object,
    ) -> None:
        self.backend, self.shape, self._runner = runner.backend, shape, runner
        self.shares = pool is not None
        tensors = [
            number
            for number, one in enumerate(arguments)
            if isinstance(one, torch.Tensor) and number != shape.token
        ]
        self.bound = [number for number in tensors if number in bound]
        self.moved = [number for number in tensors if number not in bound]
        self._plain = [number for number, one in enumerate(arguments) if not isinstance(one, torch.Tensor)]
        self._values = [arguments[number] for number in self._plain]
        self._addresses: list[int | None] = [
            arguments[number].data_ptr() if number in self.bound else None for number in range(len(arguments))
        ]
        self._made: list[Any] = []
        self._events: list[Any] = []
        self._recorded: set[int] = set()
        self._held: list[Any] = []
        self._uses: Callable[[], list[int]] = list
        self._counted = False
        #: Results that went out as the graph's memory, until nobody refers to them.
        self._out: set[int] = set()
        self.inputs: list[Any] = []
        self._targets: list[torch.Tensor] = []
        memory = {arguments[number].untyped_storage().data_ptr() for number in self.bound}
        self.graph = self._capture(arguments, lanes, pool)
        self._numbers = self._sizes(arguments)
        self._theirs = memory
        self._results = [self._constant(*one) for one in shape.results]

    # -- capture -----------------------------------------------------------------------------------------

    def _capture(self, arguments: Sequence[Any], lanes: Sequence[Any], pool: object) -> DeviceGraph[Any]:
        backend, plan = self.backend, self.shape.plan
        call = self._runner.function(
            self.shape.source,
            {
                "fork": self._fork,
                "join": self._join,
                "keep": self._keep,
                "take": lambda streams: tuple(
                    map(self._runner.fresh, (streams[n] for n in self._runner.recorders))
                ),
                "give": lambda events: None,
                "hold": lambda events, values: self._held.append(values),
                "lend": lambda values, stream: None,
                "user_record": self._user_record,
                "user_wait": self._user_wait,
            },
        )

        def issue() -> None:
            # Here, so that it is memory of the graph's pool.
            inputs = list(arguments)
            if self.shape.token is not None:
                inputs[self.shape.token] = None  # it is this one call's, and a graph may not keep it alive
            for number in self.moved:
                inputs[number] = _like(arguments[number])
            self.inputs = [inputs[number] if number in self.moved else None for number in range(len(inputs))]
            self._events = [self._runner.fresh(lanes[0]) for _ in range(plan.user_events)]
            given = dict.fromkeys((one.event for one in plan.program.given), self._runner.fresh(lanes[0]))
            for event in given.values():
                backend.record_event(event, lanes[0])
            call(inputs, tuple(lanes), range(plan.user_events), given, {}, None)

        graph = backend.capture(issue, lanes[0], pool=pool)
        self._held.clear()
        self._targets = [_solid(self.inputs[number]) for number in self.moved]
        return graph

    def _fork(self, lanes: Sequence[Any]) -> None:
        event = self._runner.fresh(lanes[0])
        self.backend.record_event(event, lanes[0])
        for lane in lanes[1:]:
            self.backend.wait_event(lane, event)

    def _join(self, lanes: Sequence[Any]) -> None:
        for lane in lanes[1:]:
            event = self._runner.fresh(lane)
            self.backend.record_event(event, lane)
            self.backend.wait_event(lanes[0], event)

    def _user_record(self, number: int, stream: Any) -> None:
        self._recorded.add(number)
        self.backend.record_event(self._events[number], stream)

    def _user_wait(self, stream: Any, number: int) -> None:
        if number in self._recorded:  # else it was recorded before the call, which waits for it as a whole
            self.backend.wait_event(stream, self._events[number])

    def _keep(self, values: Sequence[torch.Tensor]) -> None:
        """Take the results; where the graph's code runs at each replay, put them where they were before."""
        if not self.shape.plan.threads:
            self._made = list(values)
            return
        if not self._made:
            self._made = [_like(value) for value in values]
        for old, new in zip(self._made, values, strict=True):
            _solid(old).copy_(_solid(new))

    def _sizes(self, arguments: Sequence[Any]) -> dict[str, Any]:
        code = self.shape.plan.numbers
        if code is None:
            return {}
        given = dict(zip(self.shape.plan.parameters, arguments, strict=True))
        return dict(zip(code.outputs, code.code([given[name] for name in code.inputs]), strict=True))

    # -- calls -------------------------------------------------------------------------------------------

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Say whether the numbers are those of the capture, and what is read where it lies lies where it did."""
        if [arguments[number] for number in self._plain] != self._values:
            return False
        return graphs.same_addresses(arguments, self._addresses, self.bound)

    def elsewhere(self, arguments: Sequence[Any]) -> set[int]:
        """Return which arguments don't."""
        return {number for number in self.bound if arguments[number].data_ptr() != self._addresses[number]}

    def held(self) -> set[int]:
        """Return the results that went out as the graph's memory and that somebody still refers to."""
        if not self._out:
            return set()
        now = zip(self._lent, self._uses(), self._rest, strict=True)
        self._out &= {number for number, count, rest in now if count > rest}
        return set(self._out)

    def replay(self, arguments: Sequence[Any], home: Any) -> None:
        """Issue it to *home*, on the values of *arguments*."""
        if self.moved:
            with torch.no_grad():
                sources = [_solid(arguments[number]) for number in self.moved]
                if len(sources) == 1:
                    self._targets[0].copy_(sources[0], non_blocking=True)
                else:
                    torch._foreach_copy_(self._targets, sources, non_blocking=True)
        self.graph.replay(home)
        for number in self.shape.written:
            if self.inputs[number] is None:
                torch.autograd.graph.increment_version(arguments[number])
            else:
                with torch.no_grad():
                    arguments[number].copy_(self.inputs[number])
        if not self._counted:
            self._count()

    def _count(self) -> None:
        """Look at who refers to the results now, when nobody was given one."""
        self._lent = [
            number
            for number, (kind, value, saved) in enumerate(self.shape.results)
            if kind == "made" and not saved
            if self._made[value].untyped_storage().data_ptr() not in self._theirs
        ]
        self._uses = graphs.uses([self._made[self.shape.results[number][1]] for number in self._lent])
        self._rest, self._counted = self._uses(), True

    def bytes_of(self, number: int) -> int:
        """Return the size of result *number*."""
        kind, value, _ = self.shape.results[number]
        return self._made[value].nbytes if kind == "made" else 0

    def _constant(self, kind: str, value: Any, saved: bool) -> Any:
        """Return a result that is the same at each replay; None in place of the others."""
        if kind == "given" and saved:
            return self.inputs[value]
        if kind == "number":
            return self._numbers[value]
        return value if kind == "constant" else None

    def results(self, arguments: Sequence[Any], token: Any, copied: frozenset[int]) -> tuple[Any, ...]:
        """Return what the last replay gave; a copy of those in *copied*."""
        found = list(self._results)
        for number, (kind, value, saved) in enumerate(self.shape.results):
            if kind == "made":
                made = self._made[value]
                if not saved:
                    made = made.clone() if number in copied else made.detach()
                found[number] = made
            elif kind == "given" and found[number] is None:
                found[number] = arguments[value]
            elif kind == "token":
                found[number] = token
        self._out.update(number for number in self._lent if number not in copied)
        return tuple(found)

    def static(self) -> set[int]:
        """Return the addresses that stay what they are at every replay: what a backward may read where it lies."""
        own = {one.data_ptr() for one in (*self._made, *self.inputs) if isinstance(one, torch.Tensor)}
        return own | {one for one in self._addresses if one is not None}


def _like(value: torch.Tensor) -> torch.Tensor:
    """Return new memory with the sizes and strides of *value*."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _solid(value: torch.Tensor) -> torch.Tensor:
    """Return *value* without what it repeats, or a copy would write one place twice."""
    if 0 in value.stride():
        for dimension, (size, stride) in enumerate(zip(value.size(), value.stride(), strict=True)):
            if stride == 0 and size > 1:
                value = value.narrow(dimension, 0, 1)
    return value


def lanes(backend: AnyBackend, index: int, count: int) -> list[Any]:
    """Return streams to capture on, the same ones each time; one capture at a time uses them."""
    own = _lanes.setdefault((backend, index), [])
    while len(own) < count:
        own.append(backend.create_stream(index))
    return own[:count]


_lanes: dict[tuple[AnyBackend, int], list[Any]] = {}

__all__ = ["Half", "Shape", "Take", "lanes"]
