"""``torch.compile(fn, backend="devstream")``: stream code that means what it means in eager.

The way of a graph: `capture` takes the stream code out; AOT Autograd and Inductor's passes see a pure graph whose
edges between streams are sealed (`_joint`); forward and backward become plain data (`_lower`), from which the
order, the regions and the program are derived and proved (`_build`, `_proof`); each region is compiled alone
(`_regions`); a short function runs them (`_emit`, `_run`).
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any  # Any: values of a graph are of every type

import torch

from devstream import _streams
from devstream._compat import inductor, rng
from devstream.abc import AnyBackend
from devstream.compiler import _joint
from devstream.compiler._build import build
from devstream.compiler._capture import capture
from devstream.compiler._captured import AMBIENT, Captured
from devstream.compiler._emit import Plan
from devstream.compiler._kept import keep_saved
from devstream.compiler._listing import listing
from devstream.compiler._lower import Lowered, Queues, Saved, in_turn, lower
from devstream.compiler._missing import missing
from devstream.compiler._nodes import line_of
from devstream.compiler._options import Options, parse
from devstream.compiler._program import Program, Work, WorkKind
from devstream.compiler._proof import prove
from devstream.compiler._regions import Compiled, Regions
from devstream.compiler._replay import Graphs, Limits, Replayed
from devstream.compiler._resolve import Resolver, adopted, pattern, resolve
from devstream.compiler._run import Runner, entered
from devstream.exceptions import MissingWaitError, MissingWaitWarning, UnsupportedError, warning

log = logging.getLogger("devstream.compiler")

#: Called with each program that is compiled: its name and itself.
watchers: list[Callable[[str, Program], None]] = []

#: How many calls' queues a function remembers the variant of.
_KNOWN = 256


def backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's; ``torch.compile(backend="devstream")`` calls this.

    Args:
        graph_module: what was traced.
        example_inputs: the arguments of the call that is traced.
        mode: as for Inductor.
        options: `Options`, and any of Inductor's.

    Raises:
        ValueError: an option is unknown or has a wrong value.
        UnsupportedError: the graph holds stream code that can't be compiled.
        WriteBackError: an input's change can't be written back where the user's events want it.
        MissingWaitError: eager mode would miss a wait, and ``options={"missing_waits": "error"}``.
        ProofError: the program could race. It is never run; please report it.
    """
    chosen = parse(mode, options)
    captured = capture(graph_module)
    if not captured.has_streams:
        return inductor.stream_free(graph_module, example_inputs, dict(chosen.inductor))  # type: ignore[no-any-return]
    return Function(graph_module, captured, example_inputs, chosen)


class Function:
    """One compiled function: a variant for each way in which its names of streams are the same queues."""

    def __init__(
        self, module: torch.fx.GraphModule, captured: Captured, example_inputs: Sequence[Any], options: Options
    ) -> None:
        self.module, self.options = module, options
        self.mode = inductor.fake_mode(example_inputs)
        self.resolver = Resolver(captured.streams)
        self.captured = captured
        self.lock = threading.Lock()
        serving, streams = adopted(captured_examples(captured))
        first = _Variant(captured, serving, streams, options)
        self.variants = {self._key(serving, streams, captured.queues): first}
        #: The variant for these very queues, found without a look at which of them are the same.
        self.known: dict[tuple[Any, ...], _Variant] = {}

    def _key(self, serving: AnyBackend, streams: Sequence[Any], queues: tuple[int, ...]) -> tuple[Any, ...]:
        return (serving, serving.current_index(), queues, tuple(map(serving.stream_index, streams)))

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Run one call of it."""
        named, natives = self.resolver.streams(arguments, self.captured.events)
        serving, streams = adopted(named)
        here = serving.current_stream(None)
        keys = (serving, *map(serving.stream_key, (here, *streams)))
        variant = self.known.get(keys) or self._find(keys, serving, streams)
        call = resolve(variant.captured, streams, natives, arguments)

        def value(source: int | str) -> Any:
            return arguments[source] if isinstance(source, int) else call.handles[int(source.split()[1])]

        with entered((here, *call.streams[1:]), call.events):
            found = variant.run(*map(value, variant.captured.inputs))
        for number, stream in variant.record_streams:
            tensor = found[number] if number >= 0 else value(variant.captured.inputs[-1 - number])
            _streams.record_stream(tensor, here if stream == AMBIENT else call.streams[stream])
        return tuple(found[one] if isinstance(one, int) else value(one) for one in variant.captured.outputs)

    def _find(self, keys: tuple[Any, ...], serving: AnyBackend, streams: Sequence[Any]) -> _Variant:
        queues = pattern(serving, streams, self.captured.streams)
        key = self._key(serving, streams, queues)
        variant = self.variants.get(key)
        if variant is None:
            with self.lock:
                variant = self.variants.get(key) or self._another(key, queues, serving, streams)
        if len(self.known) >= _KNOWN:  # a function that makes its streams has new ones in each call
            self.known.clear()
        self.known[keys] = variant
        return variant

    def _another(
        self, key: tuple[Any, ...], queues: tuple[int, ...], serving: AnyBackend, streams: Sequence[Any]
    ) -> _Variant:
        with inductor.anew(self.mode):
            captured = capture(self.module, queues)
            self.variants[key] = _Variant(captured, serving, streams, self.options)
        return self.variants[key]


def captured_examples(captured: Captured) -> list[Any]:
    """Return the streams of the call that is traced now, by name."""
    from devstream._compat import dynamo_graph  # noqa: PLC0415 - imports Dynamo

    return dynamo_graph.take([source.slot for source in captured.streams[1:]])


def queues_of(captured: Captured, backend: AnyBackend, streams: Sequence[Any]) -> Queues:
    """Return devices and names of the queues of *captured*, whose names are these *streams* of *backend* now."""

    def device(index: int) -> str:
        return backend.device_type if backend.device_type == "cpu" else f"{backend.device_type}:{index}"

    count = max(captured.queues) + 1
    devices = [device(backend.current_index())] * count
    names = ["current"] + [""] * (count - 1)
    for number, source, stream in zip(captured.queues[1:], captured.streams[1:], streams, strict=True):
        if number != AMBIENT and not names[number]:
            devices[number] = device(backend.stream_index(stream))
            names[number] = (
                source.call or source.line.rpartition("/")[2].partition(" in ")[0] or f"stream {number}"
            )
    return Queues(tuple(devices), tuple(names))


class _Variant:
    """One compilation, valid for one pattern of queues."""

    def __init__(self, captured: Captured, serving: AnyBackend, streams: Sequence[Any], options: Options) -> None:
        self.captured, self.options = captured, options
        self.backend: AnyBackend = serving
        self.queues = queues_of(captured, serving, streams)
        self.record_streams = self._record_streams()
        self.operations = [one for one in captured.operations if one.kind not in ("record_stream", "free")]
        self._check_operations()
        self.visible = frozenset(
            number
            for number, source in enumerate(captured.events)
            if source.make is None or f"event {number}" in captured.outputs
        )
        self.saved = Saved()
        limits = Limits(options.graph_sizes, options.graph_calls)
        self.graphs = Graphs(limits) if options.graphs else None
        self.repeated: list[dict[str, Any]] = []
        # Fakes, since a variant may be compiled in a later call, and no call's tensors may live that long.
        inputs = [node.meta["example_value"] for node in captured.module.graph.nodes if node.op == "placeholder"]
        self.run = inductor.aot(
            captured.module, inputs, inner=self._inner, joint=_joint.prepare, options=options.beside_streams()
        )

    def _record_streams(self) -> list[tuple[int, int]]:
        """Let the tensors of each record_stream leave the graph; return their outputs with the stream."""
        graph = self.captured.module.graph
        output = graph.output_node()
        results: Any = output.args[0]
        kept = list(results)
        nodes = {node.name: node for node in graph.nodes}
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        found = []
        for one in self.captured.operations:
            if one.kind != "record_stream":
                continue
            if one.graph:
                raise self._unsupported(f"record_stream inside checkpoint or autograd.Function ({one.line})")
            assert one.tensor is not None
            assert one.stream is not None
            node = nodes[one.tensor]
            if node in inputs:
                found.append((-1 - inputs.index(node), one.stream))
            else:
                found.append((len(kept), one.stream))
                kept.append(node)
        if len(kept) > len(results):
            output.args = (tuple(kept),)
            self.captured.module.recompile()
        return found

    def _check_operations(self) -> None:
        late = [one for one in self.operations if one.backward and one.kind != "wait_stream"]
        if late:
            raise self._unsupported(
                f"{late[0].kind} in the backward of an autograd.Function ({late[0].line})",
                "leave it out: what the backward reads is ordered by itself",
            )
        self.operations = [one for one in self.operations if not one.backward]

    def _unsupported(self, operation: str, alternative: str = "move it out of the compiled function") -> Exception:
        return UnsupportedError(
            operation=operation,
            backend="devstream's compiler",
            capability="a place for it in a program",
            alternative=alternative,
        )

    # -- one half ----------------------------------------------------------------------------------------

    def _inner(
        self, module: torch.fx.GraphModule, example_inputs: Sequence[Any], **given: Any
    ) -> Runner | Replayed:
        backward, inference = bool(given.get("is_backward")), bool(given.get("is_inference"))
        rng.take_apart(module.graph, self.repeated)
        _joint.assign(module.graph)
        token = _joint.take_token(module.graph)
        _joint.unseal(module.graph)
        name = "backward" if backward else "inference" if inference else "forward"
        facts = None if backward else inductor.ForwardFacts()
        if facts is not None and facts.returns is not None and not inference:
            keep_saved(module, returns=facts.returns, outside=facts.outside)
        module.graph.lint()
        module.recompile()
        lowered = lower(
            module,
            self.queues,
            name=name,
            token=token,
            operations=() if backward else self.operations,
            visible=self.visible,
            returns=facts.returns if facts is not None and not inference else None,
            outside=facts.outside if facts is not None else (),
            saved=self.saved,
            backward=backward,
            cost=self.options.cost,
        )
        if not backward:
            self._tell_missing(lowered)
        graph = in_turn(lowered) if self.backend.works_in_threads else lowered.graph
        program = build(graph, delay_us=self.options.delay_us)
        if self.options.seen is not None:
            self.options.seen(program)
        prove(program)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", listing(program))
        for watcher in watchers:
            watcher(name, program)
        static = frozenset(lowered.parameters[number] for number in given.get("static_input_idxs", ()))
        regions = Regions(
            lowered,
            use_inductor=self.options.regions == "inductor",
            backward=backward,
            inference=inference,
            static=static,
            options=self.options.beside_streams(),
        )
        plan = self._plan(lowered, program, regions, token)
        runner = Runner(plan, self.backend, ambient=lowered.ambient, backward=backward)
        if self.graphs is None:
            return runner
        returned = None if facts is None or inference else facts.returns
        return Replayed(
            runner,
            self.graphs,
            static=static,
            random=lowered.random,
            returned=returned,
            obstacle=self._drawn_by_the_host(lowered),
        )

    def _drawn_by_the_host(self, lowered: Lowered) -> str | None:
        """Say why regions that run node by node can't be captured; None where they can."""
        if self.options.regions == "inductor" or self.backend.works_in_threads:
            return None  # on the CPU a replay runs the host's code again
        drawn = next((node for node in lowered.nodes.values() if inductor.draws_from_seed(node)), None)
        if drawn is None:
            return None
        line = line_of(drawn)
        return f"with regions='eager' the host draws its random numbers{f' ({line})' if line else ''}"

    def _plan(self, lowered: Lowered, program: Program, regions: Regions, token: str | None) -> Plan:
        code: dict[int, Compiled] = {
            number: regions.compile(step)
            for number, step in enumerate(program.steps)
            if isinstance(step, Work) and step.kind is not WorkKind.WRITE_BACK
        }
        sizes = [lowered.nodes[value] for kind, value in lowered.results if kind == "number"]
        return Plan(
            program=program,
            code=code,
            parameters=lowered.parameters,
            results=lowered.results,
            user_events=len(self.captured.events),
            threads=self.backend.works_in_threads,
            token=token,
            numbers=regions.numbers(list(dict.fromkeys(sizes))) if sizes else None,
        )

    def _tell_missing(self, lowered: Lowered) -> None:
        if self.options.missing_waits == "ignore":
            return
        added = {name for name, node in lowered.nodes.items() if _joint.is_seeds(node)}
        found = [one for one in missing(lowered.graph) if one.sure and one.first not in added]
        if found and self.options.missing_waits == "error":
            raise MissingWaitError(waits=[str(one) for one in found])
        for one in found:
            said = warning(MissingWaitWarning, wait=str(one))
            file, _, line = (one.second_line or one.first_line).rpartition(":")
            if line.isdigit():
                warnings.warn_explicit(said, None, file, int(line))
            else:
                warnings.warn(said, stacklevel=2)


__all__ = ["Function", "backend", "captured_examples", "log", "queues_of", "watchers"]
