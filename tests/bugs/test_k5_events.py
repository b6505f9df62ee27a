"""K5: the state of events. Each test's first line names the row of the bug log and where it was reported."""

from __future__ import annotations

import logging
import threading
import time
import warnings

import pytest
import torch

import devstream
from devstream import _objects
from devstream.exceptions import EventNotReadyError, EventNotRecordedError, EventOverwrittenWarning


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(_objects, "strict_depth", 1)


def test_the_time_of_a_pending_event_is_an_error_that_tells_to_synchronize(cpu):
    """B25, pytorch/tutorials#3166."""
    side = devstream.Stream("cpu")
    start, end = devstream.Event("cpu", enable_timing=True), devstream.Event("cpu", enable_timing=True)
    start.record(side)
    latch = cpu.hold(side)
    end.record(side)
    with pytest.raises(EventNotReadyError, match=r"event\.synchronize\(\)"):
        start.elapsed_time(end)
    latch.release()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_the_time_between_two_events_is_the_time_between_their_happening(cpu):
    """B25: the right value, against a clock read around it."""
    side = devstream.Stream("cpu")
    start, end = devstream.Event("cpu", enable_timing=True), devstream.Event("cpu", enable_timing=True)
    outer = time.perf_counter_ns()
    start.record(side)
    inner = time.perf_counter_ns()
    while time.perf_counter_ns() - inner < 5_000_000:
        pass
    least = time.perf_counter_ns() - inner
    end.record(side)
    most = time.perf_counter_ns() - outer
    assert least / 1e6 <= start.elapsed_time(end) <= most / 1e6


def test_strict_raises_for_a_wait_without_a_record(strict):
    """B27, sgl-project/sglang#14214."""
    with pytest.raises(EventNotRecordedError, match="wait on an event that was never recorded"):
        devstream.Stream("cpu").wait_event(devstream.Event("cpu"))


def test_a_wait_without_a_record_returns_at_once_and_logs_one_line(caplog):
    """B27, sgl-project/sglang#14214."""
    side = devstream.Stream("cpu")
    with caplog.at_level(logging.WARNING, "devstream"):
        for _ in range(5):
            side.wait_event(devstream.Event("cpu"))
    (line,) = caplog.messages
    assert "never recorded" in line
    assert f"{__file__}:" in line
    assert side.query()


def three_chunks(one_event):
    """Add three chunks that a side stream makes, each handed over by an event."""
    side, main = devstream.Stream("cpu"), devstream.default_stream("cpu")
    shared, chunks, events = devstream.Event("cpu"), [], []
    for value in (1, 2, 3):
        event = shared if one_event else devstream.Event("cpu")
        with devstream.stream(side):
            chunks.append(torch.full((4,), float(value)))
            event.record()
        events.append(event)
    for event in events:
        main.wait_event(event)
    return sum(chunks).tolist()


def test_one_event_a_chunk_gives_the_exact_sum_and_no_flag(strict):
    """B28, PrimeIntellect-ai/prime-rl#3411."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert three_chunks(one_event=False) == [6.0] * 4


def test_one_event_for_three_chunks_gives_exactly_two_flags(strict):
    """B28, PrimeIntellect-ai/prime-rl#3411."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        three_chunks(one_event=True)
    assert [item.category for item in caught] == [EventOverwrittenWarning] * 2
    assert {item.filename for item in caught} == {__file__}


@pytest.mark.parametrize("blocking", [False, True])
def test_wait_returns_at_once_and_synchronize_holds_the_host(cpu, blocking):
    """B29, pytorch/pytorch#60541."""
    side = devstream.Stream("cpu")
    latch = cpu.hold(side)
    event = devstream.Event("cpu", blocking=blocking)
    event.record(side)
    event.wait(devstream.Stream("cpu"))
    event.wait()  # the current stream
    assert not event.query()
    steps, waits = [], threading.Event()

    def release():
        waits.wait()
        steps.append("released")
        latch.release()

    thread = threading.Thread(target=release)
    thread.start()
    waits.set()
    event.synchronize()
    steps.append("synchronized")
    thread.join()
    assert steps == ["released", "synchronized"]


def test_the_docs_of_both_say_who_waits():
    """B29: in their first line."""
    assert "the host goes on" in devstream.Event.wait.__doc__.splitlines()[0]
    assert devstream.Event.synchronize.__doc__.startswith("Block the host")


def test_recorded_tells_a_new_event_from_one_that_happened():
    """B30, pytorch/pytorch#49343."""
    event = devstream.Event("cpu")
    assert (event.recorded, devstream.recorded(event), event.query()) == (False, False, True)
    event.record()
    event.synchronize()
    assert (event.recorded, devstream.recorded(event), event.query()) == (True, True, True)


def test_recorded_tells_a_new_native_event_from_one_that_happened():
    """B30, with torch's own class."""
    event = torch.Event("cpu")
    assert devstream.recorded(event) is False
    devstream.Stream("cpu").record_event(event)
    assert devstream.recorded(event) is True


# -- on a GPU ------------------------------------------------------------------------------------------------


def busy(stream, milliseconds):
    """Keep *stream* busy on the device for about this long."""
    with devstream.stream(stream):
        torch.cuda._sleep(int(milliseconds * torch.cuda.get_device_properties(0).clock_rate))


@pytest.mark.cuda
def test_the_time_of_fifty_milliseconds_on_a_gpu_is_right_after_synchronize():
    """B25: 50 ms, to 20 %; the error before that says synchronize."""
    side, reference = devstream.Stream("cuda"), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    start, end = devstream.Event("cuda", enable_timing=True), devstream.Event("cuda", enable_timing=True)
    busy(side, 1)
    side.synchronize()
    start.record(side)
    reference[0].record(torch.cuda.ExternalStream(side.native_handle))
    busy(side, 50)
    reference[1].record(torch.cuda.ExternalStream(side.native_handle))
    end.record(side)
    with pytest.raises(RuntimeError, match="synchronize"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(reference[0].elapsed_time(reference[1]), rel=0.2)
    assert start.elapsed_time(end) == pytest.approx(50, rel=0.5)  # the clock rate is a nominal one


@pytest.mark.cuda
@pytest.mark.parametrize("blocking", [False, True])
def test_wait_takes_no_time_and_synchronize_two_hundred_milliseconds_on_a_gpu(blocking):
    """B29: wait() below 10 ms, synchronize() at least 150 ms."""
    side, event = devstream.Stream("cuda"), devstream.Event("cuda", blocking=blocking)
    busy(side, 1)
    side.synchronize()
    busy(side, 300)
    event.record(side)
    begin = time.perf_counter()
    event.wait(devstream.Stream("cuda"))
    waited = time.perf_counter() - begin
    event.synchronize()
    assert waited < 0.010
    assert time.perf_counter() - begin >= 0.150
