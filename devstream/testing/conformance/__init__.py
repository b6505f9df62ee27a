"""The laws of a backend, one method a law. Whoever writes a backend subclasses and runs them.

    from devstream.testing.conformance import BackendConformance

    class TestMyBackend(BackendConformance):
        known_failures = {"test_elapsed_time_is_in_milliseconds": "driver bug MYDRV-12"}

        @pytest.fixture
        def backend(self):
            return MyBackend()          # or the name of a registered backend

What a backend can't do it says by leaving the `Capability` out, and the laws about it are skipped. An exception is
never a skip. The backend must have `Backend.hold`, since order can only be seen on a stream that is held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch

from devstream import _registry
from devstream.abc import AnyBackend, Backend
from devstream.testing.conformance._current import CurrentDeviceLaws, CurrentStreamLaws
from devstream.testing.conformance._devices import DeviceLaws
from devstream.testing.conformance._events import HostLaws, TimingLaws
from devstream.testing.conformance._graphs import GraphLaws
from devstream.testing.conformance._identity import IdentityLaws
from devstream.testing.conformance._memory import MemoryLaws
from devstream.testing.conformance._ordering import OrderingLaws
from devstream.testing.conformance._subject import Maker, Subject, trial


class BackendConformance(
    OrderingLaws,
    HostLaws,
    TimingLaws,
    CurrentStreamLaws,
    CurrentDeviceLaws,
    IdentityLaws,
    DeviceLaws,
    MemoryLaws,
    GraphLaws,
):
    """Every law. A subclass gives a fixture ``backend``: an instance, or the name of a registered backend.

    Attributes:
        known_failures: name of a law -> why the backend breaks it; the law is then a strict expected failure.
    """

    known_failures: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:  # Any: whatever other bases take
        super().__init_subclass__(**kwargs)
        for name, reason in cls.known_failures.items():
            law = getattr(cls, name, None)
            if not name.startswith("test_") or not callable(law):
                raise ValueError(f"{cls.__qualname__}.known_failures names {name!r}, which is no law of the kit")
            if not reason:
                raise ValueError(f"{cls.__qualname__}.known_failures[{name!r}] must say the reason")
            setattr(cls, name, pytest.mark.xfail(reason=reason, strict=True)(_own_copy(law)))

    def foreign_streams(self, backend: AnyBackend) -> Mapping[str, Maker]:
        """Return what else the backend takes for a stream of device 0: how it is got, and a function that gets it.

        By default ``torch.Stream`` where the backend has an ``adopt_stream``. Override it to add a vendor's.
        """
        if type(backend).adopt_stream is Backend.adopt_stream:
            return {}
        return {"torch.Stream(device)": lambda: torch.Stream(device=torch.device(backend.device_type, 0))}

    def foreign_events(self, backend: AnyBackend) -> Mapping[str, Maker]:
        """Return what else the backend takes for an event; by default ``torch.Event``, as for streams."""
        if type(backend).adopt_event is Backend.adopt_event:
            return {}
        return {"torch.Event(device)": lambda: torch.Event(device=torch.device(backend.device_type, 0))}

    @pytest.fixture
    def subject(self, backend: AnyBackend | str) -> Iterator[Subject]:
        """Choose the backend under test for the process while a law looks at it."""
        own = _registry.load(backend) if isinstance(backend, str) else backend
        with trial(
            backend, foreign_streams=self.foreign_streams(own), foreign_events=self.foreign_events(own)
        ) as subject:
            yield subject


def laws() -> dict[str, Callable[..., None]]:
    """Return every law by name, in the order of the classes."""
    return {
        name: getattr(BackendConformance, name) for name in dir(BackendConformance) if name.startswith("test_")
    }


def _own_copy(law: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does what *law* does, so that a mark on it reaches no other class."""

    @functools.wraps(law)
    def copied(*args: Any, **kwargs: Any) -> None:  # Any: a law's fixtures
        law(*args, **kwargs)

    return copied


__all__ = ["BackendConformance", "Subject", "laws", "trial"]
