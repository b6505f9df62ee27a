"""Time work on a device, by events of its own on a stream of its own.

[Note: Why the stream is held while work is issued]
A kernel of 3 µs that costs the host 10 µs to launch would be timed as 10. So the stream is held, all launches of a
round are queued behind it, and then it is let go: the device runs them back to back. Work that blocks the host
must not be issued behind a latch, since nobody would release it; it is timed with ``queued=False``. Where that
isn't known beforehand, the latch is released after a second, and the work is timed without one.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from devstream._streams import Event, create_stream, synchronize
from devstream._streams import stream as switch
from devstream.abc import AnyBackend, Capability, Latch
from devstream.exceptions import StreamError, UnsupportedError
from devstream.roofline.curves import Curve

#: Longer than this no round takes to issue.
_HELD_S = 1.0
#: Launches that wait behind a latch. The queues of today's drivers hold about a thousand.
_QUEUE = 200


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one call, a quarter of the rounds being faster, and how far half of them spread, relative to it.

    Not the median: what disturbs a measurement on a shared host only ever makes it longer.
    """

    seconds: float
    spread: float


class _Guard:
    """Releases a latch in time where work behind it waits for the device, which would wait for the latch.

    Args:
        latch: that holds the stream.
    """

    def __init__(self, latch: Latch) -> None:
        self.was_needed = False
        self._latch = latch
        self._timer = threading.Timer(_HELD_S, self._rescue)
        self._timer.daemon = True
        self._timer.start()

    def _rescue(self) -> None:
        self.was_needed = True
        self._latch.release()

    def release(self) -> None:
        """Let the stream go on, all work having been issued."""
        self._timer.cancel()
        self._latch.release()


def _expected(amount: float, others: Sequence[tuple[float, Timed]]) -> float:
    """Return what the neighbours' times let one expect: between them, or at most the next one's."""
    if not others:
        return math.inf
    if len(others) == 1:
        other, timed = others[0]
        return timed.seconds * max(1.0, amount / other)
    return Curve.measured([(other, timed.seconds) for other, timed in others]).seconds(amount)


def curve_of(samples: Sequence[tuple[float, Timed]]) -> Curve:
    """Return the curve of a sweep's result."""
    spread = statistics.median(timed.spread for _, timed in samples)
    return Curve.measured([(amount, timed.seconds) for amount, timed in samples], spread=spread)


class Clock:
    """Times work on one device.

    Args:
        backend: of the device.
        index: of the device.
        point_s: about how long one measurement may take.
    """

    def __init__(self, backend: AnyBackend, index: int, *, point_s: float) -> None:
        self.backend, self.index, self.point_s = backend, index, point_s
        #: As streams and events take it.
        self.device = torch.device(backend.device_type, index)
        #: As tensors take it: torch has one CPU, whatever the number of virtual devices.
        self.tensors = torch.device("cpu") if backend.device_type == "cpu" else self.device
        self.stream = create_stream(self.device, 0)
        self._keeps_time = Capability.TIMING in backend.capabilities(index)
        #: Tensor operations of the CPU run in the caller, so nothing can be queued.
        self.inline = backend.device_type == "cpu"
        self._can_hold = not self.inline
        #: Whether the work that is timed now was seen to wait for the device.
        self._blocks = False

    def time(self, work: Callable[[], object], *, queued: bool = True, longest_loops: int = _QUEUE) -> Timed:
        """Return the time of one call of *work*, issued to the clock's stream.

        Args:
            work: issues its operations to the current stream; called a few times before it is timed.
            queued: see the note above.
            longest_loops: calls in one round at most.
        """
        self._blocks = False
        synchronize(self.device)  # what *work* reads may come from another stream
        with switch(self.stream):
            work()  # loads kernels, fills caches
            synchronize(self.device)
            started = time.perf_counter()
            work()
            synchronize(self.device)
            about_s = max(time.perf_counter() - started, 1e-7)
            loops = max(1, min(longest_loops, int(self.point_s / 5 / about_s)))
            rounds = max(4, min(9, int(self.point_s / (loops * about_s))))
            found = [self._round(work, loops, queued and not self._blocks) / loops for _ in range(rounds)]
        lower, middle, upper = statistics.quantiles(found, n=4, method="inclusive")
        return Timed(lower, (upper - lower) / middle)

    def sweep(
        self, points: Sequence[tuple[float, Callable[[], object]]], *, longest_s: float, **options: Any
    ) -> list[tuple[float, Timed]]:  # Any: those of `time`
        """Return the times of *points*, ``(amount, work)`` in rising order, up to one longer than *longest_s*.

        A point that lies far above the line between its neighbours was disturbed; it is measured again, and the
        shorter time counts.
        """
        found: list[tuple[float, Timed]] = []
        for amount, work in points:
            found.append((amount, self.time(work, **options)))
            if found[-1][1].seconds > longest_s:
                break
        for _ in range(2):
            for index, (amount, timed) in enumerate(found):
                others = [one for one in found[max(0, index - 1) : index + 2] if one[0] != amount]
                if timed.seconds > 1.3 * _expected(amount, others):
                    again = self.time(points[index][1], **options)
                    found[index] = (amount, min(timed, again, key=lambda one: one.seconds))
        return found

    def _round(self, work: Callable[[], object], loops: int, queued: bool) -> float:
        if not self._keeps_time:
            synchronize(self.device)
            started = time.perf_counter()
            for _ in range(loops):
                work()
            synchronize(self.device)
            return time.perf_counter() - started
        latch = self._hold() if queued and loops > 1 else None
        guard = None if latch is None else _Guard(latch)
        try:
            start, end = (Event(self.device, enable_timing=True) for _ in range(2))
            start.record(self.stream)
            for _ in range(loops):
                work()
            end.record(self.stream)
        finally:
            if guard is not None:
                guard.release()
        if guard is not None and guard.was_needed:
            self._blocks = True
            return self._round(work, loops, queued=False)
        end.synchronize()
        # Clocks of some devices tick coarsely; a time of nothing would make a curve impossible.
        return max(start.elapsed_time(end) / 1e3, loops * 1e-9)

    def _hold(self) -> Any:  # Any: the latch of any backend, or None where the device can't be held
        if not self._can_hold:
            return None
        try:
            return self.backend.hold(self.stream)
        except (UnsupportedError, StreamError):
            self._can_hold = False
            return None

    def host_time(self, call: Callable[[], object], *, loops: int = 200, rounds: int = 7) -> float:
        """Return the host's seconds for one *call*: the median of rounds, each with an idle device before it."""
        found = []
        with switch(self.stream):
            for _ in range(20):
                call()
            for _ in range(rounds):
                synchronize(self.device)
                started = time.perf_counter()
                for _ in range(loops):
                    call()
                found.append((time.perf_counter() - started) / loops)
            synchronize(self.device)
        return statistics.median(found)

    def wall(self, work: Callable[[], object], *, rounds: int = 5) -> float:
        """Return the host's seconds from an idle device, through *work*, to an idle device again: the median."""
        found = []
        work()
        for _ in range(rounds):
            synchronize(self.device)
            started = time.perf_counter()
            work()
            synchronize(self.device)
            found.append(time.perf_counter() - started)
        return statistics.median(found)
