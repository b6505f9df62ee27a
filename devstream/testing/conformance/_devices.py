"""Laws about more than one device, and about more than one backend."""

from __future__ import annotations

from functools import partial

import torch

from devstream import _registry
from devstream import _streams as verbs
from devstream.abc import Capability
from devstream.exceptions import DeviceMismatchError
from devstream.testing._latch import latch
from devstream.testing.conformance._ordering import assert_ordered
from devstream.testing.conformance._subject import Subject
from devstream.testing.recording import RecordingBackend


class DeviceLaws:
    """Order crosses devices; what belongs to one device isn't taken for another's."""

    def test_a_device_that_does_not_exist_is_refused(self, subject: Subject) -> None:
        """``DeviceMismatchError`` with the number of devices, not a vendor's error code."""
        count = subject.backend.device_count()
        device = subject.device(count)
        subject.error(DeviceMismatchError, lambda: verbs.create_stream(device, 0), str(device), str(count))
        subject.error(DeviceMismatchError, lambda: verbs.Event(device), str(device))
        subject.error(DeviceMismatchError, lambda: verbs.synchronize(device), str(device))

    def test_a_stream_waits_for_an_event_of_another_device(self, subject: Subject) -> None:
        """An edge crosses devices of one backend, through events and through ``wait_stream``, both ways."""
        subject.needs_devices(2)
        for source, target in ((0, 1), (1, 0)):
            for number in range(2):
                producer, consumer = subject.side_stream(source), subject.side_stream(target)

                def by_event(producer: object = producer, consumer: object = consumer) -> None:
                    event = subject.mark(producer)
                    event.wait(consumer)  # type: ignore[arg-type]

                def by_stream(producer: object = producer, consumer: object = consumer) -> None:
                    verbs.wrap(consumer).wait_stream(producer)  # type: ignore[arg-type]

                edge, what = ((by_event, "Event.wait"), (by_stream, "Stream.wait_stream"))[number]
                assert_ordered(subject, producer, consumer, edge, f"{what} from device {source} to {target}")

    def test_an_event_without_a_device_takes_that_of_its_first_record(self, subject: Subject) -> None:
        """``Event()`` belongs to no device until it is recorded, and to that one from then on."""
        subject.needs_devices(2)
        one = subject.side_stream(1)
        event = verbs.Event()
        assert event.device.index is None, "Event() must belong to no device before its first record"
        event.record(one)
        assert event.device == subject.device(1), "Event.record must bind the event to the stream's device"

    def test_an_event_of_one_device_refuses_to_be_recorded_on_another(self, subject: Subject) -> None:
        """``DeviceMismatchError`` naming both, and the event is as it was."""
        subject.needs_devices(2)
        zero, one = subject.side_stream(0), subject.side_stream(1)
        for event in (verbs.Event(subject.device(0)), subject.mark(zero)):
            was = event.recorded
            words = (str(subject.device(0)), str(subject.device(1)))
            subject.error(DeviceMismatchError, partial(event.record, one), *words)
            subject.error(DeviceMismatchError, partial(one.record_event, event), *words)
            assert event.recorded is was, "a refused record must leave the event as it was"

    def test_a_device_is_synchronized_alone(self, subject: Subject) -> None:
        """``synchronize`` of one device doesn't wait for another's work."""
        subject.needs_devices(2)
        with latch(subject.side_stream(1)) as held:
            assert subject.finishes(lambda: verbs.synchronize(subject.device(0))), (
                "synchronize(device 0) waited for device 1"
            )
            held.release()

    def test_time_between_two_devices_is_refused(self, subject: Subject) -> None:
        """``elapsed_time`` of events on two devices raises, since their clocks don't agree."""
        subject.needs_devices(2)
        subject.needs(Capability.TIMING)
        events = [verbs.Event(subject.device(index), enable_timing=True) for index in range(2)]
        for index, event in enumerate(events):
            event.record(subject.side_stream(index))
            event.synchronize()
        subject.error(DeviceMismatchError, lambda: events[0].elapsed_time(events[1]), "elapsed_time")

    def test_wrap_refuses_another_device_than_the_streams_own(self, subject: Subject) -> None:
        """A native stream knows its device; to name another one is an error."""
        subject.needs_devices(2)
        stream = subject.side_stream(0)
        assert verbs.wrap(stream, subject.device(0)) == stream, "wrap must accept the stream's own device"
        subject.error(DeviceMismatchError, lambda: verbs.wrap(stream, subject.device(1)), str(subject.device(0)))

    def test_streams_of_two_devices_are_never_equal(self, subject: Subject) -> None:
        """Not even the two default streams."""
        subject.needs_devices(2)
        zero, one = verbs.default_stream(subject.device(0)), verbs.default_stream(subject.device(1))
        assert zero != one, "default streams of two devices are two queues"
        assert subject.key(zero) != subject.key(one), "Backend.stream_key must hold the device"
        assert verbs.named_stream("kit", subject.device(0)) != verbs.named_stream("kit", subject.device(1)), (
            "named_stream is one a device and purpose"
        )

    def test_streams_and_events_of_another_backend_are_refused(self, subject: Subject) -> None:
        """An edge between two backends raises ``DeviceMismatchError`` that names both, and records nothing."""
        name = subject.backend.name
        fake = isinstance(subject.backend, RecordingBackend)
        other = _registry.load("cpu") if fake else RecordingBackend()
        foreign, stream, words = other.create_stream(0), subject.side_stream(), (repr(name), repr(other.name))
        # Of this device, as it says: one of no device would be the other backend's.
        event = verbs.Event(torch.device(subject.backend.device_type))
        subject.error(DeviceMismatchError, lambda: event.record(foreign), *words)
        assert not event.recorded, "a refused record must leave the event as it was"
        event.record(stream)
        subject.error(DeviceMismatchError, lambda: event.wait(foreign), *words)
        subject.error(DeviceMismatchError, lambda: stream.wait_stream(foreign), *words)
        theirs = foreign.record_event()
        subject.error(DeviceMismatchError, lambda: stream.wait_event(theirs), *words)
        subject.error(DeviceMismatchError, lambda: stream.record_event(theirs), *words)


__all__ = ["DeviceLaws"]
