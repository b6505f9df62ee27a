"""When things happen on the CPU's streams: points, their order, and the threads of what is asynchronous.

The CPU runs tensor operations at once, in the order of their issue, which is always a legal order of a stream
program. What can be late are copies and host functions (they run on a thread of their stream) and whatever
comes behind a latch. So a stream is no list of work here but its last `Point`; a point has happened when
everything that it comes after has, and it knows at what time.

A point behind a latch is *held*: nobody may block on it just to go on issuing work, since the thread that
would block is often the one that will release the latch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Point:
    """A place in a stream's work. Created, chained and completed by a `Timeline` only."""

    __slots__ = ("error", "followers", "happened", "held", "time_ns", "waiting_for")

    def __init__(self) -> None:
        self.happened = False
        self.held = False
        self.time_ns = 0
        self.waiting_for = 0
        self.followers: list[Point] = []
        self.error: BaseException | None = None


class Timeline:
    """All points of one backend, under one lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def after(self, *earlier: Point | None) -> Point:
        """Return a point that happens as soon as all of *earlier* have; at once where they already have."""
        point = Point()
        with self._changed:
            self._chain(point, earlier)
            if point.waiting_for == 0:
                self._complete(point)
        return point

    def gate(self, *earlier: Point | None, held: bool) -> Point:
        """Return a point that happens once `open` was called for it and all of *earlier* have happened."""
        point = Point()
        with self._changed:
            point.waiting_for = 1
            point.held = held
            self._chain(point, earlier)
        return point

    def open(self, gate: Point, error: BaseException | None = None) -> None:
        """Let a gate happen; *error* is what its work raised."""
        with self._changed:
            gate.error = gate.error or error
            gate.waiting_for -= 1
            if gate.waiting_for == 0:
                self._complete(gate)
            self._changed.notify_all()

    def wait(self, point: Point | None) -> None:
        """Block the host until *point* has happened.

        Raises:
            BaseException: what work before the point raised, as an accelerator reports a failed kernel.
        """
        if point is None:
            return
        if not point.happened:
            with self._changed:
                self._changed.wait_for(lambda: point.happened)
        if point.error is not None:
            raise point.error

    def _chain(self, point: Point, earlier: tuple[Point | None, ...]) -> None:
        for other in earlier:
            if other is None:
                continue
            if other.happened:
                point.error = point.error or other.error
            else:
                other.followers.append(point)
                point.waiting_for += 1
                point.held = point.held or other.held

    def _complete(self, point: Point) -> None:
        ready = [point]
        while ready:  # no recursion: a long chain behind a latch is as long as the program
            done = ready.pop()
            done.happened, done.time_ns = True, time.perf_counter_ns()
            for follower in done.followers:
                follower.error = follower.error or done.error
                follower.waiting_for -= 1
                if follower.waiting_for == 0:
                    ready.append(follower)
            done.followers = []


class Worker:
    """The thread of one stream; started by the first asynchronous task, gone with the stream."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def run(self, timeline: Timeline, task: Callable[[], None], previous: Point | None) -> Point:
        """Run *task* after *previous* on this worker's thread; return the point of its end."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        end = timeline.gate(held=False)

        def work() -> None:
            error: BaseException | None = None
            try:
                timeline.wait(previous)
                task()
            except BaseException as caught:  # kept in the point, and raised in whoever waits for it
                error = caught
            timeline.open(end, error)

        self._pool.submit(work)
        return end
