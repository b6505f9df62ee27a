"""Stream code under compilers that are not ours."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import devstream
from devstream import _tracing
from devstream.exceptions import CompileWarning

SIDE = devstream.Stream("cpu")


def program(x: torch.Tensor) -> torch.Tensor:
    SIDE.wait_stream(devstream.current_stream("cpu"))
    with devstream.stream(SIDE):
        y = x + 1
    devstream.current_stream("cpu").wait_stream(SIDE)
    return y * 2


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tracing, "_warned", False)
    torch.compiler.reset()


def warned(backend: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function = torch.compile(program, backend=backend, fullgraph=True, options=options or None)
        for shape in (3, 4, 5):
            try:
                assert function(torch.ones(shape)).tolist() == [4.0] * shape
            except NameError:  # Inductor's code for the CPU names streams that it never made (torch 2.13 and 2.14)
                assert backend == "inductor"
    return [str(one.message) for one in told if isinstance(one.message, CompileWarning)]


def test_inductor_alone_is_warned_of_once():
    (text,) = warned("inductor")
    assert "'inductor'" in text
    assert 'backend="devstream"' in text


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compilers_that_keep_the_order_are_not(backend):
    assert not warned(backend)


def test_ours_is_not():
    assert not warned("devstream", regions="eager")
