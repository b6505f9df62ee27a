"""AOT Autograd and Inductor, as the compiler uses them. Imports Inductor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any  # Any: Inductor's types are private

import torch
from torch._functorch import config as _functorch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as _config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from devstream._compat.inductor_patterns import Patterns, when_needed

#: Options of Inductor by name, as ``torch.compile(options=...)`` takes them.
known_options: Callable[[], dict[str, Any]] = _config.get_config_copy

#: Taken while one thread has changed torch's settings, which are the process's.
_lock = threading.RLock()


class _JointPass(CustomGraphPass):
    """Runs a function of ours on the joint graph, then what the user has set."""

    def __init__(
        self, function: Callable[[torch.fx.Graph], None], after: Any, matcher: bool, patterns: Patterns
    ) -> None:
        self._function, self._after, self._matcher, self._patterns = function, after, matcher, patterns
        self._thread = threading.get_ident()

    def __call__(self, graph: torch.fx.Graph) -> None:
        # On torch 2.11 the settings are the process's: another thread's graph may come by, which is none of ours.
        ours = threading.get_ident() == self._thread
        if ours:
            self._function(graph)
        for one in self._after if isinstance(self._after, list | tuple) else [self._after]:
            if one is not None:
                one(graph)
        # Behind the seals patterns are safe again; `aot` had turned them off for the passes before.
        if ours:
            self._patterns.make(graph)
            _config.pattern_matcher = self._matcher

    def uuid(self) -> None:
        """Say that no cache may hold what this pass has seen."""
        return


def stream_free(module: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """Compile a graph without stream code as ``torch.compile`` does."""
    return compile_fx(module, inputs, config_patches=options or None)


def aot(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    inner: Callable[..., Any],
    joint: Callable[[torch.fx.Graph], None],
    options: dict[str, Any],
) -> Callable[..., Any]:
    """Compile *module*; *joint* sees the joint graph before Inductor's passes, *inner* each half behind them.

    Patterns before the joint graph are off: they know nothing of streams. So is the cache of AOT Autograd, whose
    key doesn't know them either.
    """
    with _lock, _config.patch(options), when_needed() as patterns:
        ours = _JointPass(joint, _config.joint_custom_pre_pass, _config.pattern_matcher, patterns)
        settings = {"pattern_matcher": False, "joint_custom_pre_pass": ours}
        with _functorch.patch(enable_autograd_cache=False), _config.patch(settings):
            compiled: Any = compile_fx(module, inputs, inner_compile=inner)
    function: Callable[..., Any] = compiled
    return function


def region(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    backward: bool,
    inference: bool,
    static: Sequence[int],
    options: dict[str, Any],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile one region with Inductor alone; each output keeps the strides that it has in the graph."""
    mode = fake_mode(inputs)
    module.graph.output_node().meta["user_visible_output_idxs"] = list(range(len(outputs_of(module))))
    with ExitStack() as stack:
        # A context of its own, or it would tell the outer one about strides of outputs.
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(_plain(options))
        compiled: Any = compile_fx_inner(
            module,
            list(inputs),
            static_input_idxs=list(static),
            cudagraphs=BoxedBool(False),
            is_backward=backward,
            is_inference=inference,
        )
    # Without the bookkeeping around it, which the program does once for all regions.
    code: Callable[[list[Any]], Sequence[Any]] = getattr(compiled, "current_callable", None) or compiled
    return code


def _plain(options: dict[str, Any]) -> AbstractContextManager[None]:
    """Return Inductor's settings for a region: the user's, and none of `aot`."""
    ours = _config.joint_custom_pre_pass
    settings: dict[str, Any] = {"triton.cudagraphs": False, **options}
    if isinstance(ours, _JointPass):
        settings |= {"joint_custom_pre_pass": ours._after, "pattern_matcher": ours._matcher}
    return _config.patch(settings)  # type: ignore[no-any-return]


def draws_from_seed(node: torch.fx.Node) -> bool:
    """Say whether *node* makes random numbers from one of a graph's seeds."""
    name = str(node.target) if node.op == "call_function" else ""
    return "inductor_randint" in name or "inductor_random" in name


def draw_from_seeds(module: torch.fx.GraphModule) -> None:
    """Let a graph that runs node by node draw from its seeds, as Inductor's kernels do.

    Inductor's own definition for eager mode looks at no seed, so a recomputed node would draw something else.
    """
    changed = False
    for node in module.graph.nodes:
        if draws_from_seed(node):
            node.target = _randint if "inductor_randint" in str(node.target) else _random
            changed = True
    if changed:
        module.recompile()


def _generator(seed: torch.Tensor) -> torch.Generator:
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed))
    return generator


def _random(size: Sequence[int], seed: torch.Tensor, mode: str, *, offset: int = 0) -> torch.Tensor:
    draw = torch.rand if mode == "rand" else torch.randn
    made: torch.Tensor = draw(list(size), device=seed.device, generator=_generator(seed))
    return made


def _randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    return torch.randint(low, high, list(size), device=seed.device, generator=_generator(seed))


def outputs_of(module: torch.fx.GraphModule) -> tuple[Any, ...]:
    """Return the arguments of the output node."""
    found: Any = module.graph.output_node().args[0]
    return tuple(found)


def fake_mode(values: Sequence[Any] = ()) -> Any:
    """Return the mode that fake tensors of this compilation have."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    return detect_fake_mode(list(values))


def mode_of(value: Any) -> Any:
    """Return the mode of a fake tensor, None for any other value."""
    return detect_fake_mode([value])


def anew(mode: Any) -> AbstractContextManager[Any]:
    """Return a context in which a graph that Dynamo traced before can be compiled again."""
    return tracing(TracingContext(mode))


@contextmanager
def faked() -> Iterator[Callable[[Any], Any]]:
    """Let operators run on fake tensors of fixed sizes; yield what makes one of a real one."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    with mode, shapes.ignore_fresh_unbacked_symbols():
        yield lambda value: mode.from_tensor(value, static_shapes=True)


def both_halves() -> AbstractContextManager[Any]:
    """Return a context in which a backward is compiled with its forward, not when it is first called."""
    context: AbstractContextManager[Any] = _functorch.patch(force_non_lazy_backward_lowering=True)
    return context


def mode_options(mode: str | None) -> dict[str, Any]:
    """Return what *mode* of ``torch.compile`` sets.

    Raises:
        ValueError: there is no such mode.
    """
    if mode in (None, "default"):
        return {}
    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    if mode not in modes:
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(sorted(modes))}")
    return dict(modes[mode])


class ForwardFacts:
    """What AOT Autograd says about the graph that it hands over now.

    Attributes:
        returns: how many outputs of the forward graph are not saved values.
        outside: for each of its first outputs, the number of the input that AOT writes it back to.
    """

    def __init__(self) -> None:
        context = TracingContext.try_get()
        metadata: Any = None if context is None else context.fw_metadata
        self.returns: int | None = None if metadata is None else int(metadata.num_forward_returns)
        self.outside: tuple[int, ...] = () if metadata is None else tuple(metadata.mutated_inp_runtime_indices)


__all__ = [
    "ForwardFacts",
    "anew",
    "aot",
    "both_halves",
    "draw_from_seeds",
    "draws_from_seed",
    "fake_mode",
    "faked",
    "known_options",
    "mode_of",
    "mode_options",
    "outputs_of",
    "region",
    "stream_free",
]
