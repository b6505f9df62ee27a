"""The driver's version, which torch doesn't tell; read from where each vendor's kernel module says it."""

from __future__ import annotations

import platform
import re
from pathlib import Path

#: The file of each vendor's kernel module, by `devstream.DeviceSpec.vendor`. NVIDIA's has a sentence, AMD's the
#: version alone (and only the module that comes with ROCm has the file; the kernel's own goes with the kernel).
_FILES = {"nvidia": "/proc/driver/nvidia/version", "amd": "/sys/module/amdgpu/version"}


def driver_version(vendor: str) -> str:
    """Return the version of *vendor*'s driver; the operating system's where the vendor has no file of its own."""
    path = Path(_FILES.get(vendor, ""))
    if path.is_file():
        found = re.search(r"\d+(\.\d+)+", path.read_text(encoding="utf-8", errors="replace"))
        if found is not None:
            return found.group()
    return f"{platform.system()} {platform.release()}"


def processor_name() -> str:
    """Return the model of the host's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


__all__ = ["driver_version", "processor_name"]
