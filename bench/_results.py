"""What every bench shares: the machine and versions of a run, its rows beside their limits, and its two files."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter_ns

import torch

import devstream

RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """One figure beside its limit. *ok* is None where a row has no limit of its own."""

    goal: str
    what: str
    value: float
    unit: str
    spread: str = ""
    limit: str = ""
    ok: bool | None = None


@dataclass
class Run:
    """One run of one bench."""

    bench: str
    command: str
    device: torch.device
    rows: list[Row] = field(default_factory=list)

    def facts(self) -> dict[str, str]:
        """Return the machine and the versions."""
        index = self.device.index or 0
        spec = devstream.backend(self.device).spec(index)
        return {
            "device": spec.name,
            "runtime": spec.runtime,
            "torch": torch.__version__,
            "devstream": devstream.__version__,
            "python": platform.python_version(),
            "host": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": self.command,
        }

    def markdown(self) -> str:
        """Return the table that goes into bench/results."""
        lines = [f"# {self.bench}", "", "Written by the bench; don't edit.", ""]
        lines += [f"- {name}: {value}" for name, value in self.facts().items()]
        lines += [
            "",
            "| goal | what | value | spread | limit | reached |",
            "| --- | --- | ---: | --- | --- | --- |",
        ]
        for row in self.rows:
            reached = {None: "", True: "yes", False: "**no**"}[row.ok]
            figure = f"{row.value:.3g} {row.unit}"
            lines.append(f"| {row.goal} | {row.what} | {figure} | {row.spread} | {row.limit} | {reached} |")
        return "\n".join(lines) + "\n"

    def finish(self, json_file: str | None, keep: bool) -> int:
        """Print the table, write the files that were asked for, and return 1 where a limit was missed."""
        print(self.markdown())
        if json_file:
            data = {"schema": 1, "bench": self.bench, **self.facts(), "rows": [asdict(row) for row in self.rows]}
            Path(json_file).write_text(json.dumps(data, indent=2) + "\n")
        if keep:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{self.bench}-{self.device.type}.md").write_text(self.markdown())
        return int(any(row.ok is False for row in self.rows))


def interleaved_ns(calls: Sequence[Callable[[], object]], *, loops: int, rounds: int) -> list[list[float]]:
    """Return nanoseconds a call for each of *calls*, measured in turns (A B A B) so that drift hits all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(min(loops, 1000)):
            call()
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            start = perf_counter_ns()
            for _ in range(loops):
                call()
            found.append((perf_counter_ns() - start) / loops)
    return times


def median_and_spread(values: Sequence[float], scale: float = 1.0) -> tuple[float, str]:
    """Return the median and the range, both divided by *scale*."""
    low, high = min(values) / scale, max(values) / scale
    return statistics.median(values) / scale, f"{low:.3g} to {high:.3g}"
