"""Why a program can't be one device graph: what in it has to run on the host, or elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from devstream.compiler._graph import Origin
from devstream.compiler._program import Program, RecordStream, Slot, Synchronize, Work, WorkKind


def obstacle_of(program: Program, random: Iterable[str] = ()) -> str | None:
    """Return what keeps *program* from being captured, with the line of it, or None.

    Args:
        program: what would be captured.
        random: names of the nodes that draw random numbers from the device's own generator.
    """
    known = frozenset(random)
    for step in program.steps:
        found = _step(step, known)
        if found is not None:
            return found
    home = program.streams[0].device
    away = {stream.device for stream in program.streams} - {home}
    if away:
        return f"it works on {' and '.join(sorted({home, *away}))}, and a graph is of one device"
    pageable = hosts(program)
    for slot in program.slots:
        if slot.device != home and slot.name not in pageable:
            return (
                f"{_named(program, slot)} is in the memory of {slot.device}, and a graph would read it only once"
            )
    return None


def hosts(program: Program) -> tuple[str, ...]:
    """Return the inputs that only copies to the device read: a graph can, where they are page-locked."""
    home = program.streams[0].device
    if home == "cpu":
        return ()
    copies = [one for one in _works(program) if one.kind is WorkKind.COPY]
    others = {name for one in _works(program) if one.kind is not WorkKind.COPY for name in one.inputs}
    written = {one.target for one in _works(program)}
    return tuple(
        slot.name
        for slot in program.slots
        if slot.device == "cpu" and slot.origin is not Origin.PRODUCED
        if slot.name not in others | written
        if any(slot.name in one.inputs for one in copies)
    )


def line_of(program: Program, name: str) -> str:
    """Return the line of the first step that uses the value *name*."""
    return next((one.line for one in _works(program) if name in (*one.inputs, *one.outputs)), "")


def _step(step: object, random: frozenset[str]) -> str | None:
    match step:
        case Synchronize():
            return f"the host waits in it{_at(step.line)}"
        case RecordStream():
            return f"record_stream in it says nothing of a later replay{_at(step.line)}"
        case Work(kind=WorkKind.ISSUE | WorkKind.COLLECTIVE_WAIT):
            return f"it holds a collective, {step.name}{_at(step.line)}"
        case Work(kind=WorkKind.EFFECT) if not random.issuperset({step.name}):
            return f"{step.name} does something on the host{_at(step.line)}"
        case Work() if any("rng_state" in name for name in step.nodes):
            return f"it reads or sets the state of the random numbers{_at(step.line)}"
    return None


def _works(program: Program) -> list[Work]:
    return [step for step in program.steps if isinstance(step, Work)]


def _named(program: Program, slot: Slot) -> str:
    return f"{slot.name}{_at(line_of(program, slot.name))}"


def _at(line: str) -> str:
    return f" ({line})" if line else ""


__all__ = ["hosts", "line_of", "obstacle_of"]
