"""``python -m devstream info``: what this machine offers, and why the rest isn't available."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from devstream import _files, _registry
from devstream.abc import AnyBackend, Capability, DeviceSpec
from devstream.cli._output import write_note, write_table
from devstream.cli._versions import versions
from devstream.exceptions import DevstreamError

KIND, SCHEMA = "devstream.info", 1


@dataclass(frozen=True, slots=True)
class Found:
    """One backend: what it serves here, or why it can't.

    Attributes:
        state: ``"available"``; ``"by name"``, where it is used only if asked for by name; ``"unavailable"``; or
            ``"broken"``, where it raised.
        reason: says why, where it isn't simply available.
    """

    name: str
    device_type: str
    state: str
    reason: str
    devices: tuple[tuple[DeviceSpec, tuple[str, ...]], ...]


def add_parser(commands: Any) -> None:  # Any: argparse keeps the class of its sub-parsers' action private
    """Add this command to *commands*."""
    parser = commands.add_parser("info", help="devices, backends, capabilities and versions")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; returns 0 also where a backend is broken, which is what one asks this for."""
    found = [look(name) for name in _registry.names()]
    default = _default_device()
    if options.json:
        fields = {"versions": versions(), "default_device": default, "backends": [_as_json(one) for one in found]}
        sys.stdout.write(_files.dump(fields, kind=KIND, schema=SCHEMA))
        return 0
    rows: list[tuple[str, ...]] = [
        (one.name, one.device_type, one.state, str(len(one.devices)), one.reason) for one in found
    ]
    write_table(("backend", "serves", "state", "devices", "why"), rows, title="Backends")
    rows = [_device_row(one.name, spec, names) for one in found for spec, names in one.devices]
    heads = ("device", "backend", "name", "arch", "memory", "runtime", "priorities", "capabilities")
    write_table(heads, rows, title="Devices")
    write_note(f"Default device: {default}")
    write_note(", ".join(f"{name} {version}" for name, version in versions().items()))
    return 0


def look(name: str) -> Found:
    """Ask the backend called *name*, which imports it; whatever it raises becomes its reason."""
    try:
        backend = _registry.load(name)
    except DevstreamError as error:
        return Found(name, "", "broken", str(error), ())
    try:
        reason = backend.unavailable_reason()
        if reason is not None:
            return Found(name, backend.device_type, "unavailable", reason, ())
        reason = backend.not_automatic_reason()
        state = "available" if reason is None else "by name"
        devices = tuple(_ask(backend, index) for index in range(backend.device_count()))
        return Found(name, backend.device_type, state, reason or "", devices)
    except (
        Exception,
        SystemExit,
    ) as error:  # a plug-in may raise anything, and one broken plug-in must not hide the others
        reason = f"{type(error).__name__}: {error}"
        return Found(name, str(getattr(backend, "device_type", "")), "broken", reason, ())


def _ask(backend: AnyBackend, index: int) -> tuple[DeviceSpec, tuple[str, ...]]:
    has = backend.capabilities(index)
    return backend.spec(index), tuple(str(one.name).lower() for one in Capability if one in has)


def _default_device() -> str:
    try:
        backend = _registry.default_backend()
        return f"{backend.device_type}:{backend.current_index()} (backend {backend.name!r})"
    except DevstreamError as error:
        return f"none: {error}"


def _device_row(backend: str, spec: DeviceSpec, capabilities: tuple[str, ...]) -> tuple[str, ...]:
    memory = f"{spec.memory_bytes / 2**30:.1f} GiB" if spec.memory_bytes else "unknown"
    lowest, highest = spec.priority_range
    return (
        str(spec.device),
        backend,
        spec.name,
        spec.arch,
        memory,
        spec.runtime,
        f"{lowest} to {highest}",
        ", ".join(capabilities),
    )


def _as_json(found: Found) -> dict[str, Any]:  # Any: JSON
    return {
        "name": found.name,
        "device_type": found.device_type,
        "state": found.state,
        "reason": found.reason,
        "devices": [
            {
                "device": str(spec.device),
                "name": spec.name,
                "vendor": spec.vendor,
                "arch": spec.arch,
                "memory_bytes": spec.memory_bytes,
                "runtime": spec.runtime,
                "priority_range": list(spec.priority_range),
                "hardware_queues": spec.hardware_queues,
                "capabilities": list(names),
            }
            for spec, names in found.devices
        ],
    }
