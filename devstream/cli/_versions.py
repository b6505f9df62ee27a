"""The versions that a report should carry."""

from __future__ import annotations

import platform
from importlib import metadata


def versions(runtime: str = "") -> dict[str, str]:
    """Return the versions of Python, torch and devstream, and *runtime*, the vendor's, where one is given."""
    found = {"python": platform.python_version()}
    found |= {name: metadata.version(name) for name in ("torch", "devstream")}
    return found | ({"runtime": runtime} if runtime else {})
