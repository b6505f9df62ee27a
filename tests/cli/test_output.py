"""Tables and progress, with rich and without."""

from __future__ import annotations

import io

import pytest

from devstream.cli import _output


def test_a_plain_table_lines_its_columns_up() -> None:
    text = _output.plain_table(("name", "n"), [("a", "10"), ("longer", "2")], title="Things")
    assert text.splitlines() == ["Things", "name    n", "------  --", "a       10", "longer  2"]


@pytest.mark.parametrize("rich", [True, False])
def test_square_brackets_are_shown_as_they_are(rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "has_rich", lambda: rich)
    file = io.StringIO()
    _output.write_table(("what",), [("pip install devstream[plot]",)], file=file)
    assert "devstream[plot]" in file.getvalue()


def test_progress_in_a_log_is_a_line_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with _output.progress() as bar:
        for done in range(1, 101):
            bar.show("training", done, 100)
    assert len(capsys.readouterr().err.splitlines()) == 11
