"""Laws about which stream is which: equality, names, priorities, handles, copies."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest

from devstream import _streams as verbs
from devstream.abc import Capability
from devstream.exceptions import StreamTypeError, UnsupportedError
from devstream.testing.conformance._subject import Made, Subject


class IdentityLaws:
    """Two objects are equal, and hash alike, exactly when they are the same queue."""

    def test_streams_are_equal_exactly_when_they_are_the_same_queue(self, subject: Subject) -> None:
        """Held to the light: streams are equal, with equal hashes, where holding one holds the other."""
        streams = [made for made in subject.streams() if made.ours]
        default = verbs.default_stream(subject.device())
        streams.append(Made("wrap(default_stream())", verbs.wrap(default)))
        side = next(made.item for made in streams if made.how == "Stream()")
        with verbs.stream(side):
            streams.append(Made("current_stream() inside", verbs.current_stream()))
        for first in streams:
            for second in streams:
                self._assert_equal(first, second, same=subject.same_queue(first.item, second.item))

    def _assert_equal(self, first: Made, second: Made, *, same: bool) -> None:
        words = "are the same queue" if same else "are two queues"
        equal = first.item == second.item
        assert equal is same, f"{first.how} == {second.how} is {equal}, but they {words}"
        assert (first.item != second.item) is not same, f"{first.how} != {second.how} is wrong: they {words}"
        if same:
            assert hash(first.item) == hash(second.item), f"hash of {first.how} and {second.how}: they {words}"

    def test_wrapping_a_stream_gives_the_same_queue(self, subject: Subject) -> None:
        """``wrap`` of a native stream, or of our own, is that queue, equal each time."""
        natives = [made for made in subject.streams() if not made.ours]
        for made in [*natives, Made("Stream()", subject.side_stream())]:
            first, second = verbs.wrap(made.item), verbs.wrap(made.item)
            assert subject.same_queue(first, made.item), f"wrap({made.how}) must be the same queue"
            self._assert_equal(Made(f"wrap({made.how})", first), Made(f"wrap({made.how})", second), same=True)

    def test_the_key_is_the_queues(self, subject: Subject) -> None:
        """`Backend.stream_key` is equal exactly where the streams are."""
        streams = subject.streams()
        for first in streams:
            for second in streams:
                if first.ours and second.ours:
                    equal = subject.key(first.item) == subject.key(second.item)
                    assert equal is (first.item == second.item), f"stream_key of {first.how} and {second.how}"

    def test_a_native_handle_wraps_to_the_same_queue(self, subject: Subject) -> None:
        """``wrap(stream.native_handle, device)`` is that stream, and handle 0 the default one."""
        subject.needs(Capability.NATIVE_HANDLE)
        subject.needs(Capability.EXTERNAL_STREAMS)
        stream = subject.side_stream()
        wrapped = verbs.wrap(subject.backend.native_handle(stream), subject.device())
        assert subject.same_queue(stream, wrapped), "wrap(handle) must be the queue with that handle"
        self._assert_equal(Made("Stream()", stream), Made("wrap(handle)", wrapped), same=True)
        default = verbs.wrap(0, subject.device())
        assert default == verbs.default_stream(subject.device()), "wrap(0) must be the default stream"

    def test_what_is_no_stream_is_refused(self, subject: Subject) -> None:
        """``StreamTypeError``, also a ``TypeError``, for an argument that is no stream or no event."""
        stream = subject.side_stream()
        wrongs: tuple[Any, ...] = ("cuda", object(), 1.5)  # Any: what a type checker would refuse
        for wrong in wrongs:
            subject.error(StreamTypeError, partial(verbs.wrap, wrong))
            subject.error(StreamTypeError, partial(verbs.set_stream, wrong))
            subject.error(TypeError, partial(stream.wait_event, wrong))
            subject.error(TypeError, partial(stream.wait_stream, wrong))
        subject.error(StreamTypeError, lambda: verbs.Event(stream), "device")

    def test_the_default_stream_is_one_and_no_side_stream(self, subject: Subject) -> None:
        """``default_stream`` gives the same queue each time, and a new stream is another one."""
        device = subject.device()
        default = verbs.default_stream(device)
        assert default == verbs.default_stream(device), "default_stream must be the same queue each time"
        if Capability.SIDE_STREAMS in subject.backend.capabilities(0):
            assert verbs.create_stream(device, 0) != default, "Stream() must be no default stream"

    def test_new_streams_are_distinct(self, subject: Subject) -> None:
        """Streams made one after the other are different queues, at least until a pool wraps."""
        subject.needs(Capability.SIDE_STREAMS)
        made = [verbs.create_stream(subject.device(), 0) for _ in range(8)]
        assert len({subject.key(stream) for stream in made}) == len(made), "Stream() must be a queue of its own"
        assert len(set(made)) == len(made), "two streams that are two queues must be two elements of a set"

    def test_a_named_stream_is_one_however_often_it_is_asked_for(self, subject: Subject) -> None:
        """``named_stream`` of one device and purpose is one queue; 40 calls use up one stream of the pool."""
        device = subject.device()
        named = {verbs.named_stream("kit: one", device) for _ in range(40)}
        assert len(named) == 1, "named_stream must give one stream for one purpose"
        other = verbs.named_stream("kit: two", device)
        if Capability.SIDE_STREAMS in subject.backend.capabilities(0):
            assert other not in named, "named_stream must give another stream for another purpose"
        assert named.pop() != verbs.default_stream(device), "named_stream must be no default stream"
        unnamed: tuple[Any, ...] = ("", None, 3)  # Any: what a type checker would refuse
        for wrong in unnamed:
            subject.error(StreamTypeError, partial(verbs.named_stream, wrong, device))

    def test_a_stream_has_the_methods_of_torch(self, subject: Subject) -> None:
        """Whatever is handed out has torch's methods and attributes, and says its device."""
        for made in subject.streams():
            if made.ours:
                for name in ("wait_event", "wait_stream", "record_event", "query", "synchronize", "device"):
                    assert hasattr(made.item, name), f"{made.how} has no {name}"
                assert made.item.device.type == subject.backend.device_type, f"{made.how}.device"
                assert subject.backend.stream_index(made.item) == 0, f"Backend.stream_index of {made.how}"

    def test_priorities_are_clamped_and_have_names(self, subject: Subject) -> None:
        """A priority out of range is clamped, and ``"low"``, ``"normal"`` and ``"high"`` work everywhere."""
        device, backend = subject.device(), subject.backend
        lowest, highest = backend.priority_range(0)
        assert lowest >= highest, "Backend.priority_range is (lowest, highest), and lower numbers run first"
        normal = min(lowest, max(highest, 0))
        cases: list[tuple[Any, int]] = [  # Any: a number or a name
            (1_000, lowest),
            (-1_000, highest),
            ("low", lowest),
            ("normal", normal),
            ("high", highest),
            (lowest, lowest),
            (highest, highest),
        ]
        for asked, granted in cases:
            stream = verbs.create_stream(device, asked)
            got = backend.stream_priority(stream)
            assert got == granted, f"Stream(priority={asked!r}) was granted {got}, not {granted}"
        if Capability.PRIORITIES in backend.capabilities(0):
            assert lowest > highest, "Capability.PRIORITIES means more than one priority"
        with pytest.raises(ValueError, match="urgent"):
            verbs.create_stream(device, "urgent")
        subject.error(StreamTypeError, lambda: verbs.create_stream(device, True), "priority")

    def test_a_copy_of_a_stream_or_an_event_is_itself(self, subject: Subject) -> None:
        """``copy`` and ``deepcopy`` give the same queue, or event, so that a copied module keeps its streams."""
        for made in (*subject.streams(), *subject.events()):
            if made.ours:
                for copied in (copy.copy(made.item), copy.deepcopy(made.item), copy.deepcopy([made.item])[0]):
                    assert copied == made.item, f"a copy of {made.how} must be equal to it"

    def test_a_stream_or_an_event_refuses_to_be_pickled(self, subject: Subject) -> None:
        """``pickle`` raises ``TypeError``: a queue can't leave its process."""
        for made in (*subject.streams(), *subject.events()):
            if made.ours:
                with pytest.raises(TypeError):
                    pickle.dumps(made.item)

    def test_the_spec_agrees_with_the_backend(self, subject: Subject) -> None:
        """``spec`` names the device, and has the same range of priorities; ``devices`` lists every device."""
        backend = subject.backend
        specs = [backend.spec(index) for index in range(backend.device_count())]
        for index, spec in enumerate(specs):
            assert spec.device == subject.device(index), "DeviceSpec.device must be the device"
            assert spec.name, "DeviceSpec.name must not be empty"
            assert spec.vendor, "DeviceSpec.vendor must not be empty"
            assert spec.priority_range == backend.priority_range(index), "DeviceSpec.priority_range"
        assert [spec.device for spec in verbs.devices()[: len(specs)]] == [spec.device for spec in specs]

    def test_a_stream_can_do_no_more_than_its_device(self, subject: Subject) -> None:
        """A stream's capabilities are some of its device's; what is absent is refused by name."""
        backend = subject.backend
        for made in subject.streams():
            has = verbs.capabilities(made.item)
            assert has in verbs.capabilities(subject.device()), f"{made.how} claims more than its device has"
        stream = subject.side_stream()
        refused = repr(backend.name)
        if Capability.NATIVE_HANDLE not in verbs.capabilities(stream):
            subject.error(UnsupportedError, lambda: backend.native_handle(stream), "NATIVE_HANDLE", refused)
        if Capability.EXTERNAL_STREAMS not in verbs.capabilities(subject.device()):
            subject.error(
                UnsupportedError, lambda: verbs.wrap(12345, subject.device()), "EXTERNAL_STREAMS", refused
            )


__all__ = ["IdentityLaws"]
