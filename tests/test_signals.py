"""A signal whose handler raises, as Ctrl-C does, at any point of a block: the thread gets its own stream back."""

from __future__ import annotations

import inspect
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import devstream
from devstream import _observe, _registry, _streams
from devstream.abc import Backend
from devstream.backends.cpu import CpuBackend, CpuStream

PACKAGE = str(Path(devstream.__file__).parent)

#: The first line of these that a signal can interrupt is the one after ``try:``; before it, nothing is called.
GUARDED = {"__enter__": CpuStream.__enter__, "__exit__": CpuStream.__exit__}


class Interrupt:
    """Raises SIGINT at event number *wanted* of the lines and returns of our functions, while it is entered."""

    def __init__(self, wanted):
        self.wanted, self.seen, self.fired = wanted, 0, None

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        if event == "call" or (code.co_name in GUARDED and not self.is_guarded(frame, event)):
            return self.trace
        if event in {"line", "return"}:
            if self.seen == self.wanted and self.fired is None:
                self.fired = f"{event} {code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}"
                signal.raise_signal(signal.SIGINT)
            self.seen += 1
        return self.trace

    def is_guarded(self, frame, event):
        lines, first = inspect.getsourcelines(GUARDED[frame.f_code.co_name])
        start = next(i for i, line in enumerate(lines) if line.strip() == "try:")
        return event == "line" and frame.f_lineno > first + start


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_everywhere(block, look):
    """Run *block* with an interrupt at each point in turn, and compare *look()* with what it was before."""
    before, points = look(), []
    for wanted in range(10_000):
        interrupt = Interrupt(wanted)
        try:
            with interrupt:
                block()
        except KeyboardInterrupt:
            pass
        if interrupt.fired is None:
            return points
        points.append(interrupt.fired)
        assert look() == before, interrupt.fired
    raise AssertionError("the block never ends")


@pytest.mark.parametrize("index", [0, 1])
def test_a_block_of_the_cpu_that_is_interrupted_anywhere_leaves_what_was_current(index):
    cpu, outer, inner = devstream.backend("cpu"), devstream.Stream("cpu"), devstream.Stream(f"cpu:{index}")

    def block():
        with inner, inner:
            pass

    def look():
        return cpu.current_stream(None), cpu.current_stream(0), cpu.current_stream(1), len(cpu.here.blocks)

    with devstream.stream(outer):
        points = interrupted_everywhere(block, look)
    assert {point.split()[-1] for point in points} >= {"__enter__", "__exit__", "enter", "leave", "choose", "pop"}


def test_blocks_left_out_of_order_and_interrupted_leave_what_was_current():
    cpu, one, two = devstream.backend("cpu"), devstream.Stream("cpu"), devstream.Stream("cpu:1")

    def block():
        try:
            one.__enter__()
            two.__enter__()
        finally:
            # What an interrupted program does: it leaves what it has entered, in whatever order.
            for stream in (one, two):
                try:
                    stream.__exit__(None, None, None)
                except devstream.DevstreamError:
                    pass  # it wasn't entered
                except KeyboardInterrupt:
                    if stream is two:
                        raise

    def look():
        return cpu.current_stream(None), cpu.current_stream(0), cpu.current_stream(1), len(cpu.here.blocks)

    assert interrupted_everywhere(block, look)


class Plain(CpuBackend):
    """Raises SIGINT before or after its call number *wanted* of `set_stream`, as a signal in one would."""

    name = "plain"
    wanted, calls, late = -1, 0, False

    def set_stream(self, stream):
        fires, self.calls = self.calls == self.wanted, self.calls + 1
        if fires and not self.late:
            signal.raise_signal(signal.SIGINT)
        super().set_stream(stream)
        if fires:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def plain():
    _registry.register("plain", Plain)
    with _registry.chosen("plain") as backend:
        yield backend
    _registry.unregister("plain")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen"])
@pytest.mark.parametrize("work", ["stream", "carry_streams", "copy"])
def test_what_switches_by_verb_brings_the_streams_back_when_interrupted(plain, work, seen, late):
    inner, source, target = devstream.Stream("cpu:1"), torch.ones(2), torch.zeros(2)
    with devstream.stream(inner):
        carried = devstream.carry_streams(lambda: None)

    def block():
        if work == "stream":
            with _streams._switched(plain, inner):
                pass
        elif work == "copy":
            Backend.copy(plain, target, source, inner)
        else:
            carried()

    def look():
        return plain.current_stream(None), plain.current_stream(0), plain.current_stream(1)

    before = look()
    with _observe.subscribe(lambda notice: None) if seen else nullcontext():
        for wanted in range(100):
            plain.wanted, plain.calls, plain.late = wanted, 0, late
            try:
                block()
            except KeyboardInterrupt:
                assert look() == before, wanted
            else:
                break
    assert 2 < wanted < 100
    assert look() == before
