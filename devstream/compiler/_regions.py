"""The code of a program's steps: the nodes of each taken out of the graph, and compiled alone.

[Note: Sizes]
A size is a number of the host. A region works out for itself the sizes that it needs, from those that the graph is
given; so no step waits for another only because of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias  # Any: arguments and values of nodes

import torch

from devstream._compat import inductor
from devstream.compiler._joint import is_number
from devstream.compiler._lower import GENERATOR, Lowered
from devstream.compiler._nodes import unsupported
from devstream.compiler._program import Work, WorkKind

#: Takes a list of arguments, which it empties, and returns its results.
Code: TypeAlias = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The code of one step: what it takes, by name, values first and then sizes; what it gives."""

    code: Code
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Regions:
    """Takes the steps of one program out of its graph.

    Args:
        lowered: the graph.
        inductor: compile regions with Inductor; else they run node by node.
        backward: it is a backward.
        inference: it has none.
        static: names of inputs whose memory stays where it is, such as parameters.
        options: the user's settings of Inductor.
    """

    def __init__(
        self,
        lowered: Lowered,
        *,
        use_inductor: bool,
        backward: bool,
        inference: bool,
        static: frozenset[str],
        options: dict[str, Any],
    ) -> None:
        self.lowered, self.use_inductor = lowered, use_inductor
        self.backward, self.inference, self.static, self.options = backward, inference, static, options
        self.symbols: dict[Any, torch.fx.Node] = {}
        for node in lowered.nodes.values():
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.SymInt):
                self.symbols.setdefault(value.node.expr, node)

    def compile(self, work: Work) -> Compiled:
        """Return the code of *work*, a region or a single operation."""
        root: Any = next(iter(self.lowered.nodes.values())).graph.owning_module
        draft = _Draft(self.lowered.nodes, self.symbols, [name for name in work.inputs if name != GENERATOR])
        for name in work.nodes:
            draft.copy(self.lowered.nodes[name])
        module = draft.module(root, work.outputs)
        inputs = tuple(node.name for node in draft.taken)
        if work.kind is not WorkKind.REGION or not self.use_inductor:
            inductor.draw_from_seeds(module)
            return Compiled(_boxed(module), inputs, work.outputs)
        fakes = [node.meta["val"] for node in draft.taken]
        made = {name for other in self.lowered.graph.nodes for name in other.makes}
        static = [number for number, name in enumerate(inputs) if name in self.static or name in made]
        code = inductor.region(
            module,
            fakes,
            backward=self.backward,
            inference=self.inference,
            static=static,
            options=self.options,
        )
        return Compiled(code, inputs, work.outputs)

    def numbers(self, wanted: Sequence[torch.fx.Node]) -> Compiled:
        """Return code for sizes that leave the graph."""
        root: Any = next(iter(self.lowered.nodes.values())).graph.owning_module
        draft = _Draft(self.lowered.nodes, self.symbols, ())
        for node in wanted:
            draft.number(node, node)
        module = draft.module(root, [node.name for node in wanted])
        return Compiled(
            _boxed(module), tuple(node.name for node in draft.taken), tuple(node.name for node in wanted)
        )


class _Draft:
    """One subgraph in the making."""

    def __init__(
        self, nodes: dict[str, torch.fx.Node], symbols: dict[Any, torch.fx.Node], inputs: Sequence[str]
    ) -> None:
        self.nodes, self.symbols = nodes, symbols
        self.graph = torch.fx.Graph()
        self.copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.taken: list[torch.fx.Node] = []
        self.last: torch.fx.Node | None = None
        self.seen: set[Any] = set()
        for name in inputs:
            self._take(nodes[name])

    def _take(self, node: torch.fx.Node) -> torch.fx.Node:
        """Make *node* an input."""
        if node in self.copies:
            return self.copies[node]
        # In front of all operations, behind the inputs before it.
        here = self.graph.inserting_before(None) if self.last is None else self.graph.inserting_after(self.last)
        with here:
            self.last = self.graph.placeholder(node.name)
        self.last.meta = dict(node.meta)
        self.copies[node] = self.last
        self.taken.append(node)
        self._bind(node.meta.get("val"))
        return self.last

    def _bind(self, value: Any) -> None:
        """Take in the sizes that a value's shape is made of."""
        for symbol in _symbols(value) - self.seen:
            self.seen.add(symbol)
            if symbol in self.symbols:
                self._take(self.symbols[symbol])

    def copy(self, node: torch.fx.Node) -> None:
        """Add *node*, an operation, whose values are there."""
        if node in self.copies:
            return
        for other in node.all_input_nodes:
            if other in self.copies:
                continue
            if other.op == "get_attr":
                self.copies[other] = self.graph.node_copy(other)
            elif is_number(other):
                self.number(other, node)
            else:
                raise AssertionError(f"{node.name} reads {other.name}, which its step is not given")
        self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        self.copies[node].meta = dict(node.meta)
        for value in _leaves(node.meta.get("val")):
            self._bind(value)

    def number(self, node: torch.fx.Node, user: torch.fx.Node) -> None:
        """Add a size: [Note: Sizes]."""
        if node in self.copies:
            return
        if node.op == "placeholder":
            self._take(node)
            return
        if all(is_number(other) for other in node.all_input_nodes) and node.all_input_nodes:
            for other in node.all_input_nodes:
                self.number(other, user)
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
            self.copies[node].meta = dict(node.meta)
            return
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            raise unsupported(
                f"{node.name}, a number read from a tensor", user, "a host that may wait inside a graph"
            )
        from torch.utils._sympy.interp import sympy_interp  # noqa: PLC0415 - torch's symbols, where there are some
        from torch.utils._sympy.reference import PythonReferenceAnalysis  # noqa: PLC0415

        expression = value.node.expr
        missing = _symbols(value) - self.symbols.keys()
        if missing:
            raise unsupported(f"the size {expression}, which depends on data", user, "a place where it is known")
        tracer = torch.fx.proxy.GraphAppendingTracer(self.graph)
        given = {one: torch.fx.Proxy(self._take(self.symbols[one]), tracer) for one in _symbols(value)}
        found: Any = sympy_interp(PythonReferenceAnalysis, given, expression)
        if isinstance(found, torch.fx.Proxy):
            found.node.meta["val"] = value
            self.copies[node] = found.node
        else:
            self.copies[node] = found

    def module(self, root: Any, outputs: Sequence[str]) -> torch.fx.GraphModule:
        """Return the subgraph as a module."""
        output = self.graph.output(tuple(self.copies[self.nodes[name]] for name in outputs))
        output.meta["val"] = tuple(self.nodes[name].meta.get("val") for name in outputs)
        self.graph.lint()
        return torch.fx.GraphModule(root, self.graph)


def _boxed(module: torch.fx.GraphModule) -> Code:
    run = module.forward

    def code(args: list[Any]) -> Sequence[Any]:
        given = tuple(args)
        args.clear()
        with torch.no_grad():
            results: Sequence[Any] = run(*given)
        return results

    return code


def _symbols(value: Any) -> set[Any]:
    from torch.fx.experimental.symbolic_shapes import free_symbols  # noqa: PLC0415 - needs sympy

    if isinstance(value, torch.Tensor | torch.SymInt):
        return set(free_symbols(value))
    return set()


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


__all__ = ["Code", "Compiled", "Regions"]
