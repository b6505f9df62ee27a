"""A program as a JSON document, and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from devstream._files import dump
from devstream.compiler._graph import Origin, Stream
from devstream.compiler._program import (
    Completion,
    Free,
    Hold,
    Program,
    Record,
    RecordStream,
    Result,
    Slot,
    Step,
    Synchronize,
    Use,
    Wait,
    Work,
    WorkKind,
)
from devstream.exceptions import FileFormatError

KIND = "devstream.program"
SCHEMA = 1
_STEPS: dict[str, type[Step]] = {
    "work": Work,
    "record": Record,
    "wait": Wait,
    "synchronize": Synchronize,
    "record_stream": RecordStream,
    "free": Free,
    "hold": Hold,
}
_NAMES = {step: name for name, step in _STEPS.items()}
#: What a field holds, where that is more than text, numbers and tuples of them.
_FIELDS: dict[str, Any] = {  # Any: classes and enumerations, called alike
    "reads": Use,
    "writes": Use,
    "exit_reads": Use,
    "exit_writes": Use,
    "exit_writers": Use,
    "streams": Stream,
    "slots": Slot,
    "results": Result,
    "given": Completion,
    "completions": Completion,
}


def to_json(program: Program) -> str:
    """Return *program* as a document of kind ``devstream.program``."""
    return dump(as_fields(program), kind=KIND, schema=SCHEMA)


def as_fields(program: Program) -> dict[str, Any]:  # Any: whatever JSON can hold
    """Return what that document says, without its kind and schema."""
    fields = {
        field.name: _plain(getattr(program, field.name))
        for field in dataclasses.fields(program)
        if field.name != "steps"
    }
    fields["steps"] = [{"step": _NAMES[type(step)], **_plain(step)} for step in program.steps]
    return fields


def from_json(text: str) -> Program:
    """Return the program of a document that `to_json` wrote.

    Raises:
        FileFormatError: the text is damaged, or of another kind or schema.
    """
    try:
        document = json.loads(text)
        found = (document.pop("kind", None), document.pop("schema", None))
        if found != (KIND, SCHEMA):
            raise FileFormatError(path="the document", reason=f"it is of kind {found[0]!r}, schema {found[1]!r}")
        steps = tuple(_made(_STEPS[step.pop("step")], step) for step in document.pop("steps"))
        program = _made(Program, {**document, "steps": ()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(path="the document", reason=f"it holds no program ({error!r})") from error
    assert isinstance(program, Program)
    return dataclasses.replace(program, steps=steps)


def _plain(value: object) -> Any:  # Any: whatever JSON can hold
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _made(cls: type, fields: dict[str, Any]) -> Any:  # Any: an instance of cls
    return cls(**{name: _field(cls, name, value) for name, value in fields.items()})


def _field(cls: type, name: str, value: Any) -> Any:  # Any: see _plain
    if cls is Work and name == "kind":
        return WorkKind(value)
    if name == "origin":
        return Origin(value)
    if isinstance(value, list):
        of = _FIELDS.get(name)
        return tuple(_made(of, item) if of is not None else item for item in value)
    return value


__all__ = ["KIND", "SCHEMA", "as_fields", "from_json", "to_json"]
