"""What compilers of stream code get wrong: the programs of tests/compiler/_faults.py, through torch's and ours.

    python bench/faults.py run [--device cuda]   # writes bench/results/faults-<torch release>-DEVICE.json
    python bench/faults.py table                 # writes docs/compile-faults.md from all of those files

Each program is compiled with ``fullgraph=True``: with torch's own streams for ``backend="inductor"``, with
devstream's for ``backend="devstream"``. Results, changed arguments and gradients are compared with the same
lines run one after the other. Each program runs in a process of its own, since a compiler that fails may leave
a process behind that can't go on. Values that agree do not show that nothing races; values that don't, or an
error, show that something is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _results import RESULTS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compile-faults.md"
CALLS = 5


def main() -> int:
    """Run the programs, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "one"))
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--jobs", type=int, default=1, help="programs at once; default: 1")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.what == "one":
        print(json.dumps(result(programs().FAULTS[chosen.program], chosen.device, ours=chosen.ours)))
    elif chosen.what == "table":
        PAGE.write_text(page())
        print(PAGE)
    else:
        release = torch.__version__.partition("+")[0]
        with ThreadPoolExecutor(chosen.jobs) as pool:
            rows = list(pool.map(lambda fault: row(fault, chosen.device), programs().FAULTS.values()))
        path = RESULTS / f"faults-{release}-{chosen.device}.json"
        found = {"schema": 1, "torch": release, "device": chosen.device, "rows": rows}
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(path)
    return 0


def programs() -> Any:
    """Return the module that holds the programs."""
    path = ROOT / "tests" / "compiler" / "_faults.py"
    spec = importlib.util.spec_from_file_location("_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_faults"] = module
    spec.loader.exec_module(module)
    return module


def row(fault: Any, device: str) -> dict[str, str]:
    """Return what became of one program."""
    found = {"program": fault.name, "wrong": fault.wrong}
    for whose in ("torch", "devstream"):
        command = [sys.executable, __file__, "one", "--device", device, "--program", fault.name]
        done = subprocess.run(
            [*command, *(["--ours"] if whose == "devstream" else [])], capture_output=True, text=True, check=False
        )
        lines = done.stdout.splitlines()
        found[whose] = json.loads(lines[-1]) if done.returncode == 0 and lines else f"crash: {done.returncode}"
    print(f"{found['program']}: torch {found['torch']}; devstream {found['devstream']}", file=sys.stderr)
    return found


def result(fault: Any, device: str, *, ours: bool) -> str:
    """Compile and run one program; say what came out."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    module = programs()
    wanted = module.run(fault, fault.make(module.plain_api()), device)
    api = module.devstream_api(device) if ours else torch_api(device)
    try:
        function = torch.compile(fault.make(api), backend="devstream" if ours else "inductor", fullgraph=True)
        for _ in range(CALLS):
            found = module.run(fault, function, device)
            if device != "cpu":
                torch.accelerator.synchronize()
            if not module.agree(found, wanted):
                return "wrong values"
    except Exception as error:  # every kind of error is a result here
        return f"error: {said(error)}"
    return "right"


def said(error: BaseException) -> str:
    """Return the class and the first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0][:100] if lines else ''}"


def torch_api(device: str) -> Any:
    """Return torch's own streams of *device*."""
    if device != "cpu":

        class Api:
            Stream = staticmethod(lambda: torch.Stream(device=device))
            Event = staticmethod(lambda: torch.Event(device=device))
            stream = staticmethod(lambda stream: stream)
            current = staticmethod(torch.accelerator.current_stream)

        return Api

    numbers = iter(range(7001, 8000))
    kind = torch.Stream(device="cpu").device_type

    class CpuApi:
        # Streams of torch's on the CPU are all one queue, unless they are given numbers.
        Stream = staticmethod(lambda: torch.Stream(stream_id=next(numbers), device_index=-1, device_type=kind))
        Event = staticmethod(lambda: torch.Event(device="cpu"))
        stream = staticmethod(lambda stream: stream)
        current = staticmethod(lambda: HERE)

    return CpuApi


HERE = torch.Stream(device="cpu")


def page() -> str:
    """Return the page of the docs."""
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("faults-*.json")]
    runs.sort(key=lambda run: ([int(part) for part in run["torch"].split(".")], run["device"]))
    lines = [
        "# What compilers of stream code get wrong",
        "",
        "Made by `python bench/faults.py table` from runs of `python bench/faults.py run`; don't edit. Each",
        "program is right in eager mode. It is compiled with `fullgraph=True`, once with torch's own streams and",
        '`backend="inductor"`, once with devstream\'s and `backend="devstream"`, called a few times, and compared',
        "with the same lines run one after the other. Right values do not show that nothing races: that is what",
        "devstream's proof is for. Programs: `tests/compiler/_faults.py`; what each protects:",
        "`tests/compiler/test_faults.py`.",
    ]
    notes: list[str] = []
    for run in runs:
        lines += ["", f"## torch {run['torch']}, {run['device']}", ""]
        if run["device"] == "cpu":
            lines += [
                "torch's streams are made for accelerators and order nothing on the CPU, so this only says what",
                "compiles. An error of torch's there may be one of the CPU alone, or of Triton not being there; a",
                "run with `--device cuda` is what compares.",
                "",
            ]
        lines += ["| program | what goes wrong where it does | torch | devstream |", "| --- | --- | --- | --- |"]
        for one in run["rows"]:
            cells = [cell(one[whose], notes) for whose in ("torch", "devstream")]
            lines.append(f"| `{one['program']}` | {one['wrong']} | {cells[0]} | {cells[1]} |")
    if notes:
        lines += ["", "## Errors", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def cell(found: str, notes: list[str]) -> str:
    """Return what stands in the table; errors are told below it."""
    if not found.startswith("error: "):
        return found if found == "right" else f"**{found}**"
    text = found.removeprefix("error: ").replace("<", "\\<").replace("|", "\\|")
    if text not in notes:
        notes.append(text)
    return f"**error {notes.index(text) + 1}**"


if __name__ == "__main__":
    raise SystemExit(main())
