"""`explain`: the programs of a function, to be read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: arguments of a function of the user's

from devstream import _files
from devstream.compiler import _picture
from devstream.compiler._document import as_fields
from devstream.compiler._graph import Graph, OpKind
from devstream.compiler._listing import listing
from devstream.compiler._look import look, name_of
from devstream.compiler._needless import needless
from devstream.compiler._program import Program

KIND, SCHEMA = "devstream.explanation", 1

_LEGEND = (
    "A column for each stream, a line for each step, in order of issue. --e3-> records event 3, ->e3-- waits for "
    "it; devstream added what has a +, with the reason beside it."
)


@dataclass(frozen=True, slots=True)
class Half:
    """One program of a function, and the numbers of the user's operations in it that are waits for nothing."""

    program: Program
    needless: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a function compiles to; ``str()`` of it is the text.

    Attributes:
        function: its name.
        halves: forward and backward, or one for inference; none where the function has no stream code.
    """

    function: str
    halves: tuple[Half, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the halves."""
        return tuple(half.program for half in self.halves)

    def __str__(self) -> str:
        if not self.halves:
            return f"{self.function} has no stream code: it compiles as with plain Inductor\n"
        texts = [listing(half.program, needless=half.needless) for half in self.halves]
        return "\n".join([f"{self.function}\n{_LEGEND}\n", *texts])

    def to_json(self) -> str:
        """Return it as a JSON document of kind ``devstream.explanation``."""
        halves = [{**as_fields(half.program), "needless": list(half.needless)} for half in self.halves]
        return _files.dump({"function": self.function, "halves": halves}, kind=KIND, schema=SCHEMA)

    def write_picture(self, path: str | Path) -> None:
        """Draw the programs side by side and write the PNG to *path*, whole or not at all.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ValueError: the name of *path* doesn't end with ``.png``.
            OSError: the file can't be written.
        """
        if Path(path).suffix.lower() != ".png":
            raise ValueError(f"the picture is a PNG, so its name ends with .png, unlike {str(path)!r}")
        drawn = [(half.program, half.needless) for half in self.halves]
        _files.write_bytes(Path(path), _picture.draw(drawn, title=self.function))


def explain(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Explanation:
    """Say what ``torch.compile(function, backend="devstream")`` makes of *function* for these arguments.

    Nothing runs: no kernel, no record, no wait. Nothing is compiled by Inductor, and *function* is left as it is.
    Print the result, or see `Explanation`: ``write_picture`` draws it, ``to_json`` is for programs. A wait of
    yours that nothing in the function needs is marked; it is kept all the same.

    Args:
        function: a function or a module; traced as with ``fullgraph=True``.
        arguments: what it is called with. Where one needs a gradient, the backward is shown as well.
        keywords: the same, by keyword.

    Raises:
        TypeError: the arguments are not those of *function*.
        UnsupportedError: it can't be traced as one graph, or holds stream code that can't be compiled.
        WriteBackError: an input's change can't be written back where the user's events want it.
    """
    seen = look(function, arguments, keywords, programs=True)
    marked = _needless(seen.eager)
    halves = [Half(program, () if program.name == "backward" else marked) for program in seen.programs]
    return Explanation(name_of(function), tuple(halves))


def _needless(graph: Graph | None) -> tuple[int, ...]:
    """Return the needless waits of *graph* as a program numbers them, which has no record_stream among them."""
    if graph is None:
        return ()
    numbers = itertools.count()
    numbered = [-1 if op.kind is OpKind.RECORD_STREAM else next(numbers) for op in graph.ops]
    return tuple(numbered[one] for one in needless(graph))


__all__ = ["KIND", "SCHEMA", "Explanation", "Half", "explain"]
