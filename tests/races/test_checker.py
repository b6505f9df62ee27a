"""devstream/races/checker.py: the life of memory, and what a report holds, with no mode and no device."""

from __future__ import annotations

import pytest
import torch

from devstream.races import describe
from devstream.races.checker import Checker, Work, fits
from devstream.races.model import Fault, LaneKind
from devstream.races.sites import Site


def site(line):
    return Site("program.py", line, "main")


@pytest.fixture
def checker():
    found = Checker(lambda race: None)
    found.order.add_lane(LaneKind.STREAM, "stream 1 of cpu:0", "cpu:0")
    found.order.add_lane(LaneKind.STREAM, "stream 2 of cpu:0", "cpu:0")
    return found


def make(checker, lane, line, size=256):
    tensor = torch.empty(size, dtype=torch.uint8)
    work = Work(checker.order, lane, "empty", site(line))
    checker.make(tensor, tensor.untyped_storage(), work, written=True)
    return tensor


def read(checker, tensor, lane, line):
    checker.touch(tensor, tensor.untyped_storage(), Work(checker.order, lane, "sum", site(line)), write=False)


def ordered(checker, later, earlier):
    checker.order.record("event", earlier, site(90))
    checker.order.wait(later, "event", site(91))


def used_elsewhere_and_freed(checker):
    x = make(checker, 1, 1)
    ordered(checker, 2, 1)
    read(checker, x, 2, 2)
    del x
    checker.bury()


def test_memory_that_is_freed_in_use_is_a_fault_once_it_may_be_handed_out(checker):
    used_elsewhere_and_freed(checker)
    assert checker.races == []
    make(checker, 1, 4)
    (race,) = checker.races
    assert race.fault is Fault.REUSE
    assert (race.first.site, race.second.site, race.allocated) == (site(2), site(4), site(1))


def test_the_user_s_own_allocations_never_get_it(checker):
    used_elsewhere_and_freed(checker)
    make(checker, 2, 4)
    assert checker.races == []


def test_a_wait_before_the_next_allocation_is_enough(checker):
    used_elsewhere_and_freed(checker)
    ordered(checker, 1, 2)
    make(checker, 1, 4)
    assert checker.races == []


def test_a_host_that_has_waited_is_enough(checker):
    used_elsewhere_and_freed(checker)
    checker.order.host_waits_device("cpu:0")
    make(checker, 1, 4)
    assert checker.races == []


def test_a_larger_block_or_one_of_the_other_pool_is_not_what_was_freed(checker):
    used_elsewhere_and_freed(checker)
    make(checker, 1, 4, size=1024)
    make(checker, 1, 5, size=2 << 20)
    assert checker.races == []
    make(checker, 1, 6, size=300)  # rounded up, it fits
    assert len(checker.races) == 1


def test_a_stream_that_the_allocator_was_told_of_is_waited_for(checker):
    x = make(checker, 1, 1)
    ordered(checker, 2, 1)
    read(checker, x, 2, 2)
    checker.tell_allocator(x, 2)
    del x
    checker.bury()
    make(checker, 1, 4)
    assert checker.races == []


def test_what_autograd_hands_from_stream_to_stream_it_tells_the_allocator_itself(checker):
    x = make(checker, 1, 1)
    ordered(checker, 2, 1)
    work = Work(checker.order, 2, "mul", site(2), by_autograd=True)
    checker.touch(x, x.untyped_storage(), work, write=False)
    del x
    checker.bury()
    make(checker, 1, 4)
    assert checker.races == []


def test_a_storage_that_is_shrunk_to_nothing_counts_as_freed(checker):
    x = make(checker, 1, 1)
    storage = x.untyped_storage()
    checker.watch_pointer(checker.memory_of(storage), storage.data_ptr())
    ordered(checker, 2, 1)
    read(checker, x, 2, 2)
    checker.free_pointer(storage.data_ptr())
    make(checker, 1, 4)
    assert [race.fault for race in checker.races] == [Fault.REUSE]
    checker.free_pointer(12345)  # of memory that nobody watched


def test_host_memory_has_no_owner_that_hands_it_out(checker):
    x = make(checker, 0, 1)
    read(checker, x, 2, 2)
    del x
    checker.bury()
    make(checker, 0, 4)
    assert checker.races == []


def test_the_same_pair_of_lines_is_one_race_with_a_count(checker):
    for _ in range(3):
        read(checker, make(checker, 1, 1), 2, 2)
    (race,) = [race for race in checker.races if race.fault is Fault.READ_BEFORE_WRITE]
    assert race.count == 3
    assert "read before write (3 times)" in describe(race)


def test_a_race_on_a_device_whose_native_waits_are_unseen_says_so(checker):
    lane = checker.order.add_lane(LaneKind.STREAM, "stream 3 of xpu:0", "xpu:0")
    read(checker, make(checker, 1, 1), lane, 2)
    text = " ".join(describe(checker.races[0]).split())
    assert "torch tells of no native record or wait on xpu" in text


def test_an_empty_tensor_touches_nothing(checker):
    read(checker, make(checker, 1, 1, size=0), 2, 2)
    assert checker.races == []


@pytest.mark.parametrize(
    ("wanted", "block", "fit"),
    [(1, 512, True), (513, 512, False), (1 << 20, 1 << 20, True), (512, 2 << 20, False), (0, 512, False)],
)
def test_which_requests_fit_into_which_blocks(wanted, block, fit):
    assert fits(wanted, block) is fit
