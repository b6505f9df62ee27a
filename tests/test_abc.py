"""What a backend gets without writing it."""

from __future__ import annotations

import torch

import devstream
from devstream.abc import Backend


def test_the_default_copy_restores_the_current_stream_of_both_devices() -> None:
    cpu = devstream.backend("cpu")
    here, there = cpu.current_stream(0), cpu.current_stream(1)
    target = torch.zeros(4)
    Backend.copy(cpu, target, torch.ones(4), cpu.create_stream(1))
    assert target.eq(1).all()
    assert cpu.current_stream(None) == here
    assert cpu.current_stream(1) == there
