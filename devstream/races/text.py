"""A race in words: both operations, both streams, both lines, and the missing edge in the words of the fix."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from devstream.races.model import Fault, LaneKind, NearMiss, Note, Operation, Race
from devstream.races.sites import NOWHERE, Site


def short(site: Site) -> str:
    """Return file and line, without the directories."""
    return f"{Path(site.file).name}:{site.line}" if site.file else "an unknown line"


def summary(races: Sequence[Race]) -> str:
    """Return all of *races*, one below the other."""
    head = f"{len(races)} race{'s' * (len(races) != 1)} found"
    return "\n\n".join([head, *(describe(race) for race in races)])


def describe(race: Race) -> str:
    """Return one race as a few lines."""
    rank = "" if race.rank is None else f"[rank {race.rank}] "
    again = f" ({race.count} times)" if race.count > 1 else ""
    lines = [f"{rank}{race.fault.value}{again}"]
    lines += _side("first", race.first)
    if race.fault is Fault.REUSE:
        lines += [f"  freed   at {race.freed}", *_source(race.freed)]
    lines += _side("then", race.second)
    allocated = "" if race.allocated is NOWHERE else f", made at {race.allocated}"
    lines.append(f"  memory  {race.size_bytes} bytes{allocated}")
    lines.append(_paragraph("missing", missing(race)))
    # That one is told already, by what is missing.
    told = [note for note in race.notes if note.miss is not NearMiss.COLLECTED]
    lines += [_paragraph("note", note_text(note, race)) for note in told]
    return "\n".join(lines)


def _paragraph(label: str, text: str) -> str:
    # Paths stay whole, so that an editor or a terminal can open them.
    return textwrap.fill(
        text,
        100,
        initial_indent=f"  {label:<7} ",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _side(label: str, operation: Operation) -> list[str]:
    verb = "writes" if operation.write else "reads"
    if operation.name == "allocation":
        verb = "may get the same memory"
    head = f"  {label:<7} {operation.name} {verb}, on {operation.lane.name}"
    return [head, f"          at {operation.site}", *_source(operation.site)]


def _source(site: Site) -> list[str]:
    return [f"              {site.text}"] if site.text else []


def missing(race: Race) -> str:
    """Return the edge that is missing, in the words of the fix."""
    first, second = race.first, race.second
    before, after = short(first.site), short(second.site)
    if race.fault is Fault.REUSE:
        return (
            f"{second.lane.name} may hand this memory out again while {first.lane.name} still uses it. Call "
            f"devstream.record_stream(tensor, stream) with {first.lane.name}, before the tensor is dropped at "
            f"{short(race.freed)}, or make {second.lane.name} wait for {first.lane.name} first"
        )
    collected = next((note for note in race.notes if note.miss is NearMiss.COLLECTED), None)
    if collected is not None:
        return (
            f"{second.lane.name} doesn't wait for {collected.lane}, which waits for the collective of {before} at "
            f"{short(collected.wait)}. Record an event on {collected.lane} after that and make {second.lane.name} "
            f"wait for it before {after}"
        )
    if first.lane.kind is LaneKind.COLLECTIVE:
        return f"nothing waits for the collective of {before}. Call wait() on what it returned before {after}"
    if second.lane.kind is LaneKind.COLLECTIVE:
        return (
            f"the collective of {after} isn't ordered after {first.lane.name}. Issue it while a stream is "
            f"current that waits for {first.lane.name} after {before}"
        )
    if second.lane.kind is LaneKind.HOST:
        return (
            f"the host doesn't wait for {first.lane.name} after {before}. Record an event on {first.lane.name} "
            f"after {before} and call event.synchronize() before {after}"
        )
    return (
        f"{second.lane.name} doesn't wait for {first.lane.name} after {before}. Record an event on "
        f"{first.lane.name} after {before} and make {second.lane.name} wait for it before {after}"
    )


def note_text(note: Note, race: Race) -> str:
    """Return a near miss as a sentence."""
    wait, record = short(note.wait), short(note.record)
    first, second = race.first, race.second
    if note.miss is NearMiss.TOO_EARLY:
        return (
            f"{second.lane.name} waits at {wait} for an event that was recorded at {record}, before "
            f"{first.name} of {short(first.site)}; record it after that"
        )
    if note.miss is NearMiss.UNRECORDED:
        later = f" (it is recorded at {record})" if note.record.file else ""
        return f"the wait at {wait} orders nothing: its event had not been recorded by then{later}"
    if note.miss is NearMiss.OVERWRITTEN:
        return (
            f"the event that was recorded at {record} was recorded again at {short(note.again)}, on {note.lane}, "
            f"before the wait at {wait}, which waits for the last record only; use one event for each"
        )
    if note.miss is NearMiss.NATIVE_UNSEEN:
        return (
            f"torch tells of no native record or wait on {note.lane}; if the edge is there and native, write it "
            "with devstream's verbs"
        )
    return f"{second.lane.name} waits at {wait} for {note.lane}, but {first.name} ran on {first.lane.name}"


__all__ = ["describe", "missing", "note_text", "short", "summary"]
