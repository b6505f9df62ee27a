"""The picture of a timeline."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from devstream.exceptions import MissingExtraError
from devstream.report import Span, write_picture

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("spans", [[], [Span("a", "nothing", 1, 1)], [Span("a", "x", 0, 1), Span("b", "y", 1, 9)]])
def test_the_picture_is_a_png(tmp_path: Path, spans: list[Span]) -> None:
    write_picture(spans, tmp_path / "timeline.png", title="a title")
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.png"]


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "matplotlib" else find(n, *a))
    with pytest.raises(MissingExtraError, match=r"pip install devstream\[plot\]"):
        write_picture([], tmp_path / "timeline.png")
    assert list(tmp_path.iterdir()) == []


def test_the_report_does_not_import_matplotlib() -> None:
    code = "import sys, devstream.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
