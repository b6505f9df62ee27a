"""On which side of the user's operations the work of a program is: part of its proof."""

from __future__ import annotations

from typing import Protocol

from devstream.compiler._program import Program, Record, RecordStream, Step, Synchronize, Wait, Work


class Report(Protocol):
    """Takes what is wrong: two steps, words, and both lines."""

    def __call__(
        self, first: int, second: int, words: str, *, value: str = "", lines: tuple[str, str] = ("", "")
    ) -> None:
        """Note it."""


class Sides:
    """The user's operations, in order of issue, against the epochs of the work around them."""

    def __init__(self, program: Program, report: Report) -> None:
        self.program, self.report = program, report
        self.done: dict[int, int] = {}
        self.last: dict[object, int] = {}
        self.added: set[int] = set()
        self.taken: set[int] = {one.event for one in program.given}
        #: By stream: the last operation that work must not fall behind, as (epoch, step, line).
        self.closed: dict[int, tuple[int, int, str]] = {}
        #: By stream: the work of the highest epoch so far.
        self.reached: dict[int, tuple[int, int, str]] = {}

    def step(self, number: int, step: Step) -> None:
        """Check one step."""
        if isinstance(step, Work):
            self._work(number, step)
        elif isinstance(step, Synchronize):
            streams = range(len(self.program.streams))
            self._op(number, step.op, *(("stream", stream) for stream in streams), ("event", step.event))
            for stream in streams:
                self._not_reached(number, stream, step.epochs[stream], step.line)
                if step.event is None and step.stream in {None, stream}:
                    self.closed[stream] = (step.epochs[stream], number, step.line)
        elif isinstance(step, RecordStream):
            self._op(number, step.op)
        elif isinstance(step, Record | Wait):
            if step.op is None:
                self._added(number, step)
                return
            self.taken.add(step.event)
            self._op(number, step.op, ("stream", step.stream), ("event", step.event))
            if isinstance(step, Record):
                self.closed[step.stream] = (step.epoch, number, step.line)
            else:
                self._not_reached(number, step.stream, step.epoch, step.line)

    def _added(self, number: int, step: Record | Wait) -> None:
        if isinstance(step, Record):
            if step.event in self.added:
                self.report(-1, number, f"event {step.event} is recorded twice by the program itself")
            self.added.add(step.event)

    def _work(self, number: int, work: Work) -> None:
        if work.epochs is None:
            return
        lowest, highest = work.epochs
        epoch, closer, line = self.closed.get(work.stream, (-1, -1, ""))
        if lowest <= epoch:
            words = (
                f"{work.name} ({work.line}) on stream {work.stream} belongs in front of the operation at "
                f"{line or 'an unknown line'}, and comes behind it"
            )
            self.report(closer, number, words, lines=(line, work.line))
        if highest > self.reached.get(work.stream, (-1, -1, ""))[0]:
            self.reached[work.stream] = (highest, number, work.line)

    def _not_reached(self, number: int, stream: int, epoch: int, line: str) -> None:
        highest, earlier, work_line = self.reached.get(stream, (-1, -1, ""))
        if highest > epoch:
            words = (
                f"step {earlier} ({work_line}) on stream {stream} belongs behind the wait at "
                f"{line or 'an unknown line'}, and comes in front of it"
            )
            self.report(earlier, number, words, lines=(work_line, line))

    def _op(self, number: int, op: int, *chains: object) -> None:
        if op in self.done:
            self.report(self.done[op], number, f"operation {op} of the user's is there twice")
        self.done[op] = number
        for chain in chains:
            if self.last.get(chain, -1) > op and chain != ("event", None):
                self.report(-1, number, f"operation {op} of the user's comes behind operation {self.last[chain]}")
            self.last[chain] = max(op, self.last.get(chain, -1))

    def exit(self, number: int) -> None:
        """Check that nothing is missing."""
        for op in sorted(set(range(self.program.ops)) - self.done.keys()):
            self.report(-1, number, f"operation {op} of the user's is missing from the program")
        for event in sorted(self.added & self.taken):
            self.report(-1, number, f"event {event} is the user's, and the program records it for itself")


__all__ = ["Report", "Sides"]
