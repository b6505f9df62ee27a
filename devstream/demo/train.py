"""Trains the model. One loop for every backend and for every choice of queues: only the queues differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from devstream._streams import Event, current_stream, synchronize
from devstream.demo.data import Text, batch
from devstream.demo.feed import Feed
from devstream.demo.lanes import TRAINING, Queues, Watch
from devstream.demo.model import ByteGpt
from devstream.demo.sizes import Size
from devstream.demo.snapshot import Evaluation, read_loss
from devstream.overlap import copy
from devstream.report import Recorder, Span

#: Batches of evaluation text have numbers of their own, so that they are the same whatever the training does.
_EVALUATION_SEED = 1 << 20
#: A loss goes to the host this often, for the progress bar.
_LOSS_EVERY = 5


@dataclass(frozen=True, slots=True)
class Segment:
    """Some steps of training and what was measured.

    Attributes:
        losses: training loss of each step, nats a byte.
        evaluated: evaluation loss of the snapshots, by step.
        tokens: bytes trained on.
        seconds: wall time, from an idle device to an idle device.
        spans: what ran when; empty where it wasn't watched.
    """

    losses: list[float]
    evaluated: dict[int, float]
    tokens: int
    seconds: float
    spans: list[Span]

    @property
    def tokens_per_s(self) -> float:
        """Bytes trained on in a second."""
        return self.tokens / self.seconds


#: Called after each step with the number of steps done and the latest loss that is on the host, or None.
OnStep = Callable[[int, float | None], None]


class Training:
    """A model, its optimizer and its text, on one device.

    Args:
        size: model and batches.
        steps: length of the whole training, which the learning rate follows.
        text: what to train on and to evaluate on.
        device: as tensors name it.
        seed: of the weights and the batches.
    """

    def __init__(self, size: Size, *, steps: int, text: Text, device: torch.device, seed: int) -> None:
        self.size, self.steps, self.device, self._text, self._seed = size, steps, device, text, seed
        self.model = ByteGpt(size.shape).to(device)
        self._weights = self.model.in_one_block()
        self._held_out = []
        for number in range(size.evaluation_batches):
            there, ready = copy(self._batch(text.evaluation, number, _EVALUATION_SEED), device)
            ready.wait(current_stream(device))
            self._held_out.append(there)
        synchronize(device)
        self.restart()

    @cached_property
    def _forward(self) -> Callable[[torch.Tensor, Event], torch.Tensor]:
        return torch.compile(self._waits_and_runs, backend="devstream", fullgraph=True)

    def _waits_and_runs(self, text: torch.Tensor, ready: Event) -> torch.Tensor:
        """Do what `Feed.take` and the model do; compiled, the wait is a step of the compiled program."""
        ready.wait(current_stream(text.device))
        loss: torch.Tensor = self.model(text)
        return loss

    def restart(self) -> None:
        """Go back to the weights before the first step."""
        self.model.reset(torch.Generator().manual_seed(self._seed))
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.size.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )

    def evaluate(self) -> float:
        """Return the evaluation loss of the present weights, in nats a byte; blocks until it is known."""
        with torch.no_grad():
            losses = [self.model(there) for there in self._held_out]
            return float(torch.stack(losses).mean())

    def run(
        self,
        first: int,
        last: int,
        *,
        queues: Queues,
        compiled: bool = False,
        watched: bool = False,
        evaluate_every: int = 0,
        on_step: OnStep | None = None,
    ) -> Segment:
        """Do the steps from *first* to before *last*.

        Args:
            first: number of the first step, which is also that of its batch.
            last: number of the first step that is not done.
            queues: where copies and evaluation go.
            compiled: run the wait for a batch and the model through ``torch.compile(backend="devstream")``.
            watched: bracket all work with timed events (where the device keeps time).
            evaluate_every: take a snapshot after so many steps and evaluate it while training goes on; 0: never.
                The last step has none: nothing would go on.
            on_step: see `OnStep`.
        """
        synchronize(self.device)
        watch = Watch(Recorder(self.device) if watched else None)
        feed = Feed(
            lambda number: self._batch(self._text.training, number, 0),
            device=self.device,
            stream=queues.batches,
            watch=watch,
        )
        held_out = self._held_out[: self.size.snapshot_batches]
        evaluation = Evaluation(self.model, self._weights, held_out, queues=queues, watch=watch)
        meter = _Meter(queues, watch, on_step)
        started = time.perf_counter()
        if first < last:
            feed.send(first)
        for step in range(first, last):
            loss = self._step(step, feed, evaluation, watch, sends=step + 1 < last, compiled=compiled)
            meter.add(step, loss)
            evaluation.advance()
            if evaluate_every and (step + 1) % evaluate_every == 0 and step + 1 < last:
                evaluation.snapshot(step + 1)
        evaluation.finish()
        synchronize(self.device)
        seconds = time.perf_counter() - started
        tokens = (last - first) * self.size.batch * self.size.shape.context
        evaluated = {result.step: float(result.loss) for result in evaluation.results}
        return Segment(meter.losses(), evaluated, tokens, seconds, watch.spans())

    def _step(
        self, step: int, feed: Feed, evaluation: Evaluation, watch: Watch, *, sends: bool, compiled: bool
    ) -> torch.Tensor:
        if compiled:
            text, ready = feed.look(step)
            ready.wait(current_stream(self.device))  # before the span: waiting for the batch is not training
            with watch.span(TRAINING, "forward"):
                loss: torch.Tensor = self._forward(text, ready)
        else:
            text = feed.take(step)
            with watch.span(TRAINING, "forward"):
                loss = self.model(text)
        if sends:
            feed.send(step + 1)  # in the middle of this step, so that it runs under the rest of it
        with watch.span(TRAINING, "backward"):
            torch.autograd.backward(loss)
        feed.give_back(step)
        evaluation.release_weights()  # before the span: waiting for the snapshot is not training
        with watch.span(TRAINING, "update"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in self._optimizer.param_groups:
                group["lr"] = self.size.learning_rate * learning_rate_share(step, self.steps)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _batch(self, text: torch.Tensor, number: int, seed: int) -> torch.Tensor:
        return batch(
            text, number=number, size=self.size.batch, context=self.size.shape.context, seed=self._seed + seed
        )


class _Meter:
    """Keeps the losses on the device, and tells the latest that has come to the host without waiting for it."""

    def __init__(self, queues: Queues, watch: Watch, on_step: OnStep | None) -> None:
        self._queues, self._watch, self._on_step = queues, watch, on_step
        self._losses: list[torch.Tensor] = []
        self._coming: list[tuple[torch.Tensor, Event]] = []
        self._latest: float | None = None

    def add(self, step: int, loss: torch.Tensor) -> None:
        """Take note of the loss of *step*."""
        self._losses.append(loss)
        if step % _LOSS_EVERY == 0:
            self._coming.append(read_loss(loss, queues=self._queues, watch=self._watch))
        while self._coming and self._coming[0][1].query():
            self._latest = float(self._coming.pop(0)[0])
        if self._on_step is not None:
            self._on_step(step + 1, self._latest)

    def losses(self) -> list[float]:
        """Return all losses; blocks until they are known."""
        return [float(loss) for loss in torch.stack(self._losses).cpu()] if self._losses else []


def learning_rate_share(step: int, steps: int) -> float:
    """Return the part of the full learning rate to use at *step* of *steps*: a short rise, then half a cosine."""
    rise = max(1, min(20, steps // 10))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))
