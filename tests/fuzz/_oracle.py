"""Which two lines of a program can run the wrong way round although they conflict: found by trying all orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """One thing in a stream's queue: it starts when those before it and the tasks *after* are over."""

    stream: int
    after: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    inside: bool = True


def tasks(lines: Sequence[Any], *, inputs: Iterable[int], joined: Iterable[int]) -> list[Task]:
    """Return what a host thread that runs these lines puts into the queues, between what the caller does."""
    found = [Task(0, writes=frozenset(inputs), inside=False)]
    events: dict[str, int] = {}
    host: frozenset[int] = frozenset()
    for line in lines:
        if line.kind == "host":
            host |= {number for number, task in enumerate(found) if task.stream == line.stream}
        elif line.kind == "record":
            events[line.event] = len(found)
            found.append(Task(line.stream, host))
        elif line.kind == "wait":
            found.append(Task(line.stream, host | {events[line.event]}))
        elif line.kind == "work":
            found.append(Task(line.stream, host, line.reads, line.writes))
    found.append(Task(0, host, reads=frozenset(joined), inside=False))
    return found


def races(found: Sequence[Task]) -> set[tuple[int, int]]:
    """Return the pairs of tasks, in order of issue, that can start the wrong way round."""
    queues: dict[int, list[int]] = {}
    for number, task in enumerate(found):
        queues.setdefault(task.stream, []).append(number)
    names = list(queues)
    clash = {
        later: [
            one
            for one, other in enumerate(found[:later])
            if other.writes & (task.reads | task.writes) or other.reads & task.writes
        ]
        for later, task in enumerate(found)
    }
    start = (0,) * len(names)
    seen, todo, wrong = {start}, [start], set()
    while todo:
        state = todo.pop()
        done = {task for name, count in zip(names, state, strict=True) for task in queues[name][:count]}
        for index, name in enumerate(names):
            if state[index] == len(queues[name]):
                continue
            task = queues[name][state[index]]
            if not done.issuperset(found[task].after):
                continue
            wrong.update((one, task) for one in clash[task] if one not in done)
            following = (*state[:index], state[index] + 1, *state[index + 1 :])
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return wrong
