"""K2: the life of memory that streams share. Each test's first line names the row of the bug log."""

from __future__ import annotations

import pytest
import torch

import devstream


@pytest.mark.cuda
def test_forty_epochs_on_a_named_stream_reserve_two_blocks_at_most():
    """B11, huggingface/pytorch-image-models#2784: 32 MiB an epoch, 64 MiB reserved."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(40):
        with devstream.stream(devstream.named_stream("prefetch of forty epochs", "cuda")):
            batch = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        del batch
    devstream.synchronize("cuda")
    assert torch.cuda.memory_reserved() - before <= 64 << 20
