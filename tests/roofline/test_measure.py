"""Measuring a device: what is found, what is kept, and what is never kept."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from devstream import _files
from devstream.exceptions import BackendError, CacheWarning, MeasurementError
from devstream.roofline import Ceilings, _kernels, _links, _measure, cached, measure
from devstream.roofline._plan import ACCELERATOR, CPU, QUICK, fitting, plan_for
from devstream.roofline.model import Counts, predict_op


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "devstream"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `measure` take a second, and keep what it finds."""
    monkeypatch.setattr(_measure, "plan_for", lambda device_type: QUICK)
    # Compiling takes longer than everything else together; test_the_vector_units_are_measured does it.
    monkeypatch.setattr(_kernels, "vector_rate", lambda clock, dtype, count: 1e10)


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*")) if cache.is_dir() else []


# -- what is found ---------------------------------------------------------------------------------------


def test_a_measurement_has_every_ceiling_of_the_device(backend, device, quick):
    found = measure(device, plan=QUICK)
    assert found.device == str(device)
    for key in ("matmul float32", "pointwise 4", "copy 4", "read 4", "write 4", "norm 4", "softmax 4", "peer"):
        if key != "peer" or backend.device_count() > 1:
            assert found.curves[key].peak > 0, key
    for key in ("matmul float32", "attention float32 forward 64"):  # of FLOPs really done
        assert 0 < found.peaks[key] <= found.curves[key].peak * (1 + 1e-6), key
    assert {"attention float32 forward 64", "attention float32 backward 64 causal"} <= set(found.curves)
    assert {"link h2d pageable", "link d2h pageable"} <= set(found.curves)
    assert found.launch_s > 0
    assert found.floor_s > 0
    assert found.event_record_s > 0
    assert found.event_wait_s > 0
    assert found.both_ways_bytes_per_s > 0
    assert found.streams_at_once >= 1
    assert found.copy_slowdown >= 1.0
    assert found.memory_bytes == backend.spec(device.index or 0).memory_bytes
    assert found.vector["float32"] > 0
    assert set(found.versions) >= {"driver", "torch", "runtime"}


@pytest.mark.cuda
def test_an_accelerator_has_pinned_memory_multiprocessors_and_streams_that_run_at_once(quick):
    found = measure("cuda", plan=replace(QUICK, streams=(4, 8), link_bytes=(1 << 12, 1 << 20, 1 << 26)))
    assert found.pinned_bytes_per_s > 0
    assert found.units > 8
    assert found.streams_at_once >= 4
    assert found.curves["link d2h pinned"].peak > 1.5 * found.curves["link d2h pageable"].rate(1 << 26)
    assert found.both_ways_bytes_per_s > 1.3 * found.curves["link d2h pinned"].peak
    # The device's own time of a kernel, not the host's of its launch.
    assert found.floor_s < found.launch_s


def test_a_cpu_says_what_it_lacks_and_why(quick):
    found = measure("cpu", plan=QUICK)
    assert found.inline
    assert "'cpu' has none" in found.missing["page-locked memory"]
    assert "torchrun" in found.missing["collectives"]


def test_the_model_predicts_with_what_was_measured(quick):
    found = measure("cpu", plan=QUICK)
    curve = found.curves["pointwise 4"]
    amount, seconds = curve.points[1]
    one = predict_op(Counts("pointwise 4", {}, {"float32": amount / 12}, amount * 2 / 3, amount / 3), found)
    assert one.seconds == pytest.approx(max(seconds, found.floor_s), rel=0.3)


@pytest.mark.slow
def test_the_vector_units_are_measured(backend, device):
    rate = measure(device, plan=QUICK).vector["float32"]
    assert 1e8 < rate < 1e15


def test_the_precision_of_float32_matmuls_is_left_as_it_was():
    before = torch.get_float32_matmul_precision()
    with _kernels._precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_a_dtype_that_a_device_cannot_multiply_is_said_to_be_missing(quick):
    found = measure("cpu", plan=replace(QUICK, matmul_dtypes=("float32", "bool")))
    assert "matmul bool" in found.missing
    assert "matmul bool" not in found.curves


def test_progress_is_told_before_each_part_and_at_the_end(quick):
    told = []
    measure("cpu", plan=QUICK, on_progress=lambda *now: told.append(now))
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert told[-1] == ("done", len(told) - 1, len(told) - 1)
    assert told[0][0] == "launches and events"


def test_a_measurement_that_takes_long_hurries():
    paces = [_measure.pace(0.02, elapsed) for elapsed in (0.0, 20.0, 40.0, 50.0, 70.0)]
    assert paces == sorted(paces, reverse=True)
    assert paces[0] == paces[1] == 0.02
    assert paces[-1] == pytest.approx(0.002)


def test_what_the_caller_has_switched_on_stays_out_of_the_measurement(quick, monkeypatch):
    seen = []
    monkeypatch.setattr(
        _links,
        "peer",
        lambda *args: seen.append(
            (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        ),
    )
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure("cpu", plan=QUICK)
        assert torch.is_inference_mode_enabled()
    assert seen == [(False, True, False)]
    assert "attention float32 backward 64" in found.curves


def test_a_small_device_is_measured_at_the_sizes_that_it_has_room_for():
    small = fitting(ACCELERATOR, 4e9)
    assert max(small.kernel_bytes) <= 4e9 / 16
    assert max(small.link_bytes) <= 4e9 / 16
    assert (1, 2048, 2048, 2048) in small.shapes
    assert (1, 8192, 8192, 8192) not in small.shapes
    assert fitting(ACCELERATOR, 141e9) == fitting(ACCELERATOR, 0) == ACCELERATOR
    assert fitting(ACCELERATOR, 1).kernel_bytes


def test_the_cpu_and_accelerators_have_sizes_of_their_own():
    assert plan_for("cpu") is CPU
    assert plan_for("cuda") is plan_for("xpu") is ACCELERATOR


# -- what is kept ----------------------------------------------------------------------------------------


def test_a_second_call_reads_what_the_first_one_found(quick, cache, monkeypatch):
    found = measure("cpu")
    assert len(files(cache)) == 1
    monkeypatch.setattr(_measure, "_measure", lambda *args: pytest.fail("it was measured again"))
    assert measure("cpu") == found
    assert cached("cpu") == found


def test_nothing_is_cached_before_a_measurement():
    assert cached("cpu") is None


def test_refresh_measures_again(quick, cache):
    measure("cpu")
    path = files(cache)[0]
    path.write_text(path.read_text().replace('"launch_s"', '"launch_s": 1.0, "was"'))
    assert measure("cpu", refresh=True).launch_s < 1.0


def test_another_torch_driver_or_number_of_threads_is_another_measurement(quick, cache, monkeypatch):
    measure("cpu")
    for name, changed in (("driver_version", lambda vendor: "999"), ("processor_name", lambda: "abacus")):
        with monkeypatch.context() as patch:
            patch.setattr(_measure, name, changed)
            assert cached("cpu") is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert cached("cpu") is None
    finally:
        torch.set_num_threads(threads)
    assert cached("cpu") is not None


def test_a_plan_of_ones_own_is_not_kept(quick, cache):
    measure("cpu", plan=QUICK)
    assert files(cache) == []


def test_the_file_says_its_kind_schema_and_what_it_is_valid_for(quick, cache):
    measure("cpu")
    document = json.loads(files(cache)[0].read_text())
    assert (document["kind"], document["schema"]) == ("devstream.ceilings", _measure.SCHEMA)
    assert document["key"]["torch"] == torch.__version__
    assert files(cache)[0].stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"kind": "devstream.ceilings", "schema": 1}'])
def test_a_damaged_file_is_one_warning_and_measured_anew(content, quick, cache):
    found = measure("cpu")
    path = files(cache)[0]
    path.write_text(content)
    with pytest.warns(CacheWarning) as caught:
        again = measure("cpu")
    assert len(caught) == 1
    assert set(again.curves) == set(found.curves)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure("cpu") == again


def test_a_file_of_another_device_is_not_believed(quick, cache):
    measure("cpu")
    path = files(cache)[0]
    document = json.loads(path.read_text())
    document["key"]["name"] = "abacus"
    fields = {name: document[name] for name in ("key", "ceilings")}
    _files.write_json(path, fields, kind="devstream.ceilings", schema=_measure.SCHEMA)
    with pytest.warns(CacheWarning, match="another device"):
        assert cached("cpu") is None


# -- what fails ------------------------------------------------------------------------------------------


def test_a_part_that_fails_is_named_and_nothing_is_kept(quick, cache, monkeypatch):
    def explode(*args: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB\nmore lines")

    monkeypatch.setattr(_links, "both_ways", explode)
    with pytest.raises(MeasurementError, match=r"'link, both ways': CUDA out of memory. Tried.*Nothing was kept"):
        measure("cpu")
    assert files(cache) == []


def test_an_interrupted_measurement_keeps_nothing(quick, cache, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_links, "peer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure("cpu")
    assert files(cache) == []


def test_a_device_that_does_not_exist_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(_measure, "_measure", lambda *args: pytest.fail("it was measured"))
    with pytest.raises(BackendError):
        measure("nonsense")


def test_an_installation_without_a_compiler_is_missing_the_vector_units_and_nothing_else(monkeypatch):
    def no_compiler(*args: object) -> float:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(_kernels, "vector_rate", no_compiler)
    found = measure("cpu", plan=QUICK)
    assert "No working C++ compiler" in found.missing["vector"]
    assert isinstance(found, Ceilings)
    assert found.curves


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_measure_their_collectives_agree_and_keep_them(tmp_path):
    script = f"""
import json, sys, torch.distributed as dist
from devstream.roofline import _kernels, _measure, measure
from devstream.roofline._plan import QUICK
_kernels.vector_rate = lambda *args: 1e10
_measure.plan_for = lambda device_type: QUICK
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
found = measure("cpu")
assert measure("cpu").collectives == found.collectives  # read from the file, whichever rank wrote it last
real, measured = _measure._measure, []
_measure._measure = lambda *args: measured.append(1) or real(*args)
if rank == 0:
    for path in __import__("pathlib").Path("{tmp_path}/devstream").glob("ceilings-*"):
        path.unlink()
dist.barrier()
measure("cpu")  # gone for both, and measured by both
assert measured == [1]
open("{tmp_path}/" + str(rank), "w").write(json.dumps(found.as_json()["collectives"]))
dist.destroy_process_group()
"""
    import subprocess
    import sys

    ranks = [subprocess.Popen([sys.executable, "-c", script, str(rank)]) for rank in (0, 1)]
    assert [one.wait(timeout=150) for one in ranks] == [0, 0]
    one, two = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert one == two
    assert one["all_reduce"]["bytes_per_s"] > 0
