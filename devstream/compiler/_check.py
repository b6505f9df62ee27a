"""`check`: the waits that a function lacks in eager mode, found without running it."""

from __future__ import annotations

import dataclasses
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any  # Any: arguments of a function of the user's

from devstream import _files
from devstream.compiler._look import look, name_of
from devstream.compiler._missing import Missing, missing

KIND, SCHEMA = "devstream.check", 1


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What `check` found; ``str()`` of it is the text.

    Attributes:
        function: its name.
        streams: what each stream of the findings is, by number; 0 is the caller's.
        missing: waits that the function lacks.
        unsure: waits that it lacks unless code outside of it gives the order.
    """

    function: str
    streams: tuple[str, ...]
    missing: tuple[Missing, ...]
    unsure: tuple[Missing, ...]

    @property
    def ok(self) -> bool:
        """Whether eager mode would miss nothing that could be found."""
        return not self.missing

    def __str__(self) -> str:
        if not self.streams:
            return f"{self.function}: no stream code, nothing to miss\n"
        lines = [f"{self.function}: {_count(len(self.missing))} missing in eager mode"]
        for number, one in enumerate(self.missing, start=1):
            lines += ["", *self._finding(number, one)]
        if self.unsure:
            lines += [
                "",
                f"{_count(len(self.unsure))} missing unless code outside of the function gives the order:",
            ]
            lines += [f"  - {one}" for one in self.unsure]
        if self.missing or self.unsure:
            lines += ["", *(f"stream {number} is {what}" for number, what in enumerate(self.streams))]
        return "\n".join(lines) + "\n"

    def _finding(self, number: int, one: Missing) -> list[str]:
        return [
            f"{number}. {one.second} on stream {one.second_stream}{_place(one.second_line)}",
            "   does not wait for",
            f"   {one.first} on stream {one.first_stream}{_place(one.first_line)}",
            f"   To do: {one.fix}.",
        ]

    def to_json(self) -> str:
        """Return it as a JSON document of kind ``devstream.check``."""
        fields = {
            "function": self.function,
            "ok": self.ok,
            "streams": list(self.streams),
            "missing": [dataclasses.asdict(one) for one in self.missing],
            "unsure": [dataclasses.asdict(one) for one in self.unsure],
        }
        return _files.dump(fields, kind=KIND, schema=SCHEMA)


def _count(number: int) -> str:
    return "no wait is" if number == 0 else "1 wait is" if number == 1 else f"{number} waits are"


def _place(line: str) -> str:
    """Return ``file:line`` with the text of that line below, as far as they are known."""
    found = re.match(r"(.+):(\d+)", line)
    text = linecache.getline(found[1], int(found[2])).strip() if found else ""
    return f", {line}" + (f"\n       {text}" if text else "") if line else ""


def check(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> CheckResult:
    """Find every wait that *function* lacks: where eager mode would race, with both lines and what to do.

    Nothing runs: no kernel, no record, no wait. Nothing is compiled by Inductor, and *function* is left as it is.
    ``torch.compile(function, backend="devstream")`` has these waits in any case. In the backward the autograd
    engine gives the order, in eager mode too, so nothing is missing there.

    Args:
        function: a function or a module; traced as with ``fullgraph=True``.
        arguments: what it is called with.
        keywords: the same, by keyword.

    Raises:
        TypeError: the arguments are not those of *function*.
        UnsupportedError: it can't be traced as one graph, or holds stream code that has no meaning in a graph.
    """
    graph = look(function, arguments, keywords, programs=False).eager
    found = missing(graph) if graph is not None else ()
    return CheckResult(
        name_of(function),
        tuple(f"{stream.name} ({stream.device})" for stream in graph.streams) if graph is not None else (),
        tuple(one for one in found if one.sure),
        tuple(one for one in found if not one.sure),
    )


__all__ = ["KIND", "SCHEMA", "CheckResult", "check"]
