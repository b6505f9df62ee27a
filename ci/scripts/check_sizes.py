"""Check that every module of devstream is short and that its name says what it is about.

    check_sizes.py [FOLDER]

A module has at most 500 lines. No module or folder is named utils, helpers, manager or common, alone or as a
part of its name: such a file has no subject and collects what should have one.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 500
REFUSED = frozenset({"util", "utils", "helper", "helpers", "manager", "managers", "common"})


def problems(package: Path) -> list[str]:
    """Return what is wrong with the modules below *package*, a sentence each."""
    modules = sorted(package.rglob("*.py"))
    if not modules:
        return [f"{package}: no module found"]
    found = []
    for module in modules:
        path = module.relative_to(package.parent)
        lines = len(module.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            found.append(f"{path}: {lines} lines, {MAX_LINES} are allowed; split it by subject")
    names = sorted({part for module in modules for part in module.relative_to(package).with_suffix("").parts})
    for name in names:
        refused = REFUSED.intersection(name.lower().split("_"))
        if refused:
            found.append(f"{package.name}: the name {name} contains '{min(refused)}'; name the subject instead")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    found = problems(Path(arguments[0]) if arguments else ROOT / "devstream")
    for problem in found:
        print(f"check_sizes.py: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
