"""The pytest plugin, loaded only by ``-p devstream.testing.plugin``: markers, fixtures, --require and --backend.

A test that needs hardware carries a marker. Where the hardware is missing the test is skipped, unless
``--require NAME`` says that it must be there: then the run stops before the first test. Nothing else skips.

The fixture `backend` runs a test once on each backend: ``cpu`` always, and ``cuda``, ``rocm`` and
``accelerator`` under the marker of that name. ``--backend NAME`` restricts it, or names a plug-in's;
``DEVSTREAM_BACKEND`` restricts it too. A backend that is asked for by name must be able to run.

``--racecheck`` runs every test under `devstream.racecheck`, so that a test whose code has a missing wait fails.
``@pytest.mark.racecheck`` does so for one test; ``@pytest.mark.racecheck(False)`` leaves one out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache

import pytest
import torch

from devstream import _compat, _registry
from devstream import _streams as verbs
from devstream.abc import AnyBackend, Latch, StreamArg
from devstream.exceptions import BackendError
from devstream.races import racecheck
from devstream.testing._latch import latch as hold
from devstream.testing.recording import Recorder

pytest.register_assert_rewrite("devstream.testing.conformance")

#: Marker -> what a test with it needs.
MARKERS = {
    "cuda": "an NVIDIA GPU",
    "rocm": "an AMD GPU",
    "accelerator": "any torch accelerator",
    "multi_gpu": "two accelerators in one process",
    "distributed": "torch.distributed, to start several ranks",
    "hip_library": "HIP's runtime library and its Python binding, hip-python; no device",
    "slow": "more than a second",
    "stress": "many repeats; off unless the -m expression names it",
}
_HARDWARE = ("cuda", "rocm", "accelerator", "multi_gpu", "distributed", "hip_library")
_BACKENDS = ("cpu", "cuda", "rocm", "accelerator")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("devstream")
    group.addoption(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help=f"fail instead of skipping where this is missing: {', '.join(_HARDWARE)}, or a backend; repeatable",
    )
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="run tests of the `backend` fixture on this backend only; repeatable",
    )

    group.addoption(
        "--racecheck",
        action="store_true",
        help="run each test under devstream.racecheck: a missing wait fails it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and stop the run where something required or chosen is missing."""
    for name, needs in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: needs {needs}")
    config.addinivalue_line(
        "markers", "racecheck(on=True, **options): run under devstream.racecheck(**options), or not"
    )
    for name in config.getoption("--require"):
        reason = missing(name)
        if reason is not None:
            raise pytest.UsageError(f"--require {name}: {reason}")
    if not selected(config):
        raise pytest.UsageError(
            f"no backend is selected: --backend {' --backend '.join(config.getoption('--backend'))} leaves "
            f"nothing of {_registry.VARIABLE}={os.environ.get(_registry.VARIABLE)}"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of our `backend` fixture once for each selected backend."""
    # A test class with a `backend` fixture of its own doesn't reach ours, and so not its parameter either.
    if "backend_name" in metafunc.fixturenames:
        params = [
            pytest.param(name, marks=[getattr(pytest.mark, mark) for mark in marks_of(name)])
            for name in selected(metafunc.config)
        ]
        metafunc.parametrize("backend_name", params, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m selects by the markers that are added here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what lacks its hardware, and leave the stress tests out unless they are asked for."""
    named = chosen_by_name(config)
    for item in items:
        if item.get_closest_marker("accelerator") is not None:
            for name in marks_of("accelerator"):
                item.add_marker(name)
        for name in _HARDWARE:
            if item.get_closest_marker(name) is not None:
                # Named, a backend runs on whatever it can; a test with the marker itself wants the vendor's.
                params = (
                    item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
                )
                ours = name in named and params.get("backend_name") == name
                reason = None if ours else missing(name)
                if reason is not None:
                    item.add_marker(pytest.mark.skip(reason=reason))
    if "stress" not in config.getoption("-m"):
        stress = [item for item in items if item.get_closest_marker("stress") is not None]
        if stress:
            config.hook.pytest_deselected(items=stress)
            items[:] = [item for item in items if item.get_closest_marker("stress") is None]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run the test, not its fixtures, under the race checker, where the option or the marker asks for it."""
    mark = item.get_closest_marker("racecheck")
    on = item.config.getoption("--racecheck") if mark is None else mark.args[0] if mark.args else True
    if not on:
        return (yield)
    with racecheck(**(mark.kwargs if mark is not None else {})):
        return (yield)


# -- what there is ---------------------------------------------------------------------------------------


@lru_cache
def missing(name: str) -> str | None:
    """Say why hardware *name*, a marker's or a backend's, is missing here, or None where it is there."""
    if name == "multi_gpu":
        count = torch.accelerator.device_count() if _compat.default_accelerator_type() else 0
        return None if count >= 2 else f"two accelerators are needed, torch finds {count}"
    if name == "distributed":
        return None if torch.distributed.is_available() else "this torch is built without torch.distributed"
    if name == "hip_library":
        try:
            importlib.import_module("hip.hip")
        except ImportError as error:
            return f"hip-python, or the libamdhip64 that it loads, is not installed: {error}"
        return None
    try:
        backend = _registry.usable(name)
    except BackendError as error:
        return str(error)
    # Such a backend can run, but a test that needs its vendor's hardware can't: ROCm's over a CUDA build.
    return backend.not_automatic_reason() if name in _HARDWARE else None


def chosen_by_name(config: pytest.Config) -> tuple[str, ...]:
    """Return the backends that the options or the environment name; none where nothing was chosen."""
    options: Sequence[str] = config.getoption("--backend")
    variable = os.environ.get(_registry.VARIABLE)
    if options and variable:
        return tuple(name for name in dict.fromkeys(options) if name == variable)
    return tuple(dict.fromkeys(options)) or ((variable,) if variable else ())


def selected(config: pytest.Config) -> tuple[str, ...]:
    """Return the backends that the `backend` fixture runs on.

    Raises:
        pytest.UsageError: one that was asked for by name can't run here.
    """
    if config.getoption("--backend") or os.environ.get(_registry.VARIABLE):
        names = chosen_by_name(config)
        for name in names:
            try:
                _registry.usable(name)
            except BackendError as error:
                raise pytest.UsageError(f"backend {name!r} was asked for: {error}") from error
        return names
    # The generic backend is no vendor of its own: without any accelerator its tests would be skipped everywhere.
    return tuple(name for name in _BACKENDS if name != "accelerator" or _compat.default_accelerator_type())


def marks_of(name: str) -> tuple[str, ...]:
    """Return the markers of a test on backend *name*: its own, and of the generic one also the vendor's."""
    if name == "accelerator":
        vendors = [vendor for vendor in ("cuda", "rocm") if missing(vendor) is None]
        return ("accelerator", *vendors)
    return (name,) if name in _HARDWARE else ()


# -- fixtures --------------------------------------------------------------------------------------------


@pytest.fixture
def backend_name(request: pytest.FixtureRequest) -> str:
    """The name of the backend that the test runs on."""
    name: str = request.param
    return name


@pytest.fixture
def backend(backend_name: str) -> Iterator[AnyBackend]:
    """The backend that the test runs on, chosen for the process meanwhile; the test runs once for each."""
    with _registry.chosen(backend_name) as own:
        yield own


@pytest.fixture
def device(backend: AnyBackend) -> torch.device:
    """The first device of the backend."""
    return torch.device(backend.device_type, 0)


@pytest.fixture
def stream(backend: AnyBackend, device: torch.device) -> verbs.Stream:
    """A new stream of the device."""
    made: verbs.Stream = verbs.create_stream(device, 0)
    return made


@pytest.fixture
def latch() -> Callable[[StreamArg], AbstractContextManager[Latch]]:
    """Give `devstream.testing.latch`, a context manager that holds a stream."""
    return hold


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A `devstream.testing.Recorder` that listens during the test."""
    with Recorder() as recording:
        yield recording
