"""What the tests of reported bugs share."""

from __future__ import annotations

import threading

import pytest

import devstream


@pytest.fixture
def cpu():
    return devstream.backend("cpu")


@pytest.fixture
def in_thread():
    """Return a function that runs another one in a new thread and returns its result."""

    def run(function):
        found = []
        thread = threading.Thread(target=lambda: found.append(function()))
        thread.start()
        thread.join()
        return found[0]

    return run
