"""Which priority a stream is granted."""

from __future__ import annotations

import logging

from devstream.exceptions import StreamTypeError
from devstream.typing import PriorityArg

_log = logging.getLogger("devstream")


def clamp_priority(priority: PriorityArg, limits: tuple[int, int]) -> int:
    """Return the priority to grant: names are looked up, numbers clamped to *limits* (lowest, highest)."""
    lowest, highest = limits
    names = {"low": lowest, "normal": min(lowest, max(highest, 0)), "high": highest}
    if isinstance(priority, str):
        if priority not in names:
            raise ValueError(f"priority {priority!r} is neither a number nor one of {sorted(names)}")
        return names[priority]
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise StreamTypeError(operation="Stream(priority=)", got=priority, expected="an int or a name")
    granted = min(lowest, max(highest, priority))
    if granted != priority:
        _log.info("priority %d clamped to %d, the device's range being %d to %d", priority, granted, *limits)
    return granted


__all__ = ["clamp_priority"]
