"""What ``torch.compile(backend="devstream", options=..., mode=...)`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias  # Any: options of Inductor are of every type

from devstream._compat import inductor
from devstream.compiler._cost import Cost, estimate
from devstream.compiler._cut import DELAY_US
from devstream.compiler._program import Program

MissingWaits: TypeAlias = Literal["warn", "error", "ignore"]
_MISSING_WAITS = ("warn", "error", "ignore")
_REGIONS = ("inductor", "eager")
_OURS = ("missing_waits", "regions", "delay_us", "cost", "mode", "graph_sizes", "graph_calls")


@dataclass(frozen=True, slots=True)
class Options:
    """How a function is compiled.

    Attributes:
        missing_waits: what is done about a wait that eager mode would miss; compiled code has it in any case.
        regions: ``"inductor"``, or ``"eager"``: the same program, its regions run node by node. For tests, and to
            tell a fault of the order from one of the kernels.
        delay_us: how long a region may hold another stream back to save one more launch, in microseconds.
        cost: how long a node takes, in microseconds, or None where it doesn't know.
        inductor: Inductor's own options, those of the mode among them.
        graphs: the mode asks for device graphs.
        graph_sizes: for how many sizes of its arguments graphs are captured; more are launched.
        graph_calls: how many calls of one size, whose backwards are to come, have a graph; more are launched.
        seen: called with each program; for ours, no option of the user's.
    """

    missing_waits: MissingWaits = "warn"
    regions: Literal["inductor", "eager"] = "inductor"
    delay_us: float = DELAY_US
    cost: Cost = estimate
    inductor: Mapping[str, Any] = field(default_factory=dict)
    graphs: bool = False
    graph_sizes: int = 16
    graph_calls: int = 4
    seen: Callable[[Program], None] | None = None

    def beside_streams(self) -> dict[str, Any]:
        """Return Inductor's options for code with streams, whose graphs are ours."""
        return {**self.inductor, "triton.cudagraphs": False} if self.graphs else dict(self.inductor)


def parse(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Return the options that the user gave.

    Raises:
        ValueError: there is none of that name, or it can't have that value.
    """
    given = {key.replace("-", "_"): value for key, value in (options or {}).items()}
    mode = given.pop("mode", mode)
    _one_of("missing_waits", given.get("missing_waits", "warn"), _MISSING_WAITS)
    _one_of("regions", given.get("regions", "inductor"), _REGIONS)
    delay = given.get("delay_us", DELAY_US)
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not delay >= 0:
        raise ValueError(f"options['delay_us'] is {delay!r}; give a number of microseconds, 0 or more")
    if not callable(given.get("cost", estimate)):
        raise ValueError(f"options['cost'] is {given['cost']!r}; give a function of a node")
    for name in ("graph_sizes", "graph_calls"):
        count = given.get(name, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"options[{name!r}] is {count!r}; give a whole number, 1 or more")
    ours = {key: given.pop(key) for key in _OURS if key in given}
    theirs = {**inductor.mode_options(mode), **given}
    unknown = sorted(given.keys() - inductor.known_options().keys())
    if unknown:
        raise ValueError(
            f"options has {', '.join(map(repr, unknown))}, which neither devstream nor Inductor knows; "
            f"devstream's are {', '.join(_OURS)}"
        )
    graphs = bool(theirs.get("triton.cudagraphs", False))
    return Options(**ours, inductor=theirs, graphs=graphs)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"options[{name!r}] is {value!r}; give one of {', '.join(allowed)}")


__all__ = ["MissingWaits", "Options", "parse"]
