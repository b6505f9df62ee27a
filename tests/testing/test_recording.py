from __future__ import annotations

import pytest

import devstream
from devstream import _observe
from devstream.exceptions import StreamTypeError
from devstream.testing import Recorder, RecordingBackend
from devstream.testing.conformance import trial
from devstream.testing.recording import Call


def test_a_recorder_keeps_what_the_verbs_report_in_order(backend, stream):
    event = devstream.Event()
    with Recorder() as recorder:
        event.record(stream)
        event.wait(stream)
    event.synchronize()
    assert recorder.log == [_observe.Record(event, stream), _observe.Wait(stream, event, True)]
    assert recorder.of(_observe.Wait) == [_observe.Wait(stream, event, True)]


def test_a_recorder_can_be_entered_again_but_not_twice(backend, stream):
    recorder = Recorder()
    for _ in range(2):
        with recorder:
            stream.record_event()
    with recorder, pytest.raises(RuntimeError, match="entered already"):
        recorder.__enter__()
    assert len(recorder.log) == 2
    assert not _observe.subscribers


def test_the_fake_keeps_its_calls():
    fake = RecordingBackend()
    with trial(fake):
        side, event = devstream.Stream(), devstream.Event()
        fake.log.clear()
        event.record(side)
        devstream.current_stream().wait_event(event)
        with devstream.stream(side):
            pass
    default = fake.default_stream(0).stream_id
    number = event.native.number
    assert fake.log[:5] == [
        Call("record_event", side.stream_id, number),
        Call("wait_event", default, number),
        Call("set_stream", side.stream_id),
        Call("set_stream", default),
        Call("set_stream", default),
    ]


def test_the_fake_is_used_only_by_name():
    assert "by name" in RecordingBackend().not_automatic_reason()


def test_what_is_no_class_of_notices_is_refused():
    with pytest.raises(StreamTypeError, match="a class of notices"):
        Recorder().of("Record")
