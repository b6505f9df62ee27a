"""The datasheets: what is in them, and who gets which."""

from __future__ import annotations

import pytest

from devstream.roofline.devices import DATASHEETS, find


@pytest.mark.parametrize("sheet", DATASHEETS.values(), ids=str)
def test_every_datasheet_names_its_source_and_is_consistent(sheet):
    assert sheet.source.startswith(("NVIDIA", "AMD"))
    assert sheet.matmul["bfloat16"] > sheet.matmul["float32"] >= sheet.vector["float32"] * 0.99
    assert sheet.matmul["float64"] >= sheet.vector["float64"]
    assert 1e9 < sheet.link_bytes_per_s < sheet.peer_bytes_per_s < sheet.memory_bytes_per_s < 1e13


@pytest.mark.parametrize(
    ("name", "memory_bytes", "expected"),
    [
        ("NVIDIA H200", 150e9, "H200"),
        ("NVIDIA H100 80GB HBM3", 85e9, "H100"),
        ("NVIDIA A100-SXM4-80GB", 85e9, "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", 42e9, "A100 40GB"),
        ("NVIDIA B200", 190e9, "B200"),
        ("AMD Instinct MI250X", 64e9, "MI250X"),
        ("AMD Instinct MI300X", 206e9, "MI300X"),
        ("AMD Instinct MI325X OAM", 270e9, "MI325X"),
        ("AMD Instinct MI355X", 300e9, "MI355X"),
    ],
)
def test_a_device_finds_its_datasheet_by_the_name_that_it_gives(name, memory_bytes, expected):
    found = find(name, memory_bytes=memory_bytes)
    assert found is not None
    assert found.name == expected


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090", "x86_64 CPU", ""],
)
def test_a_variant_with_other_rates_gets_no_datasheet_instead_of_a_wrong_one(name):
    assert find(name) is None


def test_compute_has_grown_faster_than_memory_bandwidth_from_one_generation_to_the_next():
    ampere, hopper = DATASHEETS["A100 80GB"], DATASHEETS["H100"]
    assert ampere.flop_per_byte("bfloat16") < hopper.flop_per_byte("bfloat16")
    cdna2, cdna4 = DATASHEETS["MI250X"], DATASHEETS["MI355X"]
    assert cdna2.flop_per_byte("bfloat16") < cdna4.flop_per_byte("bfloat16")
