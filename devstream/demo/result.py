"""What the demonstration found, as plain data: for the table, for ``--json`` and for the next run."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

#: What the evaluation loss has to fall, in nats a byte, for the training to count as training.
REQUIRED_FALL_NATS = 1.5

KIND, SCHEMA = "devstream.demo", 1
CACHE_KIND, CACHE_SCHEMA = "devstream.demo.last", 1


@dataclass(frozen=True, slots=True)
class Column:
    """One way to do the same steps.

    Attributes:
        name: heads the column.
        tokens_per_s: of each segment, in the order of their runs.
        copy_ms: time that copies took in all segments, from their own timestamps; None: the device keeps no time.
        hidden_ms: the part of *copy_ms* during which the training or the evaluation ran as well; None as above.
        max_loss_difference: largest difference of a training loss from the first column's.
    """

    name: str
    tokens_per_s: tuple[float, ...]
    copy_ms: float | None
    hidden_ms: float | None
    max_loss_difference: float

    @property
    def median_tokens_per_s(self) -> float:
        """The middle one of the segments."""
        return statistics.median(self.tokens_per_s)

    @property
    def hidden_share(self) -> float | None:
        """The part of the copy time that was hidden, 0 to 1; None where it wasn't measured."""
        if self.copy_ms is None or self.hidden_ms is None or self.copy_ms <= 0:
            return None
        return self.hidden_ms / self.copy_ms


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run. Losses are in nats a byte.

    Attributes:
        columns: what was compared, on the same steps from the same weights.
        compared_steps: how many steps that were, in each segment.
        snapshots: evaluation loss by step, from snapshots taken while training went on.
        versions: of what took part.
        not_compiled: why there is no column of compiled steps; empty where there is one.
        picture: where the picture of the timeline is; None: not drawn.
    """

    device: str
    device_name: str
    size: str
    steps: int
    seed: int
    parameters: int
    text_bytes: int
    columns: tuple[Column, ...]
    compared_steps: int
    loss_before: float
    loss_after: float
    snapshots: dict[int, float]
    training_s: float
    total_s: float
    versions: dict[str, str]
    not_compiled: str = ""
    picture: str | None = None

    @property
    def fall(self) -> float:
        """How much the evaluation loss fell."""
        return self.loss_before - self.loss_after

    @property
    def failure(self) -> str | None:
        """Say why this run didn't train, or None where it did."""
        if not math.isfinite(self.loss_after):
            return f"the evaluation loss is {self.loss_after} after {self.steps} steps, so the training diverged"
        if self.fall < REQUIRED_FALL_NATS:
            return (
                f"the evaluation loss fell by {self.fall:.2f} nats a byte, from {self.loss_before:.2f} to "
                f"{self.loss_after:.2f}; {REQUIRED_FALL_NATS} are expected. With fewer steps than the default "
                "that is no fault: use more --steps"
            )
        return None

    @property
    def cache_key(self) -> str:
        """What a run must have in common with an earlier one to be compared with it."""
        torch = self.versions.get("torch", "unknown")
        return f"{self.device_name}, {self.size}, {self.steps} steps, torch {torch}"

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return all fields and what follows from them; a number that isn't finite is null."""
        fields = asdict(self)
        for column, own in zip(fields["columns"], self.columns, strict=True):
            column["median_tokens_per_s"] = own.median_tokens_per_s
            column["hidden_share"] = own.hidden_share
        # JSON's keys are texts.
        fields["snapshots"] = {str(step): loss for step, loss in self.snapshots.items()}
        fields["failure"] = self.failure
        finite: dict[str, Any] = _finite(fields)
        return finite


def _finite(value: Any) -> Any:  # Any: JSON
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
