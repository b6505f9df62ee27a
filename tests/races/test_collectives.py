"""devstream/races/collectives.py: a collective lasts until somebody waits for it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import devstream
from devstream.races import LaneKind
from devstream.testing.faulty import one_process_group

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def group():
    with one_process_group(torch.device("cpu")):
        yield


@pytest.fixture
def races(group):
    with devstream.racecheck(on_race="collect") as found:
        yield found


def test_the_result_may_be_read_after_wait_and_not_before(races):
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    assert isinstance(work, dist.Work)
    work.wait()
    x + 1
    assert races == []
    work = dist.all_reduce(x, async_op=True)
    x + 1
    work.wait()
    (race,) = races
    assert race.first.lane.kind is LaneKind.COLLECTIVE
    assert race.first.name == "c10d.allreduce_"


def test_the_input_may_not_be_changed_before_wait(races):
    x, out = torch.ones(4), [torch.zeros(4)]
    work = dist.all_gather(out, x, async_op=True)
    x.add_(1)
    work.wait()
    assert [race.first.write for race in races] == [False]


def test_a_wait_holds_the_stream_that_is_current_and_no_other(races):
    x, side = torch.ones(4), devstream.Stream("cpu")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    with devstream.stream(side):
        x + 1
    (race,) = races
    assert race.first.lane.kind is LaneKind.COLLECTIVE
    words = " ".join(str(race).split())
    assert (
        f"{race.second.lane.name} doesn't wait for the default stream of cpu:0, which waits for the collective"
        in words
    )


def test_a_collective_comes_after_the_stream_that_issues_it(races):
    x, side = torch.ones(4), devstream.Stream("cpu")
    side.wait_stream(devstream.current_stream("cpu"))
    with devstream.stream(side):
        y = x * 2
        dist.all_reduce(y)
        y + 1
    assert races == []
    dist.all_reduce(x)
    assert [race.second.name for race in races] == ["c10d.allreduce_"]  # side still reads x


def test_synchronous_collectives_of_every_kind_have_no_race(races):
    x = torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for two of these
        for call in (
            lambda: dist.all_reduce(x),
            lambda: dist.broadcast(x, 0),
            lambda: dist.reduce(x, 0),
            lambda: dist.all_gather([torch.zeros(4)], x),
            lambda: dist.all_gather_into_tensor(torch.zeros(4), x),
            lambda: dist.gather(x, [torch.zeros(4)]),
            lambda: dist.scatter(x, [torch.zeros(4)]),
            dist.barrier,
        ):
            call()
            x.add_(1)
    assert races == []


def test_functional_collectives_wait_by_their_result(races):
    import torch.distributed._functional_collectives as functional

    x = torch.ones(4)
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    assert (y + 1).tolist() == [2] * 4
    assert races == []


def test_a_thousand_collectives_need_few_lanes(races):
    x = torch.ones(4)
    for _ in range(1000):
        dist.all_reduce(x)
    (watch,) = devstream._observe.subscribers
    assert len(watch._order.lanes) < 5


def test_the_handle_behaves_like_torch_s(races):
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    work.wait()
    assert work.is_completed()
    assert work.get_future().wait()[0].tolist() == [1] * 4
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    x + 1
    assert races == []
