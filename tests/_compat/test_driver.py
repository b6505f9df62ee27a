"""The driver's version, from where each vendor's kernel module says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from devstream._compat import driver


@pytest.mark.parametrize(
    ("vendor", "text", "version"),
    [
        (
            "nvidia",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC 13.3.0",
            "580.159.04",
        ),
        ("amd", "6.12.12\n", "6.12.12"),
    ],
)
def test_a_vendors_file_has_the_version(
    vendor: str, text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setitem(driver._FILES, vendor, str(tmp_path / "version"))
    assert driver.driver_version(vendor) == version


@pytest.mark.parametrize("vendor", ["cpu", "apple", "nvidia"])
def test_without_a_file_the_operating_systems_version_counts(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_FILES", {"nvidia": "/no/such/file"})
    assert driver.driver_version(vendor).split()[0] in ("Linux", "Darwin", "Windows")


def test_the_processor_has_a_name() -> None:
    assert driver.processor_name()
