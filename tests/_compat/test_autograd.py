"""The numbers of autograd's nodes: what connects a backward with its forward."""

from __future__ import annotations

import torch

from devstream._compat import TorchDispatchMode
from devstream._compat.autograd import next_sequence_number, profiler_has_devices, running_sequence_number


def test_a_backward_runs_under_the_number_that_its_forward_got() -> None:
    forward: dict[str, int] = {}
    backward: dict[str, int | None] = {}

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if running_sequence_number() is None:
                forward[str(func)] = next_sequence_number() - 1
            else:
                backward[str(func)] = running_sequence_number()
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, 3, requires_grad=True)
    with Watch():
        torch.softmax(x.sin(), -1).sum().backward()
    assert backward["aten._softmax_backward_data.default"] == forward["aten._softmax.default"]
    assert backward["aten.cos.default"] == forward["aten.sin.default"]
    assert running_sequence_number() is None


def test_this_build_says_whether_it_has_the_profiler() -> None:
    assert profiler_has_devices() in (True, False)
