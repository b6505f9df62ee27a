"""devstream/races/operations.py: what operations read and write, by their schema."""

from __future__ import annotations

import pytest
import torch

from devstream.races.operations import Kind, plan


def named(text):
    operation = torch.ops
    for part in text.split("."):
        operation = getattr(operation, part)
    return plan(operation)


@pytest.mark.parametrize(
    ("name", "reads", "writes", "results"),
    [
        ("aten.add.Tensor", (0, 1), (), True),
        ("aten.add_.Tensor", (1,), (0,), False),
        ("aten.mul.out", (0, 1), (2,), False),
        ("aten._foreach_add_.List", (1,), (0,), False),
        ("aten.zeros_like.default", (), (), True),
        ("aten.native_batch_norm.default", (0, 1, 2), (3, 4), True),
        ("aten._unsafe_view.default", (), (), False),
    ],
)
def test_reads_writes_and_new_memory(name, reads, writes, results):
    found = named(name)
    assert (found.reads, found.writes, found.results) == (reads, writes, results)


@pytest.mark.parametrize(
    "name", ["aten.view.default", "aten.detach.default", "aten.t_.default", "aten.resize_.default"]
)
def test_views_and_changes_of_shape_touch_no_data(name):
    assert named(name).nothing


def test_empty_makes_memory_that_is_not_written():
    found = named("aten.empty.memory_format")
    assert found.results
    assert found.unwritten


def test_item_makes_the_host_wait():
    assert named("aten._local_scalar_dense.default").host_waits


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "reads", "writes"),
    [
        ("c10d.allreduce_.default", (3,), (0,)),
        ("c10d.allgather_.default", (1,), (0,)),
        ("c10d.broadcast_.default", (), (0,)),
        ("c10d.send.default", (0,), ()),
        ("c10d.recv_.default", (), (0,)),
        ("c10d.barrier.default", (), ()),
    ],
)
def test_what_collectives_write_though_their_schema_is_silent(name, reads, writes):
    import torch.distributed  # noqa: F401 - registers them

    found = named(name)
    assert found.kind is Kind.COLLECTIVE
    assert (found.reads, found.writes) == (reads, writes)
