"""The CPU's captures keep CUDA's rules, and say which line breaks one."""

from __future__ import annotations

import threading

import pytest
import torch

import devstream
from devstream.exceptions import CaptureError

cpu = devstream.backend("cpu")


def line_of_caller(offset: int = 0) -> str:
    import sys

    frame = sys._getframe(1)
    return f"test_cpu_capture.py:{frame.f_lineno + offset}"


def test_host_code_of_a_capture_runs_once():
    stream, ran = devstream.Stream("cpu"), []

    def issue() -> None:
        ran.append("host")
        cpu.launch(lambda: ran.append("work"), stream)

    graph = cpu.capture(issue, stream)
    assert ran == ["host"]
    for _ in range(2):
        graph.replay(cpu.current_stream(None))
    assert ran == ["host", "work", "work"]


def test_the_streams_that_were_current_come_back():
    before, stream = cpu.current_stream(None), devstream.Stream("cpu")
    seen = []
    cpu.capture(lambda: seen.append(cpu.current_stream(None)), stream)
    assert seen == [stream]
    assert cpu.current_stream(None) is before


def test_the_default_stream_is_refused():
    with pytest.raises(CaptureError, match="the default stream"):
        cpu.capture(lambda: None, cpu.default_stream(0))


def test_a_capture_in_a_capture_is_refused():
    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    with pytest.raises(CaptureError, match="is not allowed"):
        cpu.capture(lambda: cpu.capture(lambda: None, two), one)


def test_each_question_is_refused_with_its_line():
    stream = devstream.Stream("cpu")
    event = devstream.Event("cpu")
    event.record(stream)
    for question in (stream.query, stream.synchronize, event.query, event.synchronize, devstream.synchronize):
        with pytest.raises(CaptureError, match=line_of_caller(1)):
            cpu.capture(lambda: question("cpu") if question is devstream.synchronize else question(), stream)  # noqa: B023


def test_a_wait_for_what_was_recorded_outside_is_refused_with_its_line():
    stream, other = devstream.Stream("cpu"), devstream.Stream("cpu")
    event = other.record_event()
    with pytest.raises(CaptureError, match=rf"recorded outside \(.*{line_of_caller(1)}"):
        cpu.capture(lambda: event.wait(stream), stream)


def test_a_wait_from_outside_for_what_was_captured_is_refused_until_it_is_recorded_again():
    stream, other, event = devstream.Stream("cpu"), devstream.Stream("cpu"), devstream.Event("cpu")
    cpu.capture(lambda: event.record(stream), stream)
    with pytest.raises(CaptureError, match=rf"recorded in a capture \(.*{line_of_caller(1)}"):
        event.wait(other)
    event.record(stream)
    event.wait(other)


def test_a_wait_for_an_event_that_was_never_recorded_orders_nothing():
    stream = devstream.Stream("cpu")
    cpu.capture(lambda: devstream.Event("cpu").wait(stream), stream)


def test_every_stream_that_is_not_joined_is_named_with_the_line_of_its_fork():
    stream, open_one, joined = (devstream.Stream("cpu") for _ in range(3))

    def issue() -> None:
        open_one.wait_stream(stream)
        joined.wait_stream(stream)
        cpu.launch(lambda: None, open_one)
        cpu.launch(lambda: None, joined)
        stream.wait_stream(joined)

    line = f"test_cpu_capture.py:{issue.__code__.co_firstlineno + 1}"
    with pytest.raises(CaptureError) as caught:
        cpu.capture(issue, stream)
    assert f"{open_one!r}, forked at" in str(caught.value)
    assert line in str(caught.value)
    assert repr(joined) not in str(caught.value)


def test_work_behind_the_join_is_not_joined():
    stream, side = devstream.Stream("cpu"), devstream.Stream("cpu")

    def issue() -> None:
        side.wait_stream(stream)
        stream.wait_stream(side)
        cpu.launch(lambda: None, side)

    with pytest.raises(CaptureError, match="not joined"):
        cpu.capture(issue, stream)


def test_a_join_by_way_of_a_third_stream_counts():
    stream, side, third = (devstream.Stream("cpu") for _ in range(3))
    ran = []

    def issue() -> None:
        side.wait_stream(stream)
        cpu.launch(lambda: ran.append("side"), side)
        third.wait_stream(side)
        cpu.launch(lambda: ran.append("third"), third)
        stream.wait_stream(third)
        cpu.launch(lambda: ran.append("first"), stream)

    cpu.capture(issue, stream).replay(stream)
    stream.synchronize()
    assert ran == ["side", "third", "first"]


def test_another_thread_is_left_alone():
    stream, other, answers = devstream.Stream("cpu"), devstream.Stream("cpu"), []

    def work() -> None:
        cpu.launch(lambda: answers.append("ran"), other)
        other.synchronize()
        answers.append(other.query())

    def issue() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    cpu.capture(issue, stream)
    assert answers == ["ran", True]


def test_what_a_replay_raises_is_raised_by_who_waits_for_it():
    stream = devstream.Stream("cpu")

    def fail() -> None:
        raise ZeroDivisionError

    graph = cpu.capture(lambda: cpu.launch(fail, stream), stream)
    graph.replay(stream)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()


def test_a_replay_keeps_to_a_latch():
    stream, event = devstream.Stream("cpu"), devstream.Event("cpu")
    x, y = torch.ones(2), torch.zeros(2)
    graph = cpu.capture(lambda: cpu.copy(y, x, stream), stream)
    with devstream.testing.latch(stream):
        graph.replay(stream)
        event.record(stream)
        assert not event.query()
    event.synchronize()
    assert y.tolist() == [1, 1]
