"""The models that benches run: a step each, of the sizes of the benchmark plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Gpt:
    """Layers, width, heads, length and batch of a GPT."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int = 50304


GPT = {
    "tiny": Gpt(2, 64, 4, 64, 2, 256),
    "small": Gpt(12, 768, 12, 1024, 32),
    "medium": Gpt(24, 1024, 16, 1024, 16),
    "large": Gpt(24, 2048, 16, 2048, 8),
    "xl": Gpt(32, 2560, 32, 2048, 4),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=self.causal
        )
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), self.dropout)


class Transformer(nn.Module):
    """A GPT, or with ``causal=False`` and dropout a BERT with its masked-language head."""

    def __init__(self, shape: Gpt, *, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.heads, causal=causal, dropout=dropout) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())


Step = Callable[[], torch.Tensor]


def _step(model: nn.Module, *inputs: torch.Tensor) -> Step:
    fused = inputs[0].device.type != "cpu"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def gpt(size: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Step:
    """Return a training step of a GPT."""
    shape = GPT[size]
    model = Transformer(shape).to(device, dtype)
    tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.length), device=device)
    return _step(model, tokens, tokens)


def bert_large(device: torch.device, dtype: torch.dtype, *, batch: int = 32, layers: int = 24) -> Step:
    """Return a training step of BERT-large, sequences of 512."""
    shape = Gpt(layers, 1024, 16, 512, batch, 30522)
    model = Transformer(shape, causal=False, dropout=0.1).to(device, dtype)
    tokens = torch.randint(0, shape.vocabulary, (batch, shape.length), device=device)
    return _step(model, tokens, tokens)


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


class _ConvNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        sides = (width, width, 2 * width, 4 * width, 8 * width)
        pairs = itertools.pairwise(sides)
        self.stages = nn.Sequential(*(_Residual(inner, outer, 1 + (inner != outer)) for inner, outer in pairs))
        self.head = nn.Linear(8 * width, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, 2, 1)
        return F.cross_entropy(self.head(self.stages(x).mean((2, 3))).float(), labels)


def conv_net(
    device: torch.device, dtype: torch.dtype, *, batch: int = 256, side: int = 224, width: int = 64
) -> Step:
    """Return a training step of a residual convolutional net."""
    model = _ConvNet(width).to(device, dtype).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, side, side, device=device).to(dtype, memory_format=torch.channels_last)
    return _step(model, images, torch.randint(0, 1000, (batch,), device=device))


class _Recommender(nn.Module):
    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, picks: torch.Tensor, clicks: torch.Tensor) -> torch.Tensor:
        looked_up = [table(pick) for table, pick in zip(self.tables, picks, strict=True)]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat(looked_up, -1)).squeeze(-1).float(), clicks)


def embedding_heavy(
    device: torch.device, *, tables: int = 26, rows: int = 100_000, width: int = 64, batch: int = 8192
) -> Step:
    """Return a training step of a model that mostly looks rows up."""
    model = _Recommender(tables, rows, width).to(device)
    picks = torch.randint(0, rows, (tables, batch, 8), device=device)
    return _step(model, picks, torch.rand(batch, device=device))


def mlp(device: torch.device, dtype: torch.dtype, *, width: int = 1024, batch: int = 64, layers: int = 16) -> Step:
    """Return a training step of an MLP: at the default size, bound by its launches."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*parts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).float().pow(2).mean()

    return _step(Mlp().to(device, dtype), torch.randn(batch, width, device=device).to(dtype))
