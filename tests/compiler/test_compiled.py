"""Compiled stream code gives eager's values and gradients, whatever it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import devstream
from devstream import _registry
from devstream.compiler import backend as compiler_backend

pytestmark = [
    # Dynamo makes an object of torch.autograd.Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # Of eager code: one gradient comes from a side stream, its accumulation is on the caller's.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # A process of many tests has more streams than HIP has queues.
    pytest.mark.filterwarnings("ignore:backend 'rocm'"),
    # Dynamo looks at the gradient of every argument.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


def compiled(function: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend=compiler_backend.backend, fullgraph=True, options=options)


def run(function: Any, arguments: list[torch.Tensor]) -> list[Any]:
    """Call and differentiate; return results, what was done to the arguments, and gradients."""
    results = tree_leaves(function(*arguments))
    tensors = [one for one in results if isinstance(one, torch.Tensor)]
    asked = [one for one in tensors if one.requires_grad]
    if asked and torch.is_grad_enabled():
        sum((one * one).sum() for one in asked).backward()
    found = [one.detach() if isinstance(one, torch.Tensor) else one for one in results]
    return [*found, *(one.detach() for one in arguments), *(one.grad for one in arguments)]


def same(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
        else:
            assert one == other


#: The programs that Inductor compiles on the CPU too, where that takes seconds each.
SLOW = ("branches", "batch_norm_in_training", "attention_over_two_streams")


def pytest_generate_tests(metafunc: Any) -> None:
    if "program" not in metafunc.fixturenames:
        return
    programs = load_suite().PROGRAMS
    cases = [
        pytest.param(
            program, where, marks=[pytest.mark.cuda] if where == "cuda" else [], id=f"{program.name}-{where}"
        )
        for program in programs
        for where in ("cpu", "cuda")
        if _wanted(metafunc.function.__name__, program.name, where)
    ]
    metafunc.parametrize(("program", "where"), cases)


def _wanted(test: str, program: str, where: str) -> bool:
    if "toy" in test:
        return where == "cpu"
    return where == "cuda" or "inductor" not in test or program in SLOW


def load_suite() -> Any:
    import importlib.util
    import sys
    from pathlib import Path

    if "_compiler_suite" not in sys.modules:
        spec = importlib.util.spec_from_file_location("_compiler_suite", Path(__file__).with_name("_suite.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules["_compiler_suite"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["_compiler_suite"]


def test_regions_run_eagerly(program, where):
    function = program.make(where, devstream.Stream(where), devstream.Stream(where))
    wanted = run(function, program.arguments(where))
    fast = compiled(function, regions="eager", missing_waits="error")
    for _ in range(3):
        same(run(fast, program.arguments(where)), wanted)


def test_without_gradients(program, where):
    function = program.make(where, devstream.Stream(where), devstream.Stream(where))
    with torch.no_grad():
        wanted = run(function, program.arguments(where))
        fast = compiled(function, regions="eager", missing_waits="error")
        same(run(fast, program.arguments(where)), wanted)


def test_with_inductor(program, where):
    function = program.make(where, devstream.Stream(where), devstream.Stream(where))
    wanted = run(function, program.arguments(where))
    fast = compiled(function, missing_waits="error")
    for _ in range(3):
        same(run(fast, program.arguments(where)), wanted)


def nodes_by_stream(program: Any) -> dict[str, dict[int, list[str]]]:
    """Compile for training, and return what runs on which stream, of the forward and of the backward."""
    found: dict[str, dict[int, list[str]]] = {}

    def watch(name: str, built: Any) -> None:
        streams = found.setdefault(name, {})
        for region in built.regions:
            streams.setdefault(region.stream, []).extend(region.nodes)

    compiler_backend.watchers.append(watch)
    try:
        function = program.make("cpu", devstream.Stream("cpu"), devstream.Stream("cpu"))
        run(compiled(function, regions="eager"), program.arguments("cpu"))
    finally:
        compiler_backend.watchers.remove(watch)
    return found


def one_program(name: str) -> Any:
    return next(program for program in load_suite().PROGRAMS if program.name == name)


def test_the_same_expression_on_two_streams_stays_twice():
    """Without seals one node is left of two, and one stream reads the other's."""
    found = nodes_by_stream(one_program("same_expression_twice"))["forward"]
    assert [sum(node.startswith("sin") for node in found[stream]) for stream in (1, 2)] == [1, 1]


def test_an_attention_that_the_user_split_stays_split():
    """Without seals a pattern makes one attention of the three parts."""
    found = nodes_by_stream(one_program("attention_over_two_streams"))["forward"]
    assert any("bmm" in node for node in found[1])
    assert any("exp" in node for node in found[2])
    assert not any("attention" in node for nodes in found.values() for node in nodes)


def test_shared_weights_do_not_bring_two_streams_together():
    """Four micro-batches on two streams: the sums of their gradients follow one stream, at its end."""
    found = nodes_by_stream(one_program("micro_batches"))["backward"]
    assert set(found) == {0, 1, 2}
    assert not any(node.startswith("add") for node in found[0])


def test_found_by_name():
    side = devstream.Stream("cpu")

    def function(x):
        side.wait_stream(devstream.current_stream(x.device))
        with devstream.stream(side):
            y = x + 1
        devstream.current_stream(x.device).wait_stream(side)
        return y

    torch.compiler.reset()
    fast = torch.compile(function, backend="devstream", fullgraph=True, options={"regions": "eager"})
    assert fast(torch.ones(2)).tolist() == [2.0, 2.0]


def test_dynamic_shapes_with_inductor():
    side = devstream.Stream("cpu")

    def function(x, w):
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = torch.sin(x @ w).sum(0) * x.shape[0]
        devstream.current_stream("cpu").wait_stream(side)
        return y * torch.ones(x.shape[0] * 2, 1)

    fast = compiled(function)
    for rows in (3, 5, 7):
        arguments = [torch.randn(rows, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)]
        again = [one.detach().clone().requires_grad_() for one in arguments]
        same(run(fast, arguments), run(function, again))


def test_double_backward_is_torchs_error():
    side = devstream.Stream("cpu")

    def function(x):
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = x.sin()
        devstream.current_stream("cpu").wait_stream(side)
        return y.sum()

    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(function, regions="eager")(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_dropout_is_the_same_in_forward_and_backward():
    side = devstream.Stream("cpu")

    def function(x):
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = torch.nn.functional.dropout(x, 0.5)
        z = torch.nn.functional.dropout(x, 0.5)
        devstream.current_stream("cpu").wait_stream(side)
        return y, z

    x = torch.ones(400, requires_grad=True)
    fast = compiled(function, regions="eager")
    y, z = fast(x)
    assert not torch.equal(y, z)
    assert 100 < int((y == 0).sum()) < 300
    (gradient,) = torch.autograd.grad(y.sum() + z.sum(), x)
    torch.testing.assert_close(gradient, (y + z).detach())
    again, _ = fast(x)
    assert not torch.equal(again, y)


def test_random_numbers_on_two_streams_are_no_missing_wait():
    """Their seeds are made at once, by a node that the user didn't write."""
    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")

    def function(x):
        with devstream.stream(one):
            y = torch.nn.functional.dropout(x, 0.5)
        with devstream.stream(two):
            z = torch.nn.functional.dropout(x, 0.5)
        return y, z

    x = torch.ones(64, requires_grad=True)
    y, z = compiled(function, regions="eager", missing_waits="error")(x)
    assert not torch.equal(y, z)


def test_eagers_random_numbers_where_they_are_asked_for():
    side = devstream.Stream("cpu")

    def function(x):
        a = torch.nn.functional.dropout(x, 0.5)
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            b = torch.rand_like(x)
        c = torch.bernoulli(x * 0.5)
        devstream.current_stream("cpu").wait_stream(side)
        return a, b, c

    x = torch.ones(100)
    torch.manual_seed(3)
    wanted = function(x)
    fast = compiled(function, regions="eager", fallback_random=True)
    torch.manual_seed(3)
    for one, other in zip(fast(x), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_on_the_toy_plug_in(program, where):
    """A backend that the compiler has never heard of, its streams of a plain class."""
    assert where == "cpu"
    if "toy" not in _registry.names():
        pytest.fail("the toy backend isn't installed; run `pip install --no-deps tests/plugin_example`")
    with _registry.chosen("toy"):
        function = program.make("cpu", devstream.Stream("cpu"), devstream.Stream("cpu"))
        wanted = run(function, program.arguments("cpu"))
        fast = compiled(function, regions="eager", missing_waits="error")
        for _ in range(2):
            same(run(fast, program.arguments("cpu")), wanted)
