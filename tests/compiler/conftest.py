"""`agreement`: the module of this folder that runs a program in eager and compiled, and compares."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def agreement():
    spec = importlib.util.spec_from_file_location("_agree", Path(__file__).with_name("_agree.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
