"""What users get wrong: each is a clear error, and nothing stays changed behind it."""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream import _observe, _registry
from devstream.backends.cpu import CpuBackend
from devstream.exceptions import BackendError, DeviceMismatchError, DevstreamError, StreamTypeError


class Other(CpuBackend):
    name = "other"
    device_type = "meta"  # some type of torch's that nobody else serves


@pytest.fixture
def other():
    _registry.register("meta", Other)
    try:
        yield devstream.Stream("meta"), devstream.Event("meta")
    finally:
        _registry.unregister("meta")


@pytest.fixture(autouse=True)
def nothing_changed():
    """See that the current streams, the observers and the registry are as before."""
    before = [devstream.current_stream("cpu:0"), devstream.current_stream("cpu:1"), devstream.current_stream()]
    names, notices = _registry.names(), []
    with _observe.subscribe(notices.append):
        yield
    assert [
        devstream.current_stream("cpu:0"),
        devstream.current_stream("cpu:1"),
        devstream.current_stream(),
    ] == before
    assert _registry.names() == names
    assert [n for n in notices if isinstance(n, _observe.Switch) and n.stream is not before[0]] == []


S, E = devstream.Stream, devstream.Event

NO_STREAM = {
    "text": lambda: "cpu",
    "number": lambda: 3.5,
    "true": lambda: True,
    "tensor": lambda: torch.ones(1),
    "device": lambda: torch.device("cpu"),
    "class": lambda: devstream.Stream,
    "event": lambda: devstream.Event("cpu"),
    "native event": lambda: torch.Event("cpu"),
    "list": lambda: [devstream.Stream("cpu")],
}
TAKES_A_STREAM = {
    "stream": devstream.stream,
    "set_stream": devstream.set_stream,
    "record_stream": lambda x: devstream.record_stream(torch.ones(1), x),
    "wrap": devstream.wrap,
    "Stream.wait_stream": lambda x: S("cpu").wait_stream(x),
    "Event.record": lambda x: E("cpu").record(x),
    "Event.wait": lambda x: E("cpu").wait(x),
}


@pytest.mark.parametrize("verb", TAKES_A_STREAM)
@pytest.mark.parametrize("thing", NO_STREAM)
def test_what_is_no_stream_is_a_type_error(verb, thing):
    with pytest.raises(TypeError) as caught:
        TAKES_A_STREAM[verb](NO_STREAM[thing]())
    assert isinstance(caught.value, DevstreamError)
    assert " takes " in str(caught.value)


@pytest.mark.parametrize("verb", ["set_stream", "record_stream", "wrap", "Stream.wait_stream"])
def test_no_stream_at_all_is_a_type_error(verb):
    with pytest.raises(StreamTypeError):
        TAKES_A_STREAM[verb](None)


NO_EVENT = {
    "text": lambda: "done",
    "number": lambda: 3,
    "none": lambda: None,
    "stream": lambda: devstream.Stream("cpu"),
    "native stream": lambda: torch.Stream("cpu"),
    "tensor": lambda: torch.ones(1),
}
TAKES_AN_EVENT = {
    "wait_event": lambda x: S("cpu").wait_event(x),
    "record_event": lambda x: S("cpu").record_event(x),
    "recorded": devstream.recorded,
    "elapsed_time": lambda x: E("cpu", enable_timing=True).elapsed_time(x),
}


@pytest.mark.parametrize(
    ("verb", "thing"),
    [(v, t) for v in TAKES_AN_EVENT for t in NO_EVENT if (v, t) != ("record_event", "none")],
)
def test_what_is_no_event_is_a_type_error(verb, thing):
    with pytest.raises(TypeError) as caught:
        TAKES_AN_EVENT[verb](NO_EVENT[thing]())
    assert isinstance(caught.value, DevstreamError)


TAKES_A_DEVICE = {
    "Stream": devstream.Stream,
    "Event": devstream.Event,
    "current_stream": devstream.current_stream,
    "default_stream": devstream.default_stream,
    "synchronize": devstream.synchronize,
    "named_stream": lambda d: devstream.named_stream("bad input", d),
    "wrap": lambda d: devstream.wrap(0, d),
    "backend": devstream.backend,
    "from_ipc_handle": lambda d: devstream.Event.from_ipc_handle(d, b""),
}


@pytest.mark.parametrize("verb", TAKES_A_DEVICE)
@pytest.mark.parametrize("device", [True, 1.0, b"cpu", ["cpu"], torch.float32])
def test_what_is_no_device_is_a_type_error(verb, device):
    with pytest.raises(StreamTypeError, match=r"takes a torch\.device, a str or an int"):
        TAKES_A_DEVICE[verb](device)


@pytest.mark.parametrize("verb", ["Stream", "Event", "current_stream", "backend"])
def test_a_stream_or_an_event_for_a_device_is_a_type_error(verb):
    for item in (devstream.Stream("cpu"), torch.Stream("cpu"), devstream.Event("cpu"), torch.Event("cpu")):
        with pytest.raises(StreamTypeError):
            TAKES_A_DEVICE[verb](item)


@pytest.mark.parametrize("verb", TAKES_A_DEVICE)
@pytest.mark.parametrize("device", ["cpu:2", "cpu:99", torch.device("cpu", 7)])
def test_a_device_that_does_not_exist_is_told_with_the_number_of_devices(verb, device):
    with pytest.raises(DeviceMismatchError, match=r"backend 'cpu' has 2 device\(s\); use an index from 0 to 1"):
        TAKES_A_DEVICE[verb](device)


@pytest.mark.parametrize("verb", TAKES_A_DEVICE)
@pytest.mark.parametrize("device", ["gpu", "cpu:one", "", "cpu:-1", "npu"])
def test_a_device_string_that_names_no_device_is_a_backend_error(verb, device):
    with pytest.raises(BackendError, match="known backends: cpu, cuda"):
        TAKES_A_DEVICE[verb](device)


@pytest.mark.parametrize("index", [-1, 99])
def test_an_index_that_does_not_exist_is_told(index):
    with pytest.raises(DeviceMismatchError, match=f"index {index} was asked for"):
        devstream.Stream(index)


@pytest.mark.parametrize("priority", [True, None, 1.0, [0], torch.tensor(0)])
def test_a_priority_that_is_no_number_and_no_name_is_a_type_error(priority):
    with pytest.raises(StreamTypeError, match="an int or a name"):
        devstream.Stream("cpu", priority=priority)


def test_an_unknown_name_of_a_priority_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'urgent' is neither a number nor one of \['high', 'low', 'normal'\]"):
        devstream.Stream("cpu", priority="urgent")


def test_a_positional_priority_is_refused():
    with pytest.raises(TypeError):
        devstream.Stream("cpu", 0)


def test_streams_and_events_of_two_backends_do_not_mix(other):
    stream, event = other
    mine, recorded = devstream.Stream("cpu"), devstream.Event("cpu")
    recorded.record(mine)
    for call in (
        lambda: mine.wait_event(event),
        lambda: mine.record_event(event),
        lambda: event.record(mine),
        lambda: event.wait(mine),
        lambda: stream.wait_event(recorded),
        lambda: recorded.record(stream),
        lambda: stream.wait_stream(mine),
    ):
        with pytest.raises(DeviceMismatchError) as caught:
            call()
        assert "cpu" in str(caught.value)
        assert "meta" in str(caught.value)
    assert mine.query()
    assert not event.recorded


def test_no_tensor_for_record_stream_is_a_type_error():
    for thing in (None, 3, [torch.ones(1)], devstream.Stream("cpu")):
        with pytest.raises(StreamTypeError, match="record_stream takes a tensor"):
            devstream.record_stream(thing, devstream.Stream("cpu"))


def test_an_argument_that_does_not_exist_is_a_type_error():
    with pytest.raises(TypeError):
        devstream.Event("cpu", timing=True)
    with pytest.raises(TypeError):
        devstream.Stream("cpu", stream_id=3)
