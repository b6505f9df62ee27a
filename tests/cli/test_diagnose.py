"""``python -m devstream diagnose MODULE:FUNCTION``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devstream.__main__ import main
from devstream.roofline import _diagnose
from devstream.testing.ceilings import ceilings

PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
x = torch.randn(32, 64)
number = 3

def step():
    return model(x).sum()

class Trainer:
    @staticmethod
    def step():
        return model(x).sum()

def bad():
    raise ValueError("the data is used up")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in a folder with a program, on known ceilings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_diagnose, "measure", lambda device: ceilings(inline=True))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train_program.py").write_text(PROGRAM)
    (tmp_path / "broken_program.py").write_text("import no_such_module_at_all")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("train_program", None)


def test_it_says_the_class_the_tables_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "train_program:step", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "step on cpu:0" in shown
    for words in (
        "-bound",
        "idle",
        "Memory: capacity",
        "By class of operators",
        "By module",
        "By line",
        "By kernel",
    ):
        assert words in shown, words
    assert "Sequential.0" in shown
    assert "train_program.py:8" in shown


def test_its_json_and_picture_are_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["diagnose", "train_program:Trainer.step", "--device", "cpu", "--json", "d.json", "--picture", "d.png"]
    assert main(argv) == 0
    document = json.loads((here / "d.json").read_text())
    assert (document["kind"], document["schema"]) == ("devstream.diagnosis", 1)
    assert document["function"] == "Trainer.step"
    assert document["total"]["seconds"] > 0
    assert document["picture"] == str(here / "d.png")
    assert (here / "d.png").read_bytes().startswith(b"\x89PNG")
    assert "Picture:" in capsys.readouterr().out


def test_json_on_standard_output_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "train_program:step", "--device", "cpu", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["by_module"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["step"], "MODULE:FUNCTION"),
        (["train_program:"], "MODULE:FUNCTION"),
        (["train_program:dance"], "has no 'dance'"),
        (["train_program:number"], "is a int, which can't be called"),
        (["no_such_program:step"], "importing 'no_such_program' failed"),
        (["broken_program:step"], "importing 'broken_program' failed: ModuleNotFoundError"),
        (["train_program:step", "--device", "nonsense"], "nonsense"),
        (["train_program:step", "--rows", "0"], "--rows 0"),
        (["train_program:step", "--picture", "x.jpg"], "name ends with .png"),
        (["train_program:step", "--json", "no/folder/x"], "there is no folder"),
        (["train_program:step", "--json", "x.png", "--picture", "x.png"], "both name"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(
    argv: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.glob("*.*"))
    assert main(["diagnose", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err.splitlines()[-1]
    assert sorted(here.glob("*.*")) == before


def test_a_function_that_fails_is_one_line_with_its_place(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "train_program:bad", "--device", "cpu", "--json", "d.json"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "bad raised ValueError: the data is used up at train_program.py:16" in error
    assert not (here / "d.json").exists()
