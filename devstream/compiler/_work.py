"""Groups of items as `Work` steps: which nodes run, what goes in and out, and what memory is touched.

[Note: Views are made where they are read]
A view costs nothing and a compiler may well make it by a copy. So each region makes the views that it reads anew
from their base, and what crosses from one region to another is always a tensor that owns its memory. Only a view
that leaves the program is an output of a region.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from devstream.compiler._cut import Group, GroupKind
from devstream.compiler._graph import FREE_OF_WORK, Kind, Node, Origin
from devstream.compiler._order import Order, roots
from devstream.compiler._program import Slot, Use, Work, WorkKind

_KINDS = {
    Kind.COPY: WorkKind.COPY,
    Kind.EFFECT: WorkKind.EFFECT,
    Kind.ISSUE: WorkKind.ISSUE,
    Kind.WAIT: WorkKind.COLLECTIVE_WAIT,
}


def works(order: Order, groups: Sequence[Group]) -> tuple[dict[int, Work], tuple[Slot, ...]]:
    """Return the step of each group that is work, by number, and the values that the program handles."""
    graph, maker = order.graph, _Maker(order)
    drafts = {number: maker.draft(group) for number, group in enumerate(groups) if group.kind is not GroupKind.OP}
    crossing = {name for _, inputs, _ in drafts.values() for name in inputs}
    crossing.update(output.value for output in graph.outputs)
    crossing.update(name for back in graph.write_backs for name in (back.target, back.source))
    crossing.update(maker.root[op.value] for op in graph.ops if op.value)
    crossing.update(value.name for value in graph.values if value.name not in graph.maker)
    slots = tuple(
        Slot(value.name, value.storage, graph.owner[value.storage].stream, value.device, value.origin)
        for value in graph.values
        if value.name in crossing
    )
    visible = {slot.storage for slot in slots}
    found, regions = {}, 0
    for number, (nodes, inputs, made) in drafts.items():
        name = f"region{regions}"
        regions += groups[number].kind is GroupKind.REGION
        outputs = tuple(value for value in made if value in crossing)
        found[number] = maker.work(
            groups[number], name, nodes=nodes, inputs=inputs, outputs=outputs, visible=visible
        )
    return found, slots


class _Maker:
    def __init__(self, order: Order) -> None:
        self.order, self.graph, self.root = order, order.graph, roots(order.graph)
        self.given = {value.storage for value in self.graph.values if value.origin is not Origin.PRODUCED}

    def draft(self, group: Group) -> tuple[list[str], list[str], list[str]]:
        """Return the nodes to run, the values that they take in and the values that they make."""
        if group.kind is GroupKind.WRITE_BACK:
            back = self.graph.write_backs[group.items[0] - len(self.graph.nodes)]
            return [], [back.source], []
        nodes: dict[str, None] = {}
        inputs: dict[str, None] = {}
        made: dict[str, None] = {}
        for item in group.items:
            node = self.graph.nodes[item]
            for name in (*node.reads, *node.writes):
                self._provide(name, nodes, inputs, made)
            nodes[node.name] = None
            made.update(dict.fromkeys(node.makes))
        return list(nodes), list(inputs), list(made)

    def _provide(self, name: str, nodes: dict[str, None], inputs: dict[str, None], made: dict[str, None]) -> None:
        """Let *name* be there: made in this group, made anew as a view, or taken in."""
        chain: list[Node] = []
        while self.root[name] != name and self.graph.maker[name].name not in nodes:
            chain.append(self.graph.maker[name])
            name = chain[-1].reads[0]
        if self.root[name] == name and name not in made:
            inputs[name] = None
        nodes.update(dict.fromkeys(node.name for node in reversed(chain)))

    def work(
        self,
        group: Group,
        name: str,
        *,
        nodes: Iterable[str],
        inputs: Iterable[str],
        outputs: Iterable[str],
        visible: set[int],
    ) -> Work:
        """Return the step of *group*; only *visible* storages are known outside of it."""
        reads, writes = self._uses(group, visible)
        assert group.stream is not None
        if group.kind is GroupKind.WRITE_BACK:
            back = self.graph.write_backs[group.items[0] - len(self.graph.nodes)]
            return Work(
                WorkKind.WRITE_BACK,
                group.stream,
                f"write_back_{back.target}",
                inputs=tuple(inputs),
                reads=reads,
                writes=writes,
                epochs=(back.epoch, back.epoch),
                line=back.line,
                target=back.target,
            )
        members = [self.graph.nodes[item] for item in group.items]
        epochs = [node.epoch for node in members if node.kind not in FREE_OF_WORK]
        head = members[0]
        return Work(
            _KINDS.get(head.kind, WorkKind.REGION),
            group.stream,
            head.name if group.kind is GroupKind.NODE else name,
            nodes=tuple(nodes),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            reads=reads,
            writes=writes,
            epochs=(min(epochs), max(epochs)) if epochs else None,
            line=head.line,
            collective=head.collective,
        )

    def _uses(self, group: Group, visible: set[int]) -> tuple[tuple[Use, ...], tuple[Use, ...]]:
        """Return what the group finds and what it leaves, each storage once."""
        reads: dict[int, Use] = {}
        writes: dict[int, Use] = {}
        for item in group.items:
            line = self._line(item)
            for storage, version in self.order.reads[item]:
                if storage in visible and storage not in writes:
                    reads.setdefault(storage, Use(storage, version, line))
            for storage, version in self.order.writes[item]:
                if storage in visible:
                    if storage not in writes and storage not in reads and version > (storage not in self.given):
                        reads[storage] = Use(storage, version - 1, line)  # [Note: Versions]
                    writes[storage] = Use(storage, version, line)
        return tuple(reads.values()), tuple(writes.values())

    def _line(self, item: int) -> str:
        node = self.order.node(item)
        return node.line if node is not None else self.graph.write_backs[item - len(self.graph.nodes)].line


__all__ = ["works"]
