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
from types import TracebackType
from typing import Protocol

from devstream.exceptions import ForkedProcessError


class Point:
    """A place in a stream's work. Created, chained and completed by a `Timeline` only."""

    __slots__ = (
        "error",
        "followers",
        "happened",
        "latch",
        "ran",
        "time_ns",
        "timeline",
        "trace",
        "waiting_for",
        "working",
    )

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
        self.trace: TracebackType | None = None

    def fail(self, error: BaseException, trace: TracebackType | None) -> None:
        """Take *error*, raised at *trace*, for the error of this point, unless it has one."""
        if self.error is None:
            self.error, self.trace = error, trace

    def failure(self) -> BaseException | None:
        """Return what work before this raised, to be raised again."""
        # With the traceback that it came with: each time that it is raised adds to the one that it has.
        return None if self.error is None else self.error.with_traceback(self.trace)

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
            if error is not None:
                gate.fail(error, error.__traceback__)
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
        error = point.failure()
        if error is not None:
            raise error

    def catch_up(self, point: Point | None) -> BaseException | None:
        """Block the host until all tasks before *point* have run; return what they raised."""
        if point is None:
            return None
        if not point.ran:
            self._block(point, lambda: point.ran)
        return point.failure()

    def turn(self, gate: Point) -> None:
        """Block a worker until its task, whose end *gate* is, may run.

        Raises:
            BaseException: what work before it raised; the task must not run then.
        """
        with self._changed:
            self._changed.wait_for(lambda: gate.working == 1)
        error = gate.failure()
        if error is not None:
            raise error

    def run(self, task: Callable[[], None], queue: Queue) -> None:
        """Run *task* at the end of *queue* in the calling thread, when it is its turn.

        Raises:
            BaseException: what work before it raised, or what *task* did: its caller knows that then, so the
                queue needn't.
        """
        self.finish(self.gate(held=False, queue=queue), task)

    def finish(self, end: Point, task: Callable[[], None]) -> None:
        """Run *task*, whose end the gate *end* is, as `run` does."""
        try:
            self.turn(end)
            task()
        finally:
            self.open(end)

    def _block(self, point: Point, passed: Callable[[], bool]) -> None:
        if point.timeline is not self:
            raise lost_at_fork()
        with self._changed:
            self._changed.wait_for(passed)

    def _chain(self, point: Point, earlier: tuple[Point | None, ...], queue: Queue | None) -> None:
        # Reading the tail and replacing it is one step: two threads that use one stream must not lose an edge.
        for other in earlier if queue is None else (queue.tail, *earlier):
            if other is None:
                continue
            if not other.happened:
                if other.timeline is not self:
                    raise lost_at_fork()
                other.followers.append(point)
                point.waiting_for += 1
            if other.ran:
                _pass_on(other, point)
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
                _pass_on(done, follower)
                follower.working -= ran
                follower.waiting_for -= happened
                if follower.working == 0:
                    ready.append(follower)
            if happened:
                done.followers = []


def _pass_on(earlier: Point, later: Point) -> None:
    if earlier.error is not None:
        later.fail(earlier.error, earlier.trace)


def lost_at_fork() -> ForkedProcessError:
    """Return the error for waiting in a forked child for what its parent had not finished."""
    return ForkedProcessError(operation="waiting for unfinished work", device="this work")


class Worker:
    """The thread of one stream; started by the first asynchronous task, gone with the stream."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.RLock()  # re-entrant: see CpuBackend

    def run(
        self,
        timeline: Timeline,
        task: Callable[[], None],
        queue: Queue,
        *,
        inline: Callable[[], None] | None = None,
    ) -> Point:
        """Run *task* at the end of *queue* on this worker's thread; return the point of its end.

        Where no thread can be had any more, since the interpreter is shutting down, *inline* (default: the task)
        runs in the caller's, and what it raises is raised here.
        """
        # One order for points and tasks: a task must not stand in the pool before one that it comes after.
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            end = timeline.gate(held=False, queue=queue)

            taken = threading.Lock()

            def work() -> None:
                if not taken.acquire(blocking=False):
                    return
                error: BaseException | None = None
                try:
                    timeline.turn(end)
                    task()
                except BaseException as caught:  # kept in the point, and raised in whoever waits for it
                    error = caught
                timeline.open(end, error)

            try:
                self._pool.submit(work)
                return end
            except RuntimeError:
                # No new thread, and perhaps no new task: both raise this. The pool may still come to the task.
                ours = taken.acquire(blocking=False)
        if ours:  # outside the lock: the task may launch another one
            timeline.finish(end, task if inline is None else inline)
        return end
