"""devstream/testing/_deferred.py: wrong where a wait is missing, the same each time; right where none is."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

import devstream
from devstream import overlap
from devstream.races import Fault
from devstream.testing import cpu
from devstream.testing.faulty import PROGRAMS, one_process_group

CPU = torch.device("cpu")
SHOWN = {name: p for name, p in PROGRAMS.items() if not p.only}
SCHEDULES = [("lazy", 0), *(("random", seed) for seed in range(24))]


def same(one, two):
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, two, strict=True))


def run(program, schedule, seed, *, broken):
    with cpu(schedule=schedule, seed=seed):
        return program.run(CPU, broken)


@pytest.mark.parametrize("program", SHOWN.values(), ids=SHOWN)
def test_lazy_gives_the_same_wrong_answer_each_time_where_a_wait_is_missing(program):
    first = run(program, "lazy", 0, broken=True)
    assert first != program.right
    assert all(same(first, run(program, "lazy", 0, broken=True)) for _ in range(5))


@pytest.mark.parametrize("program", SHOWN.values(), ids=SHOWN)
def test_one_of_a_few_seeds_gives_a_wrong_answer_and_each_replays(program):
    found = [run(program, "random", seed, broken=True) for seed in range(24)]
    assert any(values != program.right for values in found)
    assert all(same(values, run(program, "random", seed, broken=True)) for seed, values in enumerate(found))


@pytest.mark.parametrize("program", SHOWN.values(), ids=SHOWN)
def test_a_repaired_program_is_right_under_every_schedule(program):
    for schedule, seed in SCHEDULES:
        assert run(program, schedule, seed, broken=False) == program.right


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        here, side = devstream.current_stream("cpu"), devstream.named_stream("branch", "cpu")
        side.wait_stream(here)
        with devstream.stream(side):
            left = self.drop(self.left(x).relu())
        right = self.drop(self.right(x).relu())
        here.wait_stream(side)
        devstream.record_stream(left, here)
        return self.last(left * right)


def train():
    torch.manual_seed(0)
    model = TwoBranches()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    devstream.synchronize("cpu")
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:6])
def test_training_with_dropout_gives_eager_s_numbers(schedule, seed):
    eager_losses, eager_weights = train()
    with cpu(schedule=schedule, seed=seed):
        losses, weights = train()
    assert losses == eager_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, eager_weights, strict=True))


def test_a_conv_net_with_batch_norm_gives_eager_s_numbers():
    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
        model(torch.randn(2, 1, 6, 6)).sum().backward()
        devstream.synchronize("cpu")
        return model[1].running_mean.clone(), model[0].weight.grad.clone()

    expected = run()
    with cpu(schedule="lazy"):
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:4])
def test_an_index_that_is_not_there_yet_is_waited_for(schedule, seed):
    with cpu(schedule=schedule, seed=seed):
        table, index = torch.arange(10.0), torch.arange(3) + 4
        assert nn.functional.embedding(index, table[:, None]).sum().item() == 15
        assert table[index].tolist() == [4.0, 5.0, 6.0]
        assert torch.nonzero(index > 4).numel() == 2


def test_random_numbers_are_those_of_the_order_of_issue():
    def draw():
        torch.manual_seed(3)
        side, found = devstream.Stream("cpu"), []
        with devstream.stream(side):
            found.append(torch.rand(4))
        found.append(torch.empty(4).normal_())
        generator = torch.Generator().manual_seed(5)
        found.append(torch.randn(4, generator=generator))
        devstream.synchronize("cpu")
        return [one.tolist() for one in found]

    expected = draw()
    with cpu(schedule="lazy"):
        assert draw() == expected


def test_what_is_not_written_yet_is_nan_or_every_bit_set():
    with cpu(schedule="lazy"):
        side = devstream.Stream("cpu")
        with devstream.stream(side):
            floats, whole, truth = (
                torch.ones(2),
                torch.ones(2, dtype=torch.int64),
                torch.zeros(2, dtype=torch.bool),
            )
        assert floats.isnan().all()
        assert whole.tolist() == [-1, -1]
        assert truth.tolist() == [True, True]
        side.synchronize()
        assert floats.tolist() == [1, 1]


def test_a_copy_of_overlap_is_deferred_too():
    with cpu(schedule="lazy"):
        x = torch.ones(4)
        there, ready = overlap.copy(x, "cpu")
        x.fill_(2)  # too early
        ready.synchronize()
        assert there.tolist() == [2, 2, 2, 2]
        there, ready = overlap.copy(x, "cpu")
        ready.wait()
        x.fill_(3)
        assert there.tolist() == [2, 2, 2, 2]


def test_an_error_of_an_operation_is_raised_where_it_is_issued():
    with cpu(schedule="lazy"), pytest.raises(RuntimeError, match="shapes"):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_an_in_place_change_of_a_saved_tensor_is_still_autograd_s_error():
    with cpu(schedule="lazy"):
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            y.sum().backward()


def test_a_verb_of_another_thread_runs_what_is_queued():
    with cpu(schedule="lazy"):
        side = devstream.Stream("cpu")
        with devstream.stream(side):
            y = torch.ones(2) * 3
        thread = threading.Thread(target=side.synchronize)
        thread.start()
        thread.join()
        assert y.tolist() == [3, 3]


def test_the_checker_inside_finds_what_the_schedule_shows():
    for program in SHOWN.values():
        with cpu(schedule="lazy"):
            with devstream.racecheck(on_race="collect") as races:
                program.run(CPU, True)
            # The queue keeps what is dropped until it has run, so here nothing is freed too early.
            assert bool(races) != (program.fault == Fault.REUSE.value), program.name
            with devstream.racecheck(on_race="collect") as races:
                assert program.run(CPU, False) == program.right
            assert races == [], program.name


def test_after_the_block_all_is_done_and_nothing_is_deferred():
    with cpu(schedule="lazy"):
        y = torch.ones(2) * 3
    assert y.tolist() == [3, 3]
    assert (y + 1).data_ptr()
    assert devstream.backend("cpu").deferred is None


def test_an_error_of_the_block_leaves_nothing_deferred():
    def program():
        with cpu(schedule="random", seed=4):
            kept.append(torch.ones(2) * 3)
            raise KeyError("mine")

    kept = []
    with pytest.raises(KeyError):
        program()
    assert kept[0].tolist() == [3, 3]


@pytest.mark.distributed
def test_collectives_are_carried_out_late_and_in_their_order():
    import torch.distributed as dist

    with one_process_group(CPU), cpu(schedule="lazy"):
        x, gathered = torch.ones(2), [torch.zeros(2)]
        first = dist.all_reduce(x, async_op=True)
        second = dist.all_gather(gathered, x, async_op=True)
        assert gathered[0].tolist() == [0, 0]
        second.wait()
        assert gathered[0].tolist() == [1, 1]
        assert first.is_completed()
        dist.broadcast(x, 0)
        dist.barrier()
        x.add_(1)
        assert x.tolist() == [2, 2]
