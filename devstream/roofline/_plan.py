"""What `measure` looks at: sizes, dtypes and how long each point may take. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from devstream.roofline.curves import Shape

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a measurement.

    Attributes:
        point_s: about how long one point may take.
        longest_s: a point whose single call takes longer ends its curve.
        matmul_dtypes: dtypes of matmuls; ``"tf32"`` is float32 with its reduced precision allowed.
        shapes: of matmuls.
        unaligned_shapes: of matmuls whose depth is made a little less, so that rows are aligned to fewer bytes.
        kernel_bytes: that pointwise operations, norms, reads, writes and copies move.
        kernel_dtypes: of those.
        attention_dtypes, sequences, head_dims: of attention, with `attention_heads` heads in all.
        attention_heads: batch times heads.
        link_bytes: of copies to and from the host and between devices.
        pinned_bytes: of the allocation of page-locked memory.
        streams: numbers of streams that are tried at once.
        collective_bytes: of the collectives.
    """

    point_s: float
    longest_s: float
    matmul_dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    unaligned_shapes: tuple[Shape, ...]
    kernel_bytes: tuple[int, ...]
    kernel_dtypes: tuple[str, ...]
    attention_dtypes: tuple[str, ...]
    sequences: tuple[int, ...]
    head_dims: tuple[int, ...]
    attention_heads: int
    link_bytes: tuple[int, ...]
    pinned_bytes: int
    streams: tuple[int, ...]
    collective_bytes: tuple[int, ...]


def _squares(*sides: int) -> tuple[Shape, ...]:
    return tuple((1, side, side, side) for side in sides)


#: Thin, deep and batched matmuls as models have them, so that the tiling isn't fitted to squares alone.
_OTHER_SHAPES: tuple[Shape, ...] = (
    (1, 8192, 1024, 1024),
    (1, 16384, 1024, 4096),
    (1, 16384, 4096, 1024),
    (1, 32768, 768, 768),
    (1, 2048, 8192, 2048),
    (1, 2048, 2048, 16384),
    (1, 768, 3072, 16384),
    (1, 8192, 512, 8192),
    (128, 512, 512, 64),
    (128, 512, 64, 512),
    (1, 12288, 3072, 1536),
    (1, 24000, 1024, 2560),
    (1, 9600, 1536, 6144),
    (1, 6000, 6000, 1000),
    (48, 1024, 1024, 128),
    (96, 768, 64, 768),
)

ACCELERATOR = Plan(
    point_s=0.02,
    longest_s=0.06,
    matmul_dtypes=("float64", "float32", "tf32", "bfloat16", "float16"),
    shapes=(
        *_squares(256, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 1792, 2048),
        *_squares(2304, 2560, 3072, 3584, 4096, 5120, 6144, 8192),
        *_OTHER_SHAPES,
    ),
    unaligned_shapes=((1, 2560, 4096, 1024), (1, 4096, 4096, 2048)),
    kernel_bytes=tuple(3 << power for power in range(14, 31)),
    kernel_dtypes=("float32", "bfloat16"),
    attention_dtypes=("bfloat16", "float32"),
    sequences=(128, 256, 512, 1024, 2048, 4096),
    head_dims=(64, 128),
    attention_heads=64,
    link_bytes=tuple(1 << power for power in range(12, 29, 2)),
    pinned_bytes=256 * MIB,
    streams=(2, 4, 8, 16, 32, 64),
    collective_bytes=(1 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
)

CPU = Plan(
    point_s=0.04,
    longest_s=0.25,
    matmul_dtypes=("float64", "float32", "bfloat16"),
    shapes=(
        *_squares(32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536),
        *((1, 2048, 256, 256), (1, 256, 256, 4096), (16, 128, 128, 64), (16, 128, 64, 128)),
    ),
    unaligned_shapes=(),
    kernel_bytes=tuple(3 << power for power in range(12, 27)),
    kernel_dtypes=("float32", "bfloat16"),
    attention_dtypes=("float32",),
    sequences=(64, 128, 256, 512),
    head_dims=(64,),
    attention_heads=8,
    link_bytes=tuple(1 << power for power in range(12, 27, 2)),
    pinned_bytes=0,
    streams=(2,),
    collective_bytes=(1 * KIB, 64 * KIB, 1 * MIB, 8 * MIB),
)

#: A second or so, for tests and for looking whether everything can be measured; the figures are worth little.
QUICK = Plan(
    point_s=0.002,
    longest_s=0.02,
    matmul_dtypes=("float32",),
    shapes=_squares(64, 128, 192),
    unaligned_shapes=((1, 64, 64, 64),),
    kernel_bytes=(48 * KIB, 192 * KIB, 768 * KIB),
    kernel_dtypes=("float32",),
    attention_dtypes=("float32",),
    sequences=(64, 128),
    head_dims=(64,),
    attention_heads=2,
    link_bytes=(4 * KIB, 64 * KIB, 1 * MIB),
    pinned_bytes=1 * MIB,
    streams=(2,),
    collective_bytes=(1 * KIB, 64 * KIB),
)


def plan_for(device_type: str) -> Plan:
    """Return the sizes for a device type."""
    return CPU if device_type == "cpu" else ACCELERATOR


def fitting(plan: Plan, memory_bytes: float) -> Plan:
    """Return *plan* without what a device of *memory_bytes* (0: unknown) has no room for, a few times over."""
    if not memory_bytes:
        return plan
    room = memory_bytes / 16
    return replace(
        plan,
        # Three tensors of 4 bytes an element, of the largest shape.
        shapes=tuple(one for one in plan.shapes if 12 * max(_sides(one)) <= room) or plan.shapes[:1],
        unaligned_shapes=tuple(one for one in plan.unaligned_shapes if 12 * max(_sides(one)) <= room),
        kernel_bytes=tuple(size for size in plan.kernel_bytes if size <= room) or plan.kernel_bytes[:1],
        link_bytes=tuple(size for size in plan.link_bytes if size <= room) or plan.link_bytes[:1],
    )


def _sides(shape: Shape) -> tuple[int, int, int]:
    batch, m, n, k = shape
    return batch * m * k, batch * k * n, batch * m * n


__all__ = ["ACCELERATOR", "CPU", "QUICK", "Plan", "fitting", "plan_for"]
