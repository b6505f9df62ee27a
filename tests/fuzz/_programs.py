"""Random stream programs as source text, with what each line reads and changes beside it.

A program is drawn as a host thread would write it, and ordered as it goes: where a line needs work that its stream
doesn't know to be over, a wait is written in front of it, in one of several ways. Some are there for nothing.
So every program is right in eager mode, and leaving a wait out is a race exactly where the oracle says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

DEVICE = os.environ.get("DEVSTREAM_FUZZ_DEVICE", "cpu")
STREAMS = ("cur", "one", "two")
INPUTS = ("x", "w", "m")  # m is changed in place, and no gradient is asked for it


@dataclass(frozen=True)
class Line:
    """One line: what it does for the order, and its text.

    *kind* is "work", "view", "record", "wait", "host" (the host waits for *stream*) or "text". *wait* numbers what
    can be left out.
    """

    kind: str
    text: str
    depth: int = 1
    stream: int = 0
    event: str = ""
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    wait: int | None = None


@dataclass
class Drawn:
    """A program: its lines, and what comes back."""

    lines: list[Line]
    results: list[str]
    events: list[str]
    waits: int
    #: The storages that the caller reads afterwards, on his stream, and those that he has given.
    joined: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    facts: set[str] = field(default_factory=set)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f'"""\n{self.source()}"""')

    def source(self) -> str:
        """Return the function's text."""
        body = [f"{'    ' * line.depth}{line.text}" for line in self.lines]
        results = "".join(f"{one}, " for one in (*self.results, *self.events)).rstrip()
        head = ["def program(x, w, m):", f'    cur = devstream.current_stream("{DEVICE}")']
        return "\n".join([*head, *body, f"    return ({results})"]) + "\n"

    def without(self, wait: int) -> Drawn:
        """Leave one wait out."""
        gone = [line for line in self.lines if line.wait == wait]
        kept = [
            Line("text", "pass", line.depth) if line in gone else line  # a block must not be empty
            for line in self.lines
        ]
        return replace(self, lines=kept)

    def function(self, names: dict[str, Any]) -> Callable[..., Any]:
        """Return the function, with *names* as its globals."""
        import linecache

        text = self.source()
        file = f"<program {abs(hash(text))}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        made = dict(names)
        exec(compile(text, file, "exec"), made)
        found: Callable[..., Any] = made["program"]
        return found


@st.composite
def programs(draw: Any, *, max_lines: int = 9) -> Drawn:
    """Return a strategy for programs of up to so many lines, waits and blocks not counted."""
    writer = _Writer(lambda low, high: draw(st.integers(low, high)))
    return writer.run(max_lines)


@dataclass
class _Variable:
    name: str
    storage: int
    #: May be changed in place: it is no part of what a gradient is asked for, and no piece of a split.
    free: bool


class _Writer:
    def __init__(self, integer: Callable[[int, int], int]) -> None:
        self.integer = integer
        self.lines: list[Line] = []
        self.variables = [_Variable(name, number, name == "m") for number, name in enumerate(INPUTS)]
        self.storages = len(INPUTS)
        self.maker: dict[int, int] = dict.fromkeys(range(len(INPUTS)), 0)
        self.block = [0]
        self.names = 0
        self.waits = 0
        #: What each stream knows to be over, as a set of works; works are numbered from 0, the entry.
        self.known: list[set[int]] = [{0}, set(), set()]
        self.works = 1
        self.writer: dict[int, int] = dict.fromkeys(range(len(INPUTS)), 0)
        self.readers: dict[int, set[int]] = {}
        self.place: dict[int, int] = {0: 0}
        self.facts: set[str] = set()

    def run(self, max_lines: int) -> Drawn:
        for _ in range(self.integer(1, max_lines)):
            self._line()
        self.block = [0]
        results, events, joined = self._results()
        changed = {2} if self.writer[2] else set()  # the caller reads his own tensor again
        self._need(0, changed, set())
        return Drawn(
            self.lines,
            results,
            events,
            self.waits,
            frozenset(joined | changed),
            frozenset(range(len(INPUTS))),
            self.facts,
        )

    # -- lines -------------------------------------------------------------------------------------------

    def _line(self) -> None:
        kind = self.integer(0, 11)
        if kind <= 2 and len(self.block) < 3:
            stream = self.integer(0, len(STREAMS) - 1)
            self._add(Line("text", f"with devstream.stream({STREAMS[stream]}):"))
            self.block.append(stream)
            if len(self.block) > 2:
                self.facts.add("nesting")
            self._compute()  # a block is not empty
        elif kind == 3 and len(self.block) > 1:
            self.block.pop()
        elif kind == 4:
            self._view()
        elif kind == 5:
            self._change()
        elif kind == 6:
            self._pair()
        elif kind == 7:
            self._idle()
        else:
            self._compute()

    def _compute(self) -> None:
        one, two = self._pick(), self._pick()
        text = (
            f"torch.sin({one.name})",
            f"{one.name} * {two.name}",
            f"{one.name} @ {two.name}",
            f"{one.name}.softmax(-1) + {two.name}",
            f"torch.relu({one.name}) + 1",
            f"{one.name}.clone()",
        )[self.integer(0, 5)]
        reads = {one.storage} | ({two.storage} if two.name in text else set())
        self._make(text, reads, 1)

    def _pair(self) -> None:
        one = self._pick()
        self.facts.add("several results")
        if self.integer(0, 1):
            (values, indices) = self._make(f"torch.sort({one.name})", {one.storage}, 2)
            self.variables.remove(indices)
            self._make(f"{indices.name}.float() + {values.name}", {indices.storage, values.storage}, 1)
        else:
            # Both halves are views, until they are joined the other way round.
            first, second = self._name(), self._name()
            self._work("view", f"{first}, {second} = {one.name}.chunk(2)", set(), set())
            self._make(f"torch.cat([{second}, {first}])", {one.storage}, 1)

    def _view(self) -> None:
        one = self._pick()
        text = (f"{one.name}.t()", f"{one.name}.unsqueeze(0).squeeze(0)", f"{one.name}[:, :]")[self.integer(0, 2)]
        name = self._name()
        self.facts.add("views")
        self._work("view", f"{name} = {text}", set(), set())
        self.variables.append(_Variable(name, one.storage, one.free))

    def _change(self) -> None:
        targets = [one for one in self.variables if one.free]
        target = targets[self.integer(0, len(targets) - 1)]
        other = self._pick()
        own = other.storage == target.storage
        text = f"{target.name}.mul_(0.5)" if own else f"{target.name}.add_({other.name}.detach())"
        reads = {target.storage} | (set() if own else {other.storage})
        self.facts.add("changes")
        self._work("work", text, reads, {target.storage})

    def _idle(self) -> None:
        """Write a wait that nothing asked for."""
        stream, source = self.integer(0, 2), self.integer(0, 2)
        if stream != source:
            self._wait(stream, source)

    def _make(self, text: str, reads: set[int], count: int) -> list[_Variable]:
        stream = self.block[-1]
        made = []
        for _ in range(count):
            made.append(_Variable(self._name(), self.storages, True))
            self.maker[self.storages] = stream
            self.storages += 1
        names = ", ".join(one.name for one in made)
        self._work("work", f"{names} = {text}", reads, {one.storage for one in made})
        self.variables += made
        return made

    def _work(self, kind: str, text: str, reads: set[int], writes: set[int]) -> None:
        stream = self.block[-1]
        if kind == "work":
            self._need(stream, reads, writes)
            number = self.works
            self.works += 1
            self.known[stream].add(number)
            self.place[number] = stream
            for storage in reads:
                self.readers.setdefault(storage, set()).add(number)
            for storage in writes:
                self.writer[storage], self.readers[storage] = number, set()
        self._add(Line(kind, text, stream=stream, reads=frozenset(reads), writes=frozenset(writes)))

    def _need(self, stream: int, reads: set[int], writes: set[int]) -> None:
        """Write the waits without which work on *stream* could start too early."""
        while True:
            earlier = {self.writer[storage] for storage in reads | writes if storage in self.writer}
            earlier |= {one for storage in writes for one in self.readers.get(storage, set())}
            missing = earlier - self.known[stream]
            if not missing:
                return
            self._wait(stream, self.place[max(missing)])

    def _wait(self, stream: int, source: int) -> None:
        number, way = self.waits, self.integer(0, 5)
        self.waits += 1
        if way <= 2:
            text = f"{STREAMS[stream]}.wait_stream({STREAMS[source]})"
            event = f"w{number}"
            self._add(Line("record", "pass", stream=source, event=event))
            self._add(Line("wait", text, stream=stream, event=event, wait=number))
        elif way == 3:
            self._add(Line("host", f"{STREAMS[source]}.synchronize()", stream=source, wait=number))
            for known in self.known:
                known.update(self.known[source])
            return
        else:
            event = f"e{number}"
            self._add(Line("text", f'{event} = devstream.Event("{DEVICE}")'))
            self._add(Line("record", f"{event}.record({STREAMS[source]})", stream=source, event=event))
            self._add(Line("wait", f"{event}.wait({STREAMS[stream]})", stream=stream, event=event, wait=number))
        self.known[stream] |= self.known[source]

    def _add(self, line: Line) -> None:
        self.lines.append(replace(line, depth=len(self.block)))

    def _name(self) -> str:
        self.names += 1
        return f"t{self.names}"

    def _pick(self) -> _Variable:
        return self.variables[self.integer(0, len(self.variables) - 1)]

    # -- results -----------------------------------------------------------------------------------------

    def _results(self) -> tuple[list[str], list[str], set[int]]:
        made = self.variables[len(INPUTS) :]
        chosen = {self.integer(0, len(made) - 1) for _ in range(self.integer(1, 3))} if made else set()
        results, events, joined = [], [], set()
        for index in sorted(chosen):
            one = made[index]
            stream = self.place[self.writer[one.storage]]
            if stream and self.writer[one.storage] not in self.known[0] and self.integer(0, 3) == 0:
                # The caller waits for an event that is handed out as well.
                event = f"done{index}"
                self._add(Line("text", f'{event} = devstream.Event("{DEVICE}")'))
                self._add(Line("text", f"{event}.record({STREAMS[stream]})", stream=stream))
                events.append(event)
                self.facts.add("ordered by the caller")
            else:
                self._need(0, {one.storage}, set())
                joined.add(one.storage)
            results.append(one.name)
        return results, events, joined
