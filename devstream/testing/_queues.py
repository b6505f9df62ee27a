"""Which deferred task runs when: a pure scheduler over queues, as hostile as the order of the program allows.

A task comes after the one before it in its lane, and after the tasks that its waits name; any order that keeps
to that is one that a device may choose. A correct program computes the same in all of them. ``"lazy"`` runs a
task only when somebody needs it, and runs first what conflicts with it, was issued later, and isn't ordered after
it: so each pair that races runs in the reverse of its issue. ``"random"`` gives each lane a priority by lot, and
changes one now and then; a seed draws the same lots each time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from devstream.races.extents import Extent

#: How likely a task runs at the issue of another one, and how likely a lane's priority is drawn anew at each step.
_RUNS_BESIDE, _CHANGES = 0.2, 0.1


class Touch(NamedTuple):
    """Bytes of a storage that a task reads or writes."""

    memory: int
    extent: Extent
    write: bool


@dataclass(eq=False, slots=True)
class Task:
    """One piece of work of one lane; without *run* it only marks a place.

    Attributes:
        number: its place in the order of issue.
        needs: earlier tasks that have to be done before.
    """

    number: int
    lane: Hashable
    run: Callable[[], None] | None
    needs: tuple[Task, ...] = ()
    touches: list[Touch] = field(default_factory=list)
    done: bool = False


class Queues:
    """The tasks of all lanes that haven't run.

    Args:
        schedule: ``"lazy"`` or ``"random"``.
        seed: for ``"random"``.
    """

    def __init__(self, schedule: str, seed: int = 0) -> None:
        self._lots = random.Random(seed) if schedule == "random" else None
        self._priorities: dict[Hashable, float] = {}
        self._lanes: dict[Hashable, deque[Task]] = {}
        self._tails: dict[Hashable, Task] = {}
        self._touching: dict[int, list[Task]] = {}
        self._count = 0
        self._busy: list[Task] = []

    def add(
        self,
        lane: Hashable,
        run: Callable[[], None] | None,
        *,
        needs: Iterable[Task] = (),
        touches: Iterable[Touch] = (),
    ) -> Task:
        """Issue a task to the end of *lane* and return it."""
        self._count += 1
        needed = [one for one in needs if not one.done]
        tail = self._tails.get(lane)
        if tail is not None and not tail.done:
            needed.append(tail)
        task = Task(self._count, lane, run, tuple(needed))
        self._lanes.setdefault(lane, deque()).append(task)
        self._tails[lane] = task
        self.touch(task, touches)
        return task

    def touch(self, task: Task, touches: Iterable[Touch]) -> None:
        """Add to what *task* touches."""
        for one in touches:
            task.touches.append(one)
            self._touching.setdefault(one.memory, []).append(task)

    def tail(self, lane: Hashable) -> Task | None:
        """Return the last task of *lane*, where it hasn't run."""
        tail = self._tails.get(lane)
        return None if tail is None or tail.done else tail

    def pending(self) -> list[Task]:
        """Return all tasks that haven't run, in the order of issue."""
        return sorted((task for lane in self._lanes.values() for task in lane), key=lambda task: task.number)

    def touching(self, memory: int) -> list[Task]:
        """Return the tasks that will touch *memory*."""
        return list(self._touching.get(memory, ()))

    def is_after(self, lane: Hashable, task: Task) -> bool:
        """Whether whatever *lane* gets next comes after *task*."""
        tail = self.tail(lane)
        return task.done or (tail is not None and task in _before(tail))

    # -- running -----------------------------------------------------------------------------------------

    def demand(self, task: Task | None) -> None:
        """Run *task*, and before it what has to be, and what a hostile device would.

        Raises:
            BaseException: what a task raised; the task counts as done.
        """
        if task is None or task.done:
            return
        if self._lots is None:
            self._run_lazily(task)
            return
        while not task.done:
            self._execute(self._drawn(self._lots))

    def demand_all(self) -> None:
        """Run everything."""
        for task in self.pending():
            self.demand(task)

    def idle(self) -> None:
        """Give a device that runs beside the program the chance to run something."""
        if self._lots is not None and self._lanes and self._lots.random() < _RUNS_BESIDE:
            self._execute(self._drawn(self._lots))

    def _drawn(self, lots: random.Random) -> Task:
        heads = [lane[0] for lane in self._lanes.values()]
        ready = [head for head in heads if all(one.done for one in head.needs)]
        for head in ready:
            if head.lane not in self._priorities or lots.random() < _CHANGES:
                self._priorities[head.lane] = lots.random()
        return max(ready, key=lambda head: self._priorities[head.lane])

    def _run_lazily(self, target: Task) -> None:
        for task in sorted(_before(target), key=lambda one: one.number):
            if task.done:
                continue
            self._busy.append(task)
            try:
                for rival in self._rivals(task):
                    if not rival.done:
                        self._run_lazily(rival)
            finally:
                self._busy.pop()
            if not task.done:
                self._execute(task)

    def _rivals(self, task: Task) -> list[Task]:
        """Return the later tasks that race with *task* and can run before all that is being prepared."""
        found: dict[int, Task] = {}
        for mine in task.touches:
            for other in self._touching.get(mine.memory, ()):
                if other.number <= task.number or other.number in found:
                    continue
                if any(
                    theirs.memory == mine.memory
                    and (mine.write or theirs.write)
                    and mine.extent.meets(theirs.extent)
                    for theirs in other.touches
                ):
                    found[other.number] = other
        return [found[number] for number in sorted(found) if not _before(found[number]) & set(self._busy)]

    def _execute(self, task: Task) -> None:
        lane = self._lanes[task.lane]
        assert lane[0] is task
        lane.popleft()
        if not lane:
            del self._lanes[task.lane]
        for one in task.touches:
            self._touching[one.memory].remove(task)
            if not self._touching[one.memory]:
                del self._touching[one.memory]
        run, task.run, task.done, task.needs = task.run, None, True, ()
        if run is not None:
            run()


def _before(task: Task) -> set[Task]:
    """Return *task* and every task that has to run before it and hasn't."""
    found, todo = {task}, [task]
    while todo:
        for one in todo.pop().needs:
            if not one.done and one not in found:
                found.add(one)
                todo.append(one)
    return found


__all__ = ["Queues", "Task", "Touch"]
