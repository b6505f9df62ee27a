"""Laws about the current stream: per thread, restored by every block, the same whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest
import torch

from devstream import _compat, _observe
from devstream import _streams as verbs
from devstream.testing.conformance._subject import Subject
from devstream.testing.recording import Recorder

R = TypeVar("R")


def in_new_thread(call: Callable[[], R]) -> R:
    """Return what *call* returns in a thread that has just begun."""
    found, errors = list[R](), list[BaseException]()

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # raised again in the law's own thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


class CurrentStreamLaws:
    """The current stream belongs to the thread, and every block restores what it found."""

    def test_a_block_makes_its_stream_current_and_gives_it(self, subject: Subject) -> None:
        """Inside ``with stream(s) as q`` the current stream is *s*, and so is *q*; a native stream too."""
        for made in subject.streams():
            before = verbs.current_stream()
            with verbs.stream(made.item) as given:
                assert subject.key(verbs.current_stream()) == subject.key(made.item), (
                    f"stream({made.how}) must make it current"
                )
                assert subject.key(given) == subject.key(made.item), f"stream({made.how}) must give the stream"
            assert verbs.current_stream() == before, f"stream({made.how}) must restore the current stream"

    def test_any_nesting_restores_exactly(self, subject: Subject) -> None:
        """Blocks of a, b, a, a one inside the other: leaving them one by one gives a, b, a, and the base again."""
        base = subject.side_stream()
        a = subject.side_stream(beside=(base,))
        b = subject.side_stream(beside=(base, a))
        verbs.set_stream(base)
        for order in ((a, b, a, a), (a, a), (base, a, base), (b, b, b)):
            blocks = []
            for stream in order:
                block = verbs.stream(stream)
                block.__enter__()
                blocks.append(block)
                assert verbs.current_stream() == stream, "with stream(s): s must be current"
            for left in range(len(order) - 1, -1, -1):
                blocks[left].__exit__(None, None, None)
                expected = order[left - 1] if left else base
                assert verbs.current_stream() == expected, (
                    "leaving a block must restore what was current before it"
                )

    def test_an_exception_leaves_no_state(self, subject: Subject) -> None:
        """A block that an exception leaves restores too, doesn't swallow it, and the stream can be used again."""
        base = subject.side_stream()
        a = subject.side_stream(beside=(base,))
        b = subject.side_stream(beside=(base, a))
        verbs.set_stream(base)
        with pytest.raises(ZeroDivisionError), verbs.stream(a), verbs.stream(b), verbs.stream(a):
            raise ZeroDivisionError
        assert verbs.current_stream() == base, "a block left by an exception must restore the current stream"
        with verbs.stream(a):
            assert verbs.current_stream() == a, "a stream whose block was left by an exception must work again"
        assert verbs.current_stream() == base, "a block after an exception must restore the current stream"

    def test_a_block_restores_what_set_stream_set(self, subject: Subject) -> None:
        """``set_stream`` before a block is what the block restores; inside, it holds to the block's end."""
        a = subject.side_stream()
        b = subject.side_stream(beside=(a,))
        c = subject.side_stream(beside=(a, b))
        verbs.set_stream(a)
        with verbs.stream(b):
            assert verbs.current_stream() == b, "with stream(s): s must be current"
            verbs.set_stream(c)
            assert verbs.current_stream() == c, "set_stream inside a block must hold there"
        assert verbs.current_stream() == a, "a block must restore what set_stream set before it"

    def test_a_block_of_none_changes_nothing(self, subject: Subject) -> None:
        """``with stream(None)`` is a block without a stream."""
        side = subject.side_stream()
        with verbs.stream(side), verbs.stream(None):
            assert verbs.current_stream() == side, "stream(None) must change nothing"

    def test_a_new_thread_starts_on_the_default_stream(self, subject: Subject) -> None:
        """What is current in one thread isn't in another."""
        device = subject.device()
        side = subject.side_stream()
        with verbs.stream(side):
            seen = in_new_thread(lambda: verbs.current_stream(device))
            assert seen == verbs.default_stream(device), "a new thread must start on the default stream"
            in_new_thread(lambda: verbs.set_stream(verbs.default_stream(device)))
            assert verbs.current_stream() == side, "set_stream in one thread must not reach another"

    def test_carry_streams_takes_the_current_streams_along(self, subject: Subject) -> None:
        """``carry_streams(f)`` runs *f* under the streams that were current where it was made, and restores."""
        side = subject.side_stream()
        device = subject.device()
        with verbs.stream(side):
            carried = verbs.carry_streams(verbs.current_stream)

        def call() -> tuple[object, object]:
            return carried(device), verbs.current_stream(device)

        inside, after = in_new_thread(call)
        assert inside == side, "carry_streams must carry the current stream into the thread"
        assert after == verbs.default_stream(device), "carry_streams must restore the thread's own stream"
        assert verbs.current_stream(device) != side, "carry_streams must not change the thread that made it"

    def test_torch_sees_the_same_current_stream(self, subject: Subject) -> None:
        """Where the backend's devices are torch's accelerator, either side sees what the other made current."""
        if _compat.default_accelerator_type() != subject.backend.device_type:
            pytest.skip(f"{subject.backend.device_type!r} isn't torch's accelerator here")
        a = subject.side_stream()
        b = subject.side_stream(beside=(a,))
        with verbs.stream(a):
            seen = verbs.wrap(torch.accelerator.current_stream())
            assert subject.key(seen) == subject.key(a), "torch.accelerator.current_stream must be devstream's"
        verbs.set_stream(a)
        seen = verbs.wrap(torch.accelerator.current_stream())
        assert subject.key(seen) == subject.key(a), "torch.accelerator must see devstream.set_stream"
        torch.accelerator.set_stream(b)
        assert subject.key(verbs.current_stream()) == subject.key(b), (
            "devstream must see torch.accelerator.set_stream"
        )
        with b:
            assert subject.key(verbs.current_stream()) == subject.key(b), "devstream must see `with native_stream`"

    def test_every_verb_reports_to_the_seam_once(self, subject: Subject) -> None:
        """Record, wait, switch and synchronize each give one notice, a block one switch in and one out."""
        base = verbs.current_stream()
        stream = subject.side_stream()
        event = verbs.Event()
        with Recorder() as recorder:
            event.record(stream)
            event.wait(base)
            event.synchronize()
            with verbs.stream(stream):
                pass
            verbs.synchronize(subject.device())
        kinds = [type(notice) for notice in recorder.log]
        assert kinds == [
            _observe.Record,
            _observe.Wait,
            _observe.Synchronize,
            _observe.Switch,
            _observe.Switch,
            _observe.Synchronize,
        ], f"each verb must report once, but the log is {recorder.log}"
        way_in, way_out = recorder.of(_observe.Switch)
        assert (way_in.stream, way_in.previous) == (stream, base), (
            "a block must report what it switched to, and from"
        )
        assert (way_out.stream, way_out.previous) == (base, stream), "leaving a block must report the way back"


class CurrentDeviceLaws:
    """A stream brings its device along, and takes it away again."""

    def test_a_block_restores_the_device_and_the_streams_of_both(self, subject: Subject) -> None:
        """A block of another device's stream changes the current device, and restores it and both streams."""
        subject.needs_devices(2)
        zero, one = subject.side_stream(0), subject.side_stream(1)
        other = subject.side_stream(1, beside=(one,))
        verbs.set_stream(other)
        verbs.set_stream(zero)
        backend = subject.backend
        for order in ((one,), (one, zero, one), (one, one), (zero, one, zero)):
            with ExitStack() as blocks:
                for stream in order:
                    blocks.enter_context(verbs.stream(stream))
                    index = backend.stream_index(stream)
                    assert backend.current_index() == index, "with stream(s): its device must be current"
                    assert verbs.current_stream() == stream, "with stream(s): s must be current"
            assert backend.current_index() == 0, "a block must restore the current device"
            assert verbs.current_stream(subject.device(0)) == zero, "a block must restore its device's stream"
            assert verbs.current_stream(subject.device(1)) == other, (
                "a block must restore the other device's stream"
            )

    def test_set_stream_changes_the_device(self, subject: Subject) -> None:
        """After ``set_stream`` the stream's device is current, and a device-less verb means it."""
        subject.needs_devices(2)
        one = subject.side_stream(1)
        verbs.set_stream(one)
        assert subject.backend.current_index() == 1, "set_stream must make the stream's device current"
        assert verbs.current_stream() == one, "current_stream() must be that of the current device"
        made: Any = verbs.create_stream(None, 0)  # Any: the backend's class
        assert subject.backend.stream_index(made) == 1, "Stream() must be made on the current device"

    def test_carry_streams_takes_every_device_along(self, subject: Subject) -> None:
        """``carry_streams`` carries the current stream of each device, and which device is current."""
        subject.needs_devices(2)
        zero, one = subject.side_stream(0), subject.side_stream(1)
        verbs.set_stream(zero)
        verbs.set_stream(one)
        carried = verbs.carry_streams(
            lambda: (
                verbs.current_stream(),
                verbs.current_stream(subject.device(0)),
                subject.backend.current_index(),
            )
        )
        assert in_new_thread(carried) == (one, zero, 1), "carry_streams must carry every device's stream"


__all__ = ["CurrentDeviceLaws", "CurrentStreamLaws", "in_new_thread"]
