"""Diagnosing real functions, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.profiler import profile

import devstream
from devstream._compat import autograd
from devstream.exceptions import BackendError, DiagnosisError, UnsupportedError
from devstream.report import Span
from devstream.roofline import _diagnose, diagnose
from devstream.roofline.ceilings import Ceilings
from devstream.roofline.counting import count
from devstream.roofline.curves import Curve
from devstream.roofline.profiled import Profiled, Work
from devstream.testing.ceilings import SIZES, WORK, line

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")


@pytest.fixture
def known(backend) -> Ceilings:
    """Ceilings about as this device has them, so that nothing is measured."""
    inline = backend.device_type == "cpu"
    speed, memory, floor = (5e10, 1e10, 5e-6) if inline else (5e13, 2e12, 2e-6)
    curves: dict[str, Curve] = {
        "matmul float32": line(floor, speed, *WORK),
        "matmul tf32": line(floor, 4 * speed, *WORK),
        "matmul bfloat16": line(floor, 8 * speed, *WORK),
        "copy 4": line(floor, memory, *SIZES),
        "link d2h pinned": line(1e-5, 5e10, *SIZES),
        "link h2d pageable": line(1e-5, 1e10, *SIZES),
        "link d2h pageable": line(1e-5, 1e10, *SIZES),
    }
    return Ceilings("x:0", "x", {}, curves, vector={"float32": speed}, floor_s=floor, launch_s=1e-5, inline=inline)


@pytest.fixture
def tensors(device) -> torch.device:
    return torch.device("cpu") if device.type == "cpu" else device


def test_a_large_matmul_is_bound_by_compute(known, tensors, device):
    a = torch.randn(768, 768, device=tensors)
    found = diagnose(lambda: a @ a, device=device, ceilings=known)
    assert found.by_class[0].name == "matmul"
    assert found.by_class[0].bound == "compute"
    assert found.by_class[0].counts.matmul_flops.popitem()[1] == 2 * 768**3
    assert found.by_class[0].time_share > 0.9
    assert found.device == str(device)


def test_a_large_addition_is_bound_by_memory(known, tensors, device):
    x = torch.randn(1 << 23, device=tensors)
    found = diagnose(lambda: x + 1, device=device, ceilings=known)
    assert found.total.bound == "memory"
    assert found.total.counts.memory_bytes == 2 * 4 * (1 << 23)
    assert found.total.shares["memory"] > 0


def test_a_launch_bound_function_is_overhead(known, tensors, device):
    x = torch.zeros(4, device=tensors)

    def many():
        y = x
        for _ in range(200):
            y = y + 1
        return y

    found = diagnose(many, device=device, ceilings=known)
    assert found.bound == "overhead"
    assert found.total.counts.launches == 200
    assert found.actions[0].kind in ("capture", "compile", "batch")


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(F.gelu(self.up(x)))).pow(2).mean()


def test_forward_and_backward_are_told_by_class_module_and_line(known, tensors, device):
    torch.manual_seed(0)
    model = Step().to(tensors)
    x = torch.randn(512, 64, device=tensors)
    found = diagnose(model, x, ceilings=known, device=device)
    assert {"Step.up", "Step.norm", "Step.down"} <= {one.name for one in found.by_module}
    assert {one.name for one in found.by_class} >= {"matmul", "normalisation", "pointwise", "reduction"}
    assert any("test_diagnose.py" in one.name for one in found.by_line)
    up = next(one for one in found.by_module if one.name == "Step.up")
    assert up.counts.launches >= 2  # forward, and the gradient of its weight
    assert all(one.seconds > 0 for one in found.by_class if one.name in ("matmul", "normalisation"))
    assert sum(one.time_share for one in found.by_class) == pytest.approx(1.0)
    assert found.spans
    assert found.wall_s > 0
    assert model.up.weight.grad is None
    # A device that only torch.accelerator knows doesn't say how much memory it has.
    assert bool(found.memory.capacity) == bool(devstream.backend(device).spec(device.index or 0).memory_bytes)
    assert found.memory.largest == 512 * 256 * 4


def test_a_training_step_runs_its_own_backward_and_is_not_differentiated_again(known, tensors, device):
    model = Step().to(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 64, device=tensors)

    def train():
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss

    found = diagnose(train, ceilings=known, device=device)
    matmuls = next(one for one in found.by_class if one.name == "matmul")
    assert matmuls.counts.launches == 5  # two forward, three backward: no gradient of x is needed


def test_the_device_is_that_of_the_arguments_or_of_the_weights(known, tensors, device):
    model = Step().to(tensors)
    x = torch.randn(8, 64, device=tensors)
    for function, args in ((model, (x,)), (functools.partial(model, x), ()), (model.forward, (x,))):
        if tensors.type != "cpu" and not args:
            continue  # a partial hides both; the default device is the right one then
        assert diagnose(function, *args, ceilings=known).device.startswith(tensors.type)


@pytest.mark.slow
def test_compiled_code_is_told_by_kernel(known, tensors, device):
    model = Step().to(tensors)
    x = torch.randn(512, 64, device=tensors)
    compiled = torch.compile(model)
    found = diagnose(compiled, x, ceilings=known, device=device)
    assert found.compiled
    assert found.notes
    names = {one.name for one in found.by_class}
    assert "matmul" in names
    matmuls = next(one for one in found.by_class if one.name == "matmul")
    assert matmuls.flops_share > 0.5
    assert "Step.up" in {one.name for one in found.by_module}  # of the code as it is written
    assert "By module, uncompiled" in str(found)
    assert "compile" not in [action.kind for action in found.actions]
    kernels = {one.name for one in found.by_kernel}
    assert any(name == "compiled" or name.startswith("triton_") for name in kernels)


@pytest.mark.cuda
def test_a_copy_to_the_host_is_a_link_and_its_exposed_part_is_told(known):
    x = torch.randn(1 << 24, device="cuda")

    def run():
        return (x + 1).cpu()

    found = diagnose(run, ceilings=known, device="cuda")
    assert "link" in {one.name for one in found.by_class}
    link = next(one for one in found.by_class if one.name == "link")
    assert link.bound == "link"
    assert link.time_share > 0.5
    assert "d2h" in {span.lane for span in found.spans}


@pytest.mark.cuda
def test_the_times_of_kernels_are_the_devices_own(known):
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found = diagnose(lambda: a @ a, ceilings=known, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        a @ a
    end.record()
    torch.cuda.synchronize()
    assert found.total.seconds == pytest.approx(start.elapsed_time(end) / 20e3, rel=0.35)


# -- traces of a GPU, made by hand ------------------------------------------------------------------------


def gpu_run(*kernels):
    """Return the trace and counts of two operations whose kernels are *kernels*: ``(operation, seconds)``."""
    x, w = torch.zeros(8, 4), torch.zeros(4, 2)
    counted = count(lambda: (x @ w) + 1)
    work = [
        Work(f"kernel {number}", 1e6 * number, 1e6 * (number + took), "stream 7", mark=mark)
        for number, (mark, took) in enumerate(kernels)
    ]
    return Profiled(work), counted


def test_an_operation_has_the_time_of_all_its_kernels_and_each_kernel_its_part_of_the_work():
    ops, kernels = _diagnose._timed([gpu_run((0, 0.3), (0, 0.1), (1, 0.2), (None, 9.0))], on_host=False)
    assert [took for _, took in ops] == pytest.approx([0.4, 0.2])
    first, second, third = kernels
    assert first[0].what.counts.flops == pytest.approx(0.75 * 2 * 8 * 4 * 2)
    assert second[0].what.counts.flops == pytest.approx(0.25 * 2 * 8 * 4 * 2)
    assert [op.name for op, _ in (first, second, third)] == ["kernel 0", "kernel 1", "kernel 2"]
    assert [took for _, took in (first, second, third)] == pytest.approx([0.3, 0.1, 0.2])
    assert first[0].line == ops[0][0].line


def test_of_several_runs_the_shortest_time_of_each_operation_counts():
    runs = [gpu_run((0, 0.3), (1, 0.2)), gpu_run((0, 0.5), (1, 0.1)), gpu_run((0, 0.4), (1, 0.4))]
    ops, _ = _diagnose._timed(runs, on_host=False)
    assert [took for _, took in ops] == pytest.approx([0.3, 0.1])


def test_a_run_that_did_something_else_does_not_count():
    other = gpu_run((0, 0.01))
    other[1].ops.append(other[1].ops[0])
    ops, _ = _diagnose._timed([gpu_run((0, 0.3), (1, 0.2)), other], on_host=False)
    assert [took for _, took in ops] == pytest.approx([0.3, 0.2])


def test_a_copy_is_exposed_where_no_kernel_runs():
    spans = (Span("d2h", "c", 0.0, 4.0), Span("h2d", "c", 3.0, 6.0), Span("stream 7", "k", 1.0, 2.5))
    assert _diagnose._exposed_link_s(spans) == pytest.approx(4.5e-3)
    assert _diagnose._exposed_link_s(spans[2:]) == 0.0


# -- bad input -------------------------------------------------------------------------------------------


def test_a_function_that_fails_is_a_clear_error_with_its_line(known):
    def bad(x):
        return x @ torch.zeros(3, 3)  # shapes don't fit

    with pytest.raises(DiagnosisError) as caught:
        diagnose(bad, torch.zeros(2, 2), ceilings=known)
    assert "bad raised RuntimeError" in str(caught.value)
    assert "test_diagnose.py" in caught.value.line
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_function_that_fails_only_later_says_when(known):
    calls = []

    def third_time():
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the data is used up")
        return torch.zeros(1)

    with pytest.raises(DiagnosisError, match="while warming up"):
        diagnose(third_time, ceilings=known, device="cpu")


def test_ctrl_c_is_not_swallowed(known):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagnose(interrupted, ceilings=known, device="cpu")


def test_a_function_that_does_nothing_is_diagnosed(known):
    found = diagnose(lambda: None, ceilings=known, device="cpu")
    assert found.total.counts.launches == 0
    assert str(found)


def test_no_such_device_is_refused_before_the_function_runs(known):
    with pytest.raises(BackendError):
        diagnose(lambda: pytest.fail("it ran"), device="nonsense", ceilings=known)


def test_a_build_of_torch_without_the_profiler_is_a_clear_error(known, monkeypatch):
    monkeypatch.setattr(_diagnose, "profiler_has_devices", lambda: False)
    with pytest.raises(UnsupportedError, match=r"profiler.*Kineto"):
        diagnose(lambda: pytest.fail("it ran"), device="cpu", ceilings=known)
    assert autograd.profiler_has_devices()


def test_a_profiler_that_cannot_start_is_a_clear_error(known, monkeypatch):
    class Busy(profile):
        def __enter__(self):
            raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(_diagnose, "profile", Busy)
    with pytest.raises(UnsupportedError, match="already enabled"):
        diagnose(lambda: torch.zeros(4) + 1, device="cpu", ceilings=known)


def test_a_profiler_that_sees_nothing_run_is_a_clear_error(known, monkeypatch):
    monkeypatch.setattr(_diagnose, "parse", lambda document, *, on_host: Profiled())
    with pytest.raises(UnsupportedError, match="saw nothing run"):
        diagnose(lambda: torch.zeros(4) + 1, device="cpu", ceilings=known)
