"""Which of the user's waits his function could do without."""

from __future__ import annotations

from dataclasses import replace

from devstream.compiler._graph import Graph, OpKind
from devstream.compiler._missing import missing


def needless(graph: Graph) -> tuple[int, ...]:
    """Return the numbers of those of the user's waits that could all be left out of *graph* with no race by it.

    Where one of two would do, the earlier one is among them. A wait for an event that was recorded outside of the
    call stands for what the graph can't see, so it never is.
    """
    found: list[int] = []
    races = set(missing(graph))
    recorded: set[int | None] = set()
    for number, op in enumerate(graph.ops):
        if op.kind is OpKind.RECORD:
            recorded.add(op.event)
        elif op.kind is OpKind.WAIT and op.event in recorded:
            gone = {*found, number}
            ops = tuple(one for other, one in enumerate(graph.ops) if other not in gone)
            if set(missing(replace(graph, ops=ops))) == races:
                found.append(number)
    return tuple(found)


__all__ = ["needless"]
