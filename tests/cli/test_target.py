"""devstream/cli/_check.py, _explain.py and _target.py: a function of the user's on the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from devstream.__main__ import main

# Dynamo looks at the gradient of every argument.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

SOURCE = """
import torch
import devstream

print("imported")
side = devstream.Stream("cpu")


def step(x, w):
    a = x @ w
    with devstream.stream(side):
        b = a.sin()
    devstream.current_stream("cpu").wait_stream(side)
    return b


def right(x, w):
    side.wait_stream(devstream.current_stream("cpu"))
    with devstream.stream(side):
        b = x @ w
    devstream.current_stream("cpu").wait_stream(side)
    return b


def alone():
    with devstream.stream(side):
        a = torch.ones(2) + 1
    return a * 2


def broken(x, w):
    torch._dynamo.graph_break()
    return x


class Holder:
    step = staticmethod(step)


number = 5


def example_inputs():
    return torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)


def one():
    return torch.ones(2, 2)


def wrong():
    raise RuntimeError("no data here")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "targeted.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("targeted", None)


@pytest.mark.parametrize("target", ["targeted:step", "targeted.py:step", "targeted:Holder.step"])
def test_a_function_that_lacks_a_wait_is_named_and_ends_with_1(target, capsys):
    assert main(["check", target]) == 1
    out = capsys.readouterr().out
    assert "step: 1 wait is missing in eager mode" in out
    assert "b = a.sin()" in out
    assert "a = x @ w" in out


def test_a_right_function_ends_with_0(capsys):
    assert main(["check", "targeted:right"]) == 0
    assert "right: no wait is missing in eager mode" in capsys.readouterr().out


def test_other_arguments_and_none(folder, capsys):
    assert main(["check", "targeted:alone", "--inputs", "one"]) == 2
    (folder / "bare.py").write_text(SOURCE.replace("def example_inputs", "def other"))
    assert main(["check", "bare.py:alone"]) == 1
    assert main(["check", "bare.py:right", "--inputs", "other"]) == 0
    capsys.readouterr()
    assert main(["check", "bare.py:right"]) == 2
    assert "write example_inputs() in bare.py" in capsys.readouterr().err


def test_the_docs_show_what_the_command_prints(folder, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "explain-and-check.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(# train\.py\n.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```console\n\$ python -m devstream (check train\.py:step)\n(.*?)```", page, re.DOTALL)
    (folder / "train.py").write_text(source)
    assert main(shown[0].split()) == 1
    sys.modules.pop("train", None)
    assert capsys.readouterr().out.replace(f"{folder}/", "") == shown[1]


def test_json_is_all_that_standard_output_holds(capsys):
    assert main(["check", "targeted:step", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["kind"] == "devstream.check"
    assert "imported" in captured.err
    assert main(["explain", "targeted:step", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "devstream.explanation"


def test_explain_shows_forward_and_backward(capsys):
    assert main(["explain", "targeted:step"]) == 0
    out = capsys.readouterr().out
    assert "forward: " in out
    assert "backward: " in out


def test_explain_draws_on_request(folder, capsys):
    pytest.importorskip("matplotlib")
    assert main(["explain", "targeted:step", "--picture", "drawn.png"]) == 0
    assert (folder / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert main(["explain", "targeted:step", "--picture", "drawn.svg"]) == 2
    assert main(["explain", "targeted:step", "--picture", "nowhere/drawn.png"]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "explain"])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("targeted", "give MODULE:FUNCTION"),
        (":step", "give MODULE:FUNCTION"),
        ("targeted:", "give MODULE:FUNCTION"),
        ("targeted:nothing", "targeted has no nothing"),
        ("targeted:number", "is a int, which can't be called"),
        ("nowhere.py:step", "there is no such file"),
        ("no_such_module:step", "import no_such_module: ModuleNotFoundError"),
        ("targeted:broken", "broken is not supported"),
    ],
)
def test_what_can_not_be_looked_at_is_one_line_and_ends_with_2(command, target, words, capsys):
    assert main([command, target]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith(f"devstream {command}: ")
    assert err.count("\n") == 1


def test_what_the_users_code_raises_is_one_line(folder, capsys):
    assert main(["check", "targeted:step", "--inputs", "wrong"]) == 2
    assert "wrong() of targeted: RuntimeError: no data here" in capsys.readouterr().err
    (folder / "leaves.py").write_text("raise SystemExit('bye')")
    assert main(["check", "leaves.py:step"]) == 2
    assert "import leaves.py: SystemExit: bye" in capsys.readouterr().err
