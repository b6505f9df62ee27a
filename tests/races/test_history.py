"""devstream/races/history.py: which earlier accesses of a storage race with a new one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from devstream.races.clocks import Clocks, Stamp
from devstream.races.extents import Extent
from devstream.races.history import PRUNE_AT, Access, History
from devstream.races.sites import NOWHERE

ALL = Extent(0, 8, 8)


def access(stamp, *, write, where=ALL):
    return Access(stamp, where, write, "work", NOWHERE)


def test_a_read_races_with_a_write_that_it_does_not_come_after():
    history, clocks = History(), Clocks()
    wrote = access(clocks.tick("a"), write=True)
    assert history.add(wrote, clocks.view("a")) == []
    assert history.add(access(clocks.tick("b"), write=False), clocks.view("b")) == [wrote]


def test_reads_never_race_with_reads():
    history, clocks = History(), Clocks()
    history.add(access(clocks.tick("a"), write=False), clocks.view("a"))
    assert history.add(access(clocks.tick("b"), write=False), clocks.view("b")) == []


def test_a_write_races_with_every_unordered_read():
    history, clocks = History(), Clocks()
    reads = [access(clocks.tick(lane), write=False) for lane in "ab"]
    for read in reads:
        history.add(read, clocks.view(read.stamp.lane))
    assert history.add(access(clocks.tick("c"), write=True), clocks.view("c")) == reads


def test_disjoint_bytes_never_race():
    history, clocks = History(), Clocks()
    history.add(access(clocks.tick("a"), write=True, where=Extent(0, 4, 4)), clocks.view("a"))
    assert history.add(access(clocks.tick("b"), write=True, where=Extent(4, 8, 4)), clocks.view("b")) == []


def test_a_loop_over_one_buffer_keeps_two_accesses():
    history, clocks = History(), Clocks()
    for _ in range(1000):
        history.add(access(clocks.tick("a"), write=True), clocks.view("a"))
        history.add(access(clocks.tick("a"), write=False), clocks.view("a"))
    assert len(history.writes) + len(history.reads) == 2


def test_what_everybody_knows_is_dropped_once_there_is_much():
    history, clocks = History(), Clocks()
    for at in range(PRUNE_AT):
        history.add(access(clocks.tick("a"), write=True, where=Extent(2 * at, 2 * at + 1, 1)), clocks.view("a"))
    history.prune(lambda stamp: stamp.time < PRUNE_AT)
    assert len(history.writes) == 1


@st.composite
def programs(draw):
    """Accesses and waits of three lanes on a storage of six bytes."""
    steps = []
    for _ in range(draw(st.integers(1, 14))):
        lane = draw(st.sampled_from("abc"))
        if draw(st.booleans()):
            start = draw(st.integers(0, 5))
            stop = draw(st.integers(start + 1, 6))
            steps.append((lane, draw(st.booleans()), Extent(start, stop, stop - start)))
        else:
            steps.append((lane, draw(st.sampled_from("abc"))))
    return steps


@given(programs())
def test_a_program_is_called_racy_exactly_when_brute_force_finds_a_pair(steps):
    history, clocks = History(), Clocks()
    everything, expected, found = [], False, False
    for step in steps:
        if len(step) == 2:
            clocks.wait(step[0], clocks.record(step[1]))
            continue
        lane, write, where = step
        new = access(clocks.tick(lane), write=write, where=where)
        clock = clocks.record(lane)
        for old in everything:
            ordered = clock.get(old.stamp.lane, 0) >= old.stamp.time
            shared = set(range(old.extent.start, old.extent.stop)) & set(range(where.start, where.stop))
            expected |= bool(shared) and (write or old.write) and not ordered
        everything.append(new)
        found |= bool(history.add(new, clocks.view(lane)))
    assert found == expected


def test_unknown_accesses_are_those_that_a_clock_does_not_cover():
    history, clocks = History(), Clocks()
    one = access(clocks.tick("a"), write=False)
    history.add(one, clocks.view("a"))
    assert history.unknown_to({}) == [one]
    assert history.unknown_to(clocks.record("a")) == []
    assert one.stamp == Stamp("a", 1)
