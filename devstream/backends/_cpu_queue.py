"""When things happen on the CPU's streams: points, their order, and the threads of what is asynchronous.

The CPU runs tensor operations at once, in the order of their issue, which is always a legal order of a stream
program. What can be late are copies and host functions (they run on a thread of their stream) and whatever
comes behind a latch. So a stream is no list of work here but its last `Point`; a point has happened when
everything that it comes after has, and it knows at what time.

A latch holds points, not work: nobody may block on a latch just to go on issuing work, since the thread that
would block is often the one that will release it. So a point has two moments. It *ran* when all tasks before it
have; it *happened* when, beside that, all latches before it are open. Work waits for the first, the user for the
second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from devstream.exceptions import ForkedProcessError


class Point:
    """A place in a stream's work. Created, chained and completed by a `Timeline` only."""

    __slots__ = ("error", "followers", "happened", "latch", "ran", "time_ns", "timeline", "waiting_for", "working")

    def __init__(self, timeline: Timeline, *, latch: bool = False) -> None:
        self.timeline = timeline
        self.latch = latch
        self.ran = False
        self.happened = False
        self.time_ns = 0
        self.working = 0  # what must run before this ran
        self.waiting_for = 0  # what must happen before this happens
        self.followers: list[Point] = []
        self.error: BaseException | None = None

    @property
    def held(self) -> bool:
        """Whether only latches keep this from happening."""
        return self.ran and not self.happened


class Queue(Protocol):
    """What points are appended to: a stream."""

    tail: Point | None


class Timeline:
    """All points of one backend, under one lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def after(self, *earlier: Point | None, queue: Queue | None = None) -> Point:
        """Return a point that happens as soon as all of *earlier* have; at once where they already have.

        With *queue* it comes after the queue's tail too, and is the new tail.
        """
        point = Point(self)
        with self._changed:
            self._chain(point, earlier, queue)
            self._advance(point)
        return point

    def gate(self, *earlier: Point | None, held: bool, queue: Queue | None = None) -> Point:
        """Return a point that happens once `open` was called for it and all of *earlier* have happened.

        A *held* gate is a latch; any other stands for a task.
        """
        point = Point(self, latch=held)
        with self._changed:
            point.waiting_for = 1
            point.working = 0 if held else 1
            self._chain(point, earlier, queue)
            self._advance(point)
        return point

    def open(self, gate: Point, error: BaseException | None = None) -> None:
        """Let a gate happen; *error* is what its task raised."""
        with self._changed:
            gate.error = gate.error or error
            gate.waiting_for -= 1
            if not gate.latch:
                gate.working -= 1
            self._advance(gate)
            self._changed.notify_all()

    def wait(self, point: Point | None) -> None:
        """Block the host until *point* has happened.

        Raises:
            BaseException: what work before the point raised, as an accelerator reports a failed kernel.
        """
        if point is None:
            return
        if not point.happened:
            self._block(point, lambda: point.happened)
        if point.error is not None:
            raise point.error

    def catch_up(self, point: Point | None) -> BaseException | None:
        """Block the host until all tasks before *point* have run; return what they raised."""
        if point is None:
            return None
        if not point.ran:
            self._block(point, lambda: point.ran)
        return point.error

    def turn(self, gate: Point) -> None:
        """Block a worker until its task, whose end *gate* is, may run.

        Raises:
            BaseException: what work before it raised; the task must not run then.
        """
        with self._changed:
            self._changed.wait_for(lambda: gate.working == 1)
        if gate.error is not None:
            raise gate.error

    def _block(self, point: Point, passed: Callable[[], bool]) -> None:
        if point.timeline is not self:
            raise ForkedProcessError(operation="waiting for unfinished work", device="this work")
        with self._changed:
            self._changed.wait_for(passed)

    def _chain(self, point: Point, earlier: tuple[Point | None, ...], queue: Queue | None) -> None:
        # Reading the tail and replacing it is one step: two threads that use one stream must not lose an edge.
        for other in earlier if queue is None else (queue.tail, *earlier):
            if other is None:
                continue
            if not other.happened:
                if other.timeline is not self:
                    raise ForkedProcessError(operation="waiting for unfinished work", device="this work")
                other.followers.append(point)
                point.waiting_for += 1
            if other.ran:
                point.error = point.error or other.error
            else:
                point.working += 1
        if queue is not None:
            queue.tail = point

    def _advance(self, point: Point) -> None:
        ready = [point]
        while ready:  # no recursion: a long chain behind a latch is as long as the program
            done = ready.pop()
            ran = done.working == 0 and not done.ran
            happened = done.waiting_for == 0 and not done.happened
            if not (ran or happened):
                continue
            done.ran = True
            if happened:
                done.happened, done.time_ns = True, time.perf_counter_ns()
            for follower in done.followers:
                follower.error = follower.error or done.error
                follower.working -= ran
                follower.waiting_for -= happened
                if follower.working == 0:
                    ready.append(follower)
            if happened:
                done.followers = []


class Worker:
    """The thread of one stream; started by the first asynchronous task, gone with the stream."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def run(self, timeline: Timeline, task: Callable[[], None], queue: Queue) -> Point:
        """Run *task* at the end of *queue* on this worker's thread; return the point of its end."""
        # One order for points and tasks: a task must not stand in the pool before one that it comes after.
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            end = timeline.gate(held=False, queue=queue)

            def work() -> None:
                error: BaseException | None = None
                try:
                    timeline.turn(end)
                    task()
                except BaseException as caught:  # kept in the point, and raised in whoever waits for it
                    error = caught
                timeline.open(end, error)

            try:
                self._pool.submit(work)
            except (
                RuntimeError
            ) as error:  # the interpreter is shutting down; nobody may wait for a task that never runs
                timeline.open(end, error)
                raise
        return end
