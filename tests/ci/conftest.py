"""The scripts of ci/scripts as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def repository():
    return ROOT


@pytest.fixture(scope="session")
def load_script():
    """Return a function that imports a script by name, with its neighbours importable as when it is run."""
    scripts = ROOT / "ci" / "scripts"

    def load(name):
        if name not in sys.modules:
            sys.path.insert(0, str(scripts))
            try:
                importlib.import_module(name)
            finally:
                sys.path.remove(str(scripts))
        return sys.modules[name]

    return load
