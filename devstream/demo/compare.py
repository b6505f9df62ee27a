"""The whole run: the same steps with and without side streams, in turn, then the rest of the training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from devstream._streams import capabilities, default_stream, stream
from devstream.abc import Capability, DeviceSpec
from devstream.demo.data import Text
from devstream.demo.lanes import COMPUTE, COPIES, Queues, one_queue, side_queues
from devstream.demo.result import Column, Result
from devstream.demo.sizes import SIZES, Size
from devstream.demo.train import Segment, Training
from devstream.report import Span, together

#: Snapshots that are evaluated in the course of the training.
_SNAPSHOTS = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the run is: *done* of *total* steps of *phase*; *loss* is the latest training loss on the host."""

    phase: str
    done: int
    total: int
    loss: float | None


def run(
    spec: DeviceSpec,
    *,
    size: str,
    steps: int,
    seed: int,
    text: Text,
    versions: dict[str, str],
    compiled: bool = True,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[Result, list[Span]]:
    """Train on a device, and return what was found and the timeline of the last segment with side streams.

    Args:
        spec: the device.
        size: a key of `SIZES`.
        steps: of the training, one or more.
        seed: of weights and batches. The same seed gives the same losses on one device and one torch.
        text: see `devstream.demo.data.read_library`.
        versions: to be noted in the result.
        compiled: compare compiled steps as well; where nothing can be compiled here, the result says why.
        on_progress: called after each step.
    """
    started = time.perf_counter()
    # Tensors know one CPU, streams know several.
    device = torch.device("cpu") if spec.device.type == "cpu" else spec.device
    with stream(default_stream(spec.device)):
        training = Training(SIZES[size], steps=steps, text=text, device=device, seed=seed)
        before = training.evaluate()
        turns = [
            _Turn(one_queue(device).name, one_queue(device)),
            _Turn(side_queues(device).name, side_queues(device)),
        ]
        not_compiled = _compile(training, on_progress) if compiled else "not asked for"
        if not not_compiled:
            turns.append(_Turn("compiled, with side streams", side_queues(device), compiled=True))
        first = compared_steps(SIZES[size], steps, ways=len(turns))
        keeps_time = Capability.TIMING in capabilities(spec.device)
        segments = _compared(training, turns, first, on_progress, keeps_time=keeps_time)
        begun = time.perf_counter()
        rest = training.run(
            first,
            steps,
            queues=side_queues(device),
            evaluate_every=max(1, steps // _SNAPSHOTS),
            on_step=lambda done, loss: on_progress(Progress("training", done, steps, loss)),
        )
        after = training.evaluate()
    result = Result(
        device=str(spec.device),
        device_name=spec.name,
        size=size,
        steps=steps,
        seed=seed,
        parameters=sum(weight.numel() for weight in training.model.parameters()),
        text_bytes=len(text.training) + len(text.evaluation),
        columns=tuple(
            _column(name, own, next(iter(segments.values()))[0].losses) for name, own in segments.items()
        ),
        compared_steps=first,
        loss_before=before,
        loss_after=after,
        snapshots=rest.evaluated,
        training_s=time.perf_counter() - begun,
        total_s=time.perf_counter() - started,
        versions=versions,
        not_compiled=not_compiled,
    )
    return result, segments[turns[1].name][-1].spans


@dataclass(frozen=True, slots=True)
class _Turn:
    """One way to do the same steps."""

    name: str
    queues: Queues
    compiled: bool = False


def _compile(training: Training, on_progress: Callable[[Progress], None]) -> str:
    """Compile the step, and return an empty text; or why it can't be compiled on this machine."""
    on_progress(Progress("compiling", 0, 1, None))
    training.restart()
    try:
        training.run(0, 2, queues=side_queues(training.device), compiled=True)
    except Exception as error:  # whatever a compiler lacks here: the rest of the run doesn't need it
        return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    on_progress(Progress("compiling", 1, 1, None))
    return ""


def compared_steps(size: Size, steps: int, *, ways: int = 2) -> int:
    """Return the length of a segment: the size's own, but all of them together are no longer than the training."""
    segments = ways * (size.compared_pairs + 1)
    return max(1, min(size.compared_steps, steps // segments))


def _compared(
    training: Training,
    turns: list[_Turn],
    steps: int,
    on_progress: Callable[[Progress], None],
    *,
    keeps_time: bool,
) -> dict[str, list[Segment]]:
    """Do the first steps again and again, in each way in turn.

    One pass before the first measured one, so that neither side pays for what happens once: kernels that are
    loaded, memory that is taken from the system, threads that start.
    """
    size = training.size
    total = (size.compared_pairs + 1) * len(turns) * steps
    segments: dict[str, list[Segment]] = {way.name: [] for way in turns}
    for turn in range(size.compared_pairs + 1):
        for number, way in enumerate(turns):
            before = (turn * len(turns) + number) * steps
            training.restart()
            segment = training.run(
                0,
                steps,
                queues=way.queues,
                compiled=way.compiled,
                watched=keeps_time,
                evaluate_every=max(1, steps // 2),
                on_step=lambda done, loss, before=before: on_progress(  # type: ignore[misc]
                    Progress("comparing", before + done, total, loss)
                ),
            )
            if turn > 0:
                segments[way.name].append(segment)
    return segments


def _column(name: str, segments: list[Segment], wanted: list[float]) -> Column:
    copy_ms = hidden_ms = None
    if segments[0].spans:
        times = [together(segment.spans, COPIES, under=COMPUTE) for segment in segments]
        copy_ms, hidden_ms = sum(one.busy_ms for one in times), sum(one.hidden_ms for one in times)
    return Column(
        name=name,
        tokens_per_s=tuple(segment.tokens_per_s for segment in segments),
        copy_ms=copy_ms,
        hidden_ms=hidden_ms,
        max_loss_difference=max(
            abs(one - other) for segment in segments for one, other in zip(segment.losses, wanted, strict=True)
        ),
    )
