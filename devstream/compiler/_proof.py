"""The proof that a program can't race: happens-before over its final steps, by vector clocks.

It trusts nothing that built the program, and follows the memory, not the intentions:

- a read comes after the last write, and finds the contents that it expects;
- a write comes after the last write and all reads since; a free is a write by the stream that owns the memory;
- a collective reads and writes from its issue on, and is over for a stream only behind a wait for it;
- what is handed out is ready for whom it is promised to; what still runs at the end keeps its memory;
- the user's operations are all there, in their order, and work is on the right side of them.

The cost of a step does not depend on the length of the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from devstream.compiler._graph import Origin
from devstream.compiler._program import (
    Free,
    Hold,
    Program,
    Record,
    RecordStream,
    Step,
    Synchronize,
    Use,
    Wait,
    Work,
    WorkKind,
)
from devstream.compiler._side import Sides
from devstream.exceptions import ProofError
from devstream.races.clocks import Clock, Clocks, Lane, Stamp, covers

_HOST = "host"


@dataclass(frozen=True, slots=True)
class Violation:
    """Two steps that are not in the order that they need; -1 is the entry, ``len(steps)`` the return."""

    first: int
    second: int
    value: str
    first_line: str
    second_line: str
    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(slots=True)
class _Access:
    stamp: Stamp
    step: int
    line: str


@dataclass(slots=True)
class _Memory:
    """One storage: its contents' version, who left it, and who has read it since."""

    version: int
    writer: _Access
    readers: dict[Lane, _Access] = field(default_factory=dict)
    freed: int | None = None

    def accesses(self) -> Iterable[_Access]:
        return (self.writer, *self.readers.values())


def violations(program: Program) -> list[Violation]:
    """Return everything that is wrong with the order of *program*; nothing, if it can't race."""
    walk = _Walk(program)
    for number, step in enumerate(program.steps):
        walk.step(number, step)
    walk.exit(len(program.steps))
    return walk.found


def prove(program: Program) -> None:
    """Return if *program* can't race.

    Raises:
        ProofError: it could; the error names for each violation both steps, both lines and the missing wait.
    """
    found = violations(program)
    if found:
        raise ProofError(program=program.name, violations=[violation.words for violation in found])


class _Walk:
    """The clocks and the memory, from step to step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.found: list[Violation] = []
        self.clocks = Clocks()
        self.sides = Sides(program, self._report)
        self.names: dict[int, str] = {}
        self.owner: dict[int, int] = {}
        self.events: dict[int, Clock] = {}
        self.holds: dict[int, list[Clock]] = defaultdict(list)
        self.memory: dict[int, _Memory] = {}
        self.makers: dict[str, _Access] = {}
        self.flying: dict[str, tuple[int, Clock]] = {}
        self.landed: set[str] = set()
        self.lanes: list[Stamp] = []
        entries = [_Access(self.clocks.tick(stream), -1, "") for stream in range(len(program.streams))]
        for slot in program.slots:
            self.names.setdefault(slot.storage, slot.name)
            self.owner.setdefault(slot.storage, slot.stream)
            if slot.origin is not Origin.PRODUCED:
                self.memory.setdefault(slot.storage, _Memory(0, entries[slot.stream]))
        for given in program.given:
            self.events[given.event] = self.clocks.record(given.stream)

    def _report(
        self, first: int, second: int, words: str, *, value: str = "", lines: tuple[str, str] = ("", "")
    ) -> None:
        self.found.append(Violation(first, second, value, *lines, words))

    # -- steps ------------------------------------------------------------------------------------------

    def step(self, number: int, step: Step) -> None:
        """Take one step in order of issue."""
        self.sides.step(number, step)
        if isinstance(step, Synchronize):
            streams = range(len(self.program.streams)) if step.stream is None else (step.stream,)
            for stream in streams if step.event is None else ():
                self.clocks.synchronize(_HOST, stream)
            if step.event in self.events:
                self.clocks.wait(_HOST, self.events[step.event])
        elif isinstance(step, Hold):
            self.holds[step.storage] += [self.events.get(event, {}) for event in step.events]
        else:
            self.clocks.wait(step.stream, self.clocks.view(_HOST))
            self._on_stream(number, step)

    def _on_stream(self, number: int, step: Work | Record | Wait | RecordStream | Free) -> None:
        if isinstance(step, Record):
            self.events[step.event] = self.clocks.record(step.stream)
        elif isinstance(step, Wait):
            self.clocks.wait(step.stream, self.events.get(step.event, {}))
        elif isinstance(step, Free):
            self._free(number, step)
        elif isinstance(step, RecordStream):
            self._alive(number, step.value, "record_stream")
        else:
            self._work(number, step)

    def _work(self, number: int, work: Work) -> None:
        for name in (*work.inputs, *([work.target] if work.target else [])):
            self._alive(number, name, work.name, line=work.line)
        lane: Lane = work.stream
        if work.kind is WorkKind.COLLECTIVE_WAIT:
            self._land(number, work)
        if work.kind is WorkKind.ISSUE:
            lane = self._lane(work.stream)
        stamp = self.clocks.tick(lane)
        self._touch(number, work.stream, stamp, work.reads, work.writes)
        if work.kind is WorkKind.ISSUE:
            self.flying[work.name] = (number, self.clocks.record(lane))
        if work.kind is WorkKind.REGION:
            self.makers.update((name, _Access(stamp, number, work.line)) for name in work.outputs)

    def _touch(self, number: int, stream: int, stamp: Stamp, reads: Iterable[Use], writes: Iterable[Use]) -> None:
        """Check the accesses of one step, then note them."""
        for use in reads:
            memory = self.memory.get(use.storage)
            access = _Access(stamp, number, use.line)
            if memory is None:
                words = f"{self._who(number)} reads {self._what(use.storage)} before anything has written it"
                self._report(-1, number, words, value=self._what(use.storage), lines=("", use.line))
                continue
            if memory.version != use.version:
                self._stale(memory, access, use)
            self._ordered(stream, memory.writer, access, use.storage, ("writes", "reads"))
            memory.readers[stamp.lane] = access
        for use in writes:
            access = _Access(stamp, number, use.line)
            memory = self.memory.get(use.storage)
            if memory is not None:
                if memory.freed is not None:
                    self._dead(memory, number, self._what(use.storage), line=use.line)
                self._ordered(stream, memory.writer, access, use.storage, ("writes", "overwrites"))
                for reader in memory.readers.values():
                    self._ordered(stream, reader, access, use.storage, ("reads", "overwrites"))
            self.memory[use.storage] = _Memory(use.version, access)

    def _ordered(self, stream: int, first: _Access, second: _Access, storage: int, did: tuple[str, str]) -> None:
        """Report that *second*, on *stream*, does not come after *first*, if so."""
        if first.stamp == second.stamp or self.clocks.knows(stream, first.stamp):
            return
        value = self._what(storage)
        words = (
            f"{self._who(second.step, stream)} {did[1]} {value} without waiting for "
            f"{self._who(first.step, first.stamp.lane)}, which {did[0]} it; {self._edge(first.stamp.lane, stream)}"
        )
        self._report(first.step, second.step, words, value=value, lines=(first.line, second.line))

    def _edge(self, lane: Lane, stream: int) -> str:
        if not isinstance(lane, int):
            return f"missing: a wait of stream {stream} for that collective"
        return f"missing: a wait of stream {stream} for an event that is recorded on stream {lane} behind it"

    def _stale(self, memory: _Memory, access: _Access, use: Use) -> None:
        value, how = self._what(use.storage), "later" if memory.version > use.version else "earlier"
        words = (
            f"{self._who(access.step)} finds {how} contents of {value} than it needs (write {memory.version} by "
            f"{self._who(memory.writer.step)} instead of write {use.version}); the steps are in the wrong order"
        )
        self._report(memory.writer.step, access.step, words, value=value, lines=(memory.writer.line, access.line))

    def _alive(self, number: int, name: str, who: str, *, line: str = "") -> None:
        storage = self.program.slot[name].storage
        memory = self.memory.get(storage)
        if memory is None:
            self._report(
                -1, number, f"{who} needs {name} before anything has made it", value=name, lines=("", line)
            )
        elif memory.freed is not None:
            self._dead(memory, number, name, line=line)

    def _dead(self, memory: _Memory, number: int, name: str, *, line: str) -> None:
        assert memory.freed is not None
        words = f"{self._who(number)} needs {name}, which {self._who(memory.freed)} has given back"
        self._report(memory.freed, number, words, value=name, lines=("", line))

    def _free(self, number: int, step: Free) -> None:
        memory, value = self.memory.get(step.storage), self._what(step.storage)
        if memory is None or memory.freed is not None:
            self._report(-1, number, f"{value} is freed, but there is nothing (more) to free", value=value)
            return
        if step.stream != self.owner[step.storage]:
            words = f"{value} is freed on stream {step.stream}, but belongs to stream {self.owner[step.storage]}"
            self._report(memory.writer.step, number, words, value=value)
        access = _Access(Stamp(step.stream, 0), number, "")
        for earlier in memory.accesses():
            self._ordered(step.stream, earlier, access, step.storage, ("uses", "frees"))
        memory.freed = number

    # -- collectives ------------------------------------------------------------------------------------

    def _lane(self, stream: int) -> Lane:
        """Return a lane for a collective: one that *stream* knows to be empty, so that lanes stay few."""
        free = (position for position, last in enumerate(self.lanes) if self.clocks.knows(stream, last))
        position = next(free, len(self.lanes))
        if position == len(self.lanes):
            self.lanes.append(Stamp(("collective", position), 0))
        lane = self.lanes[position].lane
        self.clocks.wait(lane, self.clocks.view(stream))
        self.lanes[position] = Stamp(lane, self.lanes[position].time + 1)
        return lane

    def _land(self, number: int, work: Work) -> None:
        if work.collective not in self.flying:
            words = f"{work.name} waits for the collective {work.collective}, which was not issued"
            self._report(-1, number, words, lines=("", work.line))
            return
        self.clocks.wait(work.stream, self.flying[work.collective][1])
        self.landed.add(work.collective)

    # -- the end ----------------------------------------------------------------------------------------

    def exit(self, number: int) -> None:
        """Check what is promised for the time behind the last step."""
        program = self.program
        for stream in range(len(program.streams)):
            self.clocks.wait(stream, self.clocks.view(_HOST))
        for result in program.results:
            self._result(number, result.value, result.version, joined=result.joined, saved=result.saved)
        for use in program.exit_writers:
            memory = self.memory.get(use.storage)
            if memory is None or memory.version != use.version:
                words = f"{self._what(use.storage)} does not get the contents that the call leaves in it"
                self._report(-1, number, words, value=self._what(use.storage), lines=("", use.line))
            else:
                self._ordered(
                    0, memory.writer, _Access(Stamp(0, 0), number, use.line), use.storage, ("writes", "uses")
                )
        self._touch(number, 0, self.clocks.tick(0), program.exit_reads, program.exit_writes)
        for storage, memory in self.memory.items():
            if memory.freed is None:
                self._outlives(number, storage, memory)
        for name in self.flying.keys() - self.landed:
            words = f"the collective {name} is never waited for"
            self._report(self.flying[name][0], number, words)
        self.sides.exit(number)

    def _result(self, number: int, name: str, version: int, *, joined: bool, saved: bool) -> None:
        slot = self.program.slot[name]
        memory = self.memory.get(slot.storage)
        if memory is None or memory.freed is not None or memory.version != version:
            self._report(
                -1, number, f"{name} is handed out, but its contents are not there (any more)", value=name
            )
            return
        if not joined and not saved:
            return
        whom, clock = "the caller's stream", self.clocks.view(0)
        if saved and slot.stream:
            event = next((one.event for one in self.program.completions if one.stream == slot.stream), None)
            whom = f"the event that completes stream {slot.stream}"
            clock = self.events.get(event, {}) if event is not None else {}
        for access in (memory.writer, *([self.makers[name]] if name in self.makers else [])):
            if not covers(clock, access.stamp):
                words = (
                    f"{name} is handed out, but {whom} does not come after {self._who(access.step)}, its maker; "
                    f"{self._edge(access.stamp.lane, slot.stream if saved else 0)}"
                )
                self._report(access.step, number, words, value=name, lines=(access.line, ""))
                return

    def _outlives(self, number: int, storage: int, memory: _Memory) -> None:
        """Check that memory which is still referenced at the end can't be reused under a reader."""
        owner = self.owner[storage]
        for access in memory.accesses():
            if access.step == number:
                continue  # the caller's own copy behind the program; he has the memory until then
            if self.clocks.knows(owner, access.stamp) or any(
                covers(one, access.stamp) for one in self.holds[storage]
            ):
                continue
            words = (
                f"{self._what(storage)} may be reused on stream {owner} after the call, while "
                f"{self._who(access.step, access.stamp.lane)} uses it; missing: a hold until that is over"
            )
            self._report(access.step, number, words, value=self._what(storage), lines=(access.line, ""))

    def _what(self, storage: int) -> str:
        return self.names.get(storage, f"storage {storage}")

    def _who(self, number: int, lane: Lane | None = None) -> str:
        """Return a few words for a step, with its line."""
        if number < 0:
            return f"what stream {lane} did before the call" if isinstance(lane, int) else "the caller"
        if number >= len(self.program.steps):
            return "the caller"
        step = self.program.steps[number]
        name = step.name if isinstance(step, Work) else f"step {number}"
        stream = f" on stream {step.stream}" if isinstance(step, Work | Free) else ""
        line = f" ({step.line})" if isinstance(step, Work) and step.line else ""
        return f"{name}{stream}{line}"


__all__ = ["Violation", "prove", "violations"]
