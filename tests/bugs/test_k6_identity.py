"""K6: which stream it is. Each test's first line names the row of the bug log and where it was reported."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch

import devstream


class Module(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.stream = devstream.Stream(device)
        self.done = devstream.Event(device)
        self.layer = torch.nn.Linear(2, 2)


def test_handle_zero_is_the_default_stream():
    """B33, pytorch/pytorch#182960."""
    wrapped = devstream.wrap(0, "cpu")
    assert wrapped.native_handle == 0
    assert wrapped == devstream.default_stream("cpu")


def test_a_side_stream_has_a_handle_of_its_own_that_wraps_back():
    """B34, pytorch/pytorch#127531."""
    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    assert len({0, one.native_handle, two.native_handle}) == 3
    assert devstream.wrap(one.native_handle, "cpu") == one
    assert devstream.default_stream("cpu").native_handle == 0


@pytest.mark.parametrize("priority", ["low", "normal", "high", 10, 0, -100])
def test_every_priority_works_and_the_cpus_range_is_zero_to_zero(priority, caplog):
    """B35, Comfy-Org/ComfyUI#7823."""
    with caplog.at_level(logging.INFO, "devstream"):
        assert devstream.Stream("cpu", priority=priority).priority == 0
    assert devstream.backend("cpu").priority_range(0) == (0, 0)
    assert [priority for _ in caplog.messages] == ([priority] if priority in (10, -100) else [])
    assert all(f"priority {priority} clamped to 0" in line for line in caplog.messages)


def test_an_event_of_another_device_is_a_value_error_that_names_both():
    """B36, pytorch/pytorch#173792."""
    with pytest.raises(ValueError, match=r"event is on cpu:1, but stream \d+ on cpu:0"):
        devstream.Event("cpu:1").record(devstream.Stream("cpu:0"))


def test_native_and_own_streams_and_events_mix_freely():
    """B36, pytorch/pytorch#173792."""
    own = devstream.Stream("cpu")
    theirs = torch.Stream(stream_id=own.stream_id, device_index=-1, device_type=own.device_type)
    for stream in (own, theirs):
        for event in (devstream.Event("cpu"), torch.Event("cpu")):
            own.record_event(event)
            devstream.wrap(stream).wait_event(event)
            assert devstream.recorded(event)
    event = devstream.Event("cpu")
    event.record(theirs)
    event.wait(theirs)
    own.wait_stream(theirs)


def test_the_cpu_has_no_number_for_dlpack():
    """B37, pytorch/pytorch#150217: DLPack defines none for it."""
    with pytest.raises(NotImplementedError, match="dlpack_stream"):
        devstream.backend("cpu").dlpack_stream(devstream.default_stream("cpu"))


def test_a_copied_module_goes_on_using_the_same_stream():
    """B38, deepspeedai/DeepSpeedExamples#903."""
    module = Module("cpu")
    again = copy.deepcopy(module)
    assert again.stream == module.stream
    assert again.stream is module.stream
    assert again.done is module.done
    assert again.layer is not module.layer
    assert copy.copy(module.stream) is module.stream


@pytest.mark.parametrize("what", ["stream", "done"])
def test_pickling_is_a_type_error_that_says_what_to_keep_instead(what):
    """B38, deepspeedai/DeepSpeedExamples#903."""
    advice = {"stream": r"devstream\.named_stream\(purpose, device\)", "done": r"Event\.ipc_handle\(\)"}[what]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=advice):
            pickle.dumps(getattr(Module("cpu"), what), protocol)


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_handle_zero_is_the_default_stream_of_a_gpu():
    """B33."""
    assert devstream.wrap(0, "cuda").native_handle == 0
    assert devstream.wrap(0, "cuda") == devstream.default_stream("cuda")


@pytest.mark.cuda
def test_the_handle_on_a_gpu_is_the_vendors():
    """B34."""
    theirs = torch.cuda.Stream()
    assert devstream.wrap(theirs).native_handle == theirs.cuda_stream != 0
    assert devstream.default_stream("cuda").native_handle == 0


@pytest.mark.cuda
@pytest.mark.parametrize(("priority", "granted"), [(10, 0), (-100, -3), ("low", 0), ("normal", 0), ("high", -3)])
def test_a_priority_on_a_gpu_is_clamped(priority, granted):
    """B35."""
    assert devstream.backend("cuda").priority_range(0) == (0, -3)
    assert devstream.Stream("cuda", priority=priority).priority == granted


@pytest.mark.cuda
def test_a_cpu_event_on_a_gpu_stream_is_a_value_error_that_names_both():
    """B36."""
    with pytest.raises(ValueError, match=r"cpu.*cuda:0"):
        devstream.Event("cpu").record(devstream.Stream("cuda:0"))
    with pytest.raises(ValueError, match=r"cuda.*cpu:0"):
        devstream.Event("cuda").record(devstream.Stream("cpu"))


@pytest.mark.cuda
def test_generic_and_vendor_types_mix_freely_on_a_gpu():
    """B36: each pair orders, seen through a stream that is held."""
    backend = devstream.backend("cuda")
    for make_stream in (devstream.Stream, torch.Stream, torch.cuda.Stream):
        for make_event in (devstream.Event, torch.Event, torch.cuda.Event):
            source, waiter = make_stream(device="cuda"), devstream.Stream("cuda")
            event = make_event("cuda") if make_event is not torch.cuda.Event else torch.cuda.Event()
            latch = backend.hold(devstream.wrap(source))
            devstream.wrap(source).record_event(event)
            waiter.wait_event(event)
            held = waiter.query()
            latch.release()
            waiter.synchronize()
            assert held is False, (make_stream, make_event)


@pytest.mark.cuda
def test_the_number_for_dlpack_is_one_for_the_default_stream_and_the_handle_for_others():
    """B37."""
    backend, side = devstream.backend("cuda"), devstream.Stream("cuda")
    assert backend.dlpack_stream(devstream.default_stream("cuda")) == 1
    assert backend.dlpack_stream(side) == side.native_handle


@pytest.mark.cuda
def test_a_copied_module_goes_on_using_the_same_stream_of_a_gpu():
    """B38."""
    module = Module("cuda")
    assert copy.deepcopy(module).stream == module.stream
