"""Laws about order: what a record and a wait put before what, and that nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from devstream import _streams as verbs
from devstream.abc import Capability
from devstream.testing._latch import latch
from devstream.testing.conformance._subject import GLANCE_S, Background, Made, Subject

Form = tuple[str, Callable[[], object]]


def assert_ordered(
    subject: Subject, producer: Any, consumer: Any, edge: Callable[[], object], what: str
) -> None:  # Any: streams of any class
    """Hold *producer*, write behind the latch, draw the *edge*; see *consumer* wait, then read the value."""
    place = subject.device(subject.backend.stream_index(verbs.wrap(producer)))
    source, target = torch.zeros(64, device=place), torch.zeros(64)
    # Once before the latch: a kernel's first launch loads it, and some vendors wait for the whole device there.
    target.copy_(source.fill_(0.0))
    verbs.synchronize(place)
    there = torch.zeros(64, device=subject.device(subject.backend.stream_index(verbs.wrap(consumer))))
    subject.backend.copy(there, source, verbs.wrap(consumer))
    verbs.wrap(consumer).synchronize()
    with latch(producer):
        with verbs.stream(producer):
            source.fill_(7.0)
        edge()
        mark = subject.mark(consumer)
        subject.backend.copy(there, source, verbs.wrap(consumer))
        last = subject.mark(consumer)
        assert subject.stays(mark), f"{what} ordered nothing: later work of the waiting stream didn't wait"
    assert subject.finishes(last.synchronize), f"{what} made the waiting stream wait for ever"
    assert there.cpu().eq(7.0).all(), f"{what}: the waiting stream read a value from before the record"


def record_forms(stream: Made, event: Made) -> list[Form]:
    """Return every way to record *event* on *stream* in which one of our methods takes part."""
    s, e, forms = stream.item, event.item, list[Form]()

    def record_in_block() -> None:
        with verbs.stream(s):
            e.record()

    if stream.ours:
        forms.append((f"{stream.how}.record_event({event.how})", lambda: s.record_event(e)))
    if event.ours:
        forms.append((f"{event.how}.record({stream.how})", lambda: e.record(s)))
        forms.append((f"{event.how}.record() inside stream({stream.how})", record_in_block))
    return forms


def wait_forms(stream: Made, event: Made) -> list[Form]:
    """Return every way to let *stream* wait for *event* in which one of our methods takes part."""
    s, e, forms = stream.item, event.item, list[Form]()

    def wait_in_block() -> None:
        with verbs.stream(s):
            e.wait()

    if stream.ours:
        forms.append((f"{stream.how}.wait_event({event.how})", lambda: s.wait_event(e)))
    if event.ours:
        forms.append((f"{event.how}.wait({stream.how})", lambda: e.wait(s)))
        forms.append((f"{event.how}.wait() inside stream({stream.how})", wait_in_block))
    return forms


class OrderingLaws:
    """What a record and a wait put before what, and that nothing else does."""

    def test_wait_orders_work_after_the_record(self, subject: Subject) -> None:
        """Work issued to a stream after a wait happens after what the event was recorded behind."""
        producer = subject.side_stream()
        consumer = subject.side_stream(beside=(producer,))
        event = verbs.Event()

        def edge() -> None:
            event.record(producer)
            event.wait(consumer)

        assert_ordered(subject, producer, consumer, edge, "Event.wait")

    def test_without_an_edge_nothing_is_ordered(self, subject: Subject) -> None:
        """A stream that waits for nothing goes on while another is held: the control of every law on order."""
        held = subject.side_stream()
        free = subject.side_stream(beside=(held,))
        with latch(held):
            before = subject.mark(held)
            after = subject.mark(free)
            assert subject.finishes(after.synchronize), "a stream waited for another that it has no edge from"
            assert after.query(), "Event.query: an event that was synchronized must have happened"
            assert subject.stays(before), "Event.query: an event behind a latch must not have happened"
        assert subject.finishes(before.synchronize), "a released latch must let its stream go on"

    def test_every_event_recorded_on_every_stream_is_waited_for(self, subject: Subject) -> None:
        """Every pair of a stream and an event, however got, is the source of an edge in every form of record."""
        for number in range(len(subject.streams())):
            for kind in range(len(subject.events())):
                for form in range(3):
                    # New objects each time: what an earlier form ordered would hide a form that orders nothing.
                    producer, event = subject.streams()[number], subject.events()[kind]
                    forms = record_forms(producer, event)
                    if form < len(forms):
                        self._assert_record(subject, producer, event, *forms[form])

    def _assert_record(
        self, subject: Subject, producer: Made, event: Made, what: str, record: Callable[[], object]
    ) -> None:
        consumer = subject.side_stream(beside=(producer.item,))

        def edge() -> None:
            record()
            consumer.wait_event(event.item)

        assert_ordered(subject, producer.item, consumer, edge, what)

    def test_every_stream_waits_for_every_event(self, subject: Subject) -> None:
        """Every pair of a stream and an event, however got, is the end of an edge in every form of wait."""
        for number in range(len(subject.streams())):
            for kind in range(len(subject.events())):
                for form in range(3):
                    consumer, event = subject.streams()[number], subject.events()[kind]
                    forms = wait_forms(consumer, event)
                    if form < len(forms):
                        self._assert_wait(subject, consumer, event, *forms[form])

    def _assert_wait(
        self, subject: Subject, consumer: Made, event: Made, what: str, wait: Callable[[], object]
    ) -> None:
        producer = subject.side_stream(beside=(consumer.item,))

        def edge() -> None:
            producer.record_event(event.item)
            wait()

        assert_ordered(subject, producer, consumer.item, edge, what)

    def test_record_event_without_an_event_returns_one_that_orders(self, subject: Subject) -> None:
        """``stream.record_event()`` makes an event, records it and returns it, on every stream handed out."""
        for number, made in enumerate(subject.streams()):
            if not made.ours:
                continue
            producer = subject.streams()[number].item
            consumer = subject.side_stream(beside=(producer,))
            what = f"{made.how}.record_event()"

            def edge(
                producer: Any = producer, consumer: Any = consumer, what: str = what
            ) -> None:  # Any: see above
                event = producer.record_event()
                assert verbs.recorded(event) is True, f"{what} must return a recorded event"
                consumer.wait_event(event)

            assert_ordered(subject, producer, consumer, edge, what)

    def test_wait_stream_orders_every_pair_of_streams(self, subject: Subject) -> None:
        """``s.wait_stream(t)`` puts all work issued to *t* so far before later work of *s*, however got."""
        count = len(subject.streams())
        for waiting in range(count):
            for waited in range(count):
                consumer, producer = subject.streams()[waiting], subject.streams()[waited]
                if not consumer.ours or subject.key(consumer.item) == subject.key(producer.item):
                    continue

                def edge(consumer: Made = consumer, producer: Made = producer) -> None:
                    consumer.item.wait_stream(producer.item)

                what = f"{consumer.how}.wait_stream({producer.how})"
                assert_ordered(subject, producer.item, consumer.item, edge, what)

    def test_waiting_for_itself_does_not_block_a_stream(self, subject: Subject) -> None:
        """A stream may wait for itself and for its own event; that changes nothing."""
        stream = subject.side_stream()
        stream.wait_stream(stream)
        stream.wait_event(stream.record_event())
        assert subject.finishes(subject.mark(stream).synchronize), "a stream that waits for itself must go on"

    def test_order_is_transitive(self, subject: Subject) -> None:
        """What waits for a stream that waits, waits too."""
        first = subject.side_stream()
        second = subject.side_stream(beside=(first,))
        third = subject.side_stream(beside=(first, second))

        def edge() -> None:
            second.wait_stream(first)
            third.wait_stream(second)

        assert_ordered(subject, first, third, edge, "two wait_stream in a row")

    def test_a_wait_binds_to_the_record_that_was_last_at_the_call(self, subject: Subject) -> None:
        """Recording an event again moves no wait that was issued before."""
        late = subject.side_stream()
        early = subject.side_stream(beside=(late,))
        waits = subject.side_stream(beside=(late, early))
        event = verbs.Event()
        with latch(late):
            event.record(late)
            event.wait(waits)
            event.record(early)
            mark = subject.mark(waits)
            assert subject.finishes(event.synchronize), "Event.synchronize must wait for the last record only"
            assert subject.stays(mark), "Event.wait must bind to the record before it, not to a later one"
        assert subject.finishes(mark.synchronize), "a released latch must let the waiting stream go on"
        with latch(late):
            event.record(early)
            event.wait(waits)
            event.record(late)
            mark = subject.mark(waits)
            assert subject.finishes(mark.synchronize), "Event.record must not move a wait that was issued before"

    def test_a_second_record_replaces_the_first(self, subject: Subject) -> None:
        """An event that is recorded again hasn't happened until its last record has."""
        free = subject.side_stream()
        held = subject.side_stream(beside=(free,))
        event = subject.mark(free)
        assert subject.finishes(event.synchronize), "Event.synchronize must return once the record has happened"
        with latch(held):
            event.record(held)
            assert subject.stays(event), "Event.record: a second record must replace the first"
        assert subject.finishes(event.synchronize), "Event.synchronize must return once the latch is released"

    def test_work_issued_after_the_record_is_not_waited_for(self, subject: Subject) -> None:
        """A record covers the work issued before it, nothing after."""
        stream = subject.side_stream()
        event = subject.mark(stream)
        with latch(stream):
            assert subject.finishes(event.synchronize), "Event.synchronize waited for work from after the record"

    def test_a_wait_before_the_record_is_a_no_op_that_recorded_tells(self, subject: Subject) -> None:
        """Waiting for an event that was never recorded orders nothing, and `devstream.recorded` tells."""
        held = subject.side_stream()
        waits = subject.side_stream(beside=(held,))
        for event in subject.events():
            assert verbs.recorded(event.item) in (False, None), f"recorded({event.how}) before a record"
            waits.wait_event(event.item)
            with latch(held):
                held.record_event(event.item)
                mark = subject.mark(waits)
                assert subject.finishes(mark.synchronize), f"{event.how}: a record reached a wait from before it"
            assert verbs.recorded(event.item) in (True, None), f"recorded({event.how}) after a record"
            if event.ours:
                assert verbs.recorded(event.item) is True, f"recorded({event.how}) must know about its own events"

    def test_a_wait_does_not_block_the_host(self, subject: Subject) -> None:
        """Only ``synchronize`` holds the host; a wait behind a latch returns at once."""
        held = subject.side_stream()
        waits = subject.side_stream(beside=(held,))
        with latch(held):
            event = subject.mark(held)
            assert Background(lambda: event.wait(waits)).over(subject.patience_s), "Event.wait blocked the host"

    def test_a_stream_made_in_one_thread_orders_in_another(self, subject: Subject) -> None:
        """Streams and events belong to no thread."""
        subject.needs(Capability.SIDE_STREAMS)  # here, since a skip is lost in a thread
        made = list[Any]()  # Any: a stream and an event

        def make() -> None:
            made.extend((subject.side_stream(), verbs.Event()))

        maker = threading.Thread(target=make)
        maker.start()
        maker.join()
        assert made, "a thread must be able to make a stream and an event"
        producer, event = made
        consumer = subject.side_stream(beside=(producer,))

        def edge() -> None:
            event.record(producer)
            event.wait(consumer)

        assert_ordered(subject, producer, consumer, edge, "Event.wait of another thread's event")

    def test_a_released_latch_lets_everything_go_on(self, subject: Subject) -> None:
        """`Backend.hold` holds one stream, and ``release`` may be called twice."""
        stream = subject.side_stream()
        with latch(stream) as held:
            mark = subject.mark(stream)
            assert not Background(mark.synchronize).over(GLANCE_S), "Event.synchronize returned behind a latch"
            held.release()
            assert subject.finishes(mark.synchronize), "Latch.release must let its stream go on"
            held.release()


__all__ = ["OrderingLaws", "assert_ordered"]
