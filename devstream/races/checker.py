"""The checker: what operations touch, in which order, put together. It knows no torch mode and no device."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from devstream.races.extents import Extent, extent
from devstream.races.history import PRUNE_AT, Access, History
from devstream.races.model import Fault, Lane, LaneKind, NearMiss, Note, Operation, Race
from devstream.races.order import HOST, Order
from devstream.races.sites import NOWHERE, Site, here

#: Up to this size blocks come from the small pool, above from the large one, and never from the other.
#: Source: kSmallSize of torch's CUDACachingAllocator, torch 2.11.
_SMALL_BYTES = 1 << 20
#: Sizes are rounded up to this. Source: kMinBlockSize, the same.
_ROUND_BYTES = 512
#: Blocks that were freed while in use and have not been handed out again, remembered for each lane.
_FREED_KEPT = 256


class Memory:
    """One storage: its history, and whose it is.

    Attributes:
        whole: all of its bytes.
        home: the lane whose allocator pool the memory belongs to; None where it was not seen to be made.
        shared: whether another lane than *home* ever touched it.
        told: the lanes that the allocator was told of.
        pointer: its address, where the allocator's own word of its end is listened to.
    """

    # Defaults of the class, not slots: one is made for every new tensor, and most never need these.
    home: int | None = None
    site: Site = NOWHERE
    freed: Site = NOWHERE
    shared = False
    told: frozenset[int] = frozenset()
    pointer = 0
    device: torch.device | None = None
    ref: weakref.ref[torch.UntypedStorage] | None = None

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.whole = Extent(0, size_bytes, size_bytes)
        self.history = History()


@dataclass(slots=True)
class _Freed:
    """A block that was freed while *users* might still use it."""

    size_bytes: int
    users: list[Access]
    site: Site
    allocated: Site


class Checker:
    """Told what a program does, in the order of issue, it finds what nothing puts in order.

    Args:
        report: called with each new race, and nothing held. What it raises goes to whoever reported the access.
        rank: of this process, for the reports.
    """

    def __init__(self, report: Callable[[Race], None], *, rank: int | None = None) -> None:
        self.order = Order()
        self.races: list[Race] = []
        # Re-entrant: the garbage collector may end a storage while this thread holds it.
        self.lock = threading.RLock()
        #: The device types of which every record and wait is seen, native ones too.
        self.seen: set[str] = {"cpu"}
        #: Called with each memory that was freed, where somebody wants to spoil it.
        self.on_freed: Callable[[Memory], None] | None = None
        self._report = report
        self._muted = False
        self._rank = rank
        self._found: dict[tuple[object, ...], Race] = {}
        self._memories: dict[int, Memory] = {}
        self._by_pointer: dict[int, Memory] = {}
        self.dead: deque[Memory] = deque()
        self._burying = False
        self._freed: dict[int, deque[_Freed]] = {}
        self._new: list[Race] = []

    # -- accesses ----------------------------------------------------------------------------------------

    def touch(self, tensor: torch.Tensor, storage: torch.UntypedStorage, work: Work, *, write: bool) -> None:
        """Let *work* read or write *tensor*, whose storage is *storage*. Hold the lock."""
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._adopt(storage)
        if tensor.is_contiguous():
            size = tensor.nbytes
            if size == memory.size_bytes:
                where: Extent | None = memory.whole
            else:
                start = int(tensor.storage_offset()) * tensor.element_size()
                where = Extent(start, start + size, size)
        else:
            where = extent(int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.element_size())
        if where is not None and where.run:
            self.note(memory, work, where, write=write)

    def note(self, memory: Memory, work: Work, where: Extent, *, write: bool) -> None:
        """Let *work* read or write the bytes *where* of *memory*. Hold the lock."""
        lane = work.lane
        if lane != memory.home:
            memory.shared = True
            if work.by_autograd:
                memory.told |= {lane}  # autograd itself tells the allocator of what its nodes hand to each other
        access = tuple.__new__(Access, (work.stamp, where, write, work.name, work.site))  # half of Access(...)
        history = memory.history
        if not (history.writes or history.reads):
            (history.writes if write else history.reads).append(access)
            return
        for earlier in history.add(access, self.order.clocks.view(lane)):
            self._add(earlier, access, memory)
        if len(history.reads) + len(history.writes) >= PRUNE_AT:
            history.prune(self.order.known_to_all)

    def make(self, tensor: torch.Tensor, storage: torch.UntypedStorage, work: Work, *, written: bool) -> Memory:
        """Note that *work* made *tensor*, on a *storage* of its own, and wrote it. Hold the lock."""
        memory = self._memories.get(storage._cdata)
        if memory is not None:  # no new memory after all: a result that the operation keeps
            self.touch(tensor, storage, work, write=True)
            return memory
        memory = self.allocate(storage, work.lane, work.site)
        if written and memory.size_bytes:
            self.note(memory, work, memory.whole, write=True)
        return memory

    def allocate(self, storage: torch.UntypedStorage, lane: int, site: Site) -> Memory:
        """Note that *storage* was made for *lane*, which may get memory that was freed. Hold the lock."""
        memory = self._memories.get(storage._cdata)
        if memory is not None:
            return memory
        memory = self._adopt(storage)
        memory.site = site
        if lane == HOST:
            return memory  # torch's host allocator waits by itself for the copies that it knows of
        memory.home = lane
        if self._freed.get(lane):
            self._reuse(memory, lane, site)
        return memory

    def knows(self, key: int) -> bool:
        """Whether there is a storage with this ``_cdata``."""
        return key in self._memories

    def memory_of(self, storage: torch.UntypedStorage) -> Memory | None:
        """Return what is known about *storage*."""
        return self._memories.get(storage._cdata)

    def _adopt(self, storage: torch.UntypedStorage) -> Memory:
        memory = Memory(storage.nbytes())
        key = storage._cdata

        def gone(_: object) -> None:
            # In the middle of anything, so: only what is one step, and the rest at the next report.
            self._memories.pop(key, None)
            if memory.home is not None and (memory.shared or self.on_freed is not None):
                memory.freed = here(2)
                self.dead.append(memory)

        memory.ref = weakref.ref(storage, gone)
        self._memories[key] = memory
        return memory

    # -- the life of memory ------------------------------------------------------------------------------

    def bury(self) -> None:
        """Take in which memory was freed since the last report. Hold the lock."""
        if self._burying:  # poisoning what was freed switches streams, which is reported as well
            return
        self._burying = True
        try:
            while self.dead:
                self._bury(self.dead.popleft())
        finally:
            self._burying = False

    def _bury(self, memory: Memory) -> None:
        home = memory.home
        if home is None:
            return
        self.order.wait_lane(home, HOST)  # who frees is the host, and so is who allocates next
        clock = self.order.clocks.view(home)
        users = [one for one in memory.history.unknown_to(clock) if one.stamp.lane not in memory.told]
        if self.on_freed is not None:
            self.on_freed(memory)
        if users:
            freed = self._freed.setdefault(home, deque(maxlen=_FREED_KEPT))
            freed.append(_Freed(memory.size_bytes, users, memory.freed, memory.site))

    def watch_pointer(self, memory: Memory, pointer: int) -> None:
        """Remember where *memory* is, for `free_pointer`. Hold the lock."""
        memory.pointer = pointer
        self._by_pointer[pointer] = memory

    def free_pointer(self, pointer: int) -> None:
        """The allocator took back the block at *pointer*, though its storage may live on, shrunk to nothing."""
        with self.lock:
            memory = self._by_pointer.pop(pointer, None)
            if memory is None or memory.ref is None:
                return
            storage = memory.ref()
            if storage is None or self._memories.get(storage._cdata) is not memory:
                return
            del self._memories[storage._cdata]
            memory.ref, memory.freed = None, here(2)
            self._bury(memory)

    def tell_allocator(self, tensor: torch.Tensor, lane: int) -> None:
        """``record_stream``: the allocator waits for *lane* before it hands out the memory again."""
        with self.lock:
            memory = self.memory_of(tensor.untyped_storage())
            if memory is not None:
                memory.told |= {lane}

    def _reuse(self, memory: Memory, lane: int, site: Site) -> None:
        self.order.wait_lane(lane, HOST)
        clock = self.order.clocks.view(lane)
        kept = []
        for block in self._freed[lane]:
            users = [one for one in block.users if clock.get(one.stamp.lane, 0) < one.stamp.time]
            if not users:
                continue  # by now this lane waits for all of them
            if fits(memory.size_bytes, block.size_bytes):
                for user in users:
                    self._add_reuse(user, block, lane, site)
            else:
                kept.append(block)
        self._freed[lane] = deque(kept, maxlen=_FREED_KEPT)

    # -- what was found ----------------------------------------------------------------------------------

    def _add(self, earlier: Access, later: Access, memory: Memory) -> None:
        if earlier.write:
            fault = Fault.TWO_WRITERS if later.write else Fault.READ_BEFORE_WRITE
        else:
            fault = Fault.OVERWRITE
        self._keep(
            Race(
                fault,
                self._operation(earlier),
                self._operation(later),
                memory.size_bytes,
                allocated=memory.site,
                owner=None if memory.home is None else self.order.lanes[memory.home],
                notes=self._notes(earlier, int(str(later.stamp.lane))),
                rank=self._rank,
            )
        )

    def _add_reuse(self, user: Access, block: _Freed, lane: int, site: Site) -> None:
        home = self.order.lanes[lane]
        self._keep(
            Race(
                Fault.REUSE,
                self._operation(user),
                Operation("allocation", True, home, site),
                block.size_bytes,
                allocated=block.allocated,
                freed=block.site,
                owner=home,
                notes=self._notes(user, lane),
                rank=self._rank,
            )
        )

    def _notes(self, earlier: Access, lane: int) -> tuple[Note, ...]:
        found = self.order.near_misses(earlier.stamp, lane)
        device_type = self.order.lanes[lane].device.partition(":")[0]
        if device_type and device_type not in self.seen:
            found += (Note(NearMiss.NATIVE_UNSEEN, lane=device_type),)
        return found

    def _operation(self, access: Access) -> Operation:
        return Operation(access.operation, access.write, self._lane(access), access.site)

    def _lane(self, access: Access) -> Lane:
        lane = access.stamp.lane
        assert isinstance(lane, int)
        return self.order.lanes[lane]

    def _keep(self, race: Race) -> None:
        if self._muted:
            return
        key = (race.fault, race.first.name, race.first.site, race.second.name, race.second.site)
        known = self._found.get(key)
        if known is not None:
            known.count += 1
            return
        self._found[key] = race
        self.races.append(race)
        self._new.append(race)

    def take_new(self) -> list[Race]:
        """Return the races found since the last call. Hold the lock."""
        found, self._new = self._new, []
        return found

    def deliver(self) -> None:
        """Hand the new races to whoever asked for them. Don't hold the lock."""
        with self.lock:
            found = self.take_new()
        for race in found:
            self._report(race)

    def mute(self) -> None:
        """Report nothing any more: a forked child inherits what watches its parent, and isn't what is checked."""
        self.lock = threading.RLock()  # another thread of the parent may have held it
        self._muted = True

    def close(self) -> None:
        """Let go of all memory: it may live long after the program was checked."""
        with self.lock:
            for memory in self._memories.values():
                memory.ref = None
            self._memories.clear()
            self._by_pointer.clear()
            self._freed.clear()

    @property
    def has_new(self) -> bool:
        """Whether `deliver` has something to do."""
        return bool(self._new)


class Work:
    """One operation on one lane, at one time."""

    __slots__ = ("by_autograd", "lane", "name", "site", "stamp")

    def __init__(self, order: Order, lane: int, name: str, site: Site, *, by_autograd: bool = False) -> None:
        self.lane, self.name, self.site, self.by_autograd = lane, name, site, by_autograd
        self.stamp = order.tick(lane)


def fits(wanted_bytes: int, block_bytes: int) -> bool:
    """Say whether a caching allocator may serve a request from a block of this size."""
    wanted, block = (-(-size // _ROUND_BYTES) * _ROUND_BYTES for size in (wanted_bytes, block_bytes))
    return 0 < wanted <= block and (wanted <= _SMALL_BYTES) == (block <= _SMALL_BYTES)


__all__ = ["HOST", "Checker", "LaneKind", "Memory", "Work", "fits"]
