"""Write what the race checker says into docs/races.md, below each program of that page.

    race_reports.py [--check]

On the page a ```python block that is followed by a ```text block is a program with a fault, and the ```python
block after that is its repair. Every program is run under the checker: the text becomes the report of the faulty
one, and the repair must have none. With --check nothing is written, and the exit status says whether all is right.
"""

from __future__ import annotations

import argparse
import linecache
import re
import sys
from pathlib import Path

import devstream
from devstream.races import Race, describe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "races.md"
_INSIDE = r"(?:(?!```).)*?"
_PAIR = re.compile(
    rf"```python\n(?P<faulty>{_INSIDE})```\n+```text\n(?P<report>{_INSIDE})```"
    rf"{_INSIDE}```python\n(?P<fixed>{_INSIDE})```",
    re.DOTALL,
)


def run(program: str, name: str) -> list[Race]:
    """Return the races of *program*, which calls itself *name*."""
    lines = program.splitlines(keepends=True)
    linecache.cache[name] = (len(program), None, lines, name)
    with devstream.racecheck(on_race="collect") as races:
        exec(compile(program, name, "exec"), {"__name__": "example"})
    return races


def regenerate(page: str) -> tuple[str, list[str]]:
    """Return *page* with fresh reports, and what is wrong with its programs."""
    problems = []

    def fresh(found: re.Match[str]) -> str:
        reports = "\n".join(describe(race) for race in run(found["faulty"], "example.py"))
        title = found["faulty"].splitlines()[0]
        if not reports:
            problems.append(f"the program that begins with {title!r} has no race")
        if run(found["fixed"], "fixed.py"):
            problems.append(f"the repair of the program that begins with {title!r} has a race")
        text = found[0]
        at = found.start("report") - found.start()
        return text[:at] + reports + "\n" + text[at + len(found["report"]) :]

    return _PAIR.sub(fresh, page), problems


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    page = PAGE.read_text()
    fresh, problems = regenerate(page)
    if fresh != page and options.check:
        problems.append(f"{PAGE} is not what {Path(__file__).name} writes; run it")
    elif fresh != page:
        PAGE.write_text(fresh)
    for problem in problems:
        print(f"race_reports.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
