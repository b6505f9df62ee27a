"""Every backend keeps the laws of the kit."""

from __future__ import annotations

import pytest
import torch

from devstream import _registry
from devstream.testing.conformance import BackendConformance
from devstream.testing.recording import RecordingBackend


class TestBuiltIns(BackendConformance):
    """The backend comes from the plugin's fixture: the CPU always, the others where their hardware is."""

    def foreign_streams(self, backend):
        found = dict(super().foreign_streams(backend))
        if backend.device_type == "cuda":
            found["torch.cuda.Stream()"] = lambda: torch.cuda.Stream(device=0)
            found["torch.cuda.ExternalStream()"] = external_stream
        return found

    def foreign_events(self, backend):
        found = dict(super().foreign_events(backend))
        if backend.device_type == "cuda":
            found["torch.cuda.Event()"] = torch.cuda.Event
            found["torch.cuda.Event(enable_timing=True)"] = lambda: torch.cuda.Event(enable_timing=True)
        return found


def external_stream():
    owner = torch.cuda.Stream(device=0)
    return torch.cuda.ExternalStream(owner.cuda_stream, device=0)  # a pool's stream is never freed


class TestRecording(BackendConformance):
    """The fake is a verified one."""

    @pytest.fixture
    def backend(self):
        return RecordingBackend()


class TestToy(BackendConformance):
    """A backend of another package, found by its entry point."""

    @pytest.fixture
    def backend(self):
        if "toy" not in _registry.names():
            pytest.fail("the toy backend isn't installed; run `pip install --no-deps tests/plugin_example`")
        return "toy"
