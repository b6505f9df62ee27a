"""Laws about looking at events and streams from the host: query, synchronize, and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from devstream import _streams as verbs
from devstream.abc import Capability
from devstream.exceptions import (
    EventNotReadyError,
    EventNotRecordedError,
    StreamTypeError,
    TimingDisabledError,
    UnsupportedError,
)
from devstream.testing._latch import latch
from devstream.testing.conformance._subject import GLANCE_S, Background, Subject


class HostLaws:
    """What ``query`` and ``synchronize`` mean."""

    def test_event_query_tells_whether_the_record_has_happened(self, subject: Subject) -> None:
        """``Event.query`` is False while the record is behind a latch, and True afterwards."""
        stream = subject.side_stream()
        for made in subject.events():
            with latch(stream):
                stream.record_event(made.item)
                if made.ours:
                    assert subject.stays(made.item), f"Event.query of {made.how} must be False behind a latch"
            stream.synchronize()
            if made.ours:
                assert subject.finishes(made.item.synchronize), f"Event.synchronize of {made.how} must return"
                assert made.item.query(), f"Event.query of {made.how} must be True once it has happened"

    def test_event_synchronize_blocks_until_the_record_has_happened(self, subject: Subject) -> None:
        """``Event.synchronize`` returns when the record has happened, not before."""
        stream = subject.side_stream()
        for made in subject.events():
            if made.ours:
                self._assert_blocks(
                    subject,
                    stream,
                    partial(made.item.record, stream),
                    made.item.synchronize,
                    f"Event.synchronize of {made.how}",
                )

    def test_stream_query_tells_whether_all_work_is_done(self, subject: Subject) -> None:
        """``Stream.query`` is False while the stream is held, and True when it is idle."""
        stream = subject.side_stream()
        assert subject.finishes(stream.synchronize), "Stream.synchronize of an idle stream must return"
        assert stream.query(), "Stream.query of an idle stream must be True"
        with latch(stream):
            subject.mark(stream)
            assert not stream.query(), "Stream.query of a held stream must be False"
        assert subject.finishes(stream.synchronize), "Stream.synchronize must return once the latch is released"
        assert stream.query(), "Stream.query must be True once the stream was synchronized"

    def test_stream_synchronize_blocks_until_all_work_is_done(self, subject: Subject) -> None:
        """``Stream.synchronize`` returns when all work issued to the stream is done, not before."""
        stream = subject.side_stream()
        self._assert_blocks(
            subject, stream, lambda: subject.mark(stream), stream.synchronize, "Stream.synchronize"
        )

    def test_device_synchronize_covers_side_streams(self, subject: Subject) -> None:
        """``devstream.synchronize`` waits for every stream of the device, also one that nobody keeps."""
        stream = subject.side_stream()
        device = subject.device()
        self._assert_blocks(
            subject, stream, lambda: subject.mark(stream), lambda: verbs.synchronize(device), "synchronize(device)"
        )
        default = verbs.default_stream(device)
        self._assert_blocks(
            subject,
            default,
            lambda: subject.mark(default),
            lambda: verbs.synchronize(device),
            "synchronize(device)",
        )

    def _assert_blocks(
        self,
        subject: Subject,
        stream: object,
        record: Callable[[], object],
        call: Callable[[], object],
        what: str,
    ) -> None:
        with latch(stream) as held:  # type: ignore[arg-type]
            record()
            blocked = Background(call)
            assert not blocked.over(GLANCE_S), f"{what} returned before the work was done"
            held.release()
            assert blocked.over(subject.patience_s), f"{what} didn't return after the work was done"

    def test_an_event_that_was_never_recorded_looks_done(self, subject: Subject) -> None:
        """As in torch: before the first record ``query`` is True and ``synchronize`` returns."""
        for made in subject.events():
            if made.ours:
                assert made.item.query(), f"Event.query of {made.how} must be True before the first record"
                assert subject.finishes(made.item.synchronize), f"Event.synchronize of {made.how} must return"

    def test_options_that_the_device_lacks_are_refused_by_name(self, subject: Subject) -> None:
        """Without its `Capability` an option raises ``UnsupportedError`` with its and the backend's name."""
        has, name = subject.backend.capabilities(0), subject.backend.name
        for capability, option in (
            (Capability.TIMING, "enable_timing"),
            (Capability.BLOCKING_EVENTS, "blocking"),
            (Capability.IPC_EVENTS, "interprocess"),
        ):
            if capability not in has:
                options = {option: True}
                subject.error(UnsupportedError, partial(verbs.Event, **options), option, repr(name))


class TimingLaws:
    """What ``elapsed_time`` means, and when it is refused."""

    def test_elapsed_time_is_in_milliseconds(self, subject: Subject) -> None:
        """Time spent behind a latch between two events is in their difference, in milliseconds."""
        subject.needs(Capability.TIMING)
        stream = subject.side_stream()
        start, end = verbs.Event(enable_timing=True), verbs.Event(enable_timing=True)
        outer_ns = time.perf_counter_ns()
        start.record(stream)
        start.synchronize()
        inner_ns = time.perf_counter_ns()
        with latch(stream):
            end.record(stream)
            while time.perf_counter_ns() < inner_ns + 10_000_000:
                pass
            held_ms = (time.perf_counter_ns() - inner_ns) / 1e6
        end.synchronize()
        outer_ms = (time.perf_counter_ns() - outer_ns) / 1e6
        elapsed_ms = start.elapsed_time(end)
        # Two clocks: the device's may differ from the host's by some parts in a thousand.
        assert 0.9 * held_ms <= elapsed_ms <= 1.1 * outer_ms + 1.0, (
            f"Event.elapsed_time said {elapsed_ms}, but between {held_ms} ms and {outer_ms} ms had passed"
        )

    def test_elapsed_time_never_runs_backwards(self, subject: Subject) -> None:
        """Of two events recorded in order on one stream, the second never is earlier, however short the time."""
        subject.needs(Capability.TIMING)
        stream = subject.side_stream()

        def pairs() -> list[float]:
            found = []
            for _ in range(200):
                start, end = verbs.Event(enable_timing=True), verbs.Event(enable_timing=True)
                start.record(stream)
                end.record(stream)
                end.synchronize()
                found.append(start.elapsed_time(end))
            return found

        times = list[float]()
        assert subject.finishes(lambda: times.extend(pairs())), (
            "Event.elapsed_time after synchronize must not hang"
        )
        assert min(times) >= 0, f"Event.elapsed_time of two records in order was {min(times)}"

    def test_elapsed_time_the_other_way_round_is_negative(self, subject: Subject) -> None:
        """``end.elapsed_time(start)`` is ``-start.elapsed_time(end)``, and an event is 0 from itself."""
        subject.needs(Capability.TIMING)
        stream = subject.side_stream()
        start, end = verbs.Event(enable_timing=True), verbs.Event(enable_timing=True)
        start.record(stream)
        start.synchronize()
        since_ns = time.perf_counter_ns()
        while time.perf_counter_ns() < since_ns + 1_000_000:
            pass
        end.record(stream)
        end.synchronize()
        forth_ms, back_ms = start.elapsed_time(end), end.elapsed_time(start)
        assert forth_ms > 0 > back_ms and abs(forth_ms + back_ms) < 0.02, (  # noqa: PT018 - one fact
            f"Event.elapsed_time: {forth_ms} one way, {back_ms} the other"
        )
        assert start.elapsed_time(start) == 0, "Event.elapsed_time of an event with itself must be 0"

    def test_elapsed_time_needs_two_events_that_keep_time(self, subject: Subject) -> None:
        """``TimingDisabledError`` where one was made without ``enable_timing=True``."""
        subject.needs(Capability.TIMING)
        stream = subject.side_stream()
        timed, plain = verbs.Event(enable_timing=True), verbs.Event()
        timed.record(stream)
        plain.record(stream)
        stream.synchronize()
        subject.error(TimingDisabledError, lambda: timed.elapsed_time(plain), "enable_timing")
        subject.error(TimingDisabledError, lambda: plain.elapsed_time(timed), "enable_timing")

    def test_elapsed_time_needs_two_recorded_events(self, subject: Subject) -> None:
        """``EventNotRecordedError`` where one was never recorded."""
        subject.needs(Capability.TIMING)
        done, never = verbs.Event(enable_timing=True), verbs.Event(enable_timing=True)
        done.record(subject.side_stream())
        done.synchronize()
        subject.error(EventNotRecordedError, lambda: done.elapsed_time(never), "elapsed_time", "record")
        subject.error(EventNotRecordedError, lambda: never.elapsed_time(done), "elapsed_time", "record")

    def test_elapsed_time_needs_two_events_that_have_happened(self, subject: Subject) -> None:
        """``EventNotReadyError``, with the advice to synchronize, where one is still to happen; never a hang."""
        subject.needs(Capability.TIMING)
        stream = subject.side_stream()
        start, end = verbs.Event(enable_timing=True), verbs.Event(enable_timing=True)
        start.record(stream)
        with latch(stream):
            end.record(stream)
            subject.error(EventNotReadyError, lambda: start.elapsed_time(end), "elapsed_time", "synchronize")

    def test_a_backend_without_timing_says_so(self, subject: Subject) -> None:
        """Without `Capability.TIMING`, the error names ``elapsed_time`` and the backend."""
        backend = subject.backend
        if Capability.TIMING in backend.capabilities(0):
            subject.error(StreamTypeError, lambda: verbs.Event(enable_timing=True).elapsed_time(1))  # type: ignore[arg-type]
            return
        words = ("elapsed_time", repr(backend.name))
        subject.error(UnsupportedError, lambda: verbs.Event(enable_timing=True), *words)
        event = backend.create_event(0, enable_timing=False, blocking=False, interprocess=False)
        subject.error(UnsupportedError, lambda: backend.elapsed_ms(event, event), *words)


__all__ = ["HostLaws", "TimingLaws"]
