"""devstream/races/order.py: lanes, events, and what comes near to a missing edge."""

from __future__ import annotations

from devstream.races.model import LaneKind, NearMiss
from devstream.races.order import HOST, Order
from devstream.races.sites import Site


def site(line):
    return Site("program.py", line, "main")


def two_streams():
    order = Order()
    one = order.add_lane(LaneKind.STREAM, "stream 1 of cpu:0", "cpu:0")
    return order, one, order.add_lane(LaneKind.STREAM, "stream 2 of cpu:0", "cpu:0")


def test_a_wait_orders_after_the_record_and_not_after_what_came_later():
    order, one, two = two_streams()
    before = order.tick(one)
    order.record("event", one, site(1))
    after = order.tick(one)
    order.wait(two, "event", site(2))
    assert order.clocks.knows(two, before)
    assert not order.clocks.knows(two, after)


def test_what_the_host_learned_everything_issued_later_knows():
    order, one, two = two_streams()
    stamp = order.tick(one)
    order.host_waits_device("cpu:0")
    order.tick(two)
    assert order.clocks.knows(two, stamp)
    assert order.known_to_all(stamp)


def test_a_device_is_not_waited_for_by_waiting_for_another():
    order, one, _ = two_streams()
    stamp = order.tick(one)
    order.host_waits_device("cpu:1")
    assert not order.clocks.knows(HOST, stamp)


def test_an_event_recorded_too_early_is_a_near_miss():
    order, one, two = two_streams()
    order.record("event", one, site(1))
    work = order.tick(one)
    order.wait(two, "event", site(3))
    (note,) = order.near_misses(work, two)
    assert (note.miss, note.record, note.wait) == (NearMiss.TOO_EARLY, site(1), site(3))


def test_a_wait_without_a_record_is_a_near_miss_that_tells_of_the_later_record():
    order, one, two = two_streams()
    order.wait(two, "event", site(1))
    work = order.tick(one)
    order.record("event", one, site(2))
    (note,) = order.near_misses(work, two)
    assert (note.miss, note.wait, note.record) == (NearMiss.UNRECORDED, site(1), site(2))


def test_a_record_that_was_overwritten_is_a_near_miss():
    order, one, two = two_streams()
    three = order.add_lane(LaneKind.STREAM, "stream 3 of cpu:0", "cpu:0")
    work = order.tick(one)
    order.record("event", one, site(1))
    order.record("event", two, site(2))
    order.wait(three, "event", site(3))
    (note,) = order.near_misses(work, three)
    assert (note.miss, note.record, note.again, note.wait) == (NearMiss.OVERWRITTEN, site(1), site(2), site(3))


def test_another_stream_that_was_waited_for_is_a_near_miss():
    order, one, two = two_streams()
    three = order.add_lane(LaneKind.STREAM, "stream 3 of cpu:0", "cpu:0")
    work = order.tick(one)
    order.record("event", two, site(1))
    order.wait(three, "event", site(2))
    (note,) = order.near_misses(work, three)
    assert (note.miss, note.lane) == (NearMiss.OTHER_STREAM, "stream 2 of cpu:0")


def test_an_event_that_is_recorded_for_ever_without_a_wait_keeps_three_records():
    order, one, _ = two_streams()
    for line in range(100):
        order.record("event", one, site(line))
    record, length = order._events["event"], 0
    while record is not None:
        record, length = record.replaced, length + 1
    assert length <= 3


def test_a_forgotten_event_orders_nothing():
    order, one, two = two_streams()
    stamp = order.tick(one)
    order.record("event", one, site(1))
    order.forget("event")
    order.wait(two, "event", site(2))
    assert not order.clocks.knows(two, stamp)
