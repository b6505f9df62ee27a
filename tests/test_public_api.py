"""devstream/__init__.py: what is public, and what importing it costs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import devstream

PUBLIC = [
    "Capability",
    "DeviceSpec",
    "DevstreamError",
    "DevstreamWarning",
    "Event",
    "Stream",
    "UnsupportedError",
    "__version__",
    "backend",
    "capabilities",
    "carry_streams",
    "check",
    "current_stream",
    "default_stream",
    "devices",
    "explain",
    "named_stream",
    "racecheck",
    "record_stream",
    "recorded",
    "set_stream",
    "stream",
    "synchronize",
    "wrap",
]


def test_the_public_names_are_these():
    assert devstream.__all__ == PUBLIC


def test_the_public_names_are_sorted():
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_a_public_name_has_a_docstring_of_its_own(name):
    item = getattr(devstream, name)
    assert item.__doc__
    assert item.__doc__.strip().splitlines()[0].endswith((".", ":", "?"))
    if inspect.isclass(item):
        # A class that has none would show the docstring of its base.
        assert item.__doc__ not in [base.__doc__ for base in item.__mro__[1:]]


@pytest.mark.parametrize("owner", ["Stream", "Event"])
def test_every_public_method_of_the_two_classes_has_a_docstring(owner):
    cls = getattr(devstream, owner)
    for name, item in vars(cls).items():
        if not name.startswith("_") and (inspect.isfunction(item) or isinstance(item, property | classmethod)):
            assert item.__doc__, f"{owner}.{name}"


def test_the_names_of_torch_have_the_arguments_of_torch():
    assert list(inspect.signature(devstream.current_stream).parameters) == ["device"]
    assert list(inspect.signature(devstream.synchronize).parameters) == ["device"]
    assert list(inspect.signature(devstream.Event.__init__).parameters)[1:] == [
        "device",
        "enable_timing",
        "blocking",
        "interprocess",
    ]
    assert list(inspect.signature(devstream.Event.elapsed_time).parameters) == ["self", "end_event"]


def imported_by(statement):
    """Return the modules that *statement* adds after torch, and whether it looked for entry points."""
    program = f"""
import importlib.metadata, json, sys
import torch
looked = []
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda *args, **kwargs: looked.append(kwargs) or real(*args, **kwargs)
before = set(sys.modules)
{statement}
print(json.dumps([sorted(set(sys.modules) - before), looked]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def bare_import():
    return imported_by("import devstream")


def test_importing_devstream_imports_no_backend_no_feature_and_no_tool(bare_import):
    modules, _ = bare_import
    ours = {name for name in modules if name.partition(".")[0] == "devstream"}
    assert ours == {
        "devstream",
        "devstream._compat",
        "devstream._compat.dynamo",
        "devstream._event_options",
        "devstream._fork",
        "devstream._handles",
        "devstream._mismatch",
        "devstream._objects",
        "devstream._observe",
        "devstream._priority",
        "devstream._registry",
        "devstream._streams",
        "devstream._trace_ops",
        "devstream._tracing",
        "devstream._warnings",
        "devstream._unrecorded",
        "devstream.abc",
        "devstream.exceptions",
        "devstream.typing",
    }
    others = {name.partition(".")[0] for name in modules} - {"devstream"}
    assert not others & {"rich", "matplotlib", "hypothesis", "pytest", "_pytest", "numpy", "triton", "torch_npu"}


def test_importing_devstream_opens_no_vendor_library(bare_import):
    modules, _ = bare_import
    assert not [
        name
        for name in modules
        if name.startswith(("torch.cuda", "torch.xpu", "torch._inductor", "torch._dynamo"))
    ]


def test_importing_devstream_reads_no_entry_point(bare_import):
    _, looked = bare_import
    assert looked == []


def test_a_stream_of_the_cpu_imports_the_cpu_backend_only():
    modules, _ = imported_by("import devstream; devstream.Stream('cpu')")
    backends = {name for name in modules if name.startswith("devstream.backends.") and "._" not in name}
    assert backends == {"devstream.backends.cpu"}
