"""What the ROCm backend says differently from CUDA's, checked without a device; and the backend over CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

from devstream.abc import Capability
from devstream.backends.cuda import CudaBackend
from devstream.backends.rocm import CLOCK_NOISE_MS, RocmBackend
from devstream.exceptions import BackendWarning


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> RocmBackend:
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    monkeypatch.setattr(torch.version, "rocm", "7.2.0", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return RocmBackend()


def test_a_rocm_build_is_not_the_cuda_backends(rocm: RocmBackend) -> None:
    reason = CudaBackend().unavailable_reason()
    assert reason is not None
    assert "built for ROCm 7.2" in reason
    assert "'rocm'" in reason


def test_a_cuda_build_is_passed_over_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    reason = RocmBackend().not_automatic_reason()
    assert reason is not None
    assert "built for CUDA 13.0" in reason


def test_priorities_are_normal_and_high(rocm: RocmBackend) -> None:
    assert rocm.priority_range(0) == (0, -1)


@pytest.mark.parametrize(("text", "queues"), [(None, 4), ("8", 8), ("many", 4)])
def test_hardware_queues_follow_hips_variable(
    rocm: RocmBackend, monkeypatch: pytest.MonkeyPatch, text: str | None, queues: int
) -> None:
    monkeypatch.delenv("GPU_MAX_HW_QUEUES", raising=False)
    if text is not None:
        monkeypatch.setenv("GPU_MAX_HW_QUEUES", text)
    assert rocm.hardware_queues() == queues


def test_streams_past_the_hardware_queues_warn_once(rocm: RocmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_MAX_HW_QUEUES", raising=False)
    monkeypatch.setattr(CudaBackend, "create_stream", lambda self, index, *, priority=0: object())
    for _ in range(3):
        rocm.create_stream(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            rocm.create_stream(0)
    assert [warned.category for warned in caught] == [BackendWarning]
    assert "GPU_MAX_HW_QUEUES" in str(caught[0].message)


@pytest.mark.parametrize(
    ("measured", "told"),
    [(-CLOCK_NOISE_MS / 2, 0.0), (-5.0, -5.0), (3.5, 3.5), (0.0, 0.0)],
)
def test_only_the_clocks_noise_is_taken_for_no_time(
    rocm: RocmBackend, monkeypatch: pytest.MonkeyPatch, measured: float, told: float
) -> None:
    monkeypatch.setattr(CudaBackend, "elapsed_ms", lambda self, start, end: measured)
    assert rocm.elapsed_ms(torch.Event(device="cpu"), torch.Event(device="cpu")) == told


@pytest.mark.parametrize(("version", "has"), [("6.4.3", False), ("7.0.0", True), ("7.14.1", True)])
def test_graphs_keep_time_since_rocm_7(
    rocm: RocmBackend, monkeypatch: pytest.MonkeyPatch, version: str, has: bool
) -> None:
    monkeypatch.setattr(torch.version, "rocm", version)
    assert (Capability.GRAPH_TIMING in rocm.capabilities(0)) is has


@pytest.mark.parametrize(("version", "reports"), [("6.4.3", False), ("7.2.0", False), ("7.14.0", True)])
def test_capture_is_trusted_to_report_errors_since_7_14(
    rocm: RocmBackend, monkeypatch: pytest.MonkeyPatch, version: str, reports: bool
) -> None:
    monkeypatch.setattr(torch.version, "rocm", version)
    assert rocm.capture_reports_errors() is reports


def test_the_default_stream_is_0_to_dlpack_and_1_on_cuda(
    rocm: RocmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B37 of the bug log."""
    monkeypatch.setattr(CudaBackend, "native_handle", lambda self, stream: 0)
    stream = object()
    assert rocm.dlpack_stream(stream) == 0  # type: ignore[arg-type]
    assert CudaBackend().dlpack_stream(stream) == 1  # type: ignore[arg-type]


RERECORD = """
import devstream, torch
backend = devstream.backend()
stream = devstream.Stream()
event = devstream.Event()
event.record(stream)
first = event.native
latch = backend.hold(stream)
event.record(stream)
assert event.native is not first, "HIP leaves the order of a second record undefined"
assert not event.query()
latch.release()
event.synchronize()
print(backend.name, devstream.Stream(priority=-9).priority, devstream.devices()[0].vendor)
"""


@pytest.mark.cuda
@pytest.mark.parametrize("hip", [False, True])
def test_the_backend_runs_over_cuda_when_it_is_named(hip: bool) -> None:
    start = "import torch; torch.version.hip = '7.2.0'\n" if hip else ""
    found = subprocess.run(
        [sys.executable, "-c", start + RERECORD],
        env={**os.environ, "DEVSTREAM_BACKEND": "rocm"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["rocm", "-1", "amd"]
