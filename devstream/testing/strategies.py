"""Hypothesis strategies for stream programs: random records, waits and accesses on several streams, as plain data.

A program says nothing about how it is run. A test interprets it on a backend, on a model, or on both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hypothesis import strategies as st


@dataclass(frozen=True, slots=True)
class Record:
    """Record event number *event* on stream number *stream*."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Let stream number *stream* wait for event number *event*, which may never have been recorded."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Access:
    """Read, or with *write* write, cell number *cell* on stream number *stream*."""

    stream: int
    cell: int
    write: bool


Step: TypeAlias = Record | Wait | Access


@dataclass(frozen=True, slots=True)
class Program:
    """Steps, in the order of their issue by one host thread, over so many streams, events and memory cells."""

    streams: int
    events: int
    cells: int
    steps: tuple[Step, ...]


def programs(
    *, streams: int = 3, events: int = 3, cells: int = 2, max_steps: int = 12
) -> st.SearchStrategy[Program]:
    """Return a strategy for programs of at most *max_steps* steps.

    Events are few, so that records are overwritten and waits bind to the last record before them often.
    """
    on = st.integers(0, streams - 1)
    event = st.integers(0, events - 1)
    cell = st.integers(0, cells - 1)
    step: st.SearchStrategy[Step] = st.one_of(
        st.builds(Record, on, event), st.builds(Wait, on, event), st.builds(Access, on, cell, st.booleans())
    )
    steps = st.lists(step, min_size=1, max_size=max_steps).map(tuple)
    return st.builds(Program, st.just(streams), st.just(events), st.just(cells), steps)


def nestings(*, streams: int = 3, max_depth: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Return a strategy for stream numbers to enter one inside the other, the same one again too."""
    return st.lists(st.integers(0, streams - 1), min_size=1, max_size=max_depth).map(tuple)


__all__ = ["Access", "Program", "Record", "Step", "Wait", "nestings", "programs"]
