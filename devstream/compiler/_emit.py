"""A program as the text of one Python function: the runner, which decides nothing.

What the text calls are the backend's own functions and the regions' code. There are two forms. Where a stream's
work is issued by launching it (an accelerator), values are local variables, and the stream is made current around
each run of its regions. Where the work is done by a thread of the stream (the CPU), values are cells that its jobs
fill in, since a result is there only when its job is done.

[Note: The form for a graph]
What is captured starts on one stream and ends there: ``fork`` lets all others wait for its start, ``join`` lets it
wait for their ends. Results are not returned but handed to ``keep``, which is part of the graph on the CPU, where
results are there only when it is replayed; and work of the caller's stream is launched as all other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: the values of constants

from devstream.compiler._program import (
    Free,
    Hold,
    Program,
    Record,
    RecordStream,
    Step,
    Synchronize,
    Wait,
    Work,
    WorkKind,
)
from devstream.compiler._regions import Compiled


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the text is made from.

    Attributes:
        program: the steps.
        code: the code of each work step, by its place among the steps.
        parameters: names of the graph's inputs, in order.
        results: what the function returns: a value's name, or a constant.
        user_events: how many events are the user's; these come first.
        token: the result that is the call's token.
        numbers: code for sizes among the results.
        graph: the text is captured into a device graph: [Note: The form for a graph].
        threads: whether work is done by a stream's thread.
    """

    program: Program
    code: Mapping[int, Compiled]
    parameters: Sequence[str]
    results: Sequence[tuple[str, Any]]
    user_events: int
    threads: bool
    token: str | None = None
    numbers: Compiled | None = None
    graph: bool = False

    def made(self) -> tuple[str, ...]:
        """Return the results that the program makes, each once; the others are given to it."""
        names = (value for kind, value in self.results if kind == "value" and value not in self.parameters)
        return tuple(dict.fromkeys(names))


def emit(plan: Plan) -> str:
    """Return the text of ``call(args, s, u, given, kept, token)``."""
    return _Emitter(plan).text()


def pooled(plan: Plan) -> tuple[int, ...]:
    """Return for each event that calls take in turns, as ``take`` gives them, the stream that records it."""
    emitter = _Emitter(plan)
    return tuple(emitter.recorder[event] for event in emitter.pooled)


class _Emitter:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.program = plan, plan.program
        self.lines: list[str] = []
        names = [*plan.parameters, *(slot.name for slot in self.program.slots)]
        self.number = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.current = 0
        self.job: list[str] = []
        self.job_stream = 0
        self.given = {one.event for one in self.program.given}
        outliving = {one.event for one in self.program.completions}
        outliving.update(event for step in self.program.steps if isinstance(step, Hold) for event in step.events)
        #: The stream that records an event; each of the program's own is recorded once.
        self.recorder = {s.event: s.stream for s in self.program.steps if isinstance(s, Record)}
        home = self.program.streams[0].device
        #: Streams of other devices, whose current stream has to come back as well.
        self.abroad = [n for n, one in enumerate(self.program.streams) if one.device != home and not plan.threads]
        #: Values that their last reader has been handed, and nobody has to drop any more.
        self.freed: set[str] = set()
        own = {step.event for step in self.program.steps if isinstance(step, Record) and not self._is_users(step)}
        self.kept = sorted(own & outliving)
        self.pooled = sorted(own - outliving)

    def _is_users(self, step: Record | Wait) -> bool:
        return step.op is not None and step.event < self.plan.user_events

    # -- text --------------------------------------------------------------------------------------------

    def text(self) -> str:
        plan, threads = self.plan, self.plan.threads
        head = ["def call(args, s, u, given, kept, token):"]
        if threads:
            head.append(f"    v = [*args, *[None] * {len(self.number) - len(plan.parameters)}]")
        elif plan.parameters:
            head.append(f"    {self._tuple(plan.parameters)} = args")
        head.append("    args.clear()")
        head += [f"    s{number} = s[{number}]" for number in range(len(self.program.streams))]
        head += [f"    e{event} = given[{event}]" for event in sorted(self.given)]
        head += [f"    e{event} = kept[{event}] = fresh(s{self.recorder[event]})" for event in self.kept]
        if self.pooled:
            head.append(f"    {self._tuple([f'e{event}' for event in self.pooled], names=False)} = take(s)")
        head += [f"    o{number} = current(s{number})" for number in self.abroad]
        if plan.graph:
            self.lines.append("fork(s)")
        steps = self.program.steps
        for number, step in enumerate(steps):
            following = steps[number + 1 :]
            self._step(number, step, following)
        self._flush()
        if plan.graph:
            self.lines.append("join(s)")
            self._switch(0)
            self._do(0, [f"keep({self._tuple(plan.made())})"])
            self._flush()
        if any(line.startswith("switch(") for line in self.lines):
            self.lines += [f"switch(o{number})" for number in self.abroad]
            self.current = -1
        self._switch(0)
        body = [f"    {line}" for line in self.lines] or ["    pass"]
        if any(line.startswith("    switch(") for line in body):
            back = [f"        switch(o{number})" for number in self.abroad]
            body = ["    try:", *(f"    {line}" for line in body), "    except BaseException:", *back]
            body += ["        switch(s0)", "        raise"]
        tail = self._tail()
        return "\n".join([*head, *body, *tail]) + "\n"

    def _tail(self) -> list[str]:
        plan, lines = self.plan, []
        if plan.graph:
            return ["    return ()"]
        if plan.threads:
            late = {
                self.program.slot[one.value].stream
                for one in self.program.results
                if not one.joined and self.program.slot[one.value].stream
            }
            lines += [f"    there(s{stream}, s0)" for stream in sorted(late)]
        else:
            # The caller drops them when he has read them, of which their own stream knows nothing.
            lent = dict.fromkeys(
                one.value for one in self.program.results if one.joined and self.program.slot[one.value].stream
            )
            if lent:
                lines.append(f"    lend({self._tuple(lent)}, s0)")
        if self.pooled:
            lines.append(f"    give({self._tuple([f'e{event}' for event in self.pooled], names=False)})")
        if plan.numbers is not None:
            lines.append(
                f"    {self._tuple([f'n_{i}' for i in range(len(plan.numbers.outputs))], names=False)} = "
                f"numbers([{', '.join(map(self._name, plan.numbers.inputs))}])"
            )
        results = [self._result(kind, value) for kind, value in plan.results]
        lines.append(f"    return ({', '.join(results)}{',' if results else ''})")
        return lines

    def _result(self, kind: str, value: Any) -> str:
        if kind == "number":
            assert self.plan.numbers is not None
            return f"n_{self.plan.numbers.outputs.index(value)}"
        if kind == "token":
            return "token"
        return self._name(value) if kind == "value" else repr(value)

    def _name(self, name: str) -> str:
        return f"v[{self.number[name]}]" if self.plan.threads else f"v{self.number[name]}"

    def _tuple(self, parts: Iterable[str], *, names: bool = True) -> str:
        return "(" + "".join(f"{self._name(part) if names else part}, " for part in parts).strip() + ")"

    # -- steps -------------------------------------------------------------------------------------------

    def _step(self, number: int, step: Step, following: Sequence[Step]) -> None:
        if isinstance(step, Work):
            self._work(number, step, following)
        elif isinstance(step, Free):
            self._free(step)
        elif isinstance(step, Hold):
            if not self.plan.threads:
                events = self._tuple([f"e{event}" for event in step.events], names=False)
                self.lines.append(f"hold({events}, {self._tuple(step.values)})")
        elif isinstance(step, Record | Wait):
            self._flush()
            self._order(step)
        elif isinstance(step, Synchronize):
            self._flush()
            if step.event is not None and step.event < self.plan.user_events:
                self.lines.append(f"u[{step.event}].synchronize()")
            elif step.stream is not None:
                self.lines.append(f"s{step.stream}.synchronize()")
            else:
                self.lines.append("synchronize(s)")
        else:
            assert isinstance(step, RecordStream)
            self._flush()
            self.lines.append(f"record_stream({self._name(step.value)}, s{step.stream})")

    def _order(self, step: Record | Wait) -> None:
        stream, verb = f"s{step.stream}", "record" if isinstance(step, Record) else "wait"
        event = f"u[{step.event}]" if self._is_users(step) else f"e{step.event}"
        # The user's are seen by whoever observes, as in eager.
        verb = f"user_{verb}" if self._is_users(step) else verb
        arguments = (event, stream) if isinstance(step, Record) else (stream, event)
        self.lines.append(f"{verb}({', '.join(arguments)})")

    def _work(self, number: int, work: Work, following: Sequence[Step]) -> None:
        if work.kind is WorkKind.WRITE_BACK:
            lines = [f"write({self._name(work.target)}, {self._name(work.inputs[0])})"]
        else:
            code = self.plan.code[number]
            arguments = f"[{', '.join(map(self._name, code.inputs))}]"
            call = f"f{number}({arguments})"
            gone = [] if self.plan.threads else self._last_used(work, following)
            lines = []
            if gone:  # so that the region can give the memory back itself, as soon as it has read it
                lines = [f"a = {arguments}", f"del {', '.join(gone)}"]
                call = f"f{number}(a)"
            lines.append(f"{self._tuple(code.outputs)} = {call}" if code.outputs else call)
        if self.plan.threads:
            self._do(work.stream, lines)
        else:
            self._switch(work.stream)
            self.lines += lines

    def _last_used(self, work: Work, following: Sequence[Step]) -> list[str]:
        gone: list[str] = []
        for step in following:
            if not isinstance(step, Free):
                break
            if step.stream == work.stream:
                gone += [self._name(name) for name in step.values if name in work.inputs]
        self.freed.update(gone)
        return gone

    def _free(self, step: Free) -> None:
        names = [self._name(name) for name in step.values]
        if self.plan.threads:
            if self.plan.graph:  # which finds its inputs there again
                names = [self._name(name) for name in step.values if name not in self.plan.parameters]
            self._do(step.stream, [f"{name} = None" for name in names])
            return
        names = [name for name in names if name not in self.freed]
        if names:
            self.lines.append(f"del {', '.join(names)}")

    def _switch(self, stream: int) -> None:
        if not self.plan.threads and stream != self.current:
            self.lines.append(f"switch(s{stream})")
            self.current = stream

    def _do(self, stream: int, lines: list[str]) -> None:
        """Let *stream*'s thread do this; the caller's stream is this thread's."""
        if not self.plan.threads or (stream == 0 and not self.plan.graph):
            self._flush()
            self.lines += lines
            return
        if self.job and self.job_stream != stream:
            self._flush()
        if not lines:
            return
        self.job_stream = stream
        self.job += lines

    def _flush(self) -> None:
        if self.job:
            self.lines.append("def job():")
            self.lines += [f"    {line}" for line in self.job]
            self.lines.append(f"launch(job, s{self.job_stream})")
            self.job = []


__all__ = ["Plan", "emit", "pooled"]
