"""What is done to the joint graph before any other pass: streams for all nodes, sealed edges, the call's token.

[Note: Seals]
Passes over the joint graph merge and replace nodes wherever a pattern fits, and know nothing of streams. So each
edge from one stream to another gets an operator that no pattern knows, and each stream reads an input through one
of its own where several do. What passes do then, they do within a stream. `unseal` takes the operators out again.

[Note: Copies of inputs]
Passes take a copy for nothing where its source is not changed later in the graph. An input is: it is written back.
So who reads a copy of it would read the input, and would have to come before the change; and what is returned
would be the input itself. Such copies get an operator of ours too, until the passes are over. For the same reason
a seal has the storage of its source: passes ask whether a result shares memory with an input.

[Note: Where a node without a mark goes]
Marks come with the user's code; passes and AOT Autograd add nodes without one. A gradient's accumulation goes to
its first user's stream, else to that of its arguments: it would bring two streams together where nothing else
does. So does what else autograd adds of its own between streams. Any other goes where all its arguments are; one
without arguments of a stream where all its users are; the seeds of random numbers, which one node makes for the
whole graph, to the caller's stream.

[Note: The token]
The backward must find the streams and events of its own forward call, whatever other calls came in between. The
token is a tensor that the forward makes and the partitioner saves for the backward, as it does any other value. An
output is made to depend on it, or the partitioner would let the backward make one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any  # Any: arguments and values of nodes

import torch

from devstream._compat import inductor
from devstream.compiler._captured import AMBIENT, Mark, mark_of, set_mark
from devstream.compiler._naming import key_of
from devstream.compiler._nodes import line_of
from devstream.exceptions import GraphError

TOKEN = "devstream_token"

_library: Any = None
_lock = threading.Lock()


def ops() -> Any:  # Any: torch's class of operator namespaces is private
    """Return ``torch.ops.devstream`` with the operators of this module defined."""
    global _library
    with _lock:
        if _library is None:
            library: Any = torch.library.Library("devstream", "FRAGMENT")  # type: ignore[no-untyped-call]
            for name, schema, run in (
                ("seal", "(Tensor value, str edge) -> Tensor", lambda value, edge: value.clone()),
                ("token", "() -> Tensor", _no_token),
                ("carry", "(Tensor value, Tensor token) -> Tensor", lambda value, token: value.clone()),
                *_COPIES.values(),
            ):
                library.define(name + schema)
                library.impl(name, run, "CompositeExplicitAutograd")
                torch.library.register_fake(f"devstream::{name}", _FAKES[name], lib=library)
            _library = library
    return torch.ops.devstream


def _no_token() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def _like(value: torch.Tensor, _other: object) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


#: Operators that copy, and what stands for each while passes run: [Note: Copies of inputs].
_COPIES: dict[Any, tuple[str, str, Callable[..., torch.Tensor]]] = {
    torch.ops.aten.clone.default: (
        "clone",
        "(Tensor value, *, MemoryFormat? memory_format=None) -> Tensor",
        torch.ops.aten.clone.default,
    ),
    torch.ops.aten.copy.default: (
        "copy",
        "(Tensor value, Tensor source, bool non_blocking=False) -> Tensor",
        torch.ops.aten.copy.default,
    ),
}

_FAKES: dict[str, Callable[..., torch.Tensor]] = {
    "seal": _like,
    "token": _no_token,
    "carry": _like,
    **{name: run for name, _, run in _COPIES.values()},
}


def prepare(graph: torch.fx.Graph) -> None:
    """Give every node of the joint graph (or of one without gradients) a stream, seal the edges, add the token.

    Raises:
        GraphError: a node has no mark, and no rule says where it goes.
    """
    assign(graph)
    _keep_copies(graph)
    _seal(graph)
    _add_token(graph)


def computes(node: torch.fx.Node) -> bool:
    """Say whether *node* is an operation on tensors, which has to have a stream."""
    return node.op == "call_function" and not is_number(node)


def is_number(node: torch.fx.Node) -> bool:
    """Say whether *node* is a size or another number, which the host computes."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def is_item(node: torch.fx.Node) -> bool:
    """Say whether *node* takes one tensor out of a tuple."""
    return getattr(node.target, "__name__", "") == "getitem" and node.op == "call_function"


def is_seeds(node: torch.fx.Node) -> bool:
    """Say whether *node* makes the seeds of a graph's random numbers, which no line of the user's does."""
    return node.op == "call_function" and "inductor_seeds" in str(node.target)


def assign(graph: torch.fx.Graph) -> None:
    """Give each node without a mark a stream: [Note: Where a node without a mark goes]."""
    for node in graph.nodes:
        if is_seeds(node):  # one pass leaves it without a mark, another gives it that of whom it replaced first
            set_mark(node, None)
    lacking = [node for node in graph.nodes if computes(node) and (mark_of(node) is None or is_item(node))]
    for node in lacking:
        if is_item(node) and isinstance(node.args[0], torch.fx.Node) and mark_of(node.args[0]) is not None:
            set_mark(node, mark_of(node.args[0]))
    late = _backward(graph)
    rules: tuple[tuple[bool, Callable[[torch.fx.Node], int | None]], ...] = (
        (True, lambda node: _nearest(node) if node.meta.get("is_gradient_acc") else None),
        (False, lambda node: _only(_arguments(node))),
        (True, lambda node: _only(_users(node))),
        (False, lambda node: _nearest(node) if node in late else None),
        (False, lambda node: AMBIENT if next(_arguments(node), None) is None else None),
    )
    number = 0
    while number < len(rules):
        users_first, rule = rules[number]
        found = False
        for node in reversed(lacking) if users_first else lacking:
            stream = rule(node) if mark_of(node) is None else None
            if stream is not None:
                set_mark(node, Mark(stream, 0))
                found = True
        # What one rule finds may be what an earlier one lacked.
        number = 0 if found and number else number + 1
    for node in lacking:
        if mark_of(node) is None:
            streams = sorted({*_arguments(node), *_users(node)})
            raise GraphError(
                graph="the joint graph",
                problem=(
                    f"{node.name!r} ({node.target}, {line_of(node) or 'added by a pass of torch'}) has no stream, "
                    f"and its neighbours are on streams {streams}"
                ),
            )


def _nearest(node: torch.fx.Node) -> int | None:
    """Return the stream of the first user, else of the first argument."""
    return next(_users(node), next(_arguments(node), None))


def _backward(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return what depends on a tangent."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if (
            "tangents" in str(node.target)
            if node.op == "placeholder"
            else not found.isdisjoint(node.all_input_nodes)
        ):
            found.add(node)
    return found


def _arguments(node: torch.fx.Node) -> Iterator[int]:
    for other in node.all_input_nodes:
        mark = mark_of(other)
        if mark is not None and computes(other):
            yield mark.stream


def _users(node: torch.fx.Node) -> Iterator[int]:
    for other in node.users:
        mark = mark_of(other)
        if mark is not None and computes(other):
            yield int(str(other.args[1]).partition(">")[0]) if _is_seal(other) else mark.stream


def _only(streams: Iterable[int]) -> int | None:
    found = set(streams)
    return found.pop() if len(found) == 1 else None


# -- copies ----------------------------------------------------------------------------------------------


def _keep_copies(graph: torch.fx.Graph) -> None:
    """Let no pass take away a copy of an input."""
    inputs = {_storage(node) for node in graph.nodes if node.op == "placeholder"} - {None}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _COPIES:
            source = node.args[-1] if len(node.args) == 1 else node.args[1]
            if _storage(source) in inputs:
                node.target = getattr(ops(), _COPIES[node.target][0]).default


def _storage(node: Any) -> Any:  # Any: an argument of a node
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return key_of(value) if isinstance(value, torch.Tensor) else None


def _give_back_copies(graph: torch.fx.Graph) -> None:
    if _library is None:
        return
    ours = {getattr(ops(), name).default: target for target, (name, _, _) in _COPIES.items()}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ours:
            node.target = ours[node.target]


# -- seals -----------------------------------------------------------------------------------------------


def _is_seal(node: torch.fx.Node) -> bool:
    return _library is not None and node.target is ops().seal.default


def _seal(graph: torch.fx.Graph) -> None:
    """Seal the edges."""
    made: dict[tuple[torch.fx.Node, int], torch.fx.Node] = {}
    for node in list(graph.nodes):
        mark = mark_of(node)
        if mark is None or not computes(node) or is_item(node):
            continue
        for source in _sealable(node):
            sources = {mark_of(source)} if computes(source) else set()
            sources |= {mark_of(user) for user in source.users if computes(user)} if not sources else set()
            streams = {one.stream for one in sources if one is not None}
            if streams == {mark.stream}:
                continue
            key = (source, mark.stream)
            if key not in made:
                made[key] = _new_seal(graph, source, mark)
            node.replace_input_with(source, made[key])


def _sealable(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the tensors that *node* reads and doesn't change."""
    changed = _changed(node)
    return [
        source
        for source in node.all_input_nodes
        if source not in changed and source.op != "get_attr" and isinstance(source.meta.get("val"), torch.Tensor)
    ]


def _changed(node: torch.fx.Node) -> set[torch.fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    found = set()
    for argument, declared in zip(node.args, schema.arguments, strict=False):
        if (
            isinstance(argument, torch.fx.Node)
            and declared.alias_info is not None
            and declared.alias_info.is_write
        ):
            found.add(argument)
    return found


def _new_seal(graph: torch.fx.Graph, source: torch.fx.Node, mark: Mark) -> torch.fx.Node:
    from_mark = mark_of(source) if computes(source) else None
    edge = f"{from_mark.stream if from_mark is not None else AMBIENT}>{mark.stream}"
    after = source
    while after.op == "placeholder" and after.next.op == "placeholder":
        after = after.next
    with graph.inserting_after(after):
        seal = graph.call_function(ops().seal.default, (source, edge))
    seal.meta.update({key: source.meta[key] for key in ("val", "tensor_meta") if key in source.meta})
    for key in ("partitioner_tag", "seq_nr"):
        if key in source.meta:
            seal.meta[key] = source.meta[key]
    set_mark(seal, Mark(mark.stream, mark.epoch))
    return seal


def unseal(graph: torch.fx.Graph) -> None:
    """Take the seals out again, the last first, since one may read another; copies become copies again."""
    _give_back_copies(graph)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and _is_seal(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


# -- the token -------------------------------------------------------------------------------------------


def _add_token(graph: torch.fx.Graph) -> None:
    tangents = [node for node in graph.nodes if node.op == "placeholder" and "tangents" in str(node.target)]
    used = [node for node in tangents if node.users and isinstance(node.meta.get("val"), torch.Tensor)]
    output = graph.output_node()
    # The forward's outputs come first.
    results = [node for node in output.all_input_nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    if not tangents or not results:
        return
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        token = graph.call_function(ops().token.default, (), name=TOKEN)
    with _fakes(results[0]):
        token.meta["val"] = _no_token()
    set_mark(token, Mark(AMBIENT, 0))
    position = {node: number for number, node in enumerate(graph.nodes)}
    if used:
        _carry(graph, used[0], token, min(used[0].users, key=position.__getitem__), list(used[0].users))
    else:  # gradients that depend on no tangent: the last output is one
        _carry(graph, results[-1], token, output, [output])
    _carry(graph, results[0], token, output, [output])


def _carry(
    graph: torch.fx.Graph,
    value: torch.fx.Node,
    token: torch.fx.Node,
    before: torch.fx.Node,
    users: list[torch.fx.Node],
) -> None:
    """Let *users* have *value* through an operator that takes the token too."""
    with graph.inserting_before(before):
        carry = graph.call_function(ops().carry.default, (value, token))
    carry.meta["val"] = value.meta["val"]
    mark = mark_of(before) if computes(before) else mark_of(value) if computes(value) else None
    set_mark(carry, mark or Mark(AMBIENT, 0))
    for user in users:
        user.replace_input_with(value, carry)


def _fakes(value: torch.fx.Node) -> AbstractContextManager[Any]:
    mode: AbstractContextManager[Any] | None = inductor.mode_of(value.meta["val"])
    return mode or nullcontext()


def take_token(graph: torch.fx.Graph) -> str | None:
    """Take the operators of the token out; return the name of the node that is the token, None without one."""
    found = None
    for node in list(graph.nodes):
        if node.op == "call_function" and _library is not None and node.target is ops().carry.default:
            found = node.args[1].name
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return found


__all__ = ["TOKEN", "assign", "computes", "is_item", "is_number", "is_seeds", "prepare", "take_token", "unseal"]
