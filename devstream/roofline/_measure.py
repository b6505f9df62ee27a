"""`measure`: this device's own ceilings, measured once for each driver and torch, and kept."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from devstream import _files, _registry
from devstream._compat.driver import driver_version, processor_name
from devstream.abc import AnyBackend, Capability
from devstream.exceptions import CacheWarning, DevstreamError, MeasurementError, warning
from devstream.roofline import _kernels, _links
from devstream.roofline._clock import Clock
from devstream.roofline._plan import Plan, fitting, plan_for
from devstream.roofline.ceilings import Ceilings
from devstream.typing import DeviceArg

KIND, SCHEMA = "devstream.ceilings", 2

#: Called with what comes next, how many parts are done, and how many there are.
OnProgress: TypeAlias = Callable[[str, int, int], None]

#: A part's result: the attributes of `Ceilings` that it found.
_Found: TypeAlias = dict[str, Any]  # Any: of each attribute's own type


@dataclass(frozen=True, slots=True)
class _Part:
    what: str
    measure: Callable[[], _Found]


def measure(
    device: DeviceArg = None,
    *,
    refresh: bool = False,
    on_progress: OnProgress | None = None,
    plan: Plan | None = None,
) -> Ceilings:
    """Return the ceilings of *device*; measured in under a minute the first time, read from a file after that.

    They are kept for each device name, driver, torch release and (on the CPU) number of threads, below
    ``$XDG_CACHE_HOME/devstream``. Nothing else should run on the device meanwhile. A measurement that fails or is
    interrupted keeps nothing. Where ``torch.distributed`` has a group of two ranks or more, every rank must call
    this, and collectives are measured too.

    Args:
        device: default: the current accelerator, else the CPU.
        refresh: measure, whatever is kept.
        on_progress: called before each part.
        plan: other sizes than the device's own; such a measurement is not kept.

    Raises:
        MeasurementError: a part failed: which one, and of what.
        BackendError: there is no such device.
    """
    backend, index = _registry.resolve(device)
    index = backend.current_index() if index is None else index
    versions = _versions(backend, index)
    spec = backend.spec(index)
    kept = None if refresh or plan is not None else _read(spec.name, versions)
    if _all_have(kept is not None, backend, index) and kept is not None:
        return replace(kept, device=str(spec.device))
    found = _measure(backend, index, versions, plan or plan_for(backend.device_type), on_progress)
    if plan is None:
        fields = {"key": _key(spec.name, versions), "ceilings": found.as_json()}
        _files.write_cache(_path(spec.name, versions), fields, kind=KIND, schema=SCHEMA)
    return found


def cached(device: DeviceArg = None) -> Ceilings | None:
    """Return the ceilings that were kept for *device*, or None; measures nothing."""
    backend, index = _registry.resolve(device)
    index = backend.current_index() if index is None else index
    kept = _read(backend.spec(index).name, _versions(backend, index))
    return None if kept is None else replace(kept, device=str(backend.spec(index).device))


# -- measuring -------------------------------------------------------------------------------------------


def _measure(
    backend: AnyBackend, index: int, versions: dict[str, str], plan: Plan, on_progress: OnProgress | None
) -> Ceilings:
    spec = backend.spec(index)
    plan = fitting(plan, spec.memory_bytes)
    clock = Clock(backend, index, point_s=plan.point_s)
    units = _units(clock)
    result: _Found = {
        "device": str(spec.device),
        "name": spec.name,
        "versions": versions,
        "memory_bytes": float(spec.memory_bytes),
        "units": units,
        "inline": clock.inline,
        "ranks": _ranks(),
        "curves": {},
        "tilings": {},
        "peaks": {},
        "vector": {},
        "missing": {},
    }
    matmuls: dict[str, _kernels.Matmuls] = {}
    parts = list(_parts(clock, plan, units, matmuls))
    started = time.perf_counter()
    for done, part in enumerate(parts):
        clock.point_s = pace(plan.point_s, time.perf_counter() - started)
        if on_progress is not None:
            on_progress(part.what, done, len(parts))
        try:
            with _nothing_special(backend.device_type):
                found = part.measure()
        except (RuntimeError, MemoryError, OSError, ValueError) as error:
            if isinstance(error, DevstreamError):
                raise
            raise MeasurementError(what=part.what, device=str(spec.device), cause=_first_line(error)) from error
        for name, value in found.items():
            if isinstance(result.get(name), dict):
                result[name] |= value
            else:
                result[name] = value
    if on_progress is not None:
        on_progress("done", len(parts), len(parts))
    ceilings = Ceilings(**result)
    if units <= 1:
        return ceilings
    rate = ceilings.memory_bytes_per_s or 0.0
    return replace(ceilings, tiles={dtype: one.tiles(units, rate) for dtype, one in matmuls.items()})


@contextmanager
def _nothing_special(device_type: str) -> Iterator[None]:
    """Keep what the caller has switched on out of the measurement: autocast, no_grad, inference mode, a stance."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("default"))
        if torch.amp.is_autocast_available(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def pace(point_s: float, elapsed_s: float) -> float:
    """Return how long a point may take after *elapsed_s*: less and less where half a minute was not enough."""
    return point_s * min(1.0, max(0.1, (_LIMIT_S - elapsed_s) / (_LIMIT_S / 2)))


#: A measurement on a slow or busy machine hurries to be done by then.
_LIMIT_S = 55.0


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _parts(clock: Clock, plan: Plan, units: int, matmuls: dict[str, _kernels.Matmuls]) -> Iterator[_Part]:
    """Yield the parts of a measurement, the ones that need an idle host first; *matmuls* gets what they find."""

    def of_launch() -> _Found:
        launch_s, floor_s = _links.launch(clock)
        record_s, wait_s = _links.events(clock)
        return {"launch_s": launch_s, "floor_s": floor_s, "event_record_s": record_s, "event_wait_s": wait_s}

    yield _Part("launches and events", of_launch)
    for dtype in plan.matmul_dtypes:
        yield _Part(f"matmul {dtype}", lambda dtype=dtype: _matmul(clock, plan, dtype, units, matmuls))  # type: ignore[misc]
    yield _Part("vector units", lambda: _vector(clock, plan))
    for dtype in plan.kernel_dtypes:
        yield _Part(
            f"memory {dtype}",
            lambda dtype=dtype: {"curves": _kernels.kernels(clock, plan, dtype)},  # type: ignore[misc]
        )
    for dtype in plan.attention_dtypes:
        yield _Part(
            f"attention {dtype}",
            lambda dtype=dtype: _attention(clock, plan, dtype, units),  # type: ignore[misc]
        )
    yield _Part("link to the host", lambda: {"curves": _links.link(clock, plan)})
    yield _Part("link, both ways", lambda: {"both_ways_bytes_per_s": _links.both_ways(clock, plan)})
    yield _Part("page-locked memory", lambda: _pinned(clock, plan))
    yield _Part("streams at once", lambda: {"streams_at_once": _links.streams_at_once(clock, plan)})
    side = max(min(m, n, k) for _, m, n, k in plan.shapes if m == n == k)
    yield _Part(
        "matmul under a copy", lambda: {"copy_slowdown": _links.copy_slowdown(clock, plan, min(side, 4096))}
    )
    yield _Part("other devices", lambda: _peer(clock, plan))
    yield _Part("collectives", lambda: _collectives(clock, plan))


def _attention(clock: Clock, plan: Plan, dtype: str, units: int) -> _Found:
    curves, cut, peaks = _kernels.attention(clock, plan, dtype, units)
    return {"curves": curves, "tilings": cut, "peaks": peaks}


def _matmul(clock: Clock, plan: Plan, dtype: str, units: int, matmuls: dict[str, _kernels.Matmuls]) -> _Found:
    found = _kernels.matmuls(clock, plan, dtype, units)
    if found is None:
        return {"missing": {f"matmul {dtype}": "this device has no matmul of that type"}}
    matmuls[dtype] = found
    key = f"matmul {dtype}"
    return {"curves": {key: found.curve}, "tilings": {key: found.tiling}, "peaks": {key: found.peak}}


def _vector(clock: Clock, plan: Plan) -> _Found:
    count = max(1 << 12, plan.kernel_bytes[-1] // 64)
    try:
        return {"vector": {"float32": _kernels.vector_rate(clock, "float32", count)}}
    except (RuntimeError, ImportError) as error:  # a fact of this installation, not a failure of the measurement
        return {"missing": {"vector": f"torch.compile can't build a kernel here: {_first_line(error)}"}}


def _pinned(clock: Clock, plan: Plan) -> _Found:
    if Capability.PINNED_MEMORY not in clock.backend.capabilities(clock.index):
        return {"missing": {"page-locked memory": f"backend {clock.backend.name!r} has none"}}
    return {"pinned_bytes_per_s": _links.pinned_allocation(plan)}


def _peer(clock: Clock, plan: Plan) -> _Found:
    curve = _links.peer(clock, plan)
    return {"missing": {"peer": "this process sees one device"}} if curve is None else {"curves": {"peer": curve}}


def _collectives(clock: Clock, plan: Plan) -> _Found:
    if _ranks() == 1:
        reason = "no group of two ranks: run under torchrun, after torch.distributed.init_process_group"
        return {"missing": {"collectives": reason}}
    return {"collectives": _links.collectives(clock, plan)}


def _all_have(have: bool, backend: AnyBackend, index: int) -> bool:
    """Say whether every rank has a measurement: one that read while others measured would leave them waiting."""
    if _ranks() == 1:
        return have
    own = "cpu" if backend.device_type == "cpu" else f"{backend.device_type}:{index}"
    mine = torch.tensor(float(have), device=own)
    dist.all_reduce(mine, op=dist.ReduceOp.MIN)
    return bool(mine)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _units(clock: Clock) -> int:
    """Return the number of multiprocessors, where torch's module of the device type tells it."""
    if clock.inline:
        return 1
    ask = getattr(torch.get_device_module(clock.device), "get_device_properties", None)
    return int(getattr(ask(clock.index), "multi_processor_count", 1)) if ask is not None else 1


# -- the file --------------------------------------------------------------------------------------------


def _versions(backend: AnyBackend, index: int) -> dict[str, str]:
    spec = backend.spec(index)
    found = {"driver": driver_version(spec.vendor), "torch": str(torch.__version__), "runtime": spec.runtime}  # noqa: TID251 - names the file, decides nothing
    if backend.device_type == "cpu":
        found |= {"processor": processor_name(), "threads": str(torch.get_num_threads())}
    if _ranks() > 1:
        found["ranks"] = str(_ranks())
    return found


def _key(name: str, versions: dict[str, str]) -> dict[str, str]:
    return {"name": name, **versions}


def _path(name: str, versions: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(_key(name, versions), sort_keys=True).encode()).hexdigest()
    return _files.cache_dir() / f"ceilings-{digest[:16]}.json"


def _read(name: str, versions: dict[str, str]) -> Ceilings | None:
    path = _path(name, versions)
    document = _files.read_cache(path, kind=KIND, schema=SCHEMA)
    if document is None:
        return None
    try:
        if document.get("key") != _key(name, versions):
            raise ValueError("it is of another device or version")
        return Ceilings.from_json(document.get("ceilings", {}))
    except ValueError as error:
        warnings.warn(warning(CacheWarning, path=path, reason=str(error)), stacklevel=3)
        return None


__all__ = ["KIND", "SCHEMA", "OnProgress", "cached", "measure"]
