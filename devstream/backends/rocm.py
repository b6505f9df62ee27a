"""AMD. torch's HIP build *is* the ``torch.cuda`` module, so this is CUDA's backend with HIP's facts.

Each method says in a sentence why it differs. Written from AMD's documentation and headers and public issue
threads; none of it has run on AMD hardware here.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from devstream.abc import Capability, Latch
from devstream.backends._native_graph import AcceleratorGraph
from devstream.backends.accelerator import AcceleratorStream
from devstream.backends.cuda import CudaBackend
from devstream.exceptions import BackendWarning, CaptureError, UnsupportedError, warning

#: HIP streams share this many hardware queues a priority. Source: HIP environment variables, GPU_MAX_HW_QUEUES.
DEFAULT_HARDWARE_QUEUES = 4

#: Two times closer than this may come back reversed: HIP's clock has about 1 µs and small negative differences
#: are reported (rocm-systems pull request 9375 clamps them too). Milliseconds.
CLOCK_NOISE_MS = 0.01


class RocmBackend(CudaBackend):
    """Streams and events of AMD devices."""

    name: ClassVar[str] = "rocm"
    vendor: ClassVar[str] = "amd"

    #: HIP leaves the order undefined where a pending event is recorded again; CUDA overwrites.
    rerecord_overwrites: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, int] = {}
        self._warned: set[int] = set()

    def unavailable_reason(self) -> str | None:
        """Say why: no device. A CUDA build will do where this backend is named, which is how it is tested."""
        if torch.version.hip is None and torch.version.cuda is None:
            return f"torch {torch.__version__} is built without ROCm; install a ROCm build of torch"
        return self._device_reason("AMD", "rocm-smi")

    def not_automatic_reason(self) -> str | None:
        """Pass a CUDA build over: there this backend runs only by name."""
        if torch.version.hip is None:
            return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, not for ROCm"
        return None

    def rocm_version(self) -> tuple[int, int]:
        """Return ROCm's version, which since 7.14 isn't HIP's; (0, 0) over a CUDA build."""
        text = getattr(torch.version, "rocm", None) or torch.version.hip or "0.0"
        major, minor = [*text.split("."), "0"][:2]
        return int(major), int(minor)

    def capabilities(self, index: int) -> Capability:
        """Take graph timing away before ROCm 7.0, which lacks events with the external flag."""
        found = super().capabilities(index)
        return found & ~Capability.GRAPH_TIMING if self.rocm_version() < (7, 0) else found

    def capture_reports_errors(self) -> bool:
        """Say whether a refused call really fails during capture: before ROCm 7.14 many pass in silence."""
        return self.rocm_version() >= (7, 14)

    def before_capture(self, streams: Sequence[AcceleratorStream]) -> None:
        """Make hipBLASLt's handles, one for each thread and stream, since it can't make one in a capture."""
        for stream in streams:

            def multiply(index: int = stream.device_index) -> None:
                one = torch.ones(16, 16, device=torch.device("cuda", index))
                torch.mm(one, one)

            self._run(multiply, stream)
            self.synchronize_stream(stream)

    def capture(
        self, issue: Callable[[], object], stream: AcceleratorStream, *, pool: object = None
    ) -> AcceleratorGraph:
        """Look whether the capture is still on at its end: HIP before ROCm 7.14 may end one in silence."""

        def checked() -> None:
            issue()
            if not self.is_capturing():
                raise CaptureError(operation="what was issued", stream=stream)

        return super().capture(checked, stream, pool=pool)

    def priority_range(self, index: int) -> tuple[int, int]:
        """Return (0, -1): HIP has low, normal and high, of which torch exposes the last two."""
        return (0, -1)

    def hardware_queues(self) -> int:
        """Return HIP's limit: more streams than this share queues and run one after another."""
        text = os.environ.get("GPU_MAX_HW_QUEUES", "")
        return int(text) if text.isdigit() else DEFAULT_HARDWARE_QUEUES

    def create_stream(self, index: int, *, priority: int = 0) -> AcceleratorStream:
        """Warn once past the queues: the default stream holds one, the others are shared after that."""
        count = self._made[index] = self._made.get(index, 0) + 1
        if count == self.hardware_queues() and index not in self._warned:
            self._warned.add(index)
            reason = (
                f"stream {count} of cuda:{index}: HIP runs {self.hardware_queues()} queues at once, the default "
                "stream's included, and streams that share one don't overlap. Use devstream.named_stream, or set "
                "GPU_MAX_HW_QUEUES before the process starts"
            )
            warnings.warn(warning(BackendWarning, name=self.name, reason=reason), stacklevel=3)
        return super().create_stream(index, priority=priority)

    def elapsed_ms(self, start: torch.Event, end: torch.Event) -> float:
        """Return 0 for the small negative times that HIP's clocks give."""
        elapsed = super().elapsed_ms(start, end)
        return 0.0 if -CLOCK_NOISE_MS < elapsed < 0 else elapsed

    def dlpack_stream(self, stream: AcceleratorStream) -> int:
        """Return the number for ``tensor.__dlpack__(stream=...)``: ROCm's default stream is 0 there."""
        return self.native_handle(stream)

    def hold(self, stream: AcceleratorStream) -> Latch:
        """Hold by a host function: HIP waits for values only in its own signal memory, and only in beta."""
        if torch.version.cuda is not None:  # the runtime underneath is NVIDIA's; see unavailable_reason
            return super().hold(stream)
        return HostFunctionLatch(self.native_handle(stream))

    def _arch(self, index: int) -> str:
        """Return the gfx name, which torch gives only on HIP builds."""
        facts = torch.cuda.get_device_properties(index)
        return str(getattr(facts, "gcnArchName", "")).split(":")[0] or super()._arch(index)

    def _runtime(self) -> str:
        if torch.version.hip is None:
            return f"CUDA {torch.version.cuda} under the ROCm backend"
        return f"ROCm {getattr(torch.version, 'rocm', None) or torch.version.hip}"


class HostFunctionLatch:
    """Holds one HIP stream in a host function. HIP runs these one after another: hold one stream at a time."""

    def __init__(self, handle: int) -> None:
        self._released = threading.Event()
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._function = prototype(lambda _: (self._released.wait(20.0), None)[1])
        library = _hip_library()
        launch = getattr(library, "hipLaunchHostFunc", None)  # absent before ROCm 5.7
        code = -1 if launch is None else launch(ctypes.c_void_p(handle), self._function, None)
        if code != 0:
            library.hipGetLastError()  # a failed raw call sticks: torch's next call would raise it
            raise UnsupportedError(
                operation="holding a stream",
                backend="rocm",
                capability="hipLaunchHostFunc" if launch is None else f"hipLaunchHostFunc (it returned {code})",
                alternative="run this with ROCm 5.7 or later, on an AMD device",
            )
        _functions.append(self._function)

    def release(self) -> None:
        """Let the stream go on."""
        self._released.set()


#: The runtime calls these at any later time, so they are never freed.
_functions: list[Any] = []  # Any: function pointers of ctypes


def _hip_library() -> Any:  # Any: a library of ctypes
    # Already loaded by torch under the name of its major version; the newest is tried first.
    for name in ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise UnsupportedError(
        operation="holding a stream",
        backend="rocm",
        capability="libamdhip64",
        alternative="install ROCm's HIP runtime where the dynamic loader finds it",
    )
