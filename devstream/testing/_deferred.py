"""Defers the CPU's operations to queues, so that an order other than that of issue can be tried.

[Note: How an operation is deferred]
It runs once at its issue, on whatever is in memory, for the shape of its results only; these are filled with NaN
(or every bit set) and handed out. What is queued runs it again later and copies the values in. An operation that
changes its argument is queued alone. Views run at once. What the host needs (``item()``, ``nonzero()``) runs the
current stream's queue first, as a device would. Random numbers are drawn once: the state is kept with the task.

One thread: verbs of other threads first run everything that is queued. So the race checker must be entered inside.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from devstream import _observe
from devstream._compat import collectives, modes
from devstream._compat.modes import DispatchMode, TorchFunctionMode
from devstream.backends._cpu_stream import CpuStream
from devstream.backends.cpu import CpuBackend
from devstream.races.backward import Backward
from devstream.races.checker import fits
from devstream.races.collectives import issued_from_python
from devstream.races.extents import Extent, extent
from devstream.races.operations import Kind, Plan, Tensors, flat, plan
from devstream.races.poison import poison
from devstream.testing._call import Call
from devstream.testing._queues import Queues, Task, Touch

#: Methods by which the host gets at values without an operation; on a device each waits for the current stream.
_HOST_READS = {
    # The last one leads to the bytes: torch.save goes that way, and copies them to the host on an accelerator.
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "__array__", "cpu", "__repr__", "untyped_storage")
}


#: The lane of collectives: one, so that every rank carries them out in the order of their issue.
_COLLECTIVES = -1
#: Those that are deferred. Not point to point: a send that is carried out late may wait for a receive behind it.
_DEFERRED = {
    f"c10d.{name}"
    for name in (
        "allreduce_",
        "allgather_",
        "_allgather_base_",
        "broadcast_",
        "reduce_",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "alltoall_",
        "alltoall_base_",
    )
}


#: Records are remembered until they are carried out; so many, before those that were are looked for.
_MARKS_KEPT = 256


class _Memory:
    """What is known of one storage.

    Attributes:
        home: the lane whose allocator the memory belongs to, where it was seen to be made.
        told: the lanes of ``record_stream``.
        held: how many tensors of our queue hold it.
        sample: one of these, as bytes.
    """

    __slots__ = ("held", "home", "sample", "size_bytes", "told")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.home: int | None = None
        self.told: set[int] = set()
        self.held = 0
        self.sample: torch.Tensor | None = None


class Deferred:
    """A context in which the calling thread's operations on *backend* are deferred.

    Args:
        schedule: ``"lazy"`` or ``"random"``, see `devstream.testing._queues`.
        seed: for ``"random"``.
    """

    def __init__(self, backend: CpuBackend, schedule: str, seed: int) -> None:
        self._backend = backend
        self._queues = Queues(schedule, seed)
        self._lanes: dict[CpuStream, int] = {}
        self._marks: dict[int, tuple[object, Task]] = {}
        self._memories: dict[int, _Memory] = {}
        self._plans: dict[Any, Plan] = {}  # Any: torch's OpOverload, a private class
        self._backward = Backward(self, self)
        self._owner = threading.get_ident()
        self._running = False
        self._works: deque[object] = deque(maxlen=64)  # until their callers hold them
        self._modes = (_Operations(self), _HostReads(self))

    def __enter__(self) -> Self:
        self._stance = modes.compiled_runs_eagerly()
        self._stance.__enter__()
        self._subscription = _observe.subscribe(self._notice)
        self._backend.deferred = self._launch
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._stance.__exit__(kind, error, trace)
        self._backend.deferred = None
        self._subscription.close()
        while self._queues.pending():
            try:
                self._queues.demand_all()
            except Exception:
                # Each task that raised is done; the others still run. The block's own error goes first.
                if kind is None:
                    raise

    # -- lanes -------------------------------------------------------------------------------------------

    def of_stream(self, stream: CpuStream) -> int:
        """Return the lane of *stream*."""
        return self._lanes.setdefault(stream, len(self._lanes))

    def wait_lane(self, lane: int, other: int) -> None:
        """Let *lane* come after *other*: one of autograd's own waits."""
        tail = self._queues.tail(other)
        if lane != other and tail is not None:
            self._queues.add(lane, None, needs=[tail])

    def _lane(self) -> int:
        lane = self.of_stream(self._backend.current_stream(None))
        node = modes.current_backward_node()
        if node is not None:
            return self._backward.lane(node, lane)
        self._backward.end()
        return lane

    # -- the seam ----------------------------------------------------------------------------------------

    def _notice(self, notice: _observe.Notice) -> None:
        if self._running:
            return
        if threading.get_ident() != self._owner:
            self._queues.demand_all()
            return
        self._end_backward()
        match notice:
            case _observe.Record(event=event, stream=CpuStream() as stream):
                if len(self._marks) > _MARKS_KEPT:  # each wait_stream makes an event
                    self._marks = {key: mark for key, mark in self._marks.items() if not mark[1].done}
                self._marks[id(event)] = (event, self._queues.add(self.of_stream(stream), None))
            case _observe.Wait(event=event, stream=CpuStream() as stream):
                mark = self._marks.get(id(event))
                if mark is not None:
                    self._queues.add(self.of_stream(stream), None, needs=[mark[1]])
            case _observe.Switch(stream=CpuStream() as stream, previous=CpuStream() as previous):
                self._backward.switched(stream, previous)
            case _observe.Synchronize(target=target) | _observe.Happened(target=target):
                self._synchronize(target)
            case _observe.RecordStream(tensor=tensor, stream=CpuStream() as stream):
                self._memory(tensor).told.add(self.of_stream(stream))
            case _observe.Copy(destination=into, source=source, stream=CpuStream() as stream):
                tail = self._queues.tail(self.of_stream(stream))
                if tail is not None:
                    self._queues.touch(tail, self._touches([source], [into]))
        self._queues.idle()

    def _end_backward(self) -> None:
        if modes.current_backward_node() is None:
            self._backward.end()
        else:
            self._backward.verb()

    def _synchronize(self, target: object) -> None:
        if isinstance(target, torch.device):
            for stream, lane in list(self._lanes.items()):
                if self._backend.stream_index(stream) == (target.index or 0):
                    self._queues.demand(self._queues.tail(lane))
        elif isinstance(target, CpuStream):
            self._queues.demand(self._queues.tail(self.of_stream(target)))
        elif id(target) in self._marks:
            self._queues.demand(self._marks[id(target)][1])

    def _launch(self, task: Callable[[], None], stream: CpuStream) -> None:
        """Queue a copy or a host function, as `CpuBackend.launch` would run it."""
        if self._running or threading.get_ident() != self._owner:
            task()
        else:
            self._queues.add(self.of_stream(stream), self._unwatched(task))

    def _unwatched(self, task: Callable[[], None]) -> Callable[[], None]:
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            running, self._running = self._running, True
            try:
                with modes.no_modes(), torch.inference_mode(inference), torch.no_grad(), modes.below_autograd():
                    task()
            finally:
                self._running = running

        return run

    # -- running -----------------------------------------------------------------------------------------

    def host_needs_current(self) -> None:
        """Run what the current stream has queued: the host waits for it."""
        if not self._running:
            self._queues.demand(self._queues.tail(self._lane()))

    # -- operations --------------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # Any: of every type
        """Queue *func*, and return results whose values come later."""
        known = self._plans.get(func)
        if known is None:
            known = self._plans[func] = plan(func)
        if known.kind is Kind.HIGHER_ORDER:
            self._queues.demand(self._queues.tail(self._lane()))
        if known.nothing:
            return func(*args, **kwargs)
        reads, writes = _arguments(known, args, kwargs)
        lane = self._lane()
        if known.kind is Kind.COLLECTIVE and known.name in _DEFERRED and issued_from_python():
            return self._collect(Call(func, args, kwargs), lane, reads, writes)
        at_once = (
            known.host_waits
            or known.kind in (Kind.RECORD_STREAM, Kind.COLLECTIVE, Kind.WAIT_TENSOR)
            or (known.results and bool(writes))  # a batch norm: rare, and it can't be run twice
        )
        if at_once or not all(_is_plain(tensor) and tensor.numel() for tensor in (*reads, *writes)):
            # Also an empty out=, whose new shape is needed now.
            self._queues.demand(self._queues.tail(lane))
            return func(*args, **kwargs)
        call = Call(func, args, kwargs)
        try:
            if writes:
                return self._change(call, lane, reads, writes)
            return self._make(call, lane, reads, unwritten=known.unwritten)
        finally:
            self._queues.idle()

    def _collect(self, call: Call, lane: int, reads: Tensors, writes: Tensors) -> Any:
        """Queue a collective beside all streams, and return a ``Work`` by which its caller waits for it."""
        given = call.given(0)
        tail = self._queues.tail(lane)
        needs = [] if tail is None else [tail]
        self._queue(_COLLECTIVES, call, lambda: collectives.finish(call.again()), reads, writes, needs=needs)
        flight = self._queues.tail(_COLLECTIVES)
        assert flight is not None

        def waited() -> None:
            self._queues.add(self._lane(), None, needs=[flight])

        work, boxed = collectives.deferred(waited, lambda: self._queues.demand(flight))
        self._works.append(work)
        return (given, boxed)

    def _change(self, call: Call, lane: int, reads: Tensors, writes: Tensors) -> Any:
        """Queue an operation that changes arguments, and return those that it returns."""
        if call.state is not None:
            call.draw(writes)
        self._queue(lane, call, call.again, reads, writes)
        count = len(call.func._schema.returns)
        return None if count == 0 else writes[0] if count == 1 else tuple(writes[:count])

    def _make(self, call: Call, lane: int, reads: Tensors, *, unwritten: bool) -> Any:
        """Queue an operation that makes new tensors, and return these, with no values yet."""
        try:
            result = call.once()
        except (RuntimeError, IndexError, ValueError):
            return self._now(call, lane)  # perhaps only because its arguments (an index) have no values yet
        every: Tensors = []
        flat(result, every)
        if not every or not all(map(_is_plain, every)):
            return self._now(call, lane)
        own = {tensor.untyped_storage()._cdata for tensor in reads}
        made = [one for one in every if one.untyped_storage()._cdata not in own]
        if not made:
            return result  # views of arguments after all
        if len(made) < len(every):
            return self._now(call, lane)
        for tensor in made:
            self._allocated(tensor, lane)
            poison(tensor)
        if not unwritten:
            targets = [tensor.detach() for tensor in made]

            def run() -> None:
                again: Tensors = []
                flat(call.again(), again)
                for target, value in zip(targets, again, strict=True):
                    target.copy_(value)

            self._queue(lane, call, run, reads, made, targets)
        return result

    def _now(self, call: Call, lane: int) -> Any:
        """Run an operation that can't be deferred, with the random numbers that it would have drawn at first."""
        self._queues.demand(self._queues.tail(lane))
        return call.first()

    def _queue(  # noqa: PLR0917 - all of one task
        self,
        lane: int,
        call: Call,
        run: Callable[[], Any],
        reads: Tensors,
        writes: Tensors,
        targets: Sequence[torch.Tensor] = (),
        *,
        needs: Sequence[Task] = (),
    ) -> None:
        held = [*call.hold(), *targets]
        touches = self._touches(reads, writes)
        memories = [self._memory(tensor) for tensor in held]
        for memory, tensor in zip(memories, held, strict=True):
            memory.held += 1
            memory.sample = tensor

        def task() -> None:
            try:
                run()
            finally:
                call.drop()
                for memory in memories:
                    memory.held -= 1
                    if not memory.held:
                        memory.sample = None

        self._queues.add(lane, self._unwatched(task), needs=needs, touches=touches)

    def _touches(self, reads: Tensors, writes: Tensors) -> list[Touch]:
        found = []
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                start = int(tensor.storage_offset())
                where = extent(start, tensor.shape, tensor.stride(), tensor.element_size())
                if where is not None:
                    found.append(Touch(tensor.untyped_storage()._cdata, where, write))
        return found

    # -- memory ------------------------------------------------------------------------------------------

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = _Memory(storage.nbytes())
        return memory

    def _allocated(self, tensor: torch.Tensor, lane: int) -> None:
        """Note whose memory *tensor*'s is, and spoil what an allocator might have given it too early."""
        storage = tensor.untyped_storage()
        self._memories.pop(storage._cdata, None)  # of a storage that is gone, whose address came again
        self._memory(tensor).home = lane
        for key, memory in self._memories.items():
            if memory.home != lane or not memory.held or not fits(storage.nbytes(), memory.size_bytes):
                continue
            if modes.storage_uses(key) > memory.held + 1 + (memory.sample is None):
                continue  # the program holds it
            users = (task for task in self._queues.touching(key) if task.lane not in (lane, *memory.told))
            if any(not self._queues.is_after(lane, task) for task in users):
                self._spoil(key, memory, lane)

    def _spoil(self, key: int, memory: _Memory, lane: int) -> None:
        """Overwrite memory that was dropped while in use, as its next owner would, in its own stream's order."""
        assert memory.sample is not None
        whole = torch.empty(0, dtype=torch.uint8).set_(memory.sample.untyped_storage())
        memory.held += 1

        def run() -> None:
            whole.fill_(0xFF)
            memory.held -= 1

        where = Extent(0, memory.size_bytes, memory.size_bytes)
        self._queues.add(lane, self._unwatched(run), touches=[Touch(key, where, True)])


def _arguments(known: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensors, Tensors]:
    reads: Tensors = []
    writes: Tensors = []
    for positions, found in ((known.reads, reads), (known.writes, writes)):
        for at in positions:
            flat(args[at] if at < len(args) else kwargs.get(known.names[at]), found)
    return reads, writes


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own shape, which can be filled and copied into."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor())
    )


class _Operations(DispatchMode):
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred = deferred

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: see Deferred.operation
        if types and modes.acts_for_itself(types):
            return NotImplemented
        with modes.no_function_modes():
            return self._deferred.operation(func, args, kwargs or {})


class _HostReads(TorchFunctionMode):
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: see Deferred.operation
        if func in _HOST_READS:
            self._deferred.host_needs_current()
        return func(*args, **(kwargs or {}))
