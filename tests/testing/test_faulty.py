"""devstream/testing/faulty.py: the repaired programs are right, and every program says what it is."""

from __future__ import annotations

import inspect

import pytest
import torch

import devstream
from devstream.races import Fault
from devstream.testing.faulty import PROGRAMS

RUNS = [
    pytest.param(program, kind, marks=[pytest.mark.cuda] if kind == "cuda" else [], id=f"{name}-{kind}")
    for name, program in PROGRAMS.items()
    for kind in ("cpu", "cuda")
    if program.only in ("", kind)
]


@pytest.mark.parametrize(("program", "kind"), RUNS)
def test_a_repaired_program_is_right(program, kind):
    assert program.run(torch.device(kind), False) == program.right


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_names_its_fault_and_explains_itself(program):
    assert program.fault in {fault.value for fault in Fault}
    assert program.run.__doc__.endswith(".")
    assert list(inspect.signature(program.run).parameters) == ["device", "broken"]


def test_programs_leave_the_current_stream_as_it_was():
    here = devstream.current_stream("cpu")
    for program in PROGRAMS.values():
        if not program.only:
            program.run(torch.device("cpu"), True)
    assert devstream.current_stream("cpu") is here
