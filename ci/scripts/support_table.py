"""Write the support table of README.md from what the backends say that they can do.

    python ci/scripts/support_table.py [--check]

With --check nothing is written, and the exit code is 1 where the table in README.md is not the one that
the backends give.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from devstream import _registry
from devstream.abc import AnyBackend, Capability
from devstream.backends import accelerator

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"

WORDS = {
    Capability.TIMING: "events keep time",
    Capability.BLOCKING_EVENTS: "`blocking=True` sleeps",
    Capability.IPC_EVENTS: "events across processes",
    Capability.SIDE_STREAMS: "more than one stream",
    Capability.PRIORITIES: "priorities",
    Capability.NATIVE_HANDLE: "native handles",
    Capability.EXTERNAL_STREAMS: "external streams",
    Capability.RECORD_STREAM: "`record_stream`",
    Capability.PINNED_MEMORY: "pinned memory",
    Capability.ASYNC_COPY: "copies beside compute",
    Capability.GRAPH_CAPTURE: "graph capture",
    Capability.GRAPH_TIMING: "timing inside graphs",
    Capability.PEER_ACCESS: "several devices",
}

#: What the conformance kit has run on. A hand-kept fact: no program can know it.
VERIFIED = {
    "cpu": "every change",
    "cuda": "H200, torch 2.11, CUDA 13",
    "rocm": "**never on AMD hardware**; over CUDA only",
}


def columns() -> dict[str, tuple[Capability, str]]:
    """Return the capabilities of each backend and device type, and where the kit has run."""
    found = {}
    for name in ("cpu", "cuda", "rocm"):
        backend: AnyBackend = _registry.load(name)
        found[name] = (backend.capabilities(0) | Capability.PEER_ACCESS, VERIFIED[name])
    # ROCm's own limits hang on its version, which a machine without it doesn't know; this is ROCm 7's.
    found["rocm"] = (found["rocm"][0] | Capability.GRAPH_TIMING, VERIFIED["rocm"])
    for kind, facts in sorted(accelerator._FACTS.items()):
        found[kind] = (facts.capabilities, "never")
    return found


def table() -> str:
    """Return the table as markdown."""
    found = columns()
    lines = ["| | " + " | ".join(f"`{name}`" for name in found) + " |", "| --- |" + " :---: |" * len(found)]
    for capability in Capability:
        cells = ["yes" if capability in has else "" for has, _ in found.values()]
        lines.append(f"| {WORDS[capability]} | " + " | ".join(cells) + " |")
    lines.append("| conformance kit run on | " + " | ".join(verified for _, verified in found.values()) + " |")
    return "\n".join(lines)


def main() -> int:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the table is old")
    check = parser.parse_args().check
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if check:
        if new != text:
            print("the support table of README.md is old; run python ci/scripts/support_table.py", file=sys.stderr)
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
