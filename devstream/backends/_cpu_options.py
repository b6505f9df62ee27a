"""How the CPU behaves: its schedule, and whose limits it keeps to, so that a program meets them on a laptop.

A profile copies facts, not behaviour: how many queues run at once changes nothing in the order of a program.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from devstream.abc import AnyBackend, Capability
from devstream.exceptions import BackendWarning, UnsupportedError, warning

_ALL = (
    Capability.TIMING
    | Capability.BLOCKING_EVENTS
    | Capability.SIDE_STREAMS
    | Capability.NATIVE_HANDLE
    | Capability.EXTERNAL_STREAMS
    | Capability.RECORD_STREAM
    | Capability.ASYNC_COPY
    | Capability.GRAPH_CAPTURE
    | Capability.PEER_ACCESS
)


@dataclass(frozen=True, slots=True)
class Profile:
    """One vendor's limits.

    Attributes:
        capabilities: of each virtual device.
        priority_range: lowest and highest.
        hardware_queues: streams that run at once; more share queues, which is warned about. 0 for no limit.
        foreign_handles: a handle that no stream of ours has is wrapped as another library's stream, which can be
            entered and synchronized, but neither recorded nor waited on.
    """

    name: str
    capabilities: Capability
    priority_range: tuple[int, int] = (0, 0)
    hardware_queues: int = 0
    foreign_handles: bool = False

    def check_queues(self, alive: int) -> None:
        """Warn where stream number *alive* of a device shares a queue with another one."""
        if self.hardware_queues and alive == self.hardware_queues:
            reason = (
                f"stream {alive} under {self.name!r}: {self.hardware_queues} queues run at once, the default "
                "stream's included, and streams that share one don't overlap. Use devstream.named_stream"
            )
            warnings.warn(warning(BackendWarning, name="cpu", reason=reason), stacklevel=6)

    def require(self, backend: AnyBackend, capability: Capability, operation: str) -> None:
        """Refuse *operation* where the vendor lacks *capability*."""
        if capability not in self.capabilities:
            raise backend.lacks(capability, operation)


PROFILES = {
    one.name: one
    for one in (
        Profile("cpu", _ALL),
        # Source: devstream/backends/rocm.py, which has the facts and where they are from.
        Profile("hip", _ALL | Capability.PRIORITIES, (0, -1), hardware_queues=4),
        # One stream, no priorities, and an allocator that can't be told. Source: accelerator.py's row of facts.
        Profile("mps", Capability.TIMING),
        # As on Huawei's NPU. Source: the same.
        Profile("external", _ALL, foreign_handles=True),
    )
}


SCHEDULES = ("inline", "lazy", "random")


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How the CPU behaves; `devstream.testing.cpu` changes it.

    Attributes:
        devices: number of virtual devices, two or more.
        schedule: ``"inline"`` runs work in the order of its issue; ``"lazy"`` and ``"random"`` are carried out by
            `devstream.testing.cpu`.
        seed: for schedules that draw lots.
        profile: whose limits apply, see `PROFILES`; ``"cpu"`` has none.
    """

    devices: int = 2
    schedule: str = "inline"
    seed: int = 0
    profile: str = "cpu"

    def __post_init__(self) -> None:
        if self.devices < 2:
            raise ValueError(f"devices={self.devices}: the CPU has two virtual devices or more")
        for what, value, known in (("schedule", self.schedule, SCHEDULES), ("profile", self.profile, PROFILES)):
            if value not in known:
                raise UnsupportedError(
                    operation=f"{what}={value!r}",
                    backend="cpu",
                    capability=f"that {what}",
                    alternative=f"use one of {', '.join(map(repr, known))}",
                )


def refuse_foreign(operation: str) -> UnsupportedError:
    """Return the error for a record or a wait on another library's stream."""
    return UnsupportedError(
        operation=f"{operation} a stream of another library",
        backend="cpu",
        capability="external streams that can order",
        alternative="synchronize it, or do the work on a stream of devstream's own; ask "
        "devstream.capabilities(stream), which is empty for such a stream",
    )


__all__ = ["PROFILES", "SCHEDULES", "CpuOptions", "Profile", "refuse_foreign"]
