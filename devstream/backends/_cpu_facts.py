"""What the CPU says of itself, under the profile of the vendor whose limits apply."""

from __future__ import annotations

import os
import platform

import torch

from devstream.abc import Backend, Capability, DeviceSpec, EventT, StreamT
from devstream.backends._cpu_options import PROFILES, CpuOptions, Profile


class CpuFacts(Backend[StreamT, EventT]):
    """The half of the CPU's backend that answers questions."""

    options: CpuOptions

    @property
    def profile(self) -> Profile:
        """Whose limits apply."""
        return PROFILES[self.options.profile]

    def capabilities(self, index: int) -> Capability:
        """Return what the CPU can do: no IPC, no pinned memory, one priority; less under a profile."""
        return self.profile.capabilities

    def stream_capabilities(self, stream: StreamT) -> Capability:
        """Return the same for all streams but another library's."""
        return Capability(0) if getattr(stream, "foreign", False) else self.profile.capabilities

    def priority_range(self, index: int) -> tuple[int, int]:
        """Return the profile's range; a CPU has one priority."""
        return self.profile.priority_range

    def stream_priority(self, stream: StreamT) -> int:
        """Return what was granted; 0 but under a profile, since a CPU has one priority."""
        return int(getattr(stream, "granted_priority", 0))

    def spec(self, index: int) -> DeviceSpec:
        """Return what the CPU is."""
        return DeviceSpec(
            device=torch.device("cpu", index),
            name=f"{platform.machine()} CPU, virtual device {index} of {self.options.devices}",
            vendor="cpu",
            arch=platform.machine(),
            memory_bytes=_memory_bytes(),
            runtime=f"Python {platform.python_version()}",
            priority_range=self.priority_range(index),
            hardware_queues=self.profile.hardware_queues or 1,
        )


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # a system that doesn't tell
        return 0
