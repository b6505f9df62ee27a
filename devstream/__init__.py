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
    from devstream.compiler._check import check
    from devstream.compiler._explain import explain
    from devstream.races import racecheck

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
    "check",
    "current_stream",
    "default_stream",
    "devices",
    "explain",
    "named_stream",
    "racecheck",
    "record_stream",
    "recorded",
    "set_stream",
    "stream",
    "synchronize",
    "wrap",
]

#: Public names of features, by module: imported when somebody asks for them, so that the import stays cheap.
_LATER = {
    "check": "devstream.compiler._check",
    "explain": "devstream.compiler._explain",
    "racecheck": "devstream.races",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - see above

    globals()[name] = found = getattr(import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
