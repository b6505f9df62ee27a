"""What the makers of known accelerators promise: datasheet peaks, each with the document it is from.

Dense rates: where a document gives rates with structured sparsity, half of them. Nobody reaches these; what a
device really does is measured (`devstream.roofline.measure`), and shown beside them.

The numbers are not yet held against the documents themselves line by line; `source` says where to look.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Datasheet:
    """The peaks of one device as torch sees it.

    Attributes:
        name: the product.
        vendor: as in `devstream.DeviceSpec`.
        generation: the vendor's name of the architecture.
        year: of the launch.
        matmul: dense FLOP/s of the matrix units by dtype; the vector units' rate where they don't serve it.
        vector: FLOP/s of the other units by dtype; a multiply-add counts as two.
        memory_bytes: of the device's memory.
        memory_bytes_per_s: of the device's memory.
        link_bytes_per_s: to the host, one direction (PCIe x16).
        peer_bytes_per_s: to other devices of the host, all links, one direction.
        source: where the numbers are from.
    """

    name: str
    vendor: str
    generation: str
    year: int
    matmul: Mapping[str, float]
    vector: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    peer_bytes_per_s: float
    source: str

    def flop_per_byte(self, dtype: str) -> float:
        """Return the FLOPs that the matrix units could do while the memory moves one byte.

        Raises:
            KeyError: the datasheet has no rate for *dtype*.
        """
        return self.matmul[dtype] / self.memory_bytes_per_s


def _tera(**rates: float) -> Mapping[str, float]:
    return MappingProxyType({dtype: rate * TERA for dtype, rate in rates.items()})


_PCIE_4, _PCIE_5 = 32 * GIGA, 64 * GIGA

_H100_MATMUL = _tera(float64=66.9, float32=66.9, tf32=494.7, bfloat16=989.4, float16=989.4, float8=1978.9)
_H100_VECTOR = _tera(float64=33.5, float32=66.9, bfloat16=133.8, float16=133.8)
_H100_PEER = 450 * GIGA
_MI300_MATMUL = _tera(float64=163.4, float32=163.4, tf32=653.7, bfloat16=1307.4, float16=1307.4, float8=2614.9)
_MI300_VECTOR = _tera(float64=81.7, float32=163.4)

DATASHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        sheet.name: sheet
        for sheet in (
            Datasheet(
                "A100 40GB",
                "nvidia",
                "Ampere",
                2020,
                _tera(float64=19.5, float32=19.5, tf32=156, bfloat16=312, float16=312),
                _tera(float64=9.7, float32=19.5, bfloat16=39, float16=78),
                40 * GIGA,
                1555 * GIGA,
                _PCIE_4,
                300 * GIGA,
                "NVIDIA A100 Tensor Core GPU datasheet and NVIDIA A100 Tensor Core GPU Architecture white paper, "
                "table 'A100 Tensor Core GPU performance specs' (nvidia.com)",
            ),
            Datasheet(
                "A100 80GB",
                "nvidia",
                "Ampere",
                2020,
                _tera(float64=19.5, float32=19.5, tf32=156, bfloat16=312, float16=312),
                _tera(float64=9.7, float32=19.5, bfloat16=39, float16=78),
                80 * GIGA,
                2039 * GIGA,
                _PCIE_4,
                300 * GIGA,
                "NVIDIA A100 Tensor Core GPU datasheet, column A100 80GB SXM (nvidia.com)",
            ),
            Datasheet(
                "H100",
                "nvidia",
                "Hopper",
                2022,
                _H100_MATMUL,
                _H100_VECTOR,
                80 * GIGA,
                3352 * GIGA,
                _PCIE_5,
                _H100_PEER,
                "NVIDIA H100 Tensor Core GPU datasheet, column H100 SXM, and NVIDIA H100 Tensor Core GPU "
                "Architecture white paper, table of peak rates of H100 SXM5 (nvidia.com)",
            ),
            Datasheet(
                "H200",
                "nvidia",
                "Hopper",
                2024,
                _H100_MATMUL,
                _H100_VECTOR,
                141 * GIGA,
                4800 * GIGA,
                _PCIE_5,
                _H100_PEER,
                "NVIDIA H200 Tensor Core GPU datasheet, column H200 SXM (nvidia.com); the processor is H100 "
                "SXM's, whose white paper has more digits of the rates",
            ),
            Datasheet(
                "B200",
                "nvidia",
                "Blackwell",
                2024,
                _tera(float64=40, float32=80, tf32=1100, bfloat16=2250, float16=2250, float8=4500, float4=9000),
                _tera(float64=40, float32=80),
                192 * GIGA,
                8000 * GIGA,
                _PCIE_5,
                900 * GIGA,
                "NVIDIA Blackwell Architecture technical brief, table of HGX B200, a GPU of it at 1000 W "
                "(nvidia.com); systems sold later have 180 GB at 7.7 TB/s",
            ),
            Datasheet(
                "MI250X",
                "amd",
                "CDNA 2",
                2021,
                _tera(float64=47.9, float32=47.9, bfloat16=191.5, float16=191.5),
                _tera(float64=23.95, float32=23.95),
                64 * GIGA,
                1638.4 * GIGA,
                _PCIE_4,
                200 * GIGA,
                "AMD Instinct MI250X Accelerator data sheet (amd.com); half of it, because one card is two "
                "devices to torch, a graphics compute die each",
            ),
            Datasheet(
                "MI300X",
                "amd",
                "CDNA 3",
                2023,
                _MI300_MATMUL,
                _MI300_VECTOR,
                192 * GIGA,
                5325 * GIGA,
                _PCIE_5,
                448 * GIGA,
                "AMD Instinct MI300X Accelerator data sheet (amd.com)",
            ),
            Datasheet(
                "MI325X",
                "amd",
                "CDNA 3",
                2024,
                _MI300_MATMUL,
                _MI300_VECTOR,
                256 * GIGA,
                6000 * GIGA,
                _PCIE_5,
                448 * GIGA,
                "AMD Instinct MI325X Accelerator data sheet (amd.com)",
            ),
            Datasheet(
                "MI355X",
                "amd",
                "CDNA 4",
                2025,
                _tera(float64=78.6, float32=157.3, bfloat16=2516.6, float16=2516.6, float8=5033.2, float4=10066.3),
                _tera(float64=78.6, float32=157.3),
                288 * GIGA,
                8000 * GIGA,
                _PCIE_5,
                538 * GIGA,
                "AMD Instinct MI355X GPU data sheet (amd.com); it has no TF32 units",
            ),
        )
    }
)


def find(name: str, *, memory_bytes: float = 0) -> Datasheet | None:
    """Return the datasheet of the device that calls itself *name*; None where there is none.

    The product's number must stand in the name as a word ("NVIDIA H200", "AMD Instinct MI300X"). A variant with
    other rates (PCIe, NVL, a superchip) has no datasheet here, and gets none rather than a wrong one. An A100
    says in its name, or by *memory_bytes*, how much memory it has.
    """
    words = set(re.findall(r"[A-Za-z0-9]+", name.upper()))
    if words & {"PCIE", "NVL", "GH200", "GB200"}:
        return None
    if "A100" in words:
        large = "80GB" in words or memory_bytes > 60 * GIGA
        return DATASHEETS["A100 80GB" if large else "A100 40GB"]
    return next((sheet for sheet in DATASHEETS.values() if sheet.name in words), None)


__all__ = ["DATASHEETS", "Datasheet", "find"]
