"""`racecheck`: the context manager that a user enters."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import Literal

from devstream import _observe, _registry
from devstream._compat import gpu_trace, modes
from devstream.exceptions import RaceError, RaceWarning, warning
from devstream.races.checker import Checker
from devstream.races.model import Race
from devstream.races.text import describe
from devstream.races.watch import Escapes, Operations, Watch

OnRace = Literal["raise", "stop", "warn", "collect"]
_CHOICES = ("raise", "stop", "warn", "collect")
_one_at_a_time = threading.Lock()
#: The checker of the block that is entered, if any.
_entered: list[Checker] = []


def _after_fork() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    for checker in _entered:
        checker.mute()


os.register_at_fork(after_in_child=_after_fork)


class racecheck(ContextDecorator):  # noqa: N801 - used like a function
    """Find every missing wait of the block, on any device, and raise at its end with all of them.

    ``with devstream.racecheck() as races:`` gives the list of `Race`, which grows as they are found.

    Args:
        on_race: ``"raise"`` raises `RaceError` at the end of the block, with all races. ``"stop"`` raises it at
            the faulty line. ``"warn"`` warns with `RaceWarning` at each. ``"collect"`` only fills the list.
        poison: fill memory that is unwritten or freed with bytes that are NaN or -1, so that a program that reads
            it computes with that.

    Raises:
        RaceError: see *on_race*. An error of the block itself isn't replaced by it.
        RuntimeError: the block is inside another one.

    A race is found by what the program orders, not by when things ran: one run finds it each time, on the CPU
    too. What is seen: this thread's operations and their backward passes, all verbs and methods of devstream in
    every thread, and on CUDA and ROCm the native calls as well. Not seen: operations of other threads, kernels
    that are no operation of torch (Triton's, other libraries'), what a replayed graph does, and on other devices
    the native records and waits. Compiled functions run eagerly meanwhile. A forked child isn't checked. Off, it
    costs nothing; on a GPU torch can't switch its trace off again, so after the first block empty hooks remain.
    """

    def __init__(self, *, on_race: OnRace = "raise", poison: bool = False) -> None:
        if on_race not in _CHOICES:
            raise ValueError(f"on_race={on_race!r}: use one of {', '.join(map(repr, _CHOICES))}")
        self._on_race = on_race
        self._poison = poison
        self._stack: ExitStack | None = None
        self.races: list[Race] = []

    def _recreate_cm(self) -> racecheck:
        return racecheck(on_race=self._on_race, poison=self._poison)

    def __enter__(self) -> list[Race]:
        if not _one_at_a_time.acquire(blocking=False):
            raise RuntimeError("a racecheck is on already in this process; leave its block first")
        with ExitStack() as stack:
            stack.callback(self._release)
            checker = Checker(self._report, rank=_rank())
            stack.callback(checker.close)
            _entered[:] = [checker]
            stack.callback(_entered.clear)
            self.races = checker.races
            watch = Watch(checker, spoil=self._poison)
            backend = _registry.default_backend()
            if backend.device_type == "cuda" and gpu_trace.has_gpu_trace():
                stack.callback(gpu_trace.GpuTrace(watch.listen_to(backend.device_type)).close)
            stack.callback(_observe.subscribe(watch).close)
            stack.enter_context(modes.compiled_runs_eagerly())
            stack.enter_context(Escapes(watch))
            stack.enter_context(Operations(watch))
            self._stack = stack.pop_all()
        return self.races

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stack is not None
        self._stack.close()
        self._stack = None
        if kind is None and self._on_race == "raise" and self.races:
            raise RaceError(races=[describe(race) for race in self.races])

    def _release(self) -> None:
        if _one_at_a_time.locked():  # a forked child leaves the block with a lock of its own
            _one_at_a_time.release()

    def _report(self, race: Race) -> None:
        if self._on_race == "stop":
            raise RaceError(races=[describe(race)])
        if self._on_race == "warn":
            made = warning(RaceWarning, race=describe(race))
            site = race.second.site  # not the caller: between it and here are torch's frames
            warnings.warn_explicit(made, RaceWarning, site.file or "<unknown>", site.line or 1)


def _rank() -> int | None:
    """Return this process's rank where a launcher started several."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and os.environ.get("WORLD_SIZE", "1") != "1" else None


__all__ = ["racecheck"]
