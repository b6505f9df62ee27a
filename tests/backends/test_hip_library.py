"""HIP's own runtime library, through AMD's Python binding, on a machine without an AMD device.

Which calls and errors the ROCm backend would meet. Runs where ``hip-python`` and ``libamdhip64`` are installed
(``--require hip_library`` makes their absence an error); ci/README.md has the two lines that install them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from devstream.backends import rocm
from devstream.exceptions import UnsupportedError

pytestmark = pytest.mark.hip_library

#: hipErrorNoDevice and hipErrorInvalidDevice: which of them comes depends on the version and on the call.
NO_DEVICE = {100, 101}


@pytest.fixture(scope="module")
def hip() -> Any:  # Any: AMD's binding has no types
    binding = importlib.import_module("hip.hip")
    code, count = binding.hipGetDeviceCount()
    if int(code) == 0 and count:
        pytest.fail("an AMD device is here: these are the laws of a machine without one; run `tox -e gpu-rocm`")
    return binding


CALLS: dict[str, tuple[object, ...]] = {
    "hipGetDeviceCount": (),
    "hipDeviceGetStreamPriorityRange": (),
    "hipStreamCreateWithPriority": (1, -1),
    "hipStreamCreateWithFlags": (1,),
    "hipEventCreateWithFlags": (2,),
    "hipEventRecord": (None, None),
    "hipStreamWaitEvent": (None, None, 0),
    "hipEventQuery": (None,),
    "hipStreamQuery": (None,),
    "hipStreamSynchronize": (None,),
    "hipDeviceSynchronize": (),
    "hipEventElapsedTime": (None, None),
    "hipDeviceCanAccessPeer": (0, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_a_device_returns_an_error_and_does_not_crash(hip: Any, name: str) -> None:
    code, *_ = getattr(hip, name)(*CALLS[name])
    assert int(code) in NO_DEVICE
    hip.hipGetLastError()


def test_an_error_of_a_raw_call_sticks_until_it_is_taken(hip: Any) -> None:
    hip.hipDeviceSynchronize()
    assert int(hip.hipGetLastError()[0]) in NO_DEVICE


def test_the_library_tells_its_version_without_a_device(hip: Any) -> None:
    code, version = hip.hipRuntimeGetVersion()
    assert int(code) == 0
    assert version >= 50_200_000  # 5.2, the oldest that any of these was run with


def test_the_backend_finds_the_same_library(hip: Any) -> None:
    library = rocm._hip_library()
    assert library.hipGetDeviceCount is not None


def test_holding_a_stream_without_a_device_is_a_clear_error(hip: Any) -> None:
    with pytest.raises(UnsupportedError, match="hipLaunchHostFunc"):
        rocm.HostFunctionLatch(0)
