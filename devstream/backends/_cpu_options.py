"""How the CPU behaves: the options of `devstream.testing.cpu`."""

from __future__ import annotations

from dataclasses import dataclass

from devstream.exceptions import UnsupportedError

SCHEDULES = ("inline",)
PROFILES = ("cpu",)


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How the CPU behaves; `devstream.testing.cpu` changes it.

    Attributes:
        devices: number of virtual devices, two or more.
        schedule: ``"inline"`` runs work in the order of its issue.
        seed: for schedules that draw lots.
        profile: whose limits apply; ``"cpu"`` has none.
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
