"""Timing work on a device."""

from __future__ import annotations

import threading

import pytest
import torch

from devstream.abc import Capability
from devstream.exceptions import UnsupportedError
from devstream.roofline import _clock
from devstream.roofline._clock import Clock, Timed, curve_of


@pytest.fixture
def clock(backend) -> Clock:
    return Clock(backend, 0, point_s=0.01)


def test_ten_times_the_work_takes_about_ten_times_as_long(clock):
    x = torch.randn(1 << 20, device=clock.tensors)

    def ten():
        for _ in range(10):
            x.mul_(1.0)

    one = clock.time(lambda: x.mul_(1.0)).seconds
    assert 5 * one < clock.time(ten).seconds < 20 * one


def test_the_work_runs_on_the_clocks_own_stream(clock, backend):
    seen = []
    clock.time(lambda: seen.append(backend.stream_key(backend.current_stream(0))))
    assert set(seen) == {backend.stream_key(clock.stream)}


def test_no_more_calls_are_queued_than_was_asked_for(clock, monkeypatch):
    calls, rounds = [], []
    monkeypatch.setattr(clock, "_round", lambda work, loops, queued: rounds.append((loops, queued)) or 1.0)
    clock.time(lambda: calls.append(1), longest_loops=3, queued=False)
    assert set(rounds) == {(3, False)}
    assert len(rounds) >= 4


@pytest.mark.cuda
def test_a_small_kernels_time_is_the_devices_and_not_that_of_its_launch():
    from devstream import backend

    clock = Clock(backend("cuda"), 0, point_s=0.01)
    x = torch.zeros(1, device="cuda")
    assert clock.time(lambda: x.add_(1)).seconds < clock.host_time(lambda: x.add_(1))


def test_a_device_that_cannot_be_held_is_timed_all_the_same(clock, backend, monkeypatch):
    def refuse(stream):
        raise UnsupportedError(operation="hold", backend="x", capability="hold", alternative="none")

    monkeypatch.setattr(backend, "hold", refuse)
    clock._can_hold = True
    assert clock.time(lambda: None).seconds > 0
    assert not clock._can_hold


def test_work_that_waits_for_a_held_device_is_rescued_and_timed_without_holding(clock, backend, monkeypatch):
    class Held:
        def __init__(self):
            self.open = threading.Event()

        def release(self):
            self.open.set()

    held = []
    monkeypatch.setattr(backend, "hold", lambda stream: held.append(Held()) or held[-1])
    monkeypatch.setattr(_clock, "_HELD_S", 0.05)
    clock._can_hold = True

    def waits():
        if held:
            assert held[-1].open.wait(timeout=10)

    assert clock.time(waits).seconds < 0.05
    assert len(held) == 1  # once was enough to know


def test_a_device_whose_events_keep_no_time_is_timed_by_the_host(backend, monkeypatch):
    without = backend.capabilities(0) & ~Capability.TIMING
    monkeypatch.setattr(backend, "capabilities", lambda index: without)
    clock = Clock(backend, 0, point_s=0.01)
    x = torch.randn(1 << 20, device=clock.tensors)
    assert 1e-7 < clock.time(lambda: x.mul_(1.0)).seconds < 1.0


def times_of(clock, monkeypatch, *seconds):
    """Let the clock give these times in turn."""
    left = list(seconds)
    monkeypatch.setattr(clock, "time", lambda work, **options: Timed(left.pop(0), 0.01))
    return left


POINTS = [(1.0, lambda: None), (2.0, lambda: None), (4.0, lambda: None), (8.0, lambda: None)]


def test_a_disturbed_point_is_measured_again_and_the_shorter_time_counts(clock, monkeypatch):
    left = times_of(clock, monkeypatch, 1, 50, 4, 8, 2.1)
    found = clock.sweep(POINTS, longest_s=100)
    assert [timed.seconds for _, timed in found] == [1, 2.1, 4, 8]
    assert left == []


def test_an_undisturbed_sweep_measures_each_point_once(clock, monkeypatch):
    left = times_of(clock, monkeypatch, 1, 2, 4, 8)
    clock.sweep(POINTS, longest_s=100)
    assert left == []


def test_a_sweep_ends_with_the_first_point_that_takes_too_long(clock, monkeypatch):
    times_of(clock, monkeypatch, 1, 2)
    assert len(clock.sweep(POINTS, longest_s=1.5)) == 2


def test_a_curve_has_the_middle_spread_of_its_points():
    made = curve_of([(1.0, Timed(1, 0.01)), (2.0, Timed(2, 0.05)), (4.0, Timed(4, 0.9))])
    assert made.error == 0.05
    assert made.points[2] == (4.0, pytest.approx(4))
