"""How large the demonstration is."""

from __future__ import annotations

from dataclasses import dataclass

from devstream.demo.model import Shape


@dataclass(frozen=True, slots=True)
class Size:
    """A model, its batches, and how long it is trained.

    Attributes:
        shape: of the model.
        batch: texts in a batch.
        steps: default number of steps.
        learning_rate: the highest.
        evaluation_batches: of held-out text, for the losses before and after.
        snapshot_batches: how many of these a snapshot is evaluated on.
        compared_steps: steps of one segment of the comparison with and without side streams; fewer where the
            training is short.
        compared_pairs: how often each side of the comparison is run.
    """

    shape: Shape
    batch: int
    steps: int
    learning_rate: float
    evaluation_batches: int
    snapshot_batches: int
    compared_steps: int
    compared_pairs: int


SIZES: dict[str, Size] = {
    "tiny": Size(Shape(1, 32, 2, 32), 8, 120, 2e-2, 4, 2, 4, 2),  # seconds; for tests
    "small": Size(Shape(4, 128, 4, 128), 8, 800, 3e-3, 16, 4, 10, 3),  # two CPU cores, a minute or two
    "medium": Size(Shape(6, 384, 6, 256), 32, 600, 1e-3, 16, 4, 20, 3),  # any accelerator
    "large": Size(Shape(12, 1024, 16, 512), 32, 1000, 4e-4, 16, 4, 20, 3),  # a large accelerator
}
