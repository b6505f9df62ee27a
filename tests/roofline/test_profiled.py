"""Traces of torch's profiler, of a GPU and of the CPU, as plain data."""

from __future__ import annotations

import pytest

from devstream.roofline._fused import described, is_dark, is_made_by_compiler
from devstream.roofline.profiled import HostOp, Work, parse


def event(category, name, start, duration, thread=1, **arguments):
    place = {"ts": start, "dur": duration, "tid": thread}
    return {"ph": "X", "cat": category, "name": name, "args": arguments, **place}


def op(name, start, duration, dims=(), kinds=(), *, thread=1):
    return event("cpu_op", name, start, duration, thread, **{"Input Dims": list(dims), "Input type": list(kinds)})


def launch(correlation, start, thread=1, category="cuda_runtime"):
    return event(category, "cudaLaunchKernel", start, 2, thread, correlation=correlation)


def kernel(name, start, duration, correlation, stream=7, **more):
    return event("kernel", name, start, duration, thread=99, correlation=correlation, stream=stream, **more)


GPU = {
    "traceEvents": [
        event("user_annotation", "devstream::0", 0, 50),
        op("aten::linear", 1, 30, [[8, 16], [32, 16]], ["c10::BFloat16", "c10::BFloat16"]),
        op("aten::addmm", 5, 20, [[32], [8, 16], [16, 32]], ["c10::BFloat16"] * 3),
        launch(1, 10),
        event("user_annotation", "devstream::1", 60, 20),
        op("aten::gelu", 61, 15, [[8, 32]], ["float"]),
        launch(2, 65),
        kernel("sm90_gemm", 100, 40, 1),
        kernel("gelu_kernel", 140, 10, 2),
        launch(3, 85, thread=2),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 130, 30, correlation=3, stream=20, bytes=4096),
        event("gpu_memset", "Memset (Device)", 170, 1, correlation=4, stream=7),
        event("gpu_user_annotation", "devstream::0", 100, 40, thread=99),
        {"ph": "i", "name": "not a span"},
        {"ph": "M", "name": "process_name"},
    ]
}


def test_a_kernel_belongs_to_the_mark_in_which_it_was_launched():
    found = parse(GPU, on_host=False)
    assert [(one.name, one.mark) for one in found.work] == [
        ("sm90_gemm", 0),
        ("Memcpy DtoH (Device -> Pinned)", None),
        ("gelu_kernel", 1),
        ("Memset (Device)", None),
    ]
    assert found.marks == {0: (0, 50), 1: (60, 80)}
    assert not found.compiled


def test_a_kernel_knows_the_operations_that_launched_it_the_outermost_first():
    gemm, copy, gelu, _ = parse(GPU, on_host=False).work
    assert [one.name for one in gemm.callers] == ["aten::linear", "aten::addmm"]
    assert [one.name for one in gelu.callers] == ["aten::gelu"]
    assert copy.callers == ()


def test_copies_have_lanes_by_direction_and_kernels_by_stream():
    spans = parse(GPU, on_host=False).spans()
    assert [(one.lane, one.start_ms, one.end_ms) for one in spans] == [
        ("stream 7", 0, 0.04),
        ("d2h", 0.03, 0.06),
        ("stream 7", 0.04, 0.05),
        ("stream 7", 0.07, 0.071),
    ]


def test_what_runs_at_once_is_busy_once():
    assert parse(GPU, on_host=False).busy_s == pytest.approx(61e-6)


@pytest.mark.parametrize("category", ["cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime"])
def test_launches_of_every_vendor_are_found(category):
    events = [
        event("user_annotation", "devstream::4", 0, 10),
        launch(1, 5, category=category),
        kernel("k", 20, 5, 1),
    ]
    (work,) = parse({"traceEvents": events}, on_host=False).work
    assert work.mark == 4


def test_all_kernels_of_a_replayed_graph_belong_to_its_launch():
    events = [event("user_annotation", "devstream::0", 0, 10), launch(1, 5)]
    events += [kernel(f"k{number}", 20 + number, 1, 1) for number in range(3)]
    assert [one.mark for one in parse({"traceEvents": events}, on_host=False).work] == [0, 0, 0]


def test_an_empty_trace_is_idle():
    found = parse({"traceEvents": []}, on_host=False)
    assert found.work == []
    assert found.busy_s == 0.0


def test_a_kernel_belongs_to_the_operation_whose_number_it_carries_whatever_the_drivers_clock_says():
    mark, after = event("user_annotation", "devstream::0", 0, 10), event("user_annotation", "devstream::1", 20, 10)
    add = event("cpu_op", "aten::add", 5, 4, **{"External id": 77})
    late = launch(1, 22)  # a clock that is off by 15
    events = [mark, after, add, late, kernel("k", 40, 5, 1, **{"External id": 77})]
    (work,) = parse({"traceEvents": events}, on_host=False).work
    assert work.mark == 0
    assert [one.name for one in work.callers] == ["aten::add"]


# -- the CPU ---------------------------------------------------------------------------------------------

CPU = {
    "traceEvents": [
        op("aten::linear", 0, 10),
        op("aten::addmm", 1, 8),
        op("aten::relu", 12, 3),
        op("Torch-Compiled Region: 0/0", 20, 100),
        event("user_annotation", "## Call CompiledFxGraph abc ##", 30, 60),
        op("aten::mm", 40, 10, [[4, 4], [4, 4]], ["float", "float"]),
        op("autograd::engine::evaluate_function: MmBackward0", 200, 50),
        op("MmBackward0", 201, 48),
        op("aten::mm", 205, 10),
        op("aten::add", 300, 5, thread=2),
    ]
}


def test_on_the_cpu_the_outermost_operations_are_the_work():
    found = parse(CPU, on_host=True)
    assert [(one.name, one.start_us, one.end_us) for one in found.work] == [
        ("aten::linear", 0, 10),
        ("aten::relu", 12, 15),
        ("compiled", 30, 40),
        ("aten::mm", 40, 50),
        ("compiled", 50, 90),
        ("aten::mm", 205, 215),
        ("aten::add", 300, 305),
    ]
    assert found.compiled


def test_on_the_cpu_too_work_belongs_to_its_mark_without_the_time_that_marking_takes():
    marks = [event("user_annotation", "devstream::3", 10, 50), event("user_annotation", "devstream::4", 110, 50)]
    around, inside = op("aten::add", 5, 70), op("aten::add", 20, 10)
    events = [*marks, around, inside, op("mylib::fancy", 120, 5), op("aten::mul", 121, 2)]
    add, fancy = parse({"traceEvents": events}, on_host=True).work
    assert (add.mark, add.seconds) == (3, pytest.approx(10e-6))
    assert (fancy.name, fancy.mark, fancy.seconds) == ("mylib::fancy", 4, pytest.approx(5e-6))


def test_what_the_engine_runs_is_a_backward():
    backward = [one.name for one in parse(CPU, on_host=True).work if one.callers[0].backward]
    assert backward == ["aten::mm"]


# -- what a kernel does ----------------------------------------------------------------------------------


def work(*callers, name="kernel", **facts):
    return Work(name, 0.0, 10.0, "stream 7", callers=callers, **facts)


def host(name, *tensors, backward=False):
    return HostOp(name, 0.0, 1.0, 1, tensors, backward)


def test_a_matmul_left_to_a_library_has_its_flops_bytes_and_shape():
    a, b = ((64, 32), "c10::BFloat16"), ((32, 16), "c10::BFloat16")
    for name, operands in (("aten::mm", (a, b)), ("aten::addmm", (((16,), "c10::BFloat16"), a, b))):
        what = described(work(host("CompiledFunction"), host(name, *operands)))
        assert what.operator_class == "matmul"
        assert what.counts.matmul_flops == {"bfloat16": 2 * 64 * 32 * 16}
        assert what.counts.shape == (1, 64, 16, 32)
        assert what.counts.memory_bytes == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    batched = described(work(host("aten::bmm", ((3, 4, 5), "float"), ((3, 5, 6), "float"))))
    assert batched.counts.matmul_flops == {"float32": 2 * 3 * 4 * 5 * 6}


def test_attention_has_the_same_flops_whichever_operator_tells_its_shape():
    outer = described(
        work(host("aten::_scaled_dot_product_flash_attention", *[((2, 4, 128, 64), "c10::Half")] * 3))
    )
    inner = described(work(host("aten::_flash_attention_forward", *[((2, 128, 4, 64), "c10::Half")] * 3)))
    assert outer.counts.matmul_flops == inner.counts.matmul_flops == {"float16": 4 * 2 * 4 * 128 * 128 * 64}
    assert outer.counts.kind == "attention float16 forward 64"


def test_a_compiled_kernel_moves_each_operand_once_and_is_classed_by_its_name():
    operands = [((1024,), "float")] * 3
    for name, operator_class in (
        ("triton_poi_fused_add_gelu_0", "pointwise"),
        ("triton_red_fused_native_layer_norm_1", "normalisation"),
        ("triton_per_fused_sum_2", "reduction"),
        ("triton_poi_fused_embedding_3", "data movement"),
    ):
        one = work(host(name, *operands), name=name)
        assert is_made_by_compiler(one)
        what = described(one)
        assert what.operator_class == operator_class, name
        assert what.counts.memory_bytes == 3 * 4096


def test_copies_over_the_link_have_their_direction_and_kind_of_memory():
    what = described(work(name="Memcpy DtoH (Device -> Pageable)", way="d2h", size_bytes=100.0, pinned=False))
    assert what.counts.link_bytes == {"d2h pageable": 100.0}
    assert described(work(name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")).operator_class == "collective"


def test_kernels_of_a_replayed_graph_are_classed_by_their_names_alone():
    for name, operator_class in (
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_MT256x256x64", "matmul"),
        ("void flash_fwd_kernel<...>", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", "convolution"),
        ("triton_poi_fused_add_0", "pointwise"),
    ):
        assert described(work(name=name)).operator_class == operator_class, name


def test_what_nothing_tells_counts_as_nothing():
    assert is_dark(work(name="somebodys_kernel"))
    assert not is_dark(work(host("aten::mul", ((8,), "float"))))
    what = described(work(name="somebodys_kernel"))
    assert what.counts.flops == what.counts.memory_bytes == 0
