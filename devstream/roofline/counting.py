"""Count what a function does, operation by operation: FLOPs, bytes, and where in the code it came from.

[Note: How a backward finds its line and module]
Autograd runs a backward without any Python frame of the user's. But each operation of the forward leaves a node
with a number, the operation is dispatched right after its node was made, and the engine tells which node it runs.
So the place of each forward operation is kept under that number, and looked up when the node runs.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import FrameSummary
from types import FrameType
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from devstream._compat import TorchDispatchMode, tree_leaves
from devstream._compat.autograd import (
    OpOverload,
    decomposed,
    next_sequence_number,
    running_sequence_number,
)
from devstream.roofline.formulas import Described, describe, is_free, nbytes

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Op:
    """One operation that ran.

    Attributes:
        index: its place in the order of issue.
        name: for instance ``aten.mm.default``.
        what: its class, counts, and whether it can be fused.
        module: the path of the innermost module (``GPT.blocks.0.fc1``); empty outside of all.
        line: the user's line, ``FILE:NUMBER``; of a backward that of its forward.
        backward: whether autograd ran it.
        reads: numbers of the storages that it reads.
        writes: numbers of the storages that it writes.
        made_bytes: size of the storages that it made.
    """

    index: int
    name: str
    what: Described
    module: str
    line: str
    backward: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    made_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that a forward operation made and that was alive when the backward began: saved for it, mostly."""

    storage: int
    size_bytes: float
    maker: int


@dataclass(slots=True)
class Counted:
    """What a run did.

    Attributes:
        ops: in the order of their issue.
        kept: alive at the begin of the backward, the largest first; empty without a backward.
        largest: the largest storage that was made: bytes, and the index of the operation.
        sizes: bytes of each storage, by its number.
    """

    ops: list[Op] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    largest: tuple[float, int] | None = None
    sizes: dict[int, float] = field(default_factory=dict)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """A context that counts every operation of its thread, and of the backwards that the thread starts.

    Args:
        around: makes a context that each operation runs in, from its index and its class.
    """

    def __init__(self, around: Callable[[int], AbstractContextManager[object]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = Counted()
        self._around = around or (lambda index: nullcontext())
        self._places: dict[int, tuple[str, str]] = {}
        self._storages: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._makers: dict[int, tuple[float, int]] = {}
        self._numbers = 0
        self._thread = threading.get_ident()
        #: Whether a backward ran so far.
        self.saw_backward = False
        #: Whether the function ran it, and not we.
        self.called_backward = True
        self._modules = _Modules()

    def __enter__(self) -> Self:
        self._modules.open()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: object) -> None:  # Any: as the protocol has it
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._modules.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        # In inference mode composite operations come here whole.
        with self:
            parts = decomposed(func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        index = len(self.counted.ops)
        if is_free(func):
            self._note_place()
            return func(*args, **kwargs)
        with self._around(index):
            out = func(*args, **kwargs)
        what = describe(func, args, kwargs, out)
        if what is None:
            self._note_place()
            return out
        self._add(str(func), what, (args, kwargs), out)
        return out

    def _add(self, name: str, what: Described, inputs: Any, out: Any) -> None:  # Any: what torch's operators take
        index = len(self.counted.ops)
        module, line, backward = self._note_place()
        reads = tuple(self._number(leaf, None) for leaf in tree_leaves(inputs) if _has_storage(leaf))
        before = self._numbers
        writes = tuple(self._number(leaf, index) for leaf in tree_leaves(out) if _has_storage(leaf))
        fresh = [self._makers[number][0] for number in set(writes) if number >= before]
        made, largest = sum(fresh), max(fresh, default=0.0)
        if largest and (self.counted.largest is None or largest > self.counted.largest[0]):
            self.counted.largest = (largest, index)
        self.counted.ops.append(Op(index, name, what, module, line, backward, reads, writes, made))

    def _note_place(self) -> tuple[str, str, bool]:
        """Return module, line and whether this is a backward; keep the place of a forward for its backward."""
        running = running_sequence_number()
        if running is None:
            return (*self._placed(self._modules.current(), user_line()), False)
        if not self.saw_backward:
            self.saw_backward = True
            self._keep()
        module, line = self._places.get(running, ("", ""))
        # A backward in Python (of a torch.autograd.Function) has a line of its own.
        line = user_line(in_backward=True) or line
        if self._modules.current():
            # A forward inside of a backward: checkpointing computes it again. Nodes that it makes are numbered by
            # their thread; those of an engine's own thread would be taken for others of the forward's.
            if threading.get_ident() == self._thread:
                self._placed(self._modules.current(), line)
            return self._modules.current(), line, True
        return module, line, True

    def _placed(self, module: str, line: str) -> tuple[str, str]:
        # The node of this operation, if it has one, is the last that was made. If it has none, that one belongs to
        # an operation before it, which has been here already.
        self._places.setdefault(next_sequence_number() - 1, (module, line))
        return module, line

    def _number(self, tensor: torch.Tensor, maker: int | None) -> int:
        storage = tensor.untyped_storage()
        number = self._storages.get(storage)
        if number is None:
            number = self._storages[storage] = self._numbers
            self._numbers += 1
            # The whole storage: views hold on to all of it.
            size = float(storage.nbytes()) if tensor.device.type != "meta" else nbytes(tensor)
            self.counted.sizes[number] = size
            self._makers[number] = (size, -1 if maker is None else maker)
        return number

    def _keep(self) -> None:
        alive = set(self._storages.values())
        made = [Kept(number, size, maker) for number, (size, maker) in self._makers.items() if maker >= 0]
        self.counted.kept = sorted((one for one in made if one.storage in alive), key=lambda one: -one.size_bytes)


def _has_storage(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


class _Modules:
    """The path of the module whose forward runs, by hooks on all modules."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._hooks: list[Any] = []  # Any: torch's handles

    def open(self) -> None:
        # The mode is entered again around parts of composite operations; the hooks are there already.
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth == 1:
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]

    def close(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def current(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: torch.nn.Module, args: Any) -> None:  # Any: whatever a module takes
        name = self._names.get(id(module))
        if not self._stack:
            # A root: it names everything below it.
            root = type(getattr(module, "_orig_mod", module)).__name__  # a compiled module has its own class
            self._names = {id(below): f"{root}.{path}" if path else root for path, below in module.named_modules()}
            name = root
        elif name is None:
            name = f"{self._stack[-1]}.{type(module).__name__}"
        self._stack.append(name.replace("._orig_mod", ""))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()


def user_line(*, in_backward: bool = False) -> str:
    """Return the innermost line that belongs to neither torch, this package nor Python's library; or ``""``.

    Args:
        in_backward: look no further out than the call that started the backward.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if in_backward and file.endswith(("autograd/graph.py", "autograd\\graph.py")):
            return ""
        if not _is_foreign(file):
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_line_of(frames: Sequence[FrameSummary]) -> str:
    """Return the innermost line of a traceback that is the user's; or ``""``."""
    return next(
        (f"{_short(one.filename)}:{one.lineno}" for one in reversed(frames) if not _is_foreign(one.filename)), ""
    )


def _is_foreign(file: str) -> bool:
    if file.startswith((_TORCH, _HERE, "<")):
        return True
    return file.startswith(_LIBRARY) and not file.startswith(_PACKAGES)


def _short(file: str) -> str:
    try:
        below = os.path.relpath(file)
    except ValueError:  # another drive
        return file
    return file if below.startswith("..") else below


# -- running ---------------------------------------------------------------------------------------------


def run_backward(out: Any) -> None:  # Any: whatever a function returns
    """Run the backward of every tensor in *out* that has one; gradients of leaves are as before afterwards."""
    roots = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    if roots:
        with _gradients_kept(roots):
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


@contextmanager
def _gradients_kept(roots: list[torch.Tensor]) -> Iterator[None]:
    leaves: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    left: list[Any] = [root.grad_fn for root in roots]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        left += [after for after, _ in node.next_functions]
    before = [(leaf, leaf.grad) for leaf in leaves.values()]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def count(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Counted:  # Any: whatever they are
    """Run *function* once and return what it did; compiled code runs uncompiled meanwhile.

    The backward of what it returns is run and counted too, unless the function has run one itself. Works on any
    device, and with tensors on ``meta``: nothing is computed there, and everything is counted.
    """
    return count_with(Counter(), function, *args, **kwargs)


def count_with(counter: Counter, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Counted:
    """Do as `count`, with a counter of one's own."""  # Any: the same
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"), counter:
        # Compiled modules warn of hooks on all modules; ours only look.
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        out = function(*args, **kwargs)
        if not counter.saw_backward:
            counter.called_backward = False
            run_backward(out)
    return counter.counted


__all__ = ["Counted", "Counter", "Kept", "Op", "count", "count_with", "run_backward", "user_line", "user_line_of"]
