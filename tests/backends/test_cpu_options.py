"""devstream/backends/_cpu_options.py: each vendor's limits, and programs that are right under all of them."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest
import torch

import devstream
from devstream import overlap
from devstream.abc import Capability
from devstream.exceptions import BackendWarning, UnsupportedError
from devstream.testing import cpu
from devstream.testing.conformance import BackendConformance

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROFILES = ["cpu", "hip", "mps", "external"]


class _UnderProfile(BackendConformance):
    profile = "cpu"

    @pytest.fixture
    def backend(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BackendWarning)  # the laws make more streams than some queues carry
            with cpu(profile=self.profile) as backend:
                yield backend


class TestHip(_UnderProfile):
    profile = "hip"


class TestExternal(_UnderProfile):
    profile = "external"


del _UnderProfile, BackendConformance  # only the two run; of mps nearly every law would be skipped


def test_hip_has_two_priorities_and_four_queues():
    with cpu(profile="hip"):
        assert devstream.backend("cpu").priority_range(0) == (0, -1)
        assert devstream.Stream("cpu", priority=-7).priority == -1
        assert devstream.Stream("cpu", priority="low").priority == 0
        assert devstream.devices()[-1].hardware_queues == 4
    assert devstream.Stream("cpu", priority=-7).priority == 0


def test_hip_warns_once_streams_share_queues():
    with cpu(profile="hip", devices=9):
        streams = [devstream.Stream("cpu:8") for _ in range(3)]
        with pytest.warns(BackendWarning, match="4 queues run at once") as caught:
            streams.append(devstream.Stream("cpu:8"))
        assert caught[0].filename == __file__
        streams.append(devstream.Stream("cpu:8"))


def test_mps_has_one_stream_and_an_allocator_that_cannot_be_told():
    with cpu(profile="mps"):
        assert devstream.Stream("cpu") == devstream.default_stream("cpu")
        assert devstream.capabilities("cpu") == Capability.TIMING
        with pytest.raises(UnsupportedError, match="RECORD_STREAM"):
            devstream.record_stream(torch.ones(1), devstream.default_stream("cpu"))
        with pytest.raises(UnsupportedError, match="NATIVE_HANDLE"):
            _ = devstream.default_stream("cpu").native_handle
        with pytest.raises(UnsupportedError, match="EXTERNAL_STREAMS"):
            devstream.wrap(7, "cpu")


def test_a_foreign_stream_can_be_entered_and_synchronized_only():
    with cpu(profile="external"):
        foreign = devstream.wrap(987654, "cpu")
        with devstream.stream(foreign):
            y = torch.ones(2) * 2
        foreign.synchronize()
        assert foreign.query()
        assert y.tolist() == [2, 2]
        assert devstream.capabilities(foreign) == Capability(0)
        with pytest.raises(UnsupportedError, match="recording an event on a stream of another library"):
            foreign.record_event()
        with pytest.raises(UnsupportedError, match="waiting for an event"):
            foreign.wait_event(devstream.current_stream("cpu").record_event())
        own = devstream.Stream("cpu")
        assert devstream.wrap(own.native_handle, "cpu") is own
        own.record_event()
    with pytest.raises(ValueError, match="no live stream"):
        devstream.wrap(987655, "cpu")


def prefetched():
    total = torch.zeros(())
    arriving = overlap.copy(torch.zeros(64), "cpu")
    for step in range(1, 5):
        batch, ready = arriving
        arriving = overlap.copy(torch.full((64,), float(step)), "cpu")
        ready.wait(devstream.current_stream("cpu"))
        total += batch.mean()
    return total.item()


@pytest.mark.parametrize("schedule", ["inline", "lazy", "random"])
@pytest.mark.parametrize("profile", PROFILES)
def test_portable_programs_are_right_under_every_profile_and_schedule(profile, schedule):
    mains = [runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"] for name in ("two_branches", "prefetch")]
    expected = [main("cpu") for main in mains]
    with cpu(profile=profile, schedule=schedule, seed=1):
        assert prefetched() == 6
        assert [main("cpu") for main in mains] == expected
        with devstream.racecheck():
            assert prefetched() == 6
            assert [main("cpu") for main in mains] == expected
