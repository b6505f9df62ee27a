"""Ceilings of a made-up device with round numbers, for tests of whatever plans or predicts without measuring."""

from __future__ import annotations

from devstream.roofline.ceilings import Ceilings
from devstream.roofline.curves import AlphaBeta, Curve, Tiling


def line(latency_s: float, rate: float, *amounts: float, error: float = 0.05) -> Curve:
    """Return the curve of a latency and a rate through *amounts*."""
    return Curve(tuple((amount, latency_s + amount / rate) for amount in amounts), error)


#: Bytes at which its curves of memory and links have points: 256 B to 1 GiB.
SIZES = tuple(4.0**power for power in range(4, 16))
#: FLOPs at which those of matmuls have.
WORK = tuple(10.0**power for power in range(6, 14))


def ceilings(**changes: object) -> Ceilings:
    """Return the made-up device's ceilings, with *changes* to attributes of `devstream.roofline.Ceilings`.

    100 TFLOP/s in bfloat16 matmuls, 10 in float32, 5 outside of them; 1 TB/s of memory, 10 GB/s of pinned link
    each way; a launch costs the host 10 µs and the device 2.
    """
    known: dict[str, object] = {
        "device": "toy:0",
        "name": "toy",
        "curves": {
            "matmul bfloat16": line(2e-6, 100e12, *WORK),
            "matmul float32": line(2e-6, 10e12, *WORK),
            "attention bfloat16 forward 64": line(2e-6, 50e12, *WORK),
            "attention bfloat16 forward 64 causal": line(2e-6, 40e12, *WORK),
            "pointwise 4": line(2e-6, 1e12, *SIZES),
            "pointwise 2": line(2e-6, 0.9e12, *SIZES),
            "norm 4": line(4e-6, 0.5e12, *SIZES),
            "copy 4": line(2e-6, 0.95e12, *SIZES),
            "link h2d pinned": line(10e-6, 10e9, *SIZES),
            "link d2h pinned": line(10e-6, 10e9, *SIZES),
            "link d2h pageable": line(20e-6, 3e9, *SIZES),
            "peer": line(10e-6, 100e9, *SIZES),
        },
        "tilings": {"matmul bfloat16": Tiling(128, 128, 100)},
        "vector": {"float32": 5e12},
        "collectives": {"all_reduce": AlphaBeta(5e-6, 80e9, 0.1)},
        "launch_s": 10e-6,
        "floor_s": 2e-6,
        "event_record_s": 1e-6,
        "event_wait_s": 1e-6,
        "units": 100,
        "ranks": 2,
        "memory_bytes": 80e9,
    }
    return Ceilings(**(known | changes))  # type: ignore[arg-type]


__all__ = ["SIZES", "WORK", "ceilings", "line"]
