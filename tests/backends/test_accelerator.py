"""A device that exists in torch's registry only, made from Python: what the generic backend says of it."""

from __future__ import annotations

import os
import subprocess
import sys

SIMDEV = """
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup
setup("simdev")
import torch, devstream
from devstream import _registry
from devstream.exceptions import BackendUnavailableError, DeviceMismatchError, UnsupportedError
"""


def run(program: str) -> str:
    # In a process of its own: there can be only one PrivateUse1 device, and it stays.
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SIMDEV + program],
        env={name: value for name, value in os.environ.items() if name != "DEVSTREAM_BACKEND"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_device_whose_events_record_nothing_is_refused_with_that_reason() -> None:
    out = run(
        """
for ask in (lambda: devstream.backend("simdev"), devstream.Stream, devstream.current_stream):
    try:
        ask()
    except BackendUnavailableError as error:
        print(error.name, "|", error.reason)
"""
    )
    lines = out.splitlines()
    assert len(lines) == 3
    for line in lines:
        name, reason = line.split(" | ")
        assert name == "accelerator"
        assert "'simdev'" in reason
        assert "events" in reason


def test_the_cpu_works_beside_a_device_that_does_not() -> None:
    out = run(
        """
stream, event = devstream.Stream("cpu"), devstream.Event("cpu")
with devstream.stream(stream):
    value = torch.ones(2).sum()
    event.record()
event.synchronize()
print(value.item(), event.query(), devstream.recorded(event))
"""
    )
    assert out == "2.0 True True"


def test_capabilities_of_an_unknown_device_are_what_trying_shows() -> None:
    out = run(
        """
backend = _registry.load("accelerator")
print(backend.device_type, backend.device_count(), backend.capabilities(0))
stream = backend.create_stream(0)
with stream:
    print(backend.current_stream() == stream, backend.stream_index(stream))
print(backend.default_stream(0) == backend.adopt_stream(torch.Stream("simdev")))
for what in (lambda: backend.native_handle(stream), lambda: backend.record_stream(torch.ones(1), stream)):
    try:
        what()
    except UnsupportedError as error:
        print(error.capability)
"""
    )
    assert out.splitlines() == [
        "simdev 1 Capability(0)",
        "True 0",
        "True",
        "Capability.NATIVE_HANDLE",
        "Capability.RECORD_STREAM",
    ]


def test_a_device_is_tried_once_and_not_at_every_question() -> None:
    """Trying waits for a stream; a later question may come from someone who holds that stream."""
    out = run(
        """
from devstream.backends.accelerator import AcceleratorBackend
tried = []
class Counting(AcceleratorBackend):
    def _stand_in_reason(self):
        tried.append(1)
        return super()._stand_in_reason()
backend = Counting()
print(backend.unavailable_reason() == backend.unavailable_reason(), len(tried))
"""
    )
    assert out == "True 1"
