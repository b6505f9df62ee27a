"""What the compiler makes of a function, without running it: its graphs and its programs.

[Note: Looking leaves nothing behind]
Dynamo keeps what it traced beside the code that it traced, and counts how often. So a function is looked at
through a caller whose code is new each time, into which it is inlined. Where the compiled code would start, an
exception of ours ends the call; nothing of it has run by then.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn  # Any: arguments of a function of the user's

import torch

from devstream._compat import dynamo_graph, inductor
from devstream.compiler._capture import capture
from devstream.compiler._eager import eager
from devstream.compiler._graph import Graph
from devstream.compiler._nodes import is_ours
from devstream.compiler._options import parse
from devstream.compiler._program import Program
from devstream.compiler._resolve import adopted
from devstream.compiler.backend import Function, captured_examples, queues_of
from devstream.exceptions import UnsupportedError


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a function.

    Attributes:
        eager: what eager mode would do; None where there is no stream code.
        programs: what compiled code would do, forward and backward; none where they were not asked for.
    """

    eager: Graph | None
    programs: tuple[Program, ...]


class _LookedError(Exception):
    """Ends the call whose function has been looked at."""


def look(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], *, programs: bool
) -> Seen:
    """Return what *function* is for these arguments.

    Args:
        function: it is traced as one graph.
        arguments: of the call.
        keywords: of the call.
        programs: make the programs as well.

    Raises:
        TypeError: the arguments are not those of *function*.
        UnsupportedError: it can't be traced as one graph, or holds stream code that can't be compiled.
        WriteBackError, ProofError: see `devstream.compiler.backend.backend`.
    """
    graphs: list[Graph] = []
    found: list[Program] = []
    with suppress(ValueError):  # what is written in C may have no signature
        inspect.signature(function).bind(*arguments, **keywords)  # as a call would say it

    options = replace(parse(None, {"regions": "eager", "missing_waits": "ignore"}), seen=found.append)

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., NoReturn]:
        captured = capture(module)
        if captured.has_streams:
            if programs:
                Function(module, captured, inputs, options)
            queues = queues_of(captured, *adopted(captured_examples(captured)))
            graphs.append(eager(captured, queues, inputs))
        return _stop

    traced = torch.compile(_caller(function), backend=backend, fullgraph=True)
    with inductor.both_halves():
        try:
            traced(*arguments, **keywords)
        except _LookedError:
            pass
        except dynamo_graph.BackendCompilerFailed as error:
            raise dynamo_graph.cause_of(error) from None
        except dynamo_graph.Unsupported as error:
            raise UnsupportedError(
                operation=f"looking at {name_of(function)}",
                backend="torch.compile(fullgraph=True)",
                capability=_reason(error),
                alternative="look at the part that holds the streams",
            ) from error
    return Seen(next(iter(graphs), None), tuple(found))


def _stop(*_: Any) -> NoReturn:
    raise _LookedError


def _caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls *function*, with code that no other has; see the note above."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


def _reason(error: Exception) -> str:
    """Return in a line why Dynamo can't go on, and where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = re.findall(r'File "(.+)", line (\d+), in (\S+)', str(error))
    where = [f" ({path}:{line} in {function})" for path, line, function in places if not is_ours(path)]
    return f"a graph of it: {lines[0]}{where[-1] if where else ''}"


def name_of(function: Callable[..., Any]) -> str:
    """Return what the user calls *function*."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


__all__ = ["Seen", "look", "name_of"]
