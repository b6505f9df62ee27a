"""Side streams change when things run, and nothing else."""

from __future__ import annotations

import pytest
import torch

from devstream.demo.data import Text
from devstream.demo.lanes import BATCHES, COMPUTE, COPIES, TRAINING, WEIGHTS, one_queue, side_queues
from devstream.demo.sizes import SIZES
from devstream.demo.train import Segment, Training, learning_rate_share
from devstream.report import together

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")

STEPS = 12


def text() -> Text:
    words = b"for each line in text: print(line)\n" * 400
    made = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    return Text(training=made, evaluation=made[:4000], files=1)


def place(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cpu" else device


def training(device: torch.device, seed: int = 0) -> Training:
    return Training(SIZES["tiny"], steps=STEPS, text=text(), device=place(device), seed=seed)


def run(device: torch.device, *, side: bool, seed: int = 0, watched: bool = False) -> Segment:
    queues = side_queues(place(device)) if side else one_queue(place(device))
    return training(device, seed).run(0, STEPS, queues=queues, evaluate_every=5, watched=watched)


def test_losses_are_the_same_with_and_without_side_streams(device: torch.device) -> None:
    without, beside = run(device, side=False), run(device, side=True)
    if device.type == "cpu":
        assert beside.losses == without.losses
        assert beside.evaluated == without.evaluated
    assert beside.losses == pytest.approx(without.losses, rel=1e-3)
    assert beside.evaluated == pytest.approx(without.evaluated, rel=1e-3)


def test_compiled_steps_have_the_losses_of_eager_ones(device: torch.device) -> None:
    wanted = run(device, side=True)
    got = training(device).run(0, STEPS, queues=side_queues(place(device)), evaluate_every=5, compiled=True)
    assert got.losses == pytest.approx(wanted.losses, rel=1e-3)
    assert got.evaluated == pytest.approx(wanted.evaluated, rel=1e-3)


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(device: torch.device) -> None:
    first = run(device, side=True)
    assert run(device, side=True).losses == pytest.approx(first.losses, rel=1e-4)
    assert run(device, side=True, seed=1).losses != first.losses


def test_a_snapshot_is_of_the_step_that_it_was_taken_after(device: torch.device) -> None:
    evaluated = run(device, side=True).evaluated
    assert list(evaluated) == [5, 10]
    for step, loss in evaluated.items():
        own = training(device)
        own.run(0, step, queues=one_queue(place(device)))
        batches = own._held_out[: own.size.snapshot_batches]
        with torch.no_grad():
            wanted = torch.stack([own.model(batch) for batch in batches]).mean().item()
        assert loss == pytest.approx(wanted, rel=1e-6 if device.type == "cpu" else 1e-3)


def test_training_can_go_on_where_it_stopped(device: torch.device) -> None:
    whole, parts = run(device, side=True), training(device)
    queues = side_queues(place(device))
    losses = parts.run(0, 5, queues=queues).losses + parts.run(5, STEPS, queues=queues).losses
    assert losses == pytest.approx(whole.losses, rel=1e-4)


def test_a_restart_forgets_everything(device: torch.device) -> None:
    own, queues = training(device), side_queues(place(device))
    first = own.run(0, 4, queues=queues).losses
    own.restart()
    assert own.run(0, 4, queues=queues).losses == pytest.approx(first, rel=1e-4)


def test_the_timeline_has_every_copy_and_every_step(device: torch.device) -> None:
    segment = run(device, side=True, watched=True)
    lanes = [span.lane for span in segment.spans]
    assert lanes.count(BATCHES) == STEPS
    assert lanes.count(WEIGHTS) == 2
    assert lanes.count(TRAINING) == 3 * STEPS
    assert set(lanes) == COPIES | COMPUTE


def test_in_one_queue_no_copy_is_hidden(device: torch.device) -> None:
    times = together(run(device, side=False, watched=True).spans, COPIES, under=COMPUTE)
    assert times.busy_ms > 0
    assert times.hidden_ms == pytest.approx(0, abs=1e-2)


def test_progress_tells_each_step(device: torch.device) -> None:
    told: list[int] = []
    training(device).run(2, 6, queues=side_queues(place(device)), on_step=lambda done, loss: told.append(done))
    assert told == [3, 4, 5, 6]


@pytest.mark.parametrize("steps", [1, 2, 30, 1000])
def test_the_learning_rate_rises_and_falls_between_a_tenth_and_the_whole(steps: int) -> None:
    shares = [learning_rate_share(step, steps) for step in range(steps)]
    assert all(0 < share <= 1.0 for share in shares)
    assert max(shares) == 1.0
