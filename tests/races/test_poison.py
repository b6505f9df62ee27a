"""devstream/races/poison.py: what unwritten and freed memory is filled with."""

from __future__ import annotations

import pytest
import torch

import devstream
from devstream.races.poison import poison, poison_freed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_floating_point_becomes_nan(dtype):
    x = torch.ones(3, dtype=dtype)
    poison(x)
    assert x.isnan().all()


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int64, -1), (torch.int8, -1), (torch.uint8, 255), (torch.bool, True)]
)
def test_whole_numbers_get_every_bit_set(dtype, value):
    x = torch.zeros(3, dtype=dtype)
    poison(x)
    assert x.tolist() == [value] * 3


def test_views_and_tensors_that_need_a_gradient_can_be_filled():
    x = torch.zeros(4, 4, requires_grad=True)
    poison(x[1:3, ::2])
    assert int(x.isnan().sum()) == 4
    poison(torch.empty(0))


def test_a_freed_block_is_asked_for_on_its_own_stream():
    side = devstream.Stream("cpu")
    poison_freed(64, torch.device("cpu"), side)
    assert devstream.current_stream("cpu") is devstream.default_stream("cpu")
