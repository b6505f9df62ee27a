"""Write streams once; they run on CUDA, ROCm, any ``torch.accelerator`` device and the CPU.

import devstream

side, done = devstream.Stream(), devstream.Event()
with devstream.stream(side):
    y = branch_a(x)
    done.record()
z = branch_b(x)
devstream.current_stream().wait_event(done)
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from devstream._streams import (
    Event,
    Stream,
    backend,
    capabilities,
    carry_streams,
    current_stream,
    default_stream,
    devices,
    named_stream,
    record_stream,
    recorded,
    set_stream,
    stream,
    synchronize,
    wrap,
)
from devstream.abc import Capability, DeviceSpec
from devstream.exceptions import DevstreamError, DevstreamWarning, UnsupportedError

if _TYPE_CHECKING:
    from devstream.races import racecheck as racecheck

__version__ = _version("devstream")

__all__ = [
    "Capability",
    "DeviceSpec",
    "DevstreamError",
    "DevstreamWarning",
    "Event",
    "Stream",
    "UnsupportedError",
    "__version__",
    "backend",
    "capabilities",
    "carry_streams",
    "current_stream",
    "default_stream",
    "devices",
    "named_stream",
    "racecheck",
    "record_stream",
    "recorded",
    "set_stream",
    "stream",
    "synchronize",
    "wrap",
]


def __getattr__(name: str) -> _Any:  # Any: whatever has the name
    # A feature is imported when somebody asks for it: importing devstream stays cheap.
    if name == "racecheck":
        from devstream.races import racecheck  # noqa: PLC0415

        globals()[name] = racecheck
        return racecheck
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
