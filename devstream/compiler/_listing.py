"""A program as text: a column for each stream, a line for each step, in order of issue."""

from __future__ import annotations

from collections.abc import Collection

from devstream.compiler._program import (
    Free,
    Hold,
    Program,
    Record,
    RecordStream,
    Step,
    Wait,
    Work,
    WorkKind,
)

#: Said of a wait of the user's.
NEEDLESS = "nothing in this function needs this wait"
_WIDEST = 56
_SHOWN_NODES = 3


def listing(program: Program, *, needless: Collection[int] = ()) -> str:
    """Return *program* as text; *needless* numbers the user's waits that are marked so.

    ``--e3->`` records event 3 and ``->e3--`` waits for it; ``+`` marks what devstream added, with the reason.
    """
    cells = [cell(step, needless) for step in program.steps]
    heads = [f"stream {slot} ({stream.name or stream.device})" for slot, stream in enumerate(program.streams)]
    count = len(program.streams)
    widths = [
        min(_WIDEST, max([len(heads[slot]), *(len(text) for where, text, _ in cells if where == slot)]))
        for slot in range(count)
    ]
    bar = "-+-".join("-" * width for width in widths)
    lines = [f"{program.name}: {len(program.steps)} steps, {len(program.regions)} regions"]
    lines += [" | ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True)).rstrip(), bar]
    for where, text, remark in cells:
        if where is None:
            lines.append(f"{text}  {remark}".rstrip())
            continue
        row = [(text if slot == where else "").ljust(widths[slot]) for slot in range(count)]
        lines.append(f"{' | '.join(row)}  {remark}".rstrip())
    lines += [bar, *(_result(program, number) for number in range(len(program.results)))]
    lines += [f"stream {one.stream} is complete at e{one.event}" for one in program.completions]
    return "\n".join(lines) + "\n"


def _result(program: Program, number: int) -> str:
    result = program.results[number]
    how = "joined" if result.joined else "saved for the backward" if result.saved else "ordered by the user"
    return f"returns {result.value} of stream {program.slot[result.value].stream}: {how}"


def cell(step: Step, needless: Collection[int] = ()) -> tuple[int | None, str, str]:
    """Return the column, the text and the remark of a step."""
    if isinstance(step, Work):
        return step.stream, _work(step), step.line
    if isinstance(step, Record):
        return step.stream, f"--e{step.event}->{_mark(step.op)}", step.line
    if isinstance(step, Wait):
        remark = step.why or step.line
        if step.op is not None and step.op in needless:
            remark = f"{remark}: {NEEDLESS}"
        return step.stream, f"->e{step.event}--{_mark(step.op)}", remark
    if isinstance(step, Free):
        return step.stream, f"free {', '.join(step.values)}", ""
    if isinstance(step, RecordStream):
        return step.stream, f"record_stream {step.value}", step.line
    if isinstance(step, Hold):
        events = " and ".join(f"e{event}" for event in step.events)
        return None, f"hold {', '.join(step.values)} until {events}", ""
    what = f"e{step.event}" if step.event is not None else "everything"
    return (
        None,
        f"==== the host waits for {what if step.stream is None else f'stream {step.stream}'} ====",
        step.line,
    )


def _mark(op: int | None) -> str:
    return " +" if op is None else ""


def _work(work: Work) -> str:
    if work.kind is WorkKind.REGION:
        more = f" and {len(work.nodes) - _SHOWN_NODES} more" if len(work.nodes) > _SHOWN_NODES else ""
        return f"{work.name}: {', '.join(work.nodes[:_SHOWN_NODES])}{more}"
    if work.kind is WorkKind.WRITE_BACK:
        return f"write back {work.target} from {work.inputs[0]}"
    if work.kind is WorkKind.COLLECTIVE_WAIT:
        return f"wait for {work.collective}"
    return f"{work.kind} {work.name}"


__all__ = ["NEEDLESS", "cell", "listing"]
