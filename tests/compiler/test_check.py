"""devstream/compiler/_check.py and _look.py: what eager mode would miss, found without running anything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import devstream
from devstream.compiler import backend as compiler_backend
from devstream.exceptions import UnsupportedError, WriteBackError

pytestmark = [
    # Dynamo makes an object of torch.autograd.Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

SIDE, OTHER = devstream.Stream("cpu"), devstream.Stream("cpu")


def line_of(function: Any, text: str) -> str:
    """Return ``file.py:12`` of the line of this file, in *function*, that holds *text*."""
    source = Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    return f"{Path(__file__).name}:{next(n for n in range(start, start + 30) if text in source[n - 1])}"


def current() -> Any:
    return devstream.current_stream("cpu")


def forgets_the_fork(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a = x @ w
    with devstream.stream(SIDE):
        b = a.sin()
    current().wait_stream(SIDE)
    return b


def forgets_the_join(x: torch.Tensor) -> torch.Tensor:
    SIDE.wait_stream(current())
    with devstream.stream(SIDE):
        b = x.sin()
    return b * 2


def waits_for_the_wrong_event(x: torch.Tensor) -> torch.Tensor:
    first, second = devstream.Event("cpu"), devstream.Event("cpu")
    SIDE.wait_stream(current())
    with devstream.stream(SIDE):
        first.record()
        y = x.exp()
        second.record()
    first.wait()
    return y + 1


def changes_under_a_reader(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    SIDE.wait_stream(current())
    with devstream.stream(SIDE):
        z = y.sin()
    y.add_(1)
    current().wait_stream(SIDE)
    return z + y


def two_side_streams(x: torch.Tensor) -> torch.Tensor:
    for stream in (SIDE, OTHER):
        stream.wait_stream(current())
    with devstream.stream(SIDE):
        a = x.sin()
    with devstream.stream(OTHER):
        b = a.cos()
    current().wait_stream(OTHER)
    current().wait_stream(SIDE)
    return b


X = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("function", "count", "first", "second"),
    [
        (forgets_the_fork, 2, "a = x @ w", "b = a.sin()"),
        (forgets_the_join, 1, "b = x.sin()", "return b * 2"),
        (waits_for_the_wrong_event, 1, "y = x.exp()", "return y + 1"),
        (changes_under_a_reader, 1, "z = y.sin()", "y.add_(1)"),
        (two_side_streams, 1, "a = x.sin()", "b = a.cos()"),
    ],
)
def test_a_missing_wait_is_named_with_both_lines_and_the_edge(function, count, first, second):
    found = devstream.check(function, *([X] * function.__code__.co_argcount))
    assert not found.ok
    (one,) = found.missing
    assert one.first_line.endswith(line_of(function, first))
    assert one.second_line.endswith(line_of(function, second))
    assert one.sure
    text = str(found)
    assert first in text  # the source as well
    assert second in text
    assert f"let stream {one.second_stream} wait for it" in text
    assert f"stream {one.first_stream} is " in text


def test_no_false_alarm_on_the_programs_of_the_suite(suite_program):
    function = suite_program.make("cpu", SIDE, OTHER)
    found = devstream.check(function, *suite_program.arguments("cpu"))
    assert found.ok, str(found)
    assert not found.unsure, str(found)
    assert str(found) == f"{function.__qualname__}: no wait is missing in eager mode\n"


def test_what_code_outside_may_have_ordered_is_no_finding_but_is_said():
    def function(x):
        with devstream.stream(SIDE):
            return x + 1

    found = devstream.check(function, X)
    assert found.ok
    assert len(found.unsure) == 2
    assert "unless code outside of the function gives the order" in str(found)


def test_a_function_without_stream_code_misses_nothing():
    def plain(x):
        return x.sin()

    found = devstream.check(plain, X)
    assert found.ok
    assert str(found).partition("<locals>.")[2] == "plain: no stream code, nothing to miss\n"


def test_a_module_is_checked_as_it_is_called():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

        def forward(self, x, *, scale):
            with devstream.stream(SIDE):
                y = x @ self.weight
            return y * scale

    found = devstream.check(Layer(), X, scale=2)
    assert [one.second_stream for one in found.missing] == [0]
    assert found.function.endswith("Layer")


def test_the_document_says_what_the_text_says():
    found = devstream.check(forgets_the_fork, X, X)
    document = json.loads(found.to_json())
    assert (document["kind"], document["schema"], document["ok"]) == ("devstream.check", 1, False)
    (one,) = document["missing"]
    assert one["first"] == found.missing[0].first
    assert one["fix"] == found.missing[0].fix
    assert document["streams"][0] == "current (cpu)"


@pytest.fixture
def nothing_runs(monkeypatch):
    """Fail where work or an operation reaches the backend, or Inductor compiles."""
    from devstream._compat import inductor

    def refuse(*_, **__):
        raise AssertionError("something ran")

    cpu = devstream.backend("cpu")
    for name in ("launch", "record_event", "wait_event"):
        monkeypatch.setattr(cpu, name, refuse)
    monkeypatch.setattr(inductor, "region", refuse)


@pytest.mark.usefixtures("nothing_runs")
def test_nothing_runs_and_nothing_is_changed():
    def function(x, total):
        event = devstream.Event("cpu")
        SIDE.wait_stream(current())
        with devstream.stream(SIDE):
            total.add_(x.detach())
            event.record()
        event.wait()
        seen.append(1)
        return total * x

    seen: list[int] = []
    total = torch.zeros(4, 4)
    assert devstream.check(function, X.clone().requires_grad_(), total).ok
    assert devstream.explain(function, X.clone().requires_grad_(), total).halves
    assert torch.equal(total, torch.zeros(4, 4))
    assert seen == []


def test_checking_does_not_count_against_the_functions_own_compilations():
    torch.compiler.reset()
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert not devstream.check(forgets_the_join, X).ok
    compiled = torch.compile(
        forgets_the_join,
        backend=compiler_backend.backend,
        fullgraph=True,
        options={"regions": "eager", "missing_waits": "ignore"},
    )
    torch.testing.assert_close(compiled(X), X.sin() * 2)


def test_what_can_not_be_traced_is_said_with_the_line():
    def function(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(UnsupportedError, match=r"function is not supported.*test_check\.py:\d+"):
        devstream.check(function, X)


def test_what_eager_mode_does_right_and_the_compiler_refuses_is_no_finding():
    def function(x, w):
        event = devstream.Event("cpu")
        SIDE.wait_stream(current())
        with devstream.stream(SIDE):
            x.mul_(w)
            event.record()
        event.wait()
        return (x * w).sum(), event

    arguments = torch.ones(2).requires_grad_().clone(), torch.ones(2)
    assert devstream.check(function, *arguments).ok
    with pytest.raises(WriteBackError):
        devstream.explain(function, *arguments)


def test_wrong_arguments_are_the_error_of_a_call():
    with pytest.raises(TypeError, match="missing a required argument: 'w'"):
        devstream.check(forgets_the_fork, X)


def test_the_suite_without_any_one_of_its_waits_is_found_or_the_wait_is_needless(suite_program):
    """Each wait of the function in turn is left out: found, unless `explain` says that nothing needs it."""
    from devstream.compiler._look import look
    from devstream.compiler._missing import missing
    from devstream.compiler._needless import needless

    graph = look(suite_program.make("cpu", SIDE, OTHER), suite_program.arguments("cpu"), {}, programs=False).eager

    spare = set(needless(graph))
    for number, op in enumerate(graph.ops):
        if op.kind != "wait" or number in spare:
            continue
        ops = tuple(one for other, one in enumerate(graph.ops) if other not in {number, *spare})
        assert missing(dataclasses.replace(graph, ops=ops)), f"{op} is needed, and nobody missed it"
    both = dataclasses.replace(graph, ops=tuple(one for n, one in enumerate(graph.ops) if n not in spare))
    assert not missing(both)
