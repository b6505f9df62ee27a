"""Which of its arguments and results an operation of torch reads and writes, told from its schema."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

import torch

Tensors: TypeAlias = list[torch.Tensor]

#: They look at their argument's shape only, whatever the schema says.
_SHAPE_ONLY = {
    "aten::_has_same_storage_numel",
    "aten::_resize_output_",
    "aten::_unsafe_view",
    "_c10d_functional::_wrap_tensor_autograd",
    "aten::copy_sparse_to_sparse_",
    "aten::data",
    "aten::detach_",
    "aten::equal_shape",
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::record_stream",
    "aten::requires_grad_",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::squeeze_",
    "aten::sym_numel",
    "aten::sym_size",
    "aten::sym_storage_offset",
    "aten::sym_stride",
    "aten::t_",
    "aten::transpose_",
    "aten::unsqueeze_",
    "aten::as_strided_",
}
#: They need their result on the host, so they wait for the current stream.
_HOST_WAITS = {
    "aten::_local_scalar_dense",
    "aten::_unique",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
#: Their results are new memory that nobody has written.
_UNWRITTEN = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


#: Arguments that they write although the schema is silent about it: the running statistics.
_SILENT_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
#: The schemas of collectives don't say what is written: the first argument, except in these.
_ONLY_READ = {"c10d::send"}
_TOUCH_NOTHING = {"c10d::barrier", "c10d::monitored_barrier_"}


class Kind(Enum):
    """What else there is to an operation."""

    PLAIN = auto()
    COPY = auto()  #: between two tensors, perhaps of host and device
    RECORD_STREAM = auto()
    COLLECTIVE = auto()
    HIGHER_ORDER = auto()  #: of functions
    WAIT_TENSOR = auto()  #: the wait of a functional collective


@dataclass(frozen=True, slots=True)
class Plan:
    """What one operation does with its arguments.

    Attributes:
        name: for people.
        reads, writes: positions of arguments; an argument may be a tensor or a list of them.
        names: the argument's name at each position, since it may come by keyword.
        results: whether there are results that are neither views nor arguments, and so are written.
        unwritten: whether these are left unwritten all the same.
        host_waits: whether the host waits for the operation.
        nothing: whether there is nothing to note.
    """

    name: str
    kind: Kind
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    names: tuple[str, ...]
    results: bool
    unwritten: bool
    host_waits: bool
    nothing: bool


def plan(operation: Any) -> Plan:  # Any: torch's OpOverload, a private class
    """Return what *operation* does."""
    schema = getattr(operation, "_schema", None)
    if schema is None:  # a higher-order one, such as cond: it touches nothing itself
        return Plan(str(operation), Kind.HIGHER_ORDER, (), (), (), False, False, False, nothing=True)
    full, name = schema.name, schema.name.removeprefix("aten::").replace("::", ".")
    like = name.endswith("_like") or name.startswith("new_")
    reads, writes = [], []
    for at, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type) or full in _SHAPE_ONLY:
            continue
        alias = argument.alias_info
        if alias is not None:
            if alias.is_write:
                writes.append(at)
        elif not like:
            reads.append(at)
    # A result that is an argument, or a view of one, is no new memory.
    results = full not in _SHAPE_ONLY and any(
        one.alias_info is None and "Tensor" in str(one.type) for one in schema.returns
    )
    silent: tuple[int, ...] = _SILENT_WRITES.get(full, ())
    if full.startswith("c10d::"):
        results = False
        silent = () if full in _ONLY_READ | _TOUCH_NOTHING else (0,)
        if full in _TOUCH_NOTHING:
            reads = []
    reads = [at for at in reads if at not in silent]
    writes = sorted({*writes, *silent})
    kind = Kind.PLAIN
    if full in ("aten::copy_", "aten::_to_copy"):
        kind = Kind.COPY
    elif full == "aten::record_stream":
        kind = Kind.RECORD_STREAM
    elif full == "_c10d_functional::wait_tensor":
        kind = Kind.WAIT_TENSOR
    elif full.startswith(("c10d::", "_c10d_functional::")) and full not in _SHAPE_ONLY:
        kind = Kind.COLLECTIVE
    host_waits = full in _HOST_WAITS
    return Plan(
        name=name,
        kind=kind,
        reads=tuple(reads),
        writes=tuple(writes),
        names=tuple(argument.name for argument in schema.arguments),
        results=results,
        unwritten=full in _UNWRITTEN,
        host_waits=host_waits,
        nothing=kind is Kind.PLAIN and not (reads or writes or results or host_waits),
    )


def flat(value: object, found: Tensors) -> None:
    """Add the tensors of an argument, which may be a list of lists of them, to *found*."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            flat(one, found)


__all__ = ["Kind", "Plan", "Tensors", "flat", "plan"]
