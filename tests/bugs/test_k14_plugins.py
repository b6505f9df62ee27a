"""Backend gaps and silent stand-ins, as people met them in plug-ins."""

from __future__ import annotations

import threading

import pytest
import torch

import devstream
from devstream import _registry
from devstream.backends.cpu import CpuBackend
from devstream.testing import latch
from devstream.testing.conformance import BackendConformance, trial


def test_setting_the_stream_through_torch_or_through_devstream_is_seen_by_both():
    """pytorch/pytorch#196302: torch.accelerator and a plug-in's own module had two current streams."""
    backend = _registry.load("cpu")
    with trial(backend):
        native = torch.Stream(stream_id=7, device_index=-1, device_type=backend.torch_type)
        devstream.set_stream(native)
        assert devstream.current_stream() == native
        assert backend.current_stream().stream_id == 7
        other = devstream.Stream()
        backend.set_stream(other)
        assert devstream.current_stream() == other
        with other:
            assert devstream.current_stream() == other


@pytest.mark.accelerator
def test_torch_accelerator_and_devstream_have_one_current_stream():
    """The same, where torch has an accelerator."""
    device = torch.accelerator.current_accelerator()
    first, second = devstream.Stream(device), devstream.Stream(device)
    before = devstream.current_stream(device)
    try:
        torch.accelerator.set_stream(first)
        assert devstream.current_stream(device) == first
        devstream.set_stream(second)
        assert torch.accelerator.current_stream().stream_id == second.stream_id
    finally:
        devstream.set_stream(before)


class EmptyEvents(CpuBackend):
    def record_event(self, event, stream):
        event.index = self.stream_index(stream)

    def query_event(self, event):
        return True

    def synchronize_event(self, event):
        pass


class EarlyCopies(CpuBackend):
    """A copy into pageable memory goes on after the stream says that it is done."""

    def copy(self, destination, source, stream):
        go = threading.Event()
        threading.Thread(target=lambda: go.wait(5) and destination.copy_(source), daemon=True).start()


def test_a_plugin_whose_events_do_nothing_fails_and_is_told_which_call():
    """alibaba/rtp-llm#1349: the shims of CUDA's events were empty on another chip."""
    kit = BackendConformance()
    with trial(EmptyEvents(), patience_s=1) as subject, pytest.raises(AssertionError, match=r"Event\.synchronize"):
        kit.test_event_synchronize_blocks_until_the_record_has_happened(subject)


def test_a_plugin_whose_copies_return_early_fails():
    """RBLN-SW/torch-rbln#13: copies were asynchronous even into pageable memory."""
    kit = BackendConformance()
    with trial(EarlyCopies(), patience_s=1) as subject, pytest.raises(AssertionError, match=r"Backend\.copy"):
        kit.test_a_copy_is_done_when_an_event_after_it_has_happened(subject)


def test_a_plugin_beside_the_cpu_does_not_disturb_it():
    """pytorch/pytorch#116957, #161130: registering a plug-in broke the built-in's joins in backward."""
    _registry.register("bystander", CpuBackend)
    try:
        _registry.load("bystander")
        with trial("cpu") as subject:
            BackendConformance().test_a_backward_through_a_side_stream_joins_the_leaf(subject)
        assert devstream.backend("cpu") is _registry.load("cpu")
    finally:
        _registry.unregister("bystander")


def test_one_program_runs_the_same_on_every_backend(backend, device):
    """pytorch/pytorch#145935: code that names no device could not run on the CPU."""
    side, done = devstream.Stream(device), devstream.Event(device)
    x = torch.arange(4.0, device=device, requires_grad=True)
    side.wait_stream(devstream.current_stream())
    with devstream.stream(side):
        y = x * 2
        done.record()
    assert devstream.recorded(done)
    devstream.current_stream().wait_event(done)
    (y * 3).sum().backward()
    devstream.synchronize(device)
    assert x.grad.cpu().tolist() == [6.0] * 4
    with latch(side):
        assert not side.record_event().query()
    side.synchronize()
    assert side.query()


class NoTiming(CpuBackend):
    def capabilities(self, index):
        return super().capabilities(index) & ~devstream.Capability.TIMING


def test_without_timing_the_error_names_elapsed_time_and_the_backend():
    """pytorch/pytorch#131840: times were not implemented, and the error didn't say where."""
    with trial(NoTiming()), pytest.raises(NotImplementedError, match=r"elapsed_time.*'cpu'"):
        devstream.Event(enable_timing=True)
