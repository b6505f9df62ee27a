"""How commands show things: rich where it is installed and the output is a terminal's, plain text otherwise."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO


def has_rich() -> bool:
    """Say whether rich is installed; imports nothing."""
    return importlib.util.find_spec("rich") is not None


def write_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", file: TextIO | None = None
) -> None:
    """Write a table to *file* (default: standard output)."""
    file = sys.stdout if file is None else file
    if not has_rich():
        file.write(plain_table(heads, rows, title=title) + "\n")
        return
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title=title or None, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: square brackets in a cell are no markup
    # Not a terminal: full width, so that a log holds whole words.
    Console(file=file, width=None if file.isatty() else 160).print(table)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> str:
    """Return a table in plain ASCII."""
    all_rows = [list(heads), *map(list, rows)]
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, *lines] if title else lines)


def write_note(text: str, *, file: TextIO | None = None) -> None:
    """Write a paragraph, broken into lines."""
    (sys.stdout if file is None else file).write(textwrap.fill(text, 100) + "\n")


def complain(text: str) -> None:
    """Write a line to standard error, if there is one that takes it."""
    with contextlib.suppress(AttributeError, OSError):  # closed, so that Python has None for it; or full
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class Bar(Protocol):
    """A progress bar."""

    def show(self, what: str, done: int, total: int) -> None:
        """Show *what*, *done* of *total*."""
        ...


class _Lines:
    """Progress as lines: one each tenth of the way, so that a log stays short."""

    def __init__(self) -> None:
        self._told: tuple[int, int] | None = None

    def show(self, what: str, done: int, total: int) -> None:
        """Write a line where another tenth is done."""
        tenth = (total, 10 * done // total)
        if tenth != self._told:
            self._told = tenth
            complain(f"{what}: {done} of {total}")


@contextmanager
def progress() -> Iterator[Bar]:
    """Yield a bar on standard error: rich's on a terminal, lines elsewhere."""
    if sys.stderr is None or not (has_rich() and sys.stderr.isatty()):
        yield _Lines()
        return
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as shown:
        task = shown.add_task("", total=None)

        class _Rich:
            def show(self, what: str, done: int, total: int) -> None:
                shown.update(task, description=what, completed=done, total=total)

        yield _Rich()
