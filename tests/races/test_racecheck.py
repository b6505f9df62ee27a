"""devstream/races/_racecheck.py: every fault is found each time, with both lines, and what the block does then."""

from __future__ import annotations

import gc
import os
import warnings

import pytest
import torch

import devstream
from devstream.exceptions import RaceError, RaceWarning
from devstream.races import Fault, LaneKind, describe
from devstream.races.text import missing, note_text
from devstream.testing.faulty import PROGRAMS, one_process_group

RUNS = [
    pytest.param(program, kind, marks=[pytest.mark.cuda] if kind == "cuda" else [], id=f"{name}-{kind}")
    for name, program in PROGRAMS.items()
    for kind in ("cpu", "cuda")
    if program.only in ("", kind)
]
TIMES = 100


def races_of(run, *args):
    with devstream.racecheck(on_race="collect") as races:
        run(*args)
    return races


@pytest.mark.parametrize(("program", "kind"), RUNS)
def test_a_fault_is_found_in_each_of_100_runs(program, kind):
    device = torch.device(kind)
    with one_process_group(device):
        assert [bool(races_of(program.run, device, True)) for _ in range(TIMES)] == [True] * TIMES


@pytest.mark.parametrize(("program", "kind"), RUNS)
def test_a_repaired_program_has_no_race_and_is_right(program, kind):
    for _ in range(5):
        with devstream.racecheck():
            assert program.run(torch.device(kind), False) == program.right


@pytest.mark.parametrize(("program", "kind"), RUNS)
def test_a_report_names_both_operations_both_streams_both_lines_and_the_edge(program, kind):
    for race in races_of(program.run, torch.device(kind), True):
        text = describe(race)
        assert race.fault is Fault(program.fault)
        if program.only != "cuda":  # that one's first side is made elsewhere
            assert "# first" in race.first.site.text
        assert "# second" in race.second.site.text
        assert race.first.lane.number != race.second.lane.number
        for side in (race.first, race.second):
            assert side.name in text
            assert side.lane.name in text
            assert f"{side.site.file}:{side.site.line}" in text
        flat = " ".join(text.split())
        assert missing(race) in flat
        assert all(note_text(note, race) in flat for note in race.notes)


def test_a_record_overwritten_twice_is_reported_for_both_lost_chunks():
    """B28, PrimeIntellect-ai/prime-rl#3411: exactly 2 flags."""
    (race,) = races_of(PROGRAMS["record_overwritten"].run, torch.device("cpu"), True)
    assert race.count == 2
    assert "recorded again" in describe(race)


kept = []


def racing(side):
    x = torch.ones(4)
    kept.append(x)  # or its memory would be handed out again too early, which is another race
    with devstream.stream(side):
        return x * 2


@pytest.fixture
def side():
    return devstream.Stream("cpu")


def test_the_block_raises_at_its_end_with_all_races(side):
    done = []

    def program():
        with devstream.racecheck():
            racing(side)
            racing(side) + 1
            done.append(True)

    with pytest.raises(RaceError) as caught:
        program()
    assert done == [True]
    assert len(caught.value.races) == 2


def test_stop_raises_at_the_faulty_line(side):
    done = []

    def program():
        with devstream.racecheck(on_race="stop"):
            racing(side)
            done.append(True)

    with pytest.raises(RaceError, match="mul reads"):
        program()
    assert done == []
    assert devstream.current_stream("cpu") is devstream.default_stream("cpu")


def test_warn_warns_once_a_pair_of_lines_at_the_user_s_line(side):
    def program():
        with devstream.racecheck(on_race="warn"):
            for _ in range(5):
                racing(side)

    with pytest.warns(RaceWarning, match="read before write") as caught:
        program()
    assert caught[0].filename == __file__
    assert len(caught) == 1


def test_collect_raises_nothing_and_counts(side):
    with devstream.racecheck(on_race="collect") as races:
        for _ in range(5):
            racing(side)
    assert [race.count for race in races] == [5]


def test_an_error_of_the_block_is_not_replaced(side):
    def program():
        with devstream.racecheck():
            racing(side)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        program()


def test_a_function_can_be_decorated(side):
    with pytest.raises(RaceError):
        devstream.racecheck()(racing)(side)
    devstream.racecheck()(lambda: None)()


def test_a_block_inside_a_block_is_refused_and_the_outer_one_goes_on(side):
    with devstream.racecheck(on_race="collect") as races:
        with pytest.raises(RuntimeError, match="already"), devstream.racecheck():
            pass
        racing(side)
    assert len(races) == 1


def test_an_unknown_choice_is_refused_in_words():
    with pytest.raises(ValueError, match="'raise', 'stop', 'warn', 'collect'"):
        devstream.racecheck(on_race="shout")


def test_after_the_block_nothing_is_watched(side):
    from devstream import _observe

    with devstream.racecheck(on_race="collect") as races:
        pass
    racing(side)
    assert races == []
    assert _observe.subscribers == ()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_checker_keeps_no_memory_alive(side):
    import weakref

    with devstream.racecheck():
        x = torch.ones(1 << 20)
        ref = weakref.ref(x.untyped_storage())
        del x
        assert ref() is None


def test_a_long_loop_keeps_what_is_remembered_bounded(side):
    with devstream.racecheck():
        here = devstream.current_stream("cpu")
        sizes = []
        for step in range(60):
            side.wait_stream(here)
            with devstream.stream(side):
                y = torch.ones(4) * 2
            here.wait_stream(side)
            y + 1
            if step % 20 == 19:
                gc.collect()
                (watch,) = __import__("devstream")._observe.subscribers
                sizes.append((len(watch._events), len(watch._order._events), len(watch._checker._memories)))
    assert sizes[0] == sizes[1] == sizes[2]


def test_the_rank_is_in_the_report_of_one_process_of_many(side, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    (race,) = races_of(racing, side)
    assert describe(race).startswith("[rank 3] read before write")


def test_poison_fills_unwritten_memory():
    with devstream.racecheck(poison=True):
        assert torch.empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == -1).all()
        assert torch.empty(3, dtype=torch.bool).all()
        assert torch.empty_like(torch.ones(2)).isnan().all()
        assert torch.ones(3).sum().item() == 3


def test_a_named_stream_is_called_by_its_purpose():
    (race,) = races_of(racing, devstream.named_stream("prefetch", "cpu"))
    assert race.second.lane.name == 'the "prefetch" stream of cpu:0'
    assert race.first.lane.default
    assert race.first.lane.kind is LaneKind.STREAM


def test_no_warning_is_given_on_the_way(side):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        races_of(racing, side)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_is_not_checked_and_may_check_itself(side):
    with devstream.racecheck(on_race="stop"):
        child = os.fork()
        if child == 0:
            try:
                racing(side)
                os._exit(0 if len(races_of(racing, side)) == 1 else 3)
            except BaseException:
                os._exit(4)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
