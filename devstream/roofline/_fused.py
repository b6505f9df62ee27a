"""What a compiled, or any other, kernel does, as far as its name and its operands' shapes tell. Pure.

Compiled kernels have no operator whose formula could be asked. A matmul that a compiler leaves to a library is an
operator in the profiler, with its shapes. A kernel that it makes itself names the operations that it fuses, and
the profiler has the shapes of its operands: each is counted as moved once.
"""

from __future__ import annotations

import math

from devstream.roofline.formulas import Described
from devstream.roofline.model import Counts
from devstream.roofline.profiled import COMPILED, TYPES, HostOp, Work

_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
#: What vendors' libraries call their kernels.
_LIBRARIES = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "convolution": ("conv", "dgrad", "wgrad", "implicit_gemm"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "tensile", "cijk_"),
}
_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")


def described(work: Work, *, tf32: bool = False) -> Described:
    """Return class and counts of *work*; counts are empty where nothing tells them."""
    if work.way in ("h2d", "d2h"):
        way = f"{work.way} {'pinned' if work.pinned else 'pageable'}"
        return Described("link", Counts("link", link_bytes={way: work.size_bytes}))
    if "nccl" in work.name.lower() or "rccl" in work.name.lower():
        return Described("collective", Counts("collective"))
    for op in work.callers:
        if op.name in _MATMULS or op.name.removesuffix("_out") in _MATMULS:
            return _matmul(op, tf32=tf32)
        if op.name.startswith(_ATTENTION):
            return _attention(op)
        if "convolution" in op.name:
            return Described("convolution", Counts(read_bytes=_bytes(op)))
    if work.way == "d2d":
        return Described(
            "data movement", Counts("copy 4", read_bytes=work.size_bytes, write_bytes=work.size_bytes)
        )
    lower = work.name.lower()
    by_name = next((one for one, words in _LIBRARIES.items() if any(word in lower for word in words)), None)
    innermost = work.callers[-1] if work.callers else None
    if by_name is not None and (innermost is None or not innermost.tensors):
        return Described(by_name, Counts())
    moved = _bytes(innermost) if innermost is not None else 0.0
    operator_class, curve = _class_by_name(
        work.name if "_fused_" in work.name else innermost.name if innermost else ""
    )
    elements = max((math.prod(sizes) for sizes, _ in innermost.tensors), default=0) if innermost else 0
    flops = {"float32": float(elements)} if elements and operator_class != "data movement" else {}
    return Described(operator_class, Counts(curve, {}, flops, moved), fusable=True)


def is_made_by_compiler(work: Work) -> bool:
    """Say whether a compiler made this kernel."""
    return work.name.startswith(("triton_", "compiled")) or "cpp_fused" in work.name


def is_dark(work: Work) -> bool:
    """Say whether nothing tells what *work* does, but its name."""
    what = described(work)
    counts = what.counts
    known = counts.flops or counts.memory_bytes or counts.link_bytes or what.operator_class == "collective"
    return not known and work.name != COMPILED


def _bytes(op: HostOp) -> float:
    return float(sum(math.prod(sizes) * TYPES[kind][0] for sizes, kind in op.tensors))


def _class_by_name(name: str) -> tuple[str, str]:
    lower = name.lower()
    if any(word in lower for word in ("norm", "softmax")):
        return "normalisation", "norm_backward 4" if "backward" in lower else "norm 4"
    if any(word in lower for word in ("adam", "sgd", "adagrad")):
        return "optimizer", "pointwise 4"
    if any(word in lower for word in ("triton_red", "triton_per", "aten::sum", "aten::mean", "reduce")):
        return "reduction", "read 4"
    if any(word in lower for word in ("copy", "clone", "cat", "embedding", "index", "fill", "zero", "memset")):
        return "data movement", "copy 4"
    return "pointwise", "pointwise 4"


def _matmul(op: HostOp, *, tf32: bool) -> Described:
    operands = list(op.tensors)
    if op.name.removesuffix("_out") in ("aten::addmm", "aten::baddbmm"):
        operands = operands[1:]
    if len(operands) < 2 or len(operands[0][0]) not in (2, 3):
        return Described("matmul", Counts())
    (a, kind), (b, _) = operands[:2]
    batch = a[0] if len(a) == 3 else 1
    m, k, n = a[-2], a[-1], b[-1]
    size, dtype = TYPES[kind]
    if tf32 and dtype == "float32":
        dtype = "tf32"
    shape = (batch, m, n, k)
    counts = Counts(
        f"matmul {dtype}",
        {dtype: 2.0 * math.prod(shape)},
        {},
        float(batch * (m * k + k * n) * size),
        float(batch * m * n * size),
        shape=shape,
    )
    return Described("matmul", counts)


def _attention(op: HostOp) -> Described:
    operands = [one for one in op.tensors if len(one[0]) == 4]
    backward = "backward" in op.name
    if len(operands) < (4 if backward else 3):
        return Described("attention", Counts())
    (q, kind), (k, _) = operands[1:3] if backward else operands[:2]
    # The inner operators have the heads before the head's size, the outer ones before the sequence.
    inner = not op.name.startswith("aten::_scaled_dot_product")
    batch, heads = q[0], q[2] if inner else q[1]
    length, other = (q[1], k[1]) if inner else (q[2], k[2])
    size, dtype = TYPES[kind]
    flops = 4.0 * batch * heads * length * other * q[3] * (2.5 if backward else 1.0)
    moved = _bytes(op)
    way = "backward" if backward else "forward"
    return Described(
        "attention",
        Counts(f"attention {dtype} {way} {q[3]}", {dtype: flops}, {}, moved, float(math.prod(q) * size)),
    )


__all__ = ["described", "is_dark", "is_made_by_compiler"]
