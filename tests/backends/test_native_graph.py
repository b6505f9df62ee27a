"""What a capture on an accelerator says of its streams, from the notices of the verbs; the rest needs a device."""

from __future__ import annotations

import devstream
from devstream import _observe
from devstream.backends._native_graph import Forks


def test_a_fork_is_open_until_the_first_stream_waits_for_it():
    cpu = devstream.backend("cpu")
    first, side, third, outside = (devstream.Stream("cpu") for _ in range(4))
    forks = Forks(cpu, first)
    with _observe.subscribe(forks.see):
        outside.wait_stream(devstream.Stream("cpu"))
        side.wait_stream(first)
        third.wait_stream(side)
        found = forks.unjoined()
        assert [text.partition(",")[0] for text in found] == [repr(side), repr(third)]
        assert "test_native_graph.py:" in found[0]
        first.wait_stream(side)
        assert [text.partition(",")[0] for text in forks.unjoined()] == [repr(third)]
        event = third.record_event()
        event.wait(first)
        assert forks.unjoined() == []
