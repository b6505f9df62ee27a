"""Collectives and distributed tensors inside compiled stream code, in a group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

import devstream
from devstream.compiler import backend as compiler_backend
from devstream.compiler._program import Program, Work, WorkKind

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    found: list[Program] = []

    def watch(_name: str, program: Program) -> None:
        found.append(program)

    compiler_backend.watchers.append(watch)
    yield found
    compiler_backend.watchers.remove(watch)


def compiled(function: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend=compiler_backend.backend, fullgraph=True, options={"regions": "eager"})


def kinds(program: Program) -> list[WorkKind]:
    return [step.kind for step in program.steps if isinstance(step, Work)]


def test_a_collective_runs_beside_compute_of_another_stream(group, programs):
    side = devstream.Stream("cpu")

    def function(x, w):
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            total = collectives.all_reduce(x * 2, "sum", group)
        y = torch.relu(x @ w)
        devstream.current_stream("cpu").wait_stream(side)
        return y + total

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    torch.testing.assert_close(compiled(function)(x, w), torch.relu(x @ w) + 2 * x)
    (program,) = programs
    found = kinds(program)
    # Steps of their own, never inside of a region, and the wait is as late as its reader.
    assert found.count(WorkKind.ISSUE) == found.count(WorkKind.COLLECTIVE_WAIT) == 1
    issue, wait = found.index(WorkKind.ISSUE), found.index(WorkKind.COLLECTIVE_WAIT)
    assert issue < wait


def test_a_collective_in_training(group, programs):
    side = devstream.Stream("cpu")

    def function(x, w):
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            gathered = collectives.all_gather_tensor_autograd(x @ w, gather_dim=0, group=group)
        devstream.current_stream("cpu").wait_stream(side)
        return (gathered * gathered).sum()

    def arguments():
        torch.manual_seed(1)
        return [torch.randn(4, 4, requires_grad=True) for _ in range(2)]

    wanted = arguments()
    function(*wanted).backward()
    got = arguments()
    compiled(function)(*got).backward()
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert any(WorkKind.ISSUE in kinds(program) for program in programs)


def test_distributed_tensors(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    side = devstream.Stream("cpu")

    def function(x, w):
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = torch.sin(x @ w)
        z = x * 2
        devstream.current_stream("cpu").wait_stream(side)
        return (y + z).redistribute(mesh, [Replicate()]).to_local()

    def arguments():
        torch.manual_seed(2)
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        return [
            distribute_tensor(x, mesh, [Shard(0)]).requires_grad_(),
            distribute_tensor(w, mesh, [Replicate()]).requires_grad_(),
        ]

    wanted, got = arguments(), arguments()
    first = function(*wanted)
    first.sum().backward()
    fast = compiled(function)
    second = fast(*got)
    second.sum().backward()
    torch.testing.assert_close(second, first)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())
