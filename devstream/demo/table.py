"""The table at the end: plain rows of text, drawn by whoever shows them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from devstream.demo.result import Column, Result

#: Why the CPU's copies take longer beside the training than in its queue.
_HAND_OVER = (
    "Copy time rises with side streams on the CPU: a copy in the training's own queue runs in the training's "
    "thread, one of a side stream on a thread of that stream. Its time counts from its issue, so it includes the "
    "hand-over to that thread, and the wait for a core where the training uses all of them."
)


@dataclass(frozen=True, slots=True)
class Table:
    """A title, the heads of the columns, rows of as many cells, and notes below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def as_table(result: Result, *, previous_tokens_per_s: float | None = None) -> Table:
    """Return the table of *result*.

    Args:
        result: a whole run.
        previous_tokens_per_s: of the run before, with side streams in eager, of the same device, size, steps and
            torch; None: there was none.
    """
    columns = result.columns
    heads = ("", *(column.name for column in columns), "previous run")
    empty = [""] * len(columns)
    previous = "none yet" if previous_tokens_per_s is None else f"{previous_tokens_per_s:,.0f}"
    rows = (
        ("tokens/s", *(f"{column.median_tokens_per_s:,.0f}" for column in columns), previous),
        ("  lowest to highest", *(_spread(column) for column in columns), ""),
        ("  against the first, in turn", *(_ratio(column, columns[0]) for column in columns), ""),
        ("copy time, ms", *(_number(column.copy_ms) for column in columns), ""),
        ("copy time hidden", *(_share(column) for column in columns), ""),
        ("same losses", *(_same(column) for column in columns), ""),
        ("evaluation loss before", *empty[1:], f"{result.loss_before:.3f}", "nats a byte"),
        ("evaluation loss after", *empty[1:], f"{result.loss_after:.3f}", "nats a byte"),
    )
    took = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    run = (
        f"size {result.size}: {result.parameters:,} weights, {result.steps} steps, seed {result.seed}, "
        f"{result.text_bytes / 1e6:.1f} MB of text; {result.training_s:.0f} s of training, "
        f"{result.total_s:.0f} s in all"
    )
    how = (
        f"Compared: the same first steps ({result.compared_steps}) from the same weights, in turn in each "
        "way. Copy time, and what was hidden of it under training and evaluation, are from the "
        "timestamps of both. The previous run is one of the same device, size, steps and torch."
    )
    notes = [f"{result.device}: {result.device_name}", run, took, how]
    if result.not_compiled:
        notes.append(f"Not compiled: {result.not_compiled}.")
    alone, beside = columns[0].copy_ms, columns[1].copy_ms
    if result.device.partition(":")[0] == "cpu" and alone is not None and beside is not None and beside > alone:
        notes.append(_HAND_OVER)
    return Table(f"devstream demo on {result.device}", heads, rows, tuple(notes))


def _spread(column: Column) -> str:
    return f"{min(column.tokens_per_s):,.0f} to {max(column.tokens_per_s):,.0f}"


def _ratio(column: Column, first: Column) -> str:
    if column is first:
        return "1.00x"
    # By pair: what else the machine does changes slowly, so it weighs on both segments of a pair.
    ratios = [own / other for own, other in zip(column.tokens_per_s, first.tokens_per_s, strict=True)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _share(column: Column) -> str:
    return "not measured" if column.hidden_share is None else f"{column.hidden_share:.0%}"


def _same(column: Column) -> str:
    difference = column.max_loss_difference
    return "to the bit" if difference == 0.0 else f"within {difference:.1e}"
