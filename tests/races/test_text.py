"""devstream/races/text.py and model.py: the words of a report."""

from __future__ import annotations

import pickle

import pytest

from devstream.races.model import Fault, Lane, LaneKind, NearMiss, Note, Operation, Race
from devstream.races.sites import NOWHERE, Site
from devstream.races.text import describe, summary

MAIN = Lane(1, LaneKind.STREAM, "the default stream of cpu:0", "cpu:0", default=True)
SIDE = Lane(2, LaneKind.STREAM, "stream 7 of cpu:0", "cpu:0")
HOST = Lane(0, LaneKind.HOST, "the host")
FLIGHT = Lane(3, LaneKind.COLLECTIVE, "a collective")


def site(line):
    return Site("/work/train.py", line, "step")


def race(first=SIDE, second=MAIN, fault=Fault.READ_BEFORE_WRITE, **more):
    one, two = Operation("mul", True, first, site(10)), Operation("sum", False, second, site(20))
    return Race(fault, one, two, 4096, **more)


def flat(one):
    return " ".join(describe(one).split())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            race(),
            "Record an event on stream 7 of cpu:0 after train.py:10 and make the default stream of cpu:0 wait",
        ),
        (race(second=HOST), "call event.synchronize() before train.py:20"),
        (race(first=FLIGHT), "nothing waits for the collective of train.py:10. Call wait() on what it returned"),
        (race(second=FLIGHT), "Issue it while a stream is current that waits for stream 7 of cpu:0"),
        (
            race(fault=Fault.REUSE, freed=site(15)),
            "devstream.record_stream(tensor, stream) with stream 7 of cpu:0",
        ),
    ],
)
def test_the_missing_edge_is_said_in_the_words_of_its_fix(found, words):
    assert words in flat(found)


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (Note(NearMiss.TOO_EARLY, site(18), site(8)), "recorded at train.py:8, before mul of train.py:10"),
        (Note(NearMiss.UNRECORDED, site(18)), "the wait at train.py:18 orders nothing"),
        (Note(NearMiss.UNRECORDED, site(18), site(30)), "(it is recorded at train.py:30)"),
        (
            Note(NearMiss.OVERWRITTEN, site(18), site(11), site(12), "stream 9"),
            "again at train.py:12, on stream 9",
        ),
        (
            Note(NearMiss.OTHER_STREAM, site(18), lane="stream 9"),
            "waits at train.py:18 for stream 9, but mul ran on",
        ),
    ],
)
def test_a_near_miss_is_said_with_its_lines(note, words):
    assert words in flat(race(notes=(note,)))


def test_rank_count_owner_and_lines_are_in_the_report():
    text = describe(race(rank=2, count=5, allocated=site(3)))
    assert text.startswith("[rank 2] read before write (5 times)\n")
    assert "4096 bytes, made at /work/train.py:3, in step" in text
    assert "at /work/train.py:20, in step" in text


def test_an_unknown_line_is_said_to_be_one():
    one = Operation("mul", True, SIDE, NOWHERE)
    assert "at an unknown line" in describe(Race(Fault.TWO_WRITERS, one, one, 4))


def test_a_summary_counts():
    assert summary([race()]).startswith("1 race found")
    assert summary([race(), race()]).startswith("2 races found")


def test_a_race_is_plain_data():
    again = pickle.loads(pickle.dumps(race(rank=1)))
    assert again == race(rank=1)
    assert str(again) == describe(again)
