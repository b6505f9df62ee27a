"""What must have happened once before a stream of an accelerator is held."""

from __future__ import annotations

import pytest
import torch

from devstream.overlap import copy


@pytest.fixture(autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    """Load kernels and take memory now: the first time, an accelerator may wait for all of its streams."""
    if "device" not in request.fixturenames:
        return
    device: torch.device = request.getfixturevalue("device")
    if device.type == "cpu":
        return
    several = [copy(torch.ones(1 << 12), device) for _ in range(4)]
    for there, ready in several:
        ready.synchronize()
        (torch.full_like(there, 2.0) * 3).eq(6.0).all().item()
        copy(there, "cpu")[1].synchronize()
        copy(there, device)[1].synchronize()
    [torch.full((1 << 12,), -1.0, device=device) for _ in range(16)]
