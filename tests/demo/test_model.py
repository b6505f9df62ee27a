"""The model predicts each byte from the bytes before it only."""

from __future__ import annotations

import math

import pytest
import torch

from devstream.demo.model import VOCABULARY, ByteGpt, Shape

SHAPE = Shape(layers=2, width=16, heads=2, context=8)


def model(seed: int = 0) -> ByteGpt:
    made = ByteGpt(SHAPE)
    made.reset(torch.Generator().manual_seed(seed))
    return made


def test_a_new_model_knows_nothing() -> None:
    text = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(0))
    assert model()(text).item() == pytest.approx(math.log(VOCABULARY), abs=0.1)


def test_a_byte_is_not_seen_before_it_is_predicted() -> None:
    seen: list[torch.Tensor] = []
    own = model()
    own.head.register_forward_hook(lambda module, given, logits: seen.append(logits))
    text = torch.zeros(1, 9, dtype=torch.long)
    own(text)
    text[0, 5] = 7
    own(text)
    assert torch.equal(seen[0][0, :5], seen[1][0, :5])
    assert not torch.equal(seen[0][0, 5:], seen[1][0, 5:])


def test_the_same_seed_gives_the_same_weights() -> None:
    assert all(torch.equal(a, b) for a, b in zip(model().parameters(), model().parameters(), strict=True))
    assert not torch.equal(model().bytes.weight, model(seed=1).bytes.weight)


def test_weights_in_one_block_are_the_models_own() -> None:
    own, text = model(), torch.zeros(1, 9, dtype=torch.long)
    before = own(text)
    block = own.in_one_block()
    assert torch.equal(own(text), before)
    assert sum(weight.numel() for weight in own.parameters()) == block.numel()
    own.parts(block)["head.weight"].zero_()
    assert own.head.weight.eq(0).all()


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        Shape(layers=1, width=10, heads=3, context=8)
