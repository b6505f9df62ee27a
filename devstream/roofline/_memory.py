"""How much memory a device has, and how much of it is in use."""

from __future__ import annotations

from pathlib import Path

import torch

from devstream.abc import AnyBackend
from devstream.roofline.counting import Counted
from devstream.roofline.diagnosis import Memory


def device_memory(backend: AnyBackend, index: int, counted: Counted) -> Memory:
    """Return the memory of a device now, with the largest block that *counted* made."""
    largest, where = None, ""
    if counted.largest is not None:
        largest, maker = counted.largest
        op = counted.ops[maker]
        where = f"{op.name} at {op.line or op.module or 'an unknown line'}"
    capacity = float(backend.spec(index).memory_bytes) or None
    if backend.device_type == "cpu":
        used, peak = _process_bytes()
        return Memory(capacity, used, peak, None, largest, where)
    try:
        stats = torch.accelerator.memory_stats(index)
    except (RuntimeError, NotImplementedError):  # this device's allocator keeps no statistics
        return Memory(capacity, None, None, None, largest, where)
    return Memory(
        capacity,
        _number(stats, "allocated_bytes.all.current"),
        _number(stats, "allocated_bytes.all.peak"),
        _number(stats, "reserved_bytes.all.current"),
        largest,
        where,
    )


def _number(stats: object, key: str) -> float | None:
    value = stats.get(key) if isinstance(stats, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _process_bytes() -> tuple[float | None, float | None]:
    """Return the memory of this process now and at its peak, where the system tells."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None, None
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    now, peak = (float(found[key]) * 1024 if key in found else None for key in ("VmRSS", "VmHWM"))
    return now, peak


__all__ = ["device_memory"]
