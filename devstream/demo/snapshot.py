"""Evaluation on a snapshot of the weights, on a second stream, while training changes the weights.

Events order it. The snapshot comes after the update that it is a snapshot of; the next update comes after the
snapshot (`Evaluation.release_weights`); the evaluation comes after the snapshot, on the same stream; the next
snapshot's memory is taken after the evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.func import functional_call

from devstream._streams import Event, current_stream, stream
from devstream.demo.lanes import EVALUATION, LOSSES, WEIGHTS, Queues, Watch
from devstream.demo.model import ByteGpt
from devstream.overlap import copy


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The loss of the weights after *step* steps: on the host once *ready* has happened."""

    step: int
    loss: torch.Tensor
    ready: Event


class Evaluation:
    """Evaluates snapshots a batch at a time, so that its work is issued between the steps of the training.

    Args:
        model: its code evaluates the weights.
        block: the model's weights, see `ByteGpt.in_one_block`.
        batches: what it is evaluated on, already on the device.
        queues: where the work goes.
        watch: brackets the work.
    """

    def __init__(
        self,
        model: ByteGpt,
        block: torch.Tensor,
        batches: Sequence[torch.Tensor],
        *,
        queues: Queues,
        watch: Watch,
    ) -> None:
        self._model, self._block, self._batches = model, block, batches
        self._queues, self._watch = queues, watch
        self._device = batches[0].device
        self._weights: dict[str, torch.Tensor] = {}
        self._left: deque[torch.Tensor] = deque()
        self._total: torch.Tensor | None = None
        self._step = 0
        self._taken: Event | None = None
        self._evaluated: Event | None = None
        self.results: list[Evaluated] = []

    def snapshot(self, step: int) -> None:
        """Copy the weights as the current stream leaves them after *step* steps; finishes the one before first."""
        self.finish()
        side, here = self._queues.evaluation, current_stream(self._device)
        # The last snapshot's memory belongs to this stream, and goes back to it below: not before it was read.
        if self._evaluated is not None:
            self._evaluated.wait(here)
        updated = Event(self._device)
        updated.record(here)
        updated.wait(side)  # before the span: waiting for the update is not copying
        with self._watch.span(WEIGHTS, "snapshot", stream=side):
            copied, self._taken = copy(self._block, self._device, stream=side)
        self._weights = self._model.parts(copied)
        self._left.extend(self._batches)
        self._step, self._total = step, None

    def release_weights(self) -> None:
        """Make the current stream wait until the weights have been copied: the next thing to come changes them."""
        if self._taken is not None:
            self._taken.wait(current_stream(self._device))
            self._taken = None

    def advance(self) -> None:
        """Evaluate one more batch of the snapshot, if one is left."""
        if not self._left:
            return
        batch = self._left.popleft()
        side = self._queues.evaluation
        with stream(side), torch.no_grad():
            with self._watch.span(EVALUATION, "evaluate", stream=side):
                loss = functional_call(self._model, self._weights, (batch,))
                self._total = loss if self._total is None else self._total + loss
            if not self._left:
                self._evaluated = Event(self._device)
                self._evaluated.record(side)
                mean = self._total / len(self._batches)
                self.results.append(
                    Evaluated(self._step, *read_loss(mean, queues=self._queues, watch=self._watch))
                )

    def finish(self) -> None:
        """Issue what is left of the last snapshot."""
        while self._left:
            self.advance()


def read_loss(loss: torch.Tensor, *, queues: Queues, watch: Watch) -> tuple[torch.Tensor, Event]:
    """Copy a loss of the current stream to the host; read it after the event."""
    computed = Event(loss.device)
    computed.record(current_stream(loss.device))
    computed.wait(queues.losses)  # before the span: waiting for the loss is not copying
    with watch.span(LOSSES, "loss", stream=queues.losses):
        return copy(loss, "cpu", stream=queues.losses)
