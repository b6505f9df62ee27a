"""What the tests of this folder share: `agreement`, the `suite`, and the `halves` that its programs compile to."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import devstream


def load(name):
    """Return the module of this folder called *name*."""
    known = f"_compiler{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, Path(__file__).with_name(f"{name}.py"))
        sys.modules[known] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


@pytest.fixture(scope="session")
def agreement():
    return load("_agree")


@pytest.fixture(scope="session")
def suite():
    return load("_suite")


@pytest.fixture(scope="session")
def faults():
    return load("_faults")


def pytest_generate_tests(metafunc):
    if "suite_program" in metafunc.fixturenames:
        programs = load("_suite").PROGRAMS
        metafunc.parametrize("suite_program", programs, ids=[program.name for program in programs])


@functools.cache
def compiled_halves(program):
    """Compile one program of the suite on the CPU and return its forward, backward and inference, as programs."""
    from devstream.compiler import backend

    found = []

    def watch(name, half):
        found.append(half)

    backend.watchers.append(watch)
    try:
        torch.compiler.reset()
        function = torch.compile(
            program.make("cpu", devstream.Stream("cpu"), devstream.Stream("cpu")),
            backend=backend.backend,
            fullgraph=True,
            options={"regions": "eager", "missing_waits": "error"},
        )
        results = [one for one in tree_leaves(function(*program.arguments("cpu"))) if torch.is_tensor(one)]
        asked = [one for one in results if one.requires_grad]
        if asked:
            sum((one * one).sum() for one in asked).backward()
        with torch.no_grad():
            function(*program.arguments("cpu"))
    finally:
        backend.watchers.remove(watch)
    return tuple(found)


@pytest.fixture(scope="session")
def compile_halves():
    return compiled_halves


@pytest.fixture
def halves(suite_program):
    """The programs that one function of the suite compiles to."""
    return compiled_halves(suite_program)
