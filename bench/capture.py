"""Launch-bound models as device graphs, beside torch's own ways to have one, in the same run: goal C5.

    python bench/capture.py [--device cuda] [--only C5,decoder] [--roofline] [--json FILE] [--keep]

A figure is the median of interleaved rounds; the spread is their range. A training step is forward and backward,
the gradients dropped behind it; an optimizer is the same for all and left out. `devstream` runs the model with a
side stream, all others run it without. Memory is what a way keeps reserved beyond what was there before, weights
and all, and its peak, in its own first steps.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _results import Row, Run, median_and_spread
from torch import nn
from torch.nn import functional as F  # noqa: N812

import devstream
from devstream import roofline

ROUNDS = 15
WARM_UP = 5


def main() -> int:
    """Measure, print, and return 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the current accelerator, else the CPU")
    parser.add_argument("--only", default="", help=f"of {', '.join(MODELS)}, with commas between")
    parser.add_argument("--roofline", action="store_true", help="also ask the roofline what a capture would gain")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that are timed")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--keep", action="store_true", help="also write bench/results/capture-DEVICE.md")
    chosen = parser.parse_args()
    spec = devstream.backend(chosen.device).spec(0)
    device = spec.device.type
    run = Run("capture", f"python bench/capture.py --device {device}", spec.device)
    for name in chosen.only.split(",") if chosen.only else MODELS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        run.rows += measure(name, MODELS[name](device), device, chosen.rounds, with_roofline=chosen.roofline)
    return run.finish(chosen.json, chosen.keep)


# -- models: each with two parts that may run side by side -----------------------------------------------


def both(
    side: Any, first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run *first* on *side* beside *second*; one after the other without a side stream."""
    if side is None:
        return first(), second()
    here = devstream.current_stream(side.device.type)
    side.wait_stream(here)
    with devstream.stream(side):
        one = first()
    two = second()
    here.wait_stream(side)
    return one, two


class Branches(nn.Module):
    """Two MLPs of the same input."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, side: Any = None) -> torch.Tensor:
        a, b = both(side, lambda: self.one(x), lambda: self.two(x))
        return (a * b).float().mean()


class Block(nn.Module):
    """Attention beside the MLP, as in GPT-J."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).transpose(1, 3).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, side: Any) -> torch.Tensor:
        y = self.norm(x)
        a, b = both(side, lambda: self.attend(y), lambda: self.down(F.gelu(self.up(y))))
        return x + a + b


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, side: Any = None) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, side)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class DecoderBlock(Block):
    """One token more, its keys and values put into a cache."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, length, width // heads))

    def step(self, x: torch.Tensor, place: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(1, 1, 3, self.heads, -1).transpose(1, 3).unbind(2)
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, length) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(
        self, token: torch.Tensor, place: torch.Tensor, mask: torch.Tensor, side: Any = None
    ) -> torch.Tensor:
        x = self.words(token)
        for block in self.blocks:
            y = block.norm(x)
            a, b = both(
                side,
                lambda block=block, y=y: block.step(y, place, mask),
                lambda block=block, y=y: block.down(F.gelu(block.up(y))),
            )
            x = x + a + b
        return self.head(x)


class Recommender(nn.Module):
    """Tables that are looked up beside an MLP over numbers."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((tables + 1) * width, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(
        self, picks: torch.Tensor, numbers: torch.Tensor, clicks: torch.Tensor, side: Any = None
    ) -> torch.Tensor:
        looked_up, dense = both(
            side,
            lambda: torch.cat([table(picks[n]) for n, table in enumerate(self.tables)], -1),
            lambda: self.bottom(numbers),
        )
        top = self.top(torch.cat([looked_up, dense], -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(top.float(), clicks)


@dataclass
class Model:
    """A module, what it is called with, and whether it is trained."""

    module: nn.Module
    arguments: tuple[torch.Tensor, ...]
    trained: bool = True


def c5(device: str) -> Model:
    width, batch, layers = (1024, 64, 8) if device != "cpu" else (32, 4, 2)
    module = Branches(width, layers).to(device, kind(device))
    return Model(module, (torch.randn(batch, width, device=device, dtype=kind(device)),))


def gpt(device: str, batch: int) -> Model:
    layers, width, heads, length, words = (6, 512, 8, 128, 8192) if device != "cpu" else (2, 32, 2, 8, 64)
    module = Gpt(layers, width, heads, words).to(device, kind(device))
    return Model(module, (torch.randint(0, words, (batch, length), device=device),))


def decoder(device: str) -> Model:
    layers, width, heads, words, length = (12, 1024, 16, 8192, 512) if device != "cpu" else (2, 32, 2, 64, 16)
    module = Decoder(layers, width, heads, words, length).to(device, kind(device))
    mask = torch.zeros(1, 1, 1, length, device=device, dtype=torch.bool)
    mask[..., : length // 2] = True
    place = torch.tensor([length // 2 - 1], device=device)
    return Model(module, (torch.zeros(1, 1, dtype=torch.int64, device=device), place, mask), trained=False)


def recommender(device: str) -> Model:
    tables, rows, width, batch = (26, 10_000, 64, 256) if device != "cpu" else (3, 100, 8, 4)
    module = Recommender(tables, rows, width).to(device)
    picks = torch.randint(0, rows, (tables, batch, 4), device=device)
    numbers, clicks = torch.randn(batch, 13, device=device), torch.rand(batch, device=device)
    return Model(module, (picks, numbers, clicks))


def kind(device: str) -> torch.dtype:
    return torch.bfloat16 if device != "cpu" else torch.float32


MODELS: dict[str, Callable[[str], Model]] = {
    "C5": c5,
    "gpt-1": lambda device: gpt(device, 1),
    "gpt-4": lambda device: gpt(device, 4),
    "decoder": decoder,
    "dlrm": recommender,
}


# -- ways to run one -------------------------------------------------------------------------------------

OURS, LAUNCHED, REDUCED = "devstream, as graphs", "devstream, launched", "Inductor, reduce-overhead"
WAYS = ("eager", LAUNCHED, OURS, "Inductor", REDUCED, "make_graphed_callables")


def step_of(model: Model, way: str, device: str) -> Callable[[], torch.Tensor] | None:
    """Return a step of a copy of *model*, run in that *way*; None where the device has it not."""
    module = copy.deepcopy(model.module)
    arguments, call = model.arguments, module.forward
    if way in (LAUNCHED, OURS):
        side, inner = devstream.Stream(device), module.forward

        def streams(*given: torch.Tensor) -> torch.Tensor:
            return inner(*given, side)

        mode = "reduce-overhead" if way == OURS else None
        call = torch.compile(streams, backend="devstream", fullgraph=True, mode=mode)
    elif way in ("Inductor", REDUCED):
        call = torch.compile(module, fullgraph=True, mode="reduce-overhead" if way == REDUCED else None)
    elif way == "make_graphed_callables":
        if device != "cuda" or not model.trained:
            return None
        call = torch.cuda.make_graphed_callables(module, arguments)
    parameters = list(module.parameters())

    def train() -> torch.Tensor:
        if way == REDUCED:
            torch.compiler.cudagraph_mark_step_begin()
        loss: torch.Tensor = call(*arguments)
        loss.backward()
        for one in parameters:
            one.grad = None
        return loss

    def infer() -> torch.Tensor:
        if way == REDUCED:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            found: torch.Tensor = call(*arguments)
        return found

    return train if model.trained else infer


def measure(name: str, model: Model, device: str, rounds: int, *, with_roofline: bool) -> list[Row]:
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    rows: list[Row] = []
    results: dict[str, torch.Tensor] = {}
    torch._dynamo.reset()  # once, or a way would forget what it compiled for the one before
    for way in WAYS:
        before = reserved(device)
        step = step_of(model, way, device)
        if step is None:
            continue
        print(f"  {way} ...", file=sys.stderr, flush=True)
        for _ in range(WARM_UP):
            results[way] = step().detach().float().clone()
        devstream.synchronize(device)
        steps[way] = step
        if device != "cpu":
            peak = (torch.cuda.max_memory_reserved() - before) / 2**20
            kept = (reserved(device) - before) / 2**20
            rows.append(Row(name, f"memory of {way}", kept, "MiB", f"peak {peak:.0f} MiB"))
    times = dict(zip(steps, timed(device, list(steps.values()), rounds), strict=True))
    for way, found in times.items():
        off = (results[way] - results["eager"]).abs().max() / results["eager"].abs().max()
        close = bool(off <= 2e-2)
        middle, spread = median_and_spread(found)
        rows.append(
            Row(name, way if close else f"{way} (result differs!)", middle, "ms", spread, ok=close or None)
        )
        if not close:
            rows[-1].ok = False
    rows.append(compared(name, times, LAUNCHED, OURS, 5.0 if name == "C5" and device != "cpu" else None))
    rows.append(compared(name, times, "eager", OURS, None))
    rows.append(compared(name, times, REDUCED, OURS, 1.0 if device != "cpu" else None))
    if "make_graphed_callables" in times:
        rows.append(compared(name, times, "make_graphed_callables", OURS, None))
    if with_roofline:
        rows += predicted(name, steps[LAUNCHED], times)
    return rows


def compared(name: str, times: dict[str, list[float]], base: str, way: str, least: float | None) -> Row:
    """How many times as fast *way* is as *base*; at least so many within the spread."""
    ratios = [a / b for a, b in zip(times[base], times[way], strict=True)]
    value, spread = median_and_spread(ratios)
    limit = "" if least is None else f"at least {least:g}" + (" within the spread" if least == 1 else "")
    reached = None if least is None else (max(ratios) if least == 1 else value) >= least
    return Row(name, f"{way}: times as fast as {base}", value, "x", spread, limit, reached)


def predicted(name: str, launched: Callable[[], torch.Tensor], times: dict[str, list[float]]) -> list[Row]:
    """What the roofline says that a capture of the launched step would leave, beside what it left."""
    diagnosis = roofline.diagnose(launched)
    gain = next((one.gain_s for one in diagnosis.actions if one.kind == "capture"), 0.0)
    measured, _ = median_and_spread(times[OURS])
    left = 1000 * (diagnosis.wall_s - gain)
    return [
        Row(name, f"roofline: {diagnosis.bound}-bound; a captured step", left, "ms", f"measured {measured:.3g} ms")
    ]


def reserved(device: str) -> int:
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_reserved())


def timed(device: str, steps: list[Callable[[], torch.Tensor]], rounds: int) -> list[list[float]]:
    """Return milliseconds a step, in turns, the device idle before and behind each turn."""
    loops = 20 if device != "cpu" else 2
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, found in zip(steps, times, strict=True):
            devstream.synchronize(device)
            start = time.perf_counter()
            for _ in range(loops):
                step()
            devstream.synchronize(device)
            found.append(1000 * (time.perf_counter() - start) / loops)
    return times


if __name__ == "__main__":
    sys.exit(main())
