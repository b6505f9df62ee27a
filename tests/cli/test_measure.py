"""``python -m devstream measure``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from devstream.__main__ import main
from devstream.roofline import _kernels, _links, _measure
from devstream.roofline._plan import QUICK


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, with an empty cache, in a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_measure, "plan_for", lambda device_type: QUICK)
    monkeypatch.setattr(_kernels, "vector_rate", lambda clock, dtype, count: 1e10)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_it_shows_every_ceiling_what_is_missing_and_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    for words in (
        "matmul float32",
        "memory, copy",
        "link, host to device",
        "launch, on the host",
        "streams at once",
    ):
        assert words in shown.out, words
    assert "Not measured: page-locked memory" in shown.out
    assert "Hopper" in shown.out  # peak FLOP a byte by generation
    assert "launches and events: 0 of" in shown.err


def test_its_json_has_the_ceilings_and_the_datasheet(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--device", "cpu", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "devstream.ceilings"
    assert document["datasheet"] is None  # of a CPU there is none
    assert "matmul float32" in document["ceilings"]["curves"]
    assert main(["measure", "--device", "cpu", "--json", "c.json"]) == 0
    assert json.loads((here / "c.json").read_text())["ceilings"] == document["ceilings"]


def test_a_second_run_measures_nothing_and_refresh_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", "--device", "cpu"]) == 0
    monkeypatch.setattr(_measure, "_measure", lambda *args: pytest.fail("it measured"))
    assert main(["measure", "--device", "cpu"]) == 0
    with pytest.raises(pytest.fail.Exception):
        main(["measure", "--device", "cpu", "--refresh"])
    capsys.readouterr()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--device", "nonsense"], "nonsense"),
        (["--json", "no/folder/x.json"], "there is no folder"),
        (["--json", "."], "is a folder"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2_before_any_measurement(
    argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_measure, "_measure", lambda *args: pytest.fail("it measured"))
    assert main(["measure", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert words in shown.err


def test_a_measurement_that_fails_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def explode(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(_links, "link", explode)
    assert main(["measure", "--device", "cpu"]) == 2
    assert "failed at 'link to the host': out of memory. Nothing was kept" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
