"""The commands as a person gives them: what they print, what they write, how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devstream import _registry
from devstream.__main__ import main
from devstream.backends.cpu import CpuBackend
from devstream.cli import _demo as demo_command
from devstream.demo import compare
from devstream.exceptions import CacheWarning


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


TINY = ["demo", "--device", "cpu", "--size", "tiny", "--no-compiled"]


# -- both ------------------------------------------------------------------------------------------------


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "devstream", "info", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "devstream.info"


@pytest.mark.parametrize(
    "argv", [["--help"], *([name, "--help"] for name in ("info", "check", "explain", "demo"))]
)
def test_help_is_no_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert "usage: devstream" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["info", "--nonsense"], "--nonsense"),
        ([*TINY, "--steps", "0"], "--steps 0: one step or more"),
        ([*TINY, "--steps", "-3"], "--steps -3"),
        ([*TINY, "--steps", "many"], "many"),
        ([*TINY, "--seed", "-1"], "--seed -1"),
        (["demo", "--size", "gigantic"], "gigantic"),
        (["demo", "--device", "nonsense"], "nonsense"),
        (["demo", "--device", "cpu:9"], "index from 0 to 1"),
        ([*TINY, "--picture", "no/such/folder/x.png"], "there is no folder"),
        ([*TINY, "--picture", "."], "name ends with .png"),
        ([*TINY, "--picture", "x.jpg"], "name ends with .png"),
        ([*TINY, "--json", "."], "is a folder"),
        ([*TINY, "--json", "x.png", "--picture", "x.png"], "both name"),
        ([*TINY, "--json", "./x.png", "--picture", "x.png"], "both name"),
        ([*TINY, "--json", "devstream-demo.png"], "both name"),
        ([*TINY, "--json", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2_before_any_training(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    def never(*args: object, **options: object) -> None:
        pytest.fail("the training began")

    monkeypatch.setattr(compare, "run", never)
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert words in shown.err
    assert list(home.iterdir()) == []


# -- info ------------------------------------------------------------------------------------------------


def info(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["info", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.fixture
def broken() -> Iterator[str]:
    def explode() -> Any:
        raise OSError("libbroken.so: cannot open shared object file")

    _registry.register("brokenware", explode)
    yield "brokenware"
    _registry.unregister("brokenware")


def test_info_lists_the_cpu_with_its_devices_and_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    found = info(capsys)
    (cpu,) = [one for one in found["backends"] if one["name"] == "cpu"]
    assert cpu["state"] == "available"
    assert [one["device"] for one in cpu["devices"]] == ["cpu:0", "cpu:1"]
    assert "timing" in cpu["devices"][0]["capabilities"]
    assert set(found["versions"]) >= {"python", "torch", "devstream"}


def test_info_says_why_a_backend_is_not_available(capsys: pytest.CaptureFixture[str]) -> None:
    for one in info(capsys)["backends"]:
        assert one["state"] == "available" or one["reason"]


def test_a_broken_plug_in_is_a_row_with_its_reason_and_hurts_nobody(
    capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    rows = {one["name"]: one for one in info(capsys)["backends"]}
    assert rows[broken]["state"] == "broken"
    assert "libbroken.so" in rows[broken]["reason"]
    assert rows["cpu"]["state"] == "available"


def test_info_is_readable_with_and_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rich in (True, False):
        if not rich:
            monkeypatch.setattr("devstream.cli._output.has_rich", lambda: False)
        assert main(["info"]) == 0
        shown = capsys.readouterr().out
        assert "cpu:0" in shown
        assert "Default device:" in shown


# -- demo ------------------------------------------------------------------------------------------------


def test_the_demo_trains_shows_a_table_and_draws_a_picture(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(TINY) == 0
    shown = capsys.readouterr()
    for words in ("tokens/s", "without side streams", "with side streams", "copy time hidden", "to the bit"):
        assert words in shown.out
    assert "none yet" in shown.out
    assert str(home / "devstream-demo.png") in shown.out.replace("\n", "")
    assert (home / "devstream-demo.png").read_bytes().startswith(b"\x89PNG")
    assert "120 of 120" in shown.err


def test_json_on_standard_output_is_nothing_but_json(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main([*TINY, "--json", "-", "--picture", "p.png", "--seed", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "devstream.demo"
    assert document["loss_before"] - document["loss_after"] > 1.5
    assert document["columns"][1]["max_loss_difference"] == 0.0
    assert document["columns"][0]["hidden_share"] == pytest.approx(0, abs=0.01)
    assert document["picture"] == str(home / "p.png")
    assert document["seed"] == 3


def test_the_second_run_shows_the_first_ones_rate(capsys: pytest.CaptureFixture[str]) -> None:
    few = [*TINY, "--steps", "8"]
    main([*few, "--json", "first.json"])
    rate = json.loads(Path("first.json").read_text())["columns"][1]["median_tokens_per_s"]
    capsys.readouterr()
    main(few)
    assert f"{rate:,.0f}" in capsys.readouterr().out


def test_a_machine_that_cannot_compile_says_so_and_does_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no C++ compiler found\nand more")

    monkeypatch.setattr("devstream.demo.train.Training._forward", fails)
    main([one for one in TINY if one != "--no-compiled"] + ["--steps", "16", "--json", "-"])
    document = json.loads(capsys.readouterr().out)
    assert document["not_compiled"] == "RuntimeError: no C++ compiler found"
    assert [column["name"] for column in document["columns"]] == ["without side streams", "with side streams"]


def test_fewer_steps_shorten_the_comparison_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo", "--device", "cpu", "--size", "tiny", "--steps", "13", "--json", "-", "--no-compiled"])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["compared_steps"] == 2
    assert "12 of 12" in shown.err


def test_a_run_of_other_steps_is_no_previous_run(capsys: pytest.CaptureFixture[str]) -> None:
    main([*TINY, "--steps", "8"])
    capsys.readouterr()
    main([*TINY, "--steps", "9"])
    assert "none yet" in capsys.readouterr().out


def test_a_run_that_did_not_train_is_code_1_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--steps", "1"]) == 1
    assert "the evaluation loss fell by" in capsys.readouterr().err


def test_the_second_virtual_device_of_the_cpu_trains_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo", "--device", "cpu:1", "--size", "tiny", "--steps", "4", "--json", "-", "--no-compiled"])
    assert json.loads(capsys.readouterr().out)["device"] == "cpu:1"


def test_a_damaged_cache_is_one_warning_and_the_demo_runs(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "devstream" / "demo.json"
    cache.parent.mkdir(parents=True)
    cache.write_text('{"kind": "devst')
    with pytest.warns(CacheWarning) as caught:
        main([*TINY, "--steps", "4"])
    assert len(caught) == 1
    assert json.loads(cache.read_text())["kind"] == "devstream.demo.last"


def test_without_matplotlib_the_demo_runs_and_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    main([*TINY, "--steps", "4"])
    assert "pip install devstream[plot]" in capsys.readouterr().out.replace("\n", " ")
    assert list(home.iterdir()) == []
    assert main([*TINY, "--picture", "x.png"]) == 2
    assert "pip install devstream[plot]" in capsys.readouterr().err


def test_ctrl_c_leaves_no_file_and_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run", interrupted)
    assert main([*TINY, "--json", "result.json"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(home.iterdir()) == []
    assert not (tmp_path / "cache").exists()


def test_a_reader_that_goes_away_is_no_error() -> None:
    # Unbuffered, so that the write that fails is the command's own.
    found = subprocess.run(
        f"'{sys.executable}' -u -m devstream info --json | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stderr == ""
    assert found.returncode == 141


def test_a_device_file_or_a_link_is_not_replaced(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "link").symlink_to(home / "target")
    assert main([*TINY, "--json", str(home / "link")]) == 2
    assert "link" in capsys.readouterr().err
    assert main([*TINY, "--json", "/dev/null"]) == 2
    assert not Path("/dev/null").is_file()


def test_a_cache_with_impossible_rates_is_ignored_with_one_warning(home: Path) -> None:
    cache = home.parent / "cache" / "devstream" / "demo.json"
    cache.parent.mkdir(parents=True)
    cache.write_text(
        '{"kind": "devstream.demo.cache", "schema": 1, "tokens_per_s": {"x": NaN, "y": -3, "z": true}}'
    )
    kind = demo_command.CACHE_KIND
    cache.write_text(cache.read_text().replace("devstream.demo.cache", kind))
    with pytest.warns(CacheWarning, match="no rates"):
        main([*TINY, "--steps", "2", "--json", str(home / "out.json")])
    assert (home / "out.json").is_file()
    assert "NaN" not in cache.read_text()


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run the command line *command*, in which DEVSTREAM stands for ours."""
    line = command.replace("DEVSTREAM", f"'{sys.executable}' -m devstream")
    return subprocess.run(line, shell=True, executable="/bin/bash", capture_output=True, text=True, check=False)


FEW = "demo --device cpu --size tiny --steps 2 --json out.json"


@pytest.mark.parametrize("arguments", ["info", "info --json", FEW])
def test_a_closed_standard_output_is_one_line_and_code_2(arguments: str, home: Path) -> None:
    done = shell(f"DEVSTREAM {arguments} >&-")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith(": standard output is closed, so the result has nowhere to go")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("arguments", ["info", FEW])
def test_a_closed_standard_error_changes_nothing_else(arguments: str, home: Path) -> None:
    done = shell(f"DEVSTREAM {arguments} 2>&- <&-")
    assert done.returncode in {0, 1}  # 1: so few steps don't train
    assert "cpu:0" in done.stdout
    if arguments == FEW:
        assert json.loads((home / "out.json").read_text())["kind"] == "devstream.demo"


def test_with_both_closed_there_is_still_a_code() -> None:
    assert shell("DEVSTREAM info >&- 2>&-").returncode == 2
    assert shell("DEVSTREAM nonsense >&- 2>&-").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_is_full_is_one_line_and_code_2() -> None:
    done = shell("DEVSTREAM info --json > /dev/full")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr
    assert shell("DEVSTREAM info --json 2> /dev/full").returncode == 0


def test_a_backend_that_leaves_while_it_is_asked_is_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    class Leaving(CpuBackend):
        def device_count(self) -> int:
            raise SystemExit(3)

    _registry.register("leaving", Leaving)
    try:
        rows = {one["name"]: one for one in info(capsys)["backends"]}
    finally:
        _registry.unregister("leaving")
    assert rows["leaving"]["state"] == "broken"
    assert "SystemExit: 3" in rows["leaving"]["reason"]
    assert rows["cpu"]["state"] == "available"
