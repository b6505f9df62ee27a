"""Random stream programs: eager on the CPU's streams, compiled, and one line after the other give the same."""

from __future__ import annotations

import os
import random
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import _fuzz_oracle as oracle
import _fuzz_programs as drawn
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

import devstream
from devstream.compiler import backend as compiler_backend
from devstream.compiler._listing import listing
from devstream.testing.interleavings import machine, unordered

EXAMPLES = int(os.environ.get("DEVSTREAM_FUZZ", "40"))
INDUCTOR = int(os.environ.get("DEVSTREAM_FUZZ_INDUCTOR", "0"))

pytestmark = [
    # Dynamo looks at the gradient of every argument.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # Of eager code: one gradient comes from a side stream, its accumulation is on the caller's.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.timeout(0 if EXAMPLES > 40 or INDUCTOR else 300),
]
if drawn.DEVICE != "cpu":
    pytestmark.append(getattr(pytest.mark, drawn.DEVICE))


def budget(examples: int) -> settings:
    return settings(
        deadline=None,
        max_examples=max(examples, 1),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        print_blob=True,
    )


class _Nothing:
    """Takes the place of streams and events where all lines run one after the other."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


STREAMS = {"one": devstream.Stream(drawn.DEVICE), "two": devstream.Stream(drawn.DEVICE)}
PLAIN = {"torch": torch, "devstream": _Nothing(), "one": _Nothing(), "two": _Nothing()}
REAL = {"torch": torch, "devstream": devstream, **STREAMS}


def arguments(seed: int, *, gradients: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.rand(4, 4, generator=generator).to(drawn.DEVICE) for _ in drawn.INPUTS]
    for one in made[:2]:
        one.requires_grad_(gradients)
    return made


def forward(function: Any, given_: list[torch.Tensor]) -> list[torch.Tensor]:
    """Call it, and do what a caller does who was handed events."""
    results = function(*given_)
    for one in results:
        if isinstance(one, devstream.Event):
            one.wait()
    return [one for one in results if isinstance(one, torch.Tensor)]


def backward(results: list[torch.Tensor]) -> None:
    asked = [one for one in results if one.requires_grad]
    if asked:
        sum((one * one).sum() for one in asked).backward()


def outcome(results: list[torch.Tensor], given_: list[torch.Tensor]) -> list[torch.Tensor | None]:
    found = [one.detach().clone() for one in (*results, *given_)]
    return [*found, *(one.grad for one in given_)]


def one_call(function: Any, seed: int, *, gradients: bool) -> list[torch.Tensor | None]:
    given_ = arguments(seed, gradients=gradients)
    results = forward(function, given_)
    backward(results)
    return outcome(results, given_)


def two_in_flight(function: Any, order: tuple[int, int], *, gradients: bool) -> list[list[torch.Tensor | None]]:
    given_ = [arguments(seed, gradients=gradients) for seed in (1, 2)]
    results = [forward(function, one) for one in given_]
    for call in order:
        backward(results[call])
    return [outcome(*pair) for pair in zip(results, given_, strict=True)]


def same(found: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def compiled(function: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend=compiler_backend.backend, fullgraph=True, options=options)


def differentiable(program: drawn.Drawn) -> bool:
    """Whether eager mode can differentiate it: it can't where a change meets what it has saved."""
    try:
        one_call(program.function(PLAIN), 1, gradients=True)
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        return False
    return True


@contextmanager
def watched() -> Iterator[list[Any]]:
    """Yield what is compiled inside."""
    found: list[Any] = []

    def watch(name: str, program: Any) -> None:
        found.append(program)

    compiler_backend.watchers.append(watch)
    try:
        yield found
    finally:
        compiler_backend.watchers.remove(watch)


def check_values(program: drawn.Drawn, order: tuple[int, int], **options: Any) -> None:
    gradients = differentiable(program)
    wanted = [one_call(program.function(PLAIN), seed, gradients=gradients) for seed in (1, 2)]
    function = program.function(REAL)
    for seed, one in enumerate(wanted, start=1):
        same(one_call(function, seed, gradients=gradients), one)
    with watched() as halves:
        fast = compiled(function, missing_waits="error", **options)
        for found, one in zip(two_in_flight(fast, order, gradients=gradients), wanted, strict=True):
            same(found, one)
    for half in halves:
        assert not unordered(machine(half)), listing(half)


@budget(EXAMPLES)
@given(drawn.programs(), st.sampled_from([(0, 1), (1, 0)]))
def test_eager_compiled_and_line_after_line_give_the_same(program, order):
    note(program.source())
    check_values(program, order, regions="eager")


if INDUCTOR:

    @budget(INDUCTOR)
    @given(drawn.programs(), st.sampled_from([(0, 1), (1, 0)]))
    def test_regions_of_inductor_give_the_same(program, order):
        note(program.source())
        check_values(program, order)


#: Programs that once went wrong, as they were found, with what was wrong.
KEPT = {
    "a copy of an input that is changed later was taken for the input": """
        with devstream.stream(one):
            one.wait_stream(cur)
            t1 = x * m
        t2 = m.clone()
        cur.wait_stream(one)
        m.add_(t1.detach())
        return (t2,)
    """,
    "the same behind an event": """
        t1 = m.clone()
        m.add_(x.detach())
        done = devstream.Event("cpu")
        done.record(cur)
        with devstream.stream(one):
            done.wait(one)
            t2 = t1 * x
        cur.wait_stream(one)
        return (t2,)
    """,
    "the same where it is handed out from a side stream": """
        with devstream.stream(one):
            one.wait_stream(cur)
            t1 = x * m
            t2 = m.t().clone()
        cur.wait_stream(one)
        m.mul_(0.5)
        return (t1, t2)
    """,
    "a copy of a result was handed out as the result itself": """
        t1 = x.sin()
        with devstream.stream(one):
            one.wait_stream(cur)
            t2 = t1.clone()
        cur.wait_stream(one)
        return (t1, t2)
    """,
    "the backward read an input as the forward had left it": """
        t1 = torch.sin(x.softmax(-1) + m)
        with devstream.stream(cur):
            m.add_(x.detach())
        return (t1,)
    """,
    "the same where a side stream changes it": """
        with devstream.stream(one):
            one.wait_stream(cur)
            t1 = x * torch.sin(m)
            m.add_(x.detach())
        cur.wait_stream(one)
        return (t1,)
    """,
    "the same of a view of it": """
        with devstream.stream(one):
            one.wait_stream(cur)
            t1 = x * torch.sin(m.t())
            m.add_(x.detach())
        cur.wait_stream(one)
        return (t1,)
    """,
    "the same where one stream reads it and another changes it": """
        with devstream.stream(one):
            one.wait_stream(cur)
            t1 = x * torch.sin(m)
        cur.wait_stream(one)
        m.add_(x.detach())
        return (t1,)
    """,
}


@pytest.mark.parametrize("name", list(KEPT))
def test_kept(name):
    check_values(Kept(KEPT[name]), (1, 0), regions="eager")


@pytest.mark.parametrize("name", list(KEPT))
def test_what_is_handed_out_shares_no_memory_by_mistake(name):
    program = Kept(KEPT[name])
    function = program.function(REAL)
    fast = compiled(function, regions="eager", missing_waits="error")
    given_ = arguments(1, gradients=differentiable(program))
    results = forward(fast, given_)
    addresses = [one.untyped_storage().data_ptr() for one in (*given_, *results)]
    assert len(set(addresses)) == len(addresses)


class Kept(drawn.Drawn):
    """A program as text."""

    def __init__(self, text: str) -> None:
        super().__init__([], [], [], 0)
        self.text = textwrap.indent(textwrap.dedent(text).strip(), "    ").replace('"cpu"', f'"{drawn.DEVICE}"')

    def source(self) -> str:
        return f'def program(x, w, m):\n    cur = devstream.current_stream("{drawn.DEVICE}")\n{self.text}\n'


def races_of(program: drawn.Drawn) -> tuple[bool, bool]:
    """Return whether the program races within itself, and whether it does with what the caller does around it."""
    found = oracle.tasks(program.lines, inputs=program.inputs, joined=program.joined)
    pairs = oracle.races(found)
    inside = any(found[one].inside and found[other].inside for one, other in pairs)
    return inside, bool(pairs)


@budget(EXAMPLES)
@given(drawn.programs())
def test_a_right_program_lacks_no_wait(program):
    note(program.source())
    assert races_of(program) == (False, False)
    found = devstream.check(program.function(REAL), *arguments(1, gradients=False))
    assert found.ok, str(found)


@budget(EXAMPLES)
@given(drawn.programs(), st.integers(0, 1000), st.sampled_from([(0, 1), (1, 0)]))
def test_a_wait_that_is_left_out_is_found_where_an_order_breaks_and_compiled_code_has_it(program, which, order):
    assume(program.waits)
    changed = program.without(which % program.waits)
    note(changed.source())
    inside, _ = races_of(changed)
    function = changed.function(REAL)
    found = devstream.check(function, *arguments(1, gradients=False))
    assert found.ok != inside, str(found)
    gradients = differentiable(changed)
    wanted = [one_call(changed.function(PLAIN), seed, gradients=gradients) for seed in (1, 2)]
    fast = compiled(function, missing_waits="ignore", regions="eager")
    for one, other in zip(two_in_flight(fast, order, gradients=gradients), wanted, strict=True):
        same(one, other)


def test_the_programs_have_everything_in_them():
    """Of a few hundred programs, each feature is in a good part."""
    seen: dict[str, int] = {}
    generator = random.Random(5)
    for _ in range(300):
        program = drawn._Writer(generator.randint).run(9)
        for fact in program.facts | ({"waits"} if program.waits else set()):
            seen[fact] = seen.get(fact, 0) + 1
    wanted = ("nesting", "views", "changes", "several results", "ordered by the caller", "waits")
    assert {name: seen.get(name, 0) for name in wanted if seen.get(name, 0) < 15} == {}, seen
