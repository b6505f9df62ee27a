"""Which queues the demonstration uses, and the lanes of its timeline."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from devstream._streams import current_stream, named_stream
from devstream.abc import StreamArg
from devstream.report import Recorder, Span

TRAINING, EVALUATION = "training", "evaluation"
BATCHES, WEIGHTS, LOSSES = "batches in", "weights snapshot", "losses out"
#: What is copied, and under what it can hide.
COPIES = frozenset({BATCHES, WEIGHTS, LOSSES})
COMPUTE = frozenset({TRAINING, EVALUATION})


@dataclass(frozen=True, slots=True)
class Queues:
    """Where each kind of work goes; training itself stays on the current stream.

    Attributes:
        name: the column of the table.
        batches: copies batches to the device.
        evaluation: copies the weights aside and evaluates the copy.
        losses: copies losses to the host.
    """

    name: str
    batches: Any  # Any: a stream of any backend; the same below
    evaluation: Any
    losses: Any


def side_queues(device: torch.device) -> Queues:
    """Return a queue of its own for each kind of work."""
    names = ("demo batches", "demo evaluation", "demo losses")
    return Queues("with side streams", *(named_stream(name, device) for name in names))


def one_queue(device: torch.device) -> Queues:
    """Return the current stream for everything: the same program, in order."""
    here = current_stream(device)
    return Queues("without side streams", here, here, here)


class Watch:
    """Brackets work with timed events, or does nothing where the device keeps no time or nobody looks."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder

    def span(self, lane: str, name: str, *, stream: StreamArg | None = None) -> AbstractContextManager[None]:
        """Return a context whose work on *stream* (default: the current one) becomes a span of *lane*."""
        return nullcontext() if self._recorder is None else self._recorder.span(lane, name, stream=stream)

    def spans(self) -> list[Span]:
        """Block until all watched work is done, and return its spans."""
        return [] if self._recorder is None else self._recorder.spans()
