"""What one operation does: its class, its FLOPs and the bytes that it must move.

FLOPs of the matrix units are torch's own (``torch.utils.flop_counter``), with two differences: causal attention
counts half, because that is what is done, and torch's formulas leave a few operations out. Other FLOPs are counted
as the field does: one for each function of one element, a composite (GELU, a norm) by its formula.

Bytes are the least that must be moved: each element of each operand once. A kernel that reads something twice
moves more, and comes out below its ceiling; what comes from a cache comes out above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from devstream._compat import tree_leaves
from devstream.roofline.curves import Shape, attention_shape
from devstream.roofline.model import Counts
from devstream.roofline.tiles import ALIGNED

#: The classes of operators, in the order of tables.
OPERATOR_CLASSES = (
    "matmul",
    "attention",
    "convolution",
    "normalisation",
    "pointwise",
    "reduction",
    "data movement",
    "optimizer",
    "link",
    "collective",
    "other",
)

#: Classes whose FLOPs the matrix units do.
CONTRACTIONS = ("matmul", "attention", "convolution")

_MATMULS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "mv", "addmv", "dot", "vdot", "_addmm_activation"}
)
_CONVOLUTIONS = frozenset(
    {"convolution", "_convolution", "cudnn_convolution", "_slow_conv2d_forward", "convolution_backward"}
    | {"convolution_overrideable", "mkldnn_convolution", "miopen_convolution"}
)

#: Normalisations with their FLOPs an element of the (largest) input. Of the backward with weight and bias.
_NORMS = {
    "native_layer_norm": 8.0,
    "native_layer_norm_backward": 14.0,
    "native_group_norm": 8.0,
    "native_group_norm_backward": 14.0,
    "native_batch_norm": 8.0,
    "native_batch_norm_backward": 14.0,
    "_native_batch_norm_legit": 8.0,
    "_native_batch_norm_legit_no_training": 4.0,
    "_batch_norm_with_update": 8.0,
    "batch_norm_backward": 14.0,
    "cudnn_batch_norm": 8.0,
    "cudnn_batch_norm_backward": 14.0,
    "miopen_batch_norm": 8.0,
    "miopen_batch_norm_backward": 14.0,
    "_fused_rms_norm": 5.0,
    "_fused_rms_norm_backward": 10.0,
    "_softmax": 5.0,
    "_safe_softmax": 5.0,
    "_softmax_backward_data": 4.0,
    "_log_softmax": 6.0,
    "_log_softmax_backward_data": 4.0,
    "_masked_softmax": 5.0,
}
_SOFTMAX = frozenset(name for name in _NORMS if "softmax" in name)

_REDUCTIONS = frozenset(
    {"sum", "nansum", "mean", "prod", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "any", "all"}
    | {"var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "count_nonzero"}
    | {"cumsum", "cumprod", "logcumsumexp", "_foreach_norm", "trace", "median", "nanmedian"}
)
_COPIES = frozenset(
    {
        "copy_",
        "copy",
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "constant_pad_nd",
        "_copy_from",
        "repeat",
        "roll",
        "flip",
    }
    | {
        "slice_backward",
        "select_backward",
        "index_select",
        "embedding",
        "gather",
        "index",
        "take",
        "masked_select",
    }
    | {"embedding_dense_backward", "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_"}
    | {"scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "nll_loss_forward"}
    | {"nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "as_strided_scatter", "slice_scatter"}
    | {"select_scatter", "unfold_backward", "_reshape_copy", "view_copy", "_foreach_copy_", "resize_"}
    | {"_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward", "_embedding_bag_dense_backward"}
    | {"_local_scalar_dense", "masked_fill", "masked_fill_", "tril", "triu", "index_copy", "index_copy_"}
    | {
        "masked_select",
        "convert_element_type",
        "lift_fresh_copy",
        "contiguous",
        "channel_shuffle",
        "pixel_shuffle",
    }
)
_FILLS = frozenset(
    {"fill", "fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "arange", "eye"}
    | {"linspace", "new_zeros", "new_ones", "new_full", "scalar_tensor", "_foreach_zero_", "zero"}
    | {"normal_", "uniform_", "bernoulli_", "rand", "randn", "randint", "rand_like", "randn_like", "randperm"}
    | {"exponential_", "random_"}
)
#: What only makes room.
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "set_", "detach"}
    | {"alias", "lift_fresh", "lift", "_unsafe_view", "record_stream", "is_pinned", "_reshape_alias", "detach_"}
    | {
        "sym_size",
        "sym_stride",
        "sym_numel",
        "is_same_size",
        "requires_grad_",
        "_has_compatible_shallow_copy_type",
    }
)
#: Make a tensor of zeros, and put what they are given into a part of it.
_TABLE_GRADIENTS = frozenset(
    {"embedding_dense_backward", "_embedding_bag_backward", "_embedding_bag_dense_backward"}
    | {"slice_backward", "select_backward", "unfold_backward"}
)
#: Write the whole of what they are given, without reading it.
_OVERWRITES = frozenset({"copy_", "_foreach_copy_", "index_put_", "scatter_"}) | _FILLS

#: Composite pointwise operations and their FLOPs an element; all others have one.
_PER_ELEMENT = {
    "gelu": 9.0,
    "gelu_backward": 16.0,
    "silu": 4.0,
    "silu_backward": 7.0,
    "sigmoid": 3.0,
    "sigmoid_backward": 3.0,
    "tanh_backward": 3.0,
    "mish": 6.0,
    "elu": 3.0,
    "softplus": 3.0,
    "hardswish": 4.0,
    "addcmul": 3.0,
    "addcmul_": 3.0,
    "addcdiv": 3.0,
    "addcdiv_": 3.0,
    "lerp": 3.0,
    "lerp_": 3.0,
    "native_dropout": 2.0,
    "native_dropout_backward": 2.0,
    "threshold_backward": 1.0,
    "glu": 4.0,
    "addcmul.out": 3.0,
}
_PER_ELEMENT_OPTIMIZER = {"adam": 14.0, "adamw": 15.0, "sgd": 4.0, "adagrad": 6.0}


@dataclass(frozen=True, slots=True)
class Described:
    """What one operation is and does.

    Attributes:
        operator_class: one of `OPERATOR_CLASSES`.
        counts: what it does.
        fusable: whether a compiler can put it into one kernel with its neighbours.
    """

    operator_class: str
    counts: Counts
    fusable: bool = False


def is_free(func: Any) -> bool:
    """Say whether an operator moves and computes nothing: a view, an allocation."""
    return func.is_view or func._schema.name.partition("::")[2] in _ALLOCATIONS


def describe(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Described | None:
    """Return what an operation that ran does; None where it moves and computes nothing (a view, an allocation).

    Args:
        func: the operator with its overload.
        args: as it was called.
        kwargs: the same.
        out: what it returned.
    """
    name = func._schema.name.partition("::")[2]
    namespace = func.namespace
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if "c10d" in namespace:
        return _collective(name, inputs, outputs)
    if is_free(func) or not (inputs or outputs):
        return None
    link = _link(name, inputs, outputs)
    if link is not None:
        return link
    call = _Call(name, func, args, kwargs, inputs, outputs, out)
    read, write = _bytes(call)
    contraction = _contraction(call)
    if contraction is not None:
        operator_class, kind, dtype, flops, shape = contraction
        aligned = alignment_of([*inputs, *outputs]) if operator_class == "matmul" else ALIGNED
        counts = Counts(kind, {dtype: flops}, {}, read, write, shape=shape, alignment=aligned)
        return Described(operator_class, counts)
    return _other(name, inputs, outputs, read, write)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an operator; Any: what torch's operators take and return."""

    name: str
    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    out: Any

    def torchs_flops(self) -> float | None:
        """Return what torch's formula says; None where it has none."""
        formula = flop_registry.get(self.func.overloadpacket)
        return None if formula is None else float(formula(*self.args, **self.kwargs, out_val=self.out))

    def flag(self, name: str) -> bool:
        """Return the argument *name*, a truth value, wherever it was given; False where it wasn't."""
        if name in self.kwargs:
            return bool(self.kwargs[name])
        names = [one.name for one in self.func._schema.arguments]
        return name in names[: len(self.args)] and bool(self.args[names.index(name)])


# -- contractions ----------------------------------------------------------------------------------------


#: Class, curve, dtype, FLOPs and shape of what the matrix units do.
_Contraction = tuple[str, str, str, float, Shape | None]


def _contraction(call: _Call) -> _Contraction | None:
    if "attention" in call.name:
        return _attention(call)
    shape = matmul_shape(call.name, call.args)
    if shape is not None:
        dtype = _matmul_dtype([one for one in call.args if isinstance(one, torch.Tensor)])
        return "matmul", f"matmul {dtype}", dtype, 2.0 * math.prod(shape), shape
    flops = call.torchs_flops()
    if flops is None:
        return None
    convolution = call.name in _CONVOLUTIONS
    dtype = _matmul_dtype(call.inputs, convolution=convolution)
    return "convolution" if convolution else "matmul", f"matmul {dtype}", dtype, flops, None


def matmul_shape(name: str, args: Sequence[Any]) -> Shape | None:
    """Return the shape of a matmul called *name*; None where it isn't one."""
    if name not in _MATMULS:
        return None
    first = 1 if name in ("addmm", "baddbmm", "addmv", "_addmm_activation") else 0
    a, b = args[first], args[first + 1]
    if name in ("dot", "vdot"):
        return 1, 1, 1, a.shape[0]
    if name in ("mv", "addmv"):
        return 1, a.shape[0], 1, a.shape[1]
    if a.dim() == 3:
        return a.shape[0], a.shape[1], b.shape[2], a.shape[2]
    return 1, a.shape[0], b.shape[1], a.shape[1]


def alignment_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes, 16 at most, at multiples of which the rows of all *tensors* begin."""
    found = ALIGNED
    for one in tensors:
        strides = [stride for size, stride in zip(one.shape, one.stride(), strict=True) if size > 1 and stride > 1]
        found = math.gcd(found, *(stride * one.element_size() for stride in strides)) if one.dim() > 1 else found
    return found


def _matmul_dtype(tensors: list[torch.Tensor], *, convolution: bool = False) -> str:
    floats = [one for one in tensors if one.is_floating_point()] or tensors
    dtype = str(floats[0].dtype).removeprefix("torch.")
    if dtype != "float32" or floats[0].device.type in ("cpu", "meta"):
        return dtype
    # The library of convolutions has a switch of its own, which is on by default.
    allowed = torch.backends.cudnn.allow_tf32 if convolution else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed else dtype


def _attention(call: _Call) -> _Contraction | None:
    backward = "backward" in call.name
    operands = [one for one in call.args if isinstance(one, torch.Tensor) and one.dim() == 4]
    if len(operands) < 3:
        return None
    q = operands[1] if backward else operands[0]
    flops = call.torchs_flops()
    if flops is None:
        if "_for_cpu" not in call.name:
            return None
        shapes = [one.shape for one in operands[: 4 if backward else 3]]
        formula = sdpa_backward_flop_count if backward else sdpa_flop_count
        flops = float(formula(*shapes))
    causal = call.flag("is_causal")
    dtype = str(q.dtype).removeprefix("torch.")
    kind = f"attention {dtype} {'backward' if backward else 'forward'} {q.shape[-1]}{' causal' if causal else ''}"
    k = operands[2] if backward else operands[1]
    shape = attention_shape(math.prod(q.shape[:2]), q.shape[2], k.shape[2])
    return "attention", kind, dtype, flops / 2 if causal else flops, shape


# -- everything else -------------------------------------------------------------------------------------


def _other(
    name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], read: float, write: float
) -> Described:
    element = max((one.element_size() for one in (*inputs, *outputs) if one.is_floating_point()), default=4)
    largest = max((one.numel() for one in inputs), default=0)
    made = sum(one.numel() for one in outputs) or largest
    bare = name.rstrip("_")

    def as_class(operator_class: str, curve: str, flops: float, fusable: bool = False) -> Described:
        dtype = {8: "float64"}.get(element, "float32")  # the vector units do 2-byte elements as float32
        counts = Counts(f"{curve} {element}", {}, {dtype: flops} if flops else {}, read, write)
        return Described(operator_class, counts, fusable)

    if name in _NORMS:
        curve = "softmax" if name in _SOFTMAX else "norm_backward" if "backward" in name else "norm"
        return as_class("normalisation", curve, _NORMS[name] * largest, fusable=True)
    if name.startswith(("_fused_", "_foreach_")):
        return _many(name, inputs, as_class)
    if name in _COPIES:
        return as_class("data movement", "copy", 0.0, fusable=True)
    if name in _FILLS:
        return as_class("data movement", "write", 0.0, fusable=True)
    of_two = bare in ("max", "min") and len(inputs) == 2  # of two tensors these are pointwise
    if bare in _REDUCTIONS and not of_two:
        return as_class("reduction", "read", float(largest), fusable=True)
    if name in _OTHER:
        return as_class("other", name, float(largest))
    per_element = _PER_ELEMENT.get(bare, _PER_ELEMENT.get(name, 1.0))
    made_once = max((one.numel() for one in outputs), default=made)
    described = as_class("pointwise", "pointwise", per_element * made_once, fusable=True)
    if len(inputs) > 1:
        return described
    return replace(described, counts=replace(described.counts, kind=f"{described.counts.kind} unary"))


#: Neither pointwise nor a reduction; their time follows no count of ours.
_OTHER = frozenset(
    {"sort", "topk", "unique2", "_unique2", "unique_consecutive", "nonzero", "histc", "bincount", "searchsorted"}
    | {"_fft_c2c", "_fft_r2c", "_fft_c2r", "linalg_inv_ex", "linalg_lu_factor_ex", "_linalg_svd", "_linalg_eigh"}
    | {"linalg_cholesky_ex", "linalg_qr", "multinomial", "_cdist_forward", "grid_sampler_2d", "lstm", "_cudnn_rnn"}
)


def _many(name: str, inputs: list[torch.Tensor], as_class: Callable[..., Described]) -> Described:
    """Return what a kernel over lists of tensors does: of an optimizer, or of torch._foreach_*."""
    elements = float(sum(one.numel() for one in inputs))
    optimizer = next((key for key in ("adamw", "adam", "sgd", "adagrad") if key in name), None)
    if optimizer is not None:
        # Weights, gradients and states alike; the FLOPs are counted by weight.
        lists = {"adam": 4, "adamw": 4, "sgd": 3, "adagrad": 3}[optimizer]
        return as_class("optimizer", "pointwise", _PER_ELEMENT_OPTIMIZER[optimizer] * elements / lists)
    flops = 0.0 if "copy" in name or "zero" in name else elements
    return as_class("pointwise", "pointwise", flops)


# -- bytes -----------------------------------------------------------------------------------------------


def nbytes(tensor: torch.Tensor) -> float:
    """Return the bytes of a tensor's distinct elements: a dimension that is expanded counts once."""
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return float(elements * tensor.element_size())


def _bytes(call: _Call) -> tuple[float, float]:
    """Return bytes read and written."""
    sparse = _sparse_bytes(call.name, call.args, call.inputs, call.outputs)
    if sparse is not None:
        return sparse
    written = _mutated(call)
    ids = {id(one) for one in written}
    write = sum(nbytes(one) for one in written) + sum(nbytes(one) for one in call.outputs if id(one) not in ids)
    overwrites = call.name in _OVERWRITES or call.func._overloadname == "out"
    read = {id(one): one for one in call.inputs if not (overwrites and id(one) in ids)}
    return sum(nbytes(one) for one in read.values()), write


def _mutated(call: _Call) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for position, argument in enumerate(call.func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = call.kwargs.get(argument.name, call.args[position] if position < len(call.args) else None)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _sparse_bytes(
    name: str, args: Sequence[Any], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> tuple[float, float] | None:
    """Return bytes read and written where only a part of an operand is touched; None for all others."""
    made = sum(nbytes(one) for one in outputs)
    if name in ("embedding", "index_select", "gather", "index", "take"):
        return made + sum(nbytes(one) for one in inputs[1:]), made  # the rows taken, and which
    if name in ("_embedding_bag", "_embedding_bag_forward_only"):
        table, picks = inputs[0], inputs[1]
        row = nbytes(table[:1]) if table.shape[0] else 0.0
        return picks.numel() * row + sum(nbytes(one) for one in inputs[1:]), made
    if name in (
        "embedding_dense_backward",
        "_embedding_bag_backward",
        "_embedding_bag_dense_backward",
        "slice_backward",
        "select_backward",
        "unfold_backward",
    ):
        taken = nbytes(inputs[0])
        return sum(nbytes(one) for one in inputs), made + taken  # zeros first, then what there is
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        picked = float(inputs[1].numel() * inputs[0].element_size())
        return picked + nbytes(inputs[1]), made
    if name in ("nll_loss_backward", "nll_loss2d_backward"):
        return nbytes(inputs[2]), made
    if name in ("index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_"):
        moved = sum(nbytes(one) for one in inputs[1:])
        values = nbytes(inputs[-1])
        adds = "add" in name or any(argument is True for argument in args[1:])
        return moved + (values if adds else 0.0), values
    return None


# -- links and collectives -------------------------------------------------------------------------------


def _link(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Described | None:
    """Return what a copy between host and device, or between devices, does; None where nothing crosses."""
    if name == "_local_scalar_dense":
        source = inputs[0]
        if source.device.type in ("cpu", "meta"):
            return None
        return Described("link", Counts("link", link_bytes={"d2h pageable": nbytes(source)}))
    if name not in ("copy_", "_to_copy", "_copy_from") or not inputs:
        return None
    source, target = (inputs[1], inputs[0]) if name == "copy_" and len(inputs) > 1 else (inputs[0], outputs[0])
    ends = source.device.type, target.device.type
    if ends[0] == ends[1] or "meta" in ends:
        return None
    host = source if ends[0] == "cpu" else target
    memory = "pinned" if host.is_pinned() else "pageable"
    direction = "h2d" if ends[0] == "cpu" else "d2h"
    return Described("link", Counts("link", link_bytes={f"{direction} {memory}": nbytes(source)}))


_COLLECTIVE_NAMES = {
    "all_reduce": ("allreduce", "all_reduce"),
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "send": ("send", "recv"),
}


def _collective(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Described | None:
    kind = next((kind for kind, words in _COLLECTIVE_NAMES.items() if any(word in name for word in words)), None)
    if kind is None:
        return None  # a wait, a barrier
    largest = max((nbytes(one) for one in (*inputs, *outputs)), default=0.0)
    return Described("collective", Counts("collective", collective_bytes={kind: largest}))


__all__ = ["CONTRACTIONS", "OPERATOR_CLASSES", "Described", "describe", "is_free", "matmul_shape", "nbytes"]
