"""Inductor's patterns are made where they could match, and other threads are served as ever."""

import threading

import pytest
import torch
from torch._inductor.fx_passes import joint_graph

from devstream._compat import inductor_patterns
from devstream._compat.inductor_patterns import when_needed


def graph_of(*targets):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for target in targets:
        x = graph.call_function(target, (x, x))
    graph.output(x)
    return graph


@pytest.fixture
def made(monkeypatch):
    found = []
    monkeypatch.setattr(joint_graph, "lazy_init", lambda *device: found.append(("whole", device)))
    monkeypatch.setattr(inductor_patterns, "_others", lambda *device: found.append(("others", device)))
    return found


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (torch.ops.aten.mm.default, "others"),
        (torch.ops.aten.bmm.default, "whole"),
        (torch.ops.aten.baddbmm.default, "whole"),
    ],
)
def test_those_for_attention_are_made_for_batched_products(made, target, wanted):
    device = torch.device("cpu")
    with when_needed() as patterns:
        joint_graph.lazy_init(device)
        assert made == []
        patterns.make(graph_of(torch.ops.aten.add.Tensor, target))
        assert made == [(wanted, (device,))]
        patterns.make(graph_of(target))
    assert len(made) == 1


def test_another_thread_is_served_at_once(made):
    with when_needed():
        thread = threading.Thread(target=lambda: joint_graph.lazy_init(None))
        thread.start()
        thread.join()
        assert made == [("whole", (None,))]


def test_inductors_own_function_is_back_after_an_error():
    before = joint_graph.lazy_init
    with pytest.raises(KeyError), when_needed():
        raise KeyError
    assert joint_graph.lazy_init is before
