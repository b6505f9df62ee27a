"""Print the section of CHANGELOG.md for one release; fail if there is none.

release_notes.py v1.2.3
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def section(changelog: str, *, version: str) -> str:
    """Return the text below the heading of *version*, up to the next heading of that level.

    Raises:
        LookupError: the changelog has no such heading, or nothing below it.
    """
    parts = re.split(r"^## (.+)$", changelog, flags=re.MULTILINE)
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        if heading.split()[0] == version and body.strip():
            return body.strip()
    raise LookupError(f"CHANGELOG.md has no text for {version}; run towncrier build before the tag is made")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    (tag,) = sys.argv[1:] if arguments is None else arguments
    try:
        print(section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version=tag.removeprefix("v")))
    except LookupError as error:
        print(f"release_notes.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
