"""A machine that runs a compiled program in every order that streams allow: the specification of the proof.

Each stream is a queue; its head may start whenever what it waits for is over. The host runs ahead as far as it
can. A wait belongs to the last record of its event that was issued before it. A collective has a queue of its own,
and starts behind what its stream did before. Memory that goes back may be overwritten from there on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from devstream.compiler._graph import Origin
from devstream.compiler._program import (
    Free,
    Hold,
    Program,
    Record,
    RecordStream,
    Synchronize,
    Wait,
    Work,
    WorkKind,
)

Queue: TypeAlias = Hashable


@dataclass(slots=True)
class Task:
    """One thing in a queue: it starts when its queue is there and the tasks *after* are over.

    *step* numbers the program's step, ``len(steps)`` what happens behind the last one. *reads* and *writes* are
    storages; *gone* is memory that goes back.
    """

    step: int
    queue: Queue
    after: tuple[int, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    gone: int | None = None
    label: str = ""
    final: bool = False


@dataclass(slots=True)
class Machine:
    """The tasks of a program, by queue, in order of issue."""

    program: Program
    tasks: list[Task] = field(default_factory=list)
    queues: dict[Queue, list[int]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)

    def add(self, task: Task) -> int:
        """Put a task at the end of its queue."""
        self.tasks.append(task)
        self.queues[task.queue].append(len(self.tasks) - 1)
        return len(self.tasks) - 1


def machine(program: Program) -> Machine:
    """Return the machine that runs *program*."""
    return _Loader(program).load()


class _Loader:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.machine = Machine(program)
        self.events: dict[int, int] = {}
        self.collectives: dict[str, int] = {}
        self.held: tuple[int, ...] = ()
        self.holds: dict[int, set[int]] = defaultdict(set)
        self.owner = {slot.storage: slot.stream for slot in reversed(program.slots)}
        entry = {stream: self._add(-1, stream) for stream in range(len(program.streams))}
        for storage, stream in self.owner.items():
            if any(slot.storage == storage and slot.origin is not Origin.PRODUCED for slot in program.slots):
                self.machine.tasks[entry[stream]].writes |= {storage}
        for given in program.given:
            self.events[given.event] = entry[given.stream]

    def _add(self, step: int, queue: Queue, after: tuple[int, ...] = (), **what: object) -> int:
        return self.machine.add(Task(step, queue, (*after, *self.held), **what))  # type: ignore[arg-type]

    def load(self) -> Machine:
        """Issue every step, then what happens behind the last."""
        for number, step in enumerate(self.program.steps):
            if isinstance(step, Work):
                self._work(number, step)
            elif isinstance(step, Record):
                self.events[step.event] = self._add(number, step.stream)
            elif isinstance(step, Wait):
                self._add(number, step.stream, self._event(step.event))
            elif isinstance(step, Synchronize):
                streams = range(len(self.program.streams)) if step.stream is None else (step.stream,)
                last = [self.machine.queues[stream][-1] for stream in streams] if step.event is None else []
                self.held += (*last, *(self._event(step.event) if step.event is not None else ()))
            elif isinstance(step, Free):
                self._add(number, step.stream, gone=step.storage)
            elif isinstance(step, Hold):
                self.holds[step.storage].update(one for event in step.events for one in self._event(event))
            elif isinstance(step, RecordStream):
                pass
        self._exit(len(self.program.steps))
        return self.machine

    def _event(self, event: int) -> tuple[int, ...]:
        return (self.events[event],) if event in self.events else ()

    def _work(self, number: int, work: Work) -> None:
        reads = frozenset(use.storage for use in work.reads)
        writes = frozenset(use.storage for use in work.writes)
        if work.kind is WorkKind.ISSUE:
            start = self._add(number, work.stream)
            queue = ("collective", work.name)
            self.collectives[work.name] = self._add(number, queue, (start,), reads=reads, writes=writes)
        elif work.kind is WorkKind.COLLECTIVE_WAIT:
            after = (self.collectives[work.collective],) if work.collective in self.collectives else ()
            self._add(number, work.stream, after)
        else:
            self._add(number, work.stream, reads=reads, writes=writes)

    def _exit(self, number: int) -> None:
        program = self.program
        joined = {result.value for result in program.results if result.joined}
        reads = {program.slot[name].storage for name in joined} | {use.storage for use in program.exit_writers}
        views = tuple(self._makers(joined))
        self._add(number, 0, reads=frozenset(reads), final=True)
        for maker in views:
            self._add(number, 0, label=f"maker {maker}", final=True)
        for result in program.results:
            if result.saved:
                self._saved(number, result.value)
        outside = frozenset(use.storage for use in program.exit_writes)
        if program.exit_reads or program.exit_writes:
            self._add(number, 0, reads=frozenset(use.storage for use in program.exit_reads), writes=outside)
        freed = {step.storage for step in program.steps if isinstance(step, Free)}
        for storage, stream in self.owner.items():
            if storage not in freed:
                # Not in the stream's own queue: one that is held must not hold back the next.
                after = (*self.holds[storage], self.machine.queues[stream][-1])
                self._add(number, ("gone", storage), after, gone=storage, final=True)

    def _makers(self, names: set[str]) -> Iterator[int]:
        for number, step in enumerate(self.program.steps):
            if isinstance(step, Work) and step.kind is WorkKind.REGION and names.intersection(step.outputs):
                yield number

    def _saved(self, number: int, name: str) -> None:
        slot = self.program.slot[name]
        queue: Queue = 0 if slot.stream == 0 else ("saved", name)
        done = [one.event for one in self.program.completions if one.stream == slot.stream]
        after = tuple(task for event in done[:1] for task in self._event(event)) if slot.stream else ()
        self._add(number, queue, after, reads=frozenset({slot.storage}), final=True)
        for maker in self._makers({name}):
            self._add(number, queue, after, label=f"maker {maker}", final=True)


def runs(machine: Machine, choose: Callable[[list[int]], int]) -> Iterator[Task]:
    """Yield the tasks in one legal order; *choose* picks among those that could start."""
    position: dict[Queue, int] = dict.fromkeys(machine.queues, 0)
    done: set[int] = set()
    while len(done) < len(machine.tasks):
        ready = [
            queue[position[name]]
            for name, queue in machine.queues.items()
            if position[name] < len(queue) and done.issuperset(machine.tasks[queue[position[name]]].after)
        ]
        one = choose(ready)
        done.add(one)
        position[machine.tasks[one].queue] += 1
        yield machine.tasks[one]


def conflicts(machine: Machine) -> set[tuple[int, int]]:
    """Return all pairs of steps, in order of issue, that some legal order turns round although they conflict.

    All states that the machine can reach are visited: keep programs small.
    """
    names = list(machine.queues)
    clash = {later: _earlier(machine, later) for later in range(len(machine.tasks))}
    start = (0,) * len(names)
    seen, todo = {start}, [start]
    found: set[tuple[int, int]] = set()
    while todo:
        state = todo.pop()
        done = {task for name, count in zip(names, state, strict=True) for task in machine.queues[name][:count]}
        for index, name in enumerate(names):
            queue = machine.queues[name]
            if state[index] == len(queue) or not done.issuperset(machine.tasks[queue[state[index]]].after):
                continue
            task = queue[state[index]]
            found.update(
                (machine.tasks[one].step, machine.tasks[task].step) for one in clash[task] if one not in done
            )
            following = (*state[:index], state[index] + 1, *state[index + 1 :])
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def unordered(machine: Machine) -> set[tuple[int, int]]:
    """Return what `conflicts` returns, found without visiting states: pairs that nothing puts in order.

    A task comes after those before it in its queue, those that it waits for, and what these come after.
    It serves programs whose states are too many.
    """
    behind: list[int] = []
    last: dict[Queue, int] = {}
    found: set[tuple[int, int]] = set()
    for number, task in enumerate(machine.tasks):
        reached = 0
        for earlier in (*task.after, *([last[task.queue]] if task.queue in last else [])):
            reached |= behind[earlier] | 1 << earlier
        behind.append(reached)
        last[task.queue] = number
        found.update(
            (machine.tasks[one].step, task.step) for one in _earlier(machine, number) if not reached >> one & 1
        )
    return found


def _earlier(machine: Machine, later: int) -> list[int]:
    """Return the tasks that were issued before *later* and touch the same memory, one of both changing it."""
    task, found = machine.tasks[later], []
    for number, other in enumerate(machine.tasks[:later]):
        if task.label.startswith("maker") and other.label == "" and f"maker {other.step}" == task.label:
            found.append(number)
        elif task.final and other.final:
            continue  # the caller's own use and the end of the memory are his business
        changed = task.writes if task.gone is None else task.writes | {task.gone}
        if other.writes & (task.reads | changed) or other.reads & changed:
            found.append(number)
    return found


__all__ = ["Machine", "Task", "conflicts", "machine", "runs", "unordered"]
