"""devstream/compiler/_graph.py: a graph that has no meaning is refused when it is made, and says why."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings

from devstream.compiler._graph import (
    Given,
    Graph,
    Kind,
    Node,
    OpKind,
    OrderOp,
    Origin,
    Output,
    Stream,
    Value,
    WriteBack,
)
from devstream.exceptions import GraphError
from devstream.testing.graphs import graphs


def graph(**changes):
    """Return x -> a on stream 0 of two streams, with *changes*."""
    fields = {
        "streams": (Stream("cuda:0"), Stream("cuda:0")),
        "values": (Value("x", 0, 0, "cuda:0", Origin.INPUT), Value("a", 1, 0, "cuda:0")),
        "nodes": (Node("a", 0, 0, ("x",), ("a",), line="f.py:1"),),
        "outputs": (Output("a"),),
    }
    return Graph(**{**fields, **changes})


X, A = graph().values
MAKE = graph().nodes[0]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(graphs(max_actions=16))
def test_what_a_capture_collects_is_accepted(graph):
    assert graph.nodes is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"streams": ()}, "no stream"),
        ({"values": (X, A, A)}, "listed twice"),
        ({"nodes": (MAKE, MAKE)}, "listed twice"),
        ({"values": (X, dataclasses.replace(A, stream=2))}, "stream 2, which is not listed"),
        ({"values": (X, A, dataclasses.replace(A, name="b", device="cpu"))}, "its storage on cuda:0"),
        ({"nodes": (dataclasses.replace(MAKE, stream=5),)}, "on stream 5"),
        ({"nodes": (dataclasses.replace(MAKE, reads=("q",)),)}, "before anything made it"),
        ({"nodes": (dataclasses.replace(MAKE, makes=("q",)),)}, "not listed"),
        ({"nodes": (MAKE, dataclasses.replace(MAKE, name="again"))}, "made twice"),
        ({"nodes": ()}, "made by no node"),
        ({"nodes": (dataclasses.replace(MAKE, kind=Kind.VIEW),)}, "shares no storage"),
        ({"nodes": (dataclasses.replace(MAKE, stream=1),)}, "listed on stream 0"),
        ({"streams": (Stream("cuda:1"),)}, "no peer of it; copy it first"),
        ({"nodes": (dataclasses.replace(MAKE, kind=Kind.ISSUE),)}, "never waited for"),
        ({"nodes": (dataclasses.replace(MAKE, kind=Kind.WAIT, collective="q"),)}, "shares no storage"),
        ({"ops": (OrderOp(OpKind.RECORD, (0,), 0, 0),)}, "knows 1 epochs for 2 streams"),
        ({"ops": (OrderOp(OpKind.RECORD, (0, 0), 0),)}, "needs a stream and an event"),
        ({"ops": (OrderOp(OpKind.WAIT, (0, 0), 4, 0),)}, "on stream 4"),
        ({"ops": (OrderOp(OpKind.WAIT, (0, 0), 0, 0),) * 2}, "as an operation before it"),
        (
            {"ops": (OrderOp(OpKind.WAIT, (1, 0), 0, 0), OrderOp(OpKind.WAIT, (0, 0), 0, 0))},
            "below those before it",
        ),
        ({"ops": (OrderOp(OpKind.SYNCHRONIZE, (0, 0), 0, 0),)}, "not for both"),
        ({"ops": (OrderOp(OpKind.RECORD_STREAM, (0, 0), 0),)}, "needs a stream and a value"),
        ({"outputs": (Output("q"),)}, "not listed as a value"),
        ({"write_backs": (WriteBack("a", "x", 0),)}, "is no input"),
        ({"write_backs": (WriteBack("x", "q", 0),)}, "is written back from 'q'"),
        ({"given": (Given(0, 9),)}, "stream 9, which is not listed"),
    ],
)
def test_a_graph_without_a_meaning_is_refused(changes, words):
    with pytest.raises(GraphError, match=words):
        graph(**changes)


def test_a_copy_may_cross_devices_and_a_stream_may_reach_its_peers():
    there = Value("b", 2, 1, "cuda:1")
    copy = Node("b", 1, 0, ("a",), ("b",), kind=Kind.COPY)
    streams = (Stream("cuda:0"), Stream("cuda:1"))
    graph(streams=streams, values=(X, A, there), nodes=(MAKE, copy))
    near = (Stream("cuda:0"), Stream("cuda:1", peers=("cuda:0",)))
    graph(streams=near, values=(X, A, there), nodes=(MAKE, dataclasses.replace(copy, kind=Kind.COMPUTE)))
