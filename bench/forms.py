"""Which forms of stream code a torch release traces, and what it says about the others.

    python bench/forms.py run            # writes bench/results/forms-<torch release>.json
    python bench/forms.py table          # writes docs/compile-forms.md from all of those files

Each form is compiled with ``fullgraph=True`` on the CPU by devstream's backend, its regions run node by node; a
form of devstream's own must also give eager's value. Run it once with each torch release, then make the
table.
"""

from __future__ import annotations

import argparse
import json
import logging
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _results import RESULTS

import devstream
from devstream.compiler.backend import backend

PAGE = Path(__file__).parent.parent / "docs" / "compile-forms.md"

OURS = {
    "blocks": [
        "with devstream.stream(s): y = t + 1",
        "with s: y = t + 1",
        "with devstream.stream(s) as q: y = t + 1; e.record(q)",
        "with devstream.stream(None): y = t + 1",
        "with devstream.stream(s), devstream.stream(s2): y = t + 1",
        "with devstream.stream(s), devstream.stream(s): y = t + 1",
        "with devstream.stream(native): y = t + 1",
        "with devstream.stream(devstream.wrap(native)): y = t + 1",
    ],
    "order": [
        "e.record(); y = t + 1",
        "e.record(s); e.wait(s2); y = t + 1",
        "e.record(s); e.wait(); y = t + 1",
        "s.record_event(e); s2.wait_event(e); y = t + 1",
        "q = s.record_event(); s2.wait_event(q); y = t + 1",
        "s2.wait_stream(s); y = t + 1",
        "s.wait_stream(native); y = t + 1",
        "s.record_event(native_event); s2.wait_event(native_event); y = t + 1",
        "with devstream.stream(s): t.add_(1); e.record(); y = t * 1",
        "s.synchronize(); e.synchronize(); devstream.synchronize(); y = t + 1",
        "y = t + 1; devstream.record_stream(y, s)",
    ],
    "objects": [
        "devstream.current_stream().wait_stream(s); y = t + 1",
        "c = devstream.default_stream(); c.wait_stream(s); y = t + 1",
        'with devstream.named_stream("copy"): y = t + 1',
        "q = devstream.Stream(); q.wait_stream(s); y = t + 1",
        "q = devstream.Event(); q.record(s); q.wait(); y = t + 1",
        "q = devstream.Event(enable_timing=True); q.record(s); y = (t + 1, q)",
        "q = devstream.Stream(); y = (t + 1, q)",
        "with arguments[0]: y = t + 1; arguments[1].record()",
        'with held["stream"]: y = t + 1; held["event"].record()',
        "y = t + (1 if s == s2 else 2)",
        "y = t + (1 if devstream.Capability.TIMING in devstream.capabilities() else 2)",
    ],
    "answers and settings": [
        "y = t + s.query()",
        "y = t + e.query()",
        "y = t + devstream.recorded(e)",
        "y = t + e.elapsed_time(e)",
        "devstream.set_stream(s); y = t + 1",
        "y = devstream.carry_streams(torch.sin)(t)",
        "devstream.wrap(0); y = t + 1",
        "y = t + len(devstream.devices())",
        "devstream.backend(); y = t + 1",
    ],
}
NATIVE = {
    "native forms": [
        "with native: y = t + 1",
        "with native, native2: y = t + 1",
        "with torch.cuda.stream(native): y = t + 1",
        "with torch.cuda.stream(None): y = t + 1",
        "with native: y = t + 1; native_event.record()",
        "native_event.record(native); native_event.wait(native2); y = t + 1",
        "native2.wait_event(native_event); y = t + 1",
        "native2.wait_stream(native); y = t + 1",
        "native.synchronize(); native_event.synchronize(); y = t + 1",
        "native.record_event(native_event); y = t + 1",
        "q = native.record_event(); y = t + 1",
        "with native: t.add_(1); native_event.record(native); y = t * 1",
        "y = t + 1; y.record_stream(native)",
        'q = torch.Stream(device="cpu"); native.wait_stream(q); y = t + 1',
        'q = torch.Event(device="cpu"); q.record(native); y = t + 1',
        'q = torch.Stream(device="cpu"); y = (t + 1, q)',
        "y = t + native.query()",
        "y = t + native_event.query()",
        "torch.accelerator.set_stream(native); y = t + 1",
    ],
}


def main() -> int:
    """Run the forms, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    if parser.parse_args().what == "run":
        release = torch.__version__.partition("+")[0]
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        found = {name: [_row(code, ours=True) for code in codes] for name, codes in OURS.items()}
        found |= {name: [_row(code, ours=False) for code in codes] for name, codes in NATIVE.items()}
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"forms-{release}.json"
        path.write_text(json.dumps({"schema": 1, "torch": release, "forms": found}, indent=1) + "\n")
        print(path)
    else:
        PAGE.write_text(_page())
        print(PAGE)
    return 0


def _row(code: str, *, ours: bool) -> dict[str, str]:
    compiled_value: Any
    names = _names()
    program = _program(code, names)
    torch.compiler.reset()
    try:
        compiled = torch.compile(program, backend=backend, fullgraph=True, options={"regions": "eager"})
        compiled_value = compiled(torch.ones(2))
    except Exception as error:  # every kind of error is a result here
        return {"form": code, "result": _said(error)}
    if ours:
        wanted = _program(code, _names())(torch.ones(2))
        first, second = (value[0] if isinstance(value, tuple) else value for value in (compiled_value, wanted))
        if not torch.equal(first, second):
            return {"form": code, "result": "traced, **with another value than eager**"}
    return {"form": code, "result": "traced"}


def _names() -> dict[str, Any]:
    cpu = torch.Stream(device="cpu").device_type
    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    event = devstream.Event("cpu", enable_timing=True)
    return {
        "torch": torch,
        "devstream": devstream,
        "s": one,
        "s2": two,
        "e": event,
        "native": torch.Stream(stream_id=7001, device_index=-1, device_type=cpu),
        "native2": torch.Stream(stream_id=7002, device_index=-1, device_type=cpu),
        "native_event": torch.Event(device="cpu"),
        "arguments": (one, event),
        "held": {"stream": one, "event": event},
    }


def _program(code: str, names: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
    exec(f"def program(t):\n{textwrap.indent(code, '    ')}\n    return y", names)
    found: Callable[[torch.Tensor], Any] = names["program"]
    return found


def _said(error: Exception) -> str:
    """Return the error's class and its first sentence, with the advice where it has one."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    advice = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")][:1]
    advice += [line for line in lines if line.startswith("Or record a devstream.Event")]
    reason = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")][:1]
    cause = next((line for line in lines if "is not supported by backend" in line), "")
    if cause:
        return f"error: {cause.partition(': ')[2] if cause.startswith('Unsupported') else cause}"
    words = (
        [lines[0], *reason, *advice]
        if text.startswith("devstream: ")
        else [type(error).__name__, lines[0], *advice]
    )
    return "error: " + ". ".join(word.rstrip(".") for word in words)


def _page() -> str:
    runs = sorted(
        (json.loads(path.read_text()) for path in RESULTS.glob("forms-*.json")),
        key=lambda run: [int(part) for part in run["torch"].split(".")],
    )
    lines = [
        "# What `torch.compile` traces",
        "",
        "Made by `python bench/forms.py table` from runs of `python bench/forms.py run` with each torch release;",
        "don't edit. Every form stands in a function compiled with `fullgraph=True` on the CPU backend. With",
        "`fullgraph=False` an error is a graph break, and inside a stream block the whole function then runs",
        "in eager, with one notice in the log. `s`, `s2` and `e` are devstream's; the others are torch's own.",
        "",
        "torch's own CPU streams record and order nothing, so the native forms show what traces, not what runs.",
    ]
    notes: list[str] = []
    for name in runs[0]["forms"]:
        head = ["form", *(run["torch"] for run in runs)]
        lines += ["", f"## {name[0].upper()}{name[1:]}", "", _line(head), _line(["---"] * len(head))]
        for number, row in enumerate(runs[0]["forms"][name]):
            cells = [_cell(run["forms"][name][number]["result"], notes) for run in runs]
            lines.append(_line([f"`{row['form']}`", *cells]))
    lines += ["", "## Errors", ""]
    lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


def _cell(result: str, notes: list[str]) -> str:
    if not result.startswith("error: "):
        return result
    text = result.removeprefix("error: ").replace("<", "\\<").replace("|", "\\|")
    if text not in notes:
        notes.append(text)
    return f"error {notes.index(text) + 1}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
