"""devstream/_observe.py: each verb reports once, after it has acted."""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream import _observe
from devstream._observe import Record, RecordStream, Switch, Synchronize, Wait
from devstream.testing import latch


@pytest.fixture
def seen():
    notices = []
    with _observe.subscribe(notices.append):
        yield notices


def test_each_verb_reports_once(seen):
    base, side, event = devstream.current_stream("cpu"), devstream.Stream("cpu"), devstream.Event("cpu")
    tensor = torch.ones(1)

    def reports(call):
        seen.clear()
        call()
        return list(seen)

    assert reports(lambda: event.record(side)) == [Record(event, side)]
    assert reports(lambda: side.record_event(event)) == [Record(event, side)]
    assert reports(lambda: event.wait(side)) == [Wait(side, event, True)]
    assert reports(lambda: side.wait_event(event)) == [Wait(side, event, True)]
    assert reports(event.synchronize) == [Synchronize(event)]
    assert reports(side.synchronize) == [Synchronize(side)]
    assert reports(lambda: devstream.synchronize("cpu:1")) == [Synchronize(torch.device("cpu", 1))]
    assert reports(lambda: devstream.record_stream(tensor, side)) == [RecordStream(tensor, side)]
    assert reports(lambda: devstream.set_stream(side)) == [Switch(side, base)]
    assert reports(lambda: devstream.set_stream(base)) == [Switch(base, side)]
    fresh = devstream.Event("cpu")
    assert reports(lambda: side.wait_event(fresh)) == [Wait(side, fresh, False)]


def test_a_wait_for_a_stream_is_a_record_and_a_wait(seen):
    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    one.wait_stream(two)
    record, wait = seen
    assert isinstance(record, Record)
    assert record.stream is two
    assert wait == Wait(one, record.event, True)


@pytest.mark.parametrize("how", ["verb", "method"])
def test_a_block_reports_its_switch_there_and_back(seen, how):
    base, side = devstream.current_stream("cpu"), devstream.Stream("cpu")
    with devstream.stream(side) if how == "verb" else side:
        assert seen == [Switch(side, base)]
    assert seen == [Switch(side, base), Switch(base, side)]


def test_constructors_and_questions_for_the_current_stream_report_nothing(seen):
    devstream.Stream("cpu")
    devstream.Event("cpu")
    devstream.current_stream("cpu")
    devstream.default_stream("cpu")
    assert seen == []


def test_a_query_reports_only_that_its_target_is_done(seen):
    side = devstream.Stream("cpu")
    with latch(side) as held:
        event = side.record_event()
        assert not event.query()
        assert not side.query()
        held.release()
        assert event.query()
        assert side.query()
    assert seen[1:] == [_observe.Happened(event), _observe.Happened(side)]


def test_a_verb_that_fails_reports_nothing(seen):
    with pytest.raises(ValueError, match="cpu:1"):
        devstream.Event("cpu:1").record(devstream.Stream("cpu:0"))
    assert seen == []


def test_a_closed_subscription_hears_nothing_and_can_be_closed_again():
    notices = []
    subscription = _observe.subscribe(notices.append)
    subscription.close()
    subscription.close()
    devstream.Stream("cpu").synchronize()
    assert notices == []
    assert _observe.subscribers == ()


def test_two_subscriptions_of_one_observer_end_one_by_one():
    notices = []
    first, second = _observe.subscribe(notices.append), _observe.subscribe(notices.append)
    first.close()
    devstream.Stream("cpu").synchronize()
    assert len(notices) == 1
    second.close()


class StopError(Exception):
    pass


def raiser(kind):
    def observe(notice):
        if isinstance(notice, kind):
            raise StopError(type(notice).__name__)

    return observe


@pytest.mark.parametrize("how", ["verb", "method"])
def test_an_observer_that_raises_when_a_block_is_entered_leaves_the_current_stream(how):
    base, side = devstream.current_stream("cpu"), devstream.Stream("cpu:1")
    block = devstream.stream(side) if how == "verb" else side
    with _observe.subscribe(raiser(Switch)), pytest.raises(StopError), block:
        pytest.fail("the block must not run")
    assert devstream.current_stream() is base
    assert devstream.current_stream("cpu:1") is devstream.default_stream("cpu:1")


def test_an_observer_that_raises_when_a_block_is_left_comes_after_the_restoring():
    base, side = devstream.current_stream("cpu"), devstream.Stream("cpu")
    subscription = None
    with pytest.raises(StopError), devstream.stream(side):
        subscription = _observe.subscribe(raiser(Switch))
    subscription.close()
    assert devstream.current_stream("cpu") is base


def test_an_observer_that_raises_inside_a_block_stops_the_program_at_the_line():
    base, side, event = devstream.current_stream("cpu"), devstream.Stream("cpu"), devstream.Event("cpu")
    with _observe.subscribe(raiser(Record)), pytest.raises(StopError), devstream.stream(side):
        event.record()
    assert event.recorded
    assert devstream.current_stream("cpu") is base


def test_carried_streams_report_their_switches(seen):
    side = devstream.Stream("cpu")
    with devstream.stream(side):
        carried = devstream.carry_streams(seen.clear)
    carried()
    assert devstream.current_stream("cpu") is not side
    assert seen
    assert {type(notice) for notice in seen} == {Switch}
