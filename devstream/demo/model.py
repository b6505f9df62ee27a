"""A small GPT over bytes: a decoder-only transformer with pre-norm blocks and learned positions.

It names no device, stream or compiler, so that every column of the demonstration trains the very same model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model is. *context* is the number of bytes that it sees at once."""

    layers: int
    width: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")


class Attention(nn.Module):
    """Causal self-attention over all earlier bytes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.to_qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same."""
        batch, time, width = x.shape
        qkv = self.to_qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return joined


class Block(nn.Module):
    """Attention, then a two-layer network on each position, both added to their input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.network_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same."""
        x = x + self.attention(self.attention_norm(x))
        hidden = functional.gelu(self.up(self.network_norm(x)), approximate="tanh")
        total: torch.Tensor = x + self.down(hidden)
        return total


class ByteGpt(nn.Module):
    """Predicts each byte from the bytes before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights anew; the same generator state gives the same weights on every device."""
        residual_std = 0.02 / math.sqrt(2 * self.shape.layers)  # as in GPT-2: each block adds to the sum twice
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() < 2:
                    weight.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                std = residual_std if name.endswith(("out.weight", "down.weight")) else 0.02
                # Drawn on the host, where one seed means the same numbers whatever the device.
                weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))

    def in_one_block(self) -> torch.Tensor:
        """Move all weights into one block of memory and return it, so that one copy copies the model.

        Call it once, when the model is on its device and before an optimizer sees the weights.
        """
        weights = list(self.parameters())
        block = torch.cat([weight.detach().reshape(-1) for weight in weights])
        for weight, part in zip(weights, self.parts(block).values(), strict=True):
            weight.data = part
        return block

    def parts(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a block like that of `in_one_block` as weights by name, sharing its memory."""
        weights = dict(self.named_parameters())
        pieces = torch.split(block, [weight.numel() for weight in weights.values()])
        return {
            name: piece.view(weight.shape) for (name, weight), piece in zip(weights.items(), pieces, strict=True)
        }

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the loss, in nats a byte, of predicting ``text[:, 1:]`` from what comes before.

        Args:
            text: bytes as int64, (batch, time + 1) with a time of at most the model's context.
        """
        seen, wanted = text[:, :-1], text[:, 1:]
        x = self.bytes(seen) + self.positions.weight[: seen.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), wanted.reshape(-1))
