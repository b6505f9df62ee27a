"""devstream/compiler/_explain.py: the programs of a function, as text, as a document and as a picture."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import devstream
from devstream.compiler._document import from_json
from devstream.compiler._listing import NEEDLESS
from devstream.compiler._program import Wait
from devstream.exceptions import MissingExtraError

# Dynamo looks at the gradient of every argument.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # And an object of torch.autograd.Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

SIDE = devstream.Stream("cpu")


def step(x, w):
    current = devstream.current_stream("cpu")
    a = x @ w
    SIDE.wait_stream(current)
    with devstream.stream(SIDE):
        b = a.sin()
    current.wait_stream(SIDE)
    current.wait_stream(SIDE)
    return b.sum()


def arguments(*, gradients=True):
    return [torch.randn(4, 4, requires_grad=gradients) for _ in range(2)]


def test_the_text_has_a_column_for_each_stream_and_the_reason_of_each_added_wait():
    text = str(devstream.explain(step, *arguments()))
    heads = [line for line in text.splitlines() if line.startswith("stream 0 (current)")]
    assert len(heads) == 2  # forward and backward
    assert all("| stream 1 (test_explain.py:" in head for head in heads)
    assert "forward: " in text
    assert "backward: " in text
    added = [line for line in text.splitlines() if "-- +" in line]
    assert added
    assert all("needs" in line for line in added)


def test_a_wait_that_nothing_needs_is_marked_and_kept():
    explanation = devstream.explain(step, *arguments())
    forward, backward = explanation.halves
    assert len(forward.needless) == 1
    assert backward.needless == ()
    marked = [line for line in str(explanation).splitlines() if NEEDLESS in line]
    assert len(marked) == 1
    assert marked[0].startswith("->e")
    assert sum(isinstance(one, Wait) and one.op is not None for one in forward.program.steps) == 3


def test_without_gradients_there_is_one_program():
    assert [one.name for one in devstream.explain(step, *arguments(gradients=False)).programs] == ["inference"]
    with torch.no_grad():
        assert [one.name for one in devstream.explain(step, *arguments()).programs] == ["inference"]


def test_it_shows_what_is_compiled(suite_program, halves):
    function = suite_program.make("cpu", devstream.Stream("cpu"), devstream.Stream("cpu"))
    shown = devstream.explain(function, *suite_program.arguments("cpu"))
    assert [outline(one) for one in shown.programs] == [outline(one) for one in halves[: len(shown.programs)]]


def outline(program):
    """Return what each step is, and where: two traces may name nodes differently."""
    return [(type(step), getattr(step, "stream", None), getattr(step, "op", None)) for step in program.steps]


def test_a_function_without_stream_code_has_no_program():
    explanation = devstream.explain(torch.sin, torch.ones(2))
    assert explanation.programs == ()
    assert "no stream code" in str(explanation)


def test_the_document_holds_the_programs():
    explanation = devstream.explain(step, *arguments())
    document = json.loads(explanation.to_json())
    assert (document["kind"], document["schema"]) == ("devstream.explanation", 1)
    for half, found in zip(explanation.halves, document["halves"], strict=True):
        assert tuple(found.pop("needless")) == half.needless
        assert from_json(json.dumps({"kind": "devstream.program", "schema": 1, **found})) == half.program


def test_the_picture_is_a_png_that_grows_with_the_program(tmp_path):
    pytest.importorskip("matplotlib")
    small, large = tmp_path / "small.png", tmp_path / "large.png"
    devstream.explain(torch.sin, torch.ones(2)).write_picture(small)
    devstream.explain(step, *arguments()).write_picture(large)
    for path in (small, large):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert large.stat().st_size > small.stat().st_size


def test_the_picture_draws_an_arrow_for_each_wait_and_marks_the_needless_one(monkeypatch):
    pytest.importorskip("matplotlib")
    from devstream.compiler import _picture

    drawn = []
    monkeypatch.setattr(_picture, "_arrow", lambda *given: drawn.append(given[1:]))
    forward, _ = devstream.explain(step, *arguments()).halves
    _picture.draw([(forward.program, forward.needless)])
    waits = [(row, one) for row, one in enumerate(forward.program.steps) if isinstance(one, Wait)]
    assert [(head, wait) for _, head, wait, _ in drawn] == [((one.stream, row), one) for row, one in waits]
    for tail, head, *_ in drawn:
        assert tail[1] < head[1]


def test_a_picture_that_can_not_be_drawn_is_refused(tmp_path, monkeypatch):
    explanation = devstream.explain(step, *arguments())
    with pytest.raises(ValueError, match=r"ends with \.png"):
        explanation.write_picture(tmp_path / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"devstream\[plot\]"):
        explanation.write_picture(tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
