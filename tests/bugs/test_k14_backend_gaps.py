"""K14: what a backend lacks. Each test's first line names the row of the bug log and where it was reported."""

from __future__ import annotations

import threading

import pytest
import torch

import devstream
from devstream import _registry
from devstream.backends.cpu import CpuBackend


def neutral_program(device):
    """Use the whole protocol, with no word about the device."""
    side = devstream.Stream(device)
    main = devstream.current_stream(device)
    x = torch.arange(6.0, device=device)
    ready = main.record_event()
    with devstream.stream(side):
        side.wait_event(ready)
        y = x * 2
        done = devstream.Event(device, enable_timing=True)
        done.record()
    devstream.record_stream(y, main)
    main.wait_event(done)
    z = x + y
    side.wait_stream(main)
    with devstream.stream(side):
        total = z.sum()
        last = devstream.Event(device, enable_timing=True)
        last.record()
    devstream.synchronize(device)
    assert side.query()
    assert last.query()
    assert done.elapsed_time(last) >= 0
    return total.item()


def test_a_device_neutral_program_runs_on_the_cpu():
    """B86, pytorch/pytorch#145935."""
    assert neutral_program("cpu") == 45.0


@pytest.mark.cuda
def test_a_device_neutral_program_gives_on_a_gpu_what_it_gives_on_the_cpu():
    """B86, pytorch/pytorch#145935."""
    assert neutral_program("cuda") == neutral_program("cpu") == 45.0


def test_a_thousand_short_times_are_never_negative_and_never_hang():
    """B88, pytorch/pytorch#196395."""
    side, times = devstream.Stream("cpu"), []

    def measure():
        for _ in range(1000):
            start, end = (devstream.Event("cpu", enable_timing=True) for _ in range(2))
            start.record(side)
            end.record(side)
            end.synchronize()
            side.synchronize()
            times.append(start.elapsed_time(end))

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert len(times) == 1000
    assert min(times) >= 0


def test_a_backend_without_timing_says_so_by_name():
    """B90, intel/intel-extension-for-pytorch#568."""

    class Untimed(CpuBackend):
        name = "untimed"

        def capabilities(self, index):
            return super().capabilities(index) & ~devstream.Capability.TIMING

    _registry.register("untimed", Untimed)
    try:
        with _registry.chosen("untimed"):
            assert devstream.Capability.TIMING not in devstream.capabilities("cpu")
            with pytest.raises(NotImplementedError, match=r"elapsed_time.*'untimed'"):
                devstream.Event("cpu", enable_timing=True)
    finally:
        _registry.unregister("untimed")
