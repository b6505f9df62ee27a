from __future__ import annotations

import pytest
import torch

import devstream
from devstream.testing import latch


def test_a_latch_holds_its_stream_until_it_is_released(backend, stream):
    with latch(stream) as held:
        event = stream.record_event()
        assert not event.query()
        assert not stream.query()
        held.release()
        event.synchronize()
        assert event.query()


def test_a_latch_is_released_at_the_end_of_its_block(backend, stream):
    with latch(stream):
        event = stream.record_event()
    event.synchronize()
    assert event.query()


def test_a_latch_is_released_by_an_exception(backend, stream):
    events = []
    with pytest.raises(ZeroDivisionError), latch(stream):  # noqa: PT012 - the error must come after the record
        events.append(stream.record_event())
        raise ZeroDivisionError
    events[0].synchronize()
    assert events[0].query()


def test_a_latch_takes_a_native_stream():
    with latch(torch.Stream(device="cpu")):
        event = devstream.default_stream("cpu").record_event()
        assert not event.query()


def test_two_latches_hold_until_the_last_is_released(backend, stream):
    with latch(stream) as first, latch(stream) as second:
        event = stream.record_event()
        first.release()
        assert not event.query()
        second.release()
        event.synchronize()


def test_a_backend_that_cannot_hold_says_so():
    from devstream.abc import Backend

    with pytest.raises(devstream.UnsupportedError, match=r"override Backend\.hold"):
        Backend.hold(devstream.backend("cpu"), devstream.Stream("cpu"))
