"""What compiled code refuses, warns of, and leaves alone."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import devstream
from devstream.compiler import backend as compiler_backend
from devstream.compiler._program import Record
from devstream.exceptions import MissingWaitWarning

# Dynamo looks at the gradient of every argument.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

SIDE = devstream.Stream("cpu")


def compiled(function: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(
        function, backend=compiler_backend.backend, fullgraph=True, options={"regions": "eager", **options}
    )


def line_of(function: Any, text: str) -> str:
    """Return ``file.py:12`` of the line of this file, in *function*, that holds *text*."""
    source = Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    return f"{Path(__file__).name}:{next(n for n in range(start, start + 30) if text in source[n - 1])}"


def forgets_a_wait(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a = x @ w
    with devstream.stream(SIDE):
        b = a.sin()
    devstream.current_stream("cpu").wait_stream(SIDE)
    return b


def test_a_forgotten_wait_is_said_with_both_lines_and_compiled_code_has_it():
    x = torch.randn(4, 4)
    with pytest.warns(MissingWaitWarning) as told:
        found = compiled(forgets_a_wait)(x, x)
    text = str(told[0].message)
    assert len(told) == 1
    assert line_of(forgets_a_wait, "a = x @ w") in text
    assert line_of(forgets_a_wait, "b = a.sin()") in text
    assert "record an event on stream 0" in text
    torch.testing.assert_close(found, (x @ x).sin())


def test_a_forgotten_wait_can_be_an_error_or_ignored():
    x = torch.randn(4, 4)
    with pytest.raises(Exception, match=r"would race.*does not wait for"):
        compiled(forgets_a_wait, missing_waits="error")(x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MissingWaitWarning)
        compiled(forgets_a_wait, missing_waits="ignore")(x, x)


def test_an_input_that_aot_writes_back_behind_a_recorded_event():
    def program(x: torch.Tensor) -> torch.Tensor:
        done = devstream.Event("cpu")
        with devstream.stream(SIDE):
            x.mul_(2)
            done.record()
        done.wait()
        return x + 1

    with pytest.raises(Exception, match="is changed in place") as caught:
        compiled(program)(torch.ones(3, requires_grad=True) * 1)
    text = str(caught.value)
    assert line_of(program, "x.mul_(2)") in text
    assert line_of(program, "done.record()") in text
    assert "copy_() outside" in text


def test_an_input_without_gradient_is_written_back_before_the_event():
    done = devstream.Event("cpu")

    def program(x: torch.Tensor) -> torch.Tensor:
        SIDE.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(SIDE):
            x.mul_(2)
            done.record()
            return x + 1

    steps: list[Any] = []

    def watch(_name: str, found: Any) -> None:
        steps.extend(found.steps)

    compiler_backend.watchers.append(watch)
    try:
        x = torch.ones(3)
        compiled(program)(x)
    finally:
        compiler_backend.watchers.remove(watch)
    done.synchronize()
    assert x.tolist() == [2.0] * 3
    back = next(n for n, step in enumerate(steps) if getattr(step, "target", ""))
    record = next(
        n
        for n, step in enumerate(steps)
        if isinstance(step, Record) and step.line.endswith(line_of(program, "done.record()"))
    )
    assert back < record


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"missing_waits": "maybe"}, "missing_waits.*maybe.*warn, error, ignore"),
        ({"regions": "fast"}, "regions.*fast.*inductor, eager"),
        ({"delay_us": -1}, "delay_us.*-1.*microseconds"),
        ({"delay_us": float("nan")}, "delay_us.*nan"),
        ({"cost": 3}, "cost.*3.*function"),
        ({"nonsense": 1}, "'nonsense', which neither devstream nor Inductor knows"),
        ({"mode": "faster"}, "mode is 'faster'; give one of"),
    ],
)
def test_wrong_options(options, words):
    torch.compiler.reset()
    function = torch.compile(forgets_a_wait, backend=compiler_backend.backend, options=options)
    with pytest.raises(Exception, match=words):
        function(torch.ones(2, 2), torch.ones(2, 2))


def test_code_without_streams_is_inductors(monkeypatch):
    from devstream._compat import inductor

    seen = []
    monkeypatch.setattr(inductor, "stream_free", lambda module, inputs, options: seen.append(options) or module)
    torch.compiler.reset()
    function = torch.compile(lambda x: x + 1, backend=compiler_backend.backend, options={"max_autotune": True})
    assert function(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen == [{"max_autotune": True}]


def test_the_program_can_be_read_in_the_log(caplog):
    with caplog.at_level(logging.DEBUG, "devstream.compiler"):
        compiled(forgets_a_wait, missing_waits="ignore")(torch.ones(2, 2), torch.ones(2, 2))
    assert any(
        "inference: " in record.getMessage() and "region0" in record.getMessage() for record in caplog.records
    )


def test_streams_of_the_backward_body_of_a_function():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with devstream.stream(SIDE):
                found = gradient * 2
            devstream.current_stream("cpu").wait_stream(SIDE)
            return found

    def program(x: torch.Tensor) -> torch.Tensor:
        with devstream.stream(SIDE):
            y = x + 1
        devstream.current_stream("cpu").wait_stream(SIDE)
        return Twice.apply(y).sum()

    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        compiled(program)(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


_PROCESS = """
import sys, torch, devstream
from devstream.compiler import backend
seen = []
backend.watchers.append(lambda name, program: seen.append((name, len(program.regions))))
side = devstream.Stream("cpu")

def plain(x, w):
    return torch.sin(x @ w) * torch.cos(x)

def streams(x, w):
    side.wait_stream(devstream.current_stream("cpu"))
    with devstream.stream(side):
        y = torch.sin(x @ w)
    z = torch.cos(x)
    devstream.current_stream("cpu").wait_stream(side)
    return y * z

function = torch.compile(plain if sys.argv[1] == "plain" else streams, backend=backend.backend, fullgraph=True)
x = torch.ones(8, 8, requires_grad=True)
function(x, torch.ones(8, 8)).sum().backward()
hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
print(seen, hits, float(x.grad.sum()))
"""


def test_a_cached_plain_graph_is_never_taken_for_one_with_streams(tmp_path):
    """The cache of AOT Autograd doesn't know streams: a hit would lose them in silence, in another process too."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(devstream.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    found = [
        subprocess.run(
            [sys.executable, "-c", _PROCESS, what],
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=True,
        ).stdout.strip()
        for what in ("plain", "streams", "streams")
    ]
    programs, hits, values = zip(*(line.rsplit(" ", 2) for line in found), strict=True)
    assert programs[0] == "[]"
    assert "forward" in programs[1]
    assert programs[1] == programs[2]
    assert len(set(values)) == 1
    # The regions are Inductor's graphs like any other, so the second process finds all of them in its cache.
    regions = sum(count for _, count in ast.literal_eval(programs[2]))
    assert int(hits[1]) < regions == int(hits[2])


def changes_what_it_has_used(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    SIDE.wait_stream(devstream.current_stream("cpu"))
    with devstream.stream(SIDE):
        found = x * state.sin()
        state.add_(1)
    devstream.current_stream("cpu").wait_stream(SIDE)
    return found


def test_a_change_of_a_tensor_with_gaps_that_the_backward_needs_as_it_was_is_refused_with_its_line():
    state = torch.randn(4, 8)[:, ::2]
    with pytest.raises(Exception, match="as it was before the forward changed it in place") as told:
        compiled(changes_what_it_has_used)(torch.randn(4, 4, requires_grad=True), state)
    assert line_of(changes_what_it_has_used, "state.add_(1)") in str(told.value)
    assert "contiguous" in str(told.value)


def test_gradients_are_of_the_values_before_an_input_was_changed():
    """Torch's own compilers let the backward read the changed input."""
    x, state = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    before = state.clone()
    compiled(changes_what_it_has_used, regions="inductor")(x, state).sum().backward()
    torch.testing.assert_close(x.grad, before.sin())
    torch.testing.assert_close(state, before + 1)
