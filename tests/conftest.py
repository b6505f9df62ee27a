"""Hooks of the whole suite. Tests import nothing from here."""

import os

import pytest

pytest_plugins = ["pytester"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By its name ROCm warns once past its four queues, in whichever test that is; its own tests look for that."""
    if os.environ.get("DEVSTREAM_BACKEND") == "rocm":
        for item in items:
            item.add_marker(pytest.mark.filterwarnings("ignore:backend 'rocm'. stream"), append=False)
