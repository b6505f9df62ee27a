"""Turns what torch and the seam report into what the checker knows: work on lanes, edges, the life of memory."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from devstream import _observe
from devstream._compat import collectives, gpu_trace, modes
from devstream._compat.modes import TorchDispatchMode, TorchFunctionMode
from devstream._objects import Event, as_stream
from devstream.abc import StreamLike
from devstream.races.backward import Backward
from devstream.races.checker import Checker, Work
from devstream.races.lanes import Lanes
from devstream.races.model import LaneKind
from devstream.races.operations import Kind, Plan, plan
from devstream.races.order import HOST
from devstream.races.sites import Site, here, inside_backend

#: Methods that hand a tensor's memory to the host without an operation of torch -> their name in reports, and
#: whether the host has waited for the current stream by then, as the copy behind them does on an accelerator.
_ESCAPES: dict[Any, tuple[str, bool]] = {  # Any: methods of tensors, of several kinds
    torch.Tensor.tolist: ("tolist", True),
    torch.Tensor.numpy: ("numpy", True),
    torch.Tensor.__array__: ("numpy", True),
    torch.Tensor.cpu: ("cpu", True),
    torch.Tensor.data_ptr: ("data_ptr", False),
    torch.Tensor.__dlpack__: ("dlpack", False),
}

_Tensors = list[torch.Tensor]


def _flat(value: object, found: _Tensors) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _flat(one, found)


class Watch:
    """Feeds *checker* from the seam, from this thread's operations, and from a GPU's own trace."""

    def __init__(self, checker: Checker, *, poison: Callable[[torch.Tensor], None] | None = None) -> None:
        self._checker = checker
        self._order = checker.order
        self.lanes = Lanes(self._order)
        self._backward = Backward(self._order, self.lanes)
        self._plans: dict[Any, Plan] = {}  # Any: torch's OpOverload, a private class
        self._poison = poison
        self._events: dict[int, tuple[object, str]] = {}
        self._works: deque[object] = deque(maxlen=64)
        #: The device type whose native calls torch reports by itself; "" where none does.
        self.traced = ""
        #: A collective under way on a GPU, until its stream's event shows which stream that is.
        self._collective: tuple[list[tuple[torch.Tensor, bool]], str, Site, int] | None = None

    # -- operations --------------------------------------------------------------------------------------

    def operation(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:  # Any: an operation, its arguments and its result are of every type
        """Run *operation* by *call* and note what it touched."""
        known = self._plans.get(operation)
        if known is None:
            known = self._plans[operation] = plan(operation)
        if known.nothing:
            return call()
        if known.kind is Kind.PLAIN:
            result = call()
            self._plain(known, args, kwargs, result)
        elif known.kind is Kind.COLLECTIVE:
            return self._collect(known, args, kwargs, call)
        else:
            result = call()
            with modes.no_function_modes(), self._checker.lock:
                if known.kind is Kind.COPY:
                    self._copy(known, args, kwargs, result)
                elif known.kind is Kind.RECORD_STREAM:
                    self._checker.tell_allocator(args[0], self.lanes.of_stream(as_stream(args[1])[1]))
                else:
                    self._wait_tensor(args[0])
        if self._checker.has_new:
            self._checker.deliver()
        return result

    def _plain(self, known: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        reads: _Tensors = []
        writes: _Tensors = []
        count = len(args)
        for at in known.reads:
            value = args[at] if at < count else kwargs.get(known.names[at])
            if type(value) is torch.Tensor:
                reads.append(value)
            elif value is not None:
                _flat(value, reads)
        for at in known.writes:
            _flat(args[at] if at < count else kwargs.get(known.names[at]), writes)
        made: _Tensors = []
        if known.results:
            _flat(result, made)
        if not (reads or writes or made):
            return
        with modes.no_function_modes(), self._checker.lock:
            self._touch(known, reads, writes, made)

    def _touch(self, known: Plan, reads: _Tensors, writes: _Tensors, made: _Tensors) -> None:
        checker = self._checker
        checker.bury()
        site = here(4)
        works: dict[int, Work] = {}
        own: set[int] = set()
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.layout is not torch.strided or tensor.is_meta:
                    continue
                work = self._work(tensor, known.name, site, works)
                checker.touch(tensor, work, write=write)
                if made:
                    own.add(tensor.untyped_storage()._cdata)
        for tensor in made:
            if tensor.layout is not torch.strided or tensor.is_meta:
                continue
            if tensor.untyped_storage()._cdata in own:
                continue  # an argument's memory after all
            work = self._work(tensor, known.name, site, works)
            self._made(tensor, work, known, site)
        if known.host_waits:
            for lane in works:
                if lane != HOST:
                    self._order.wait_lane(HOST, lane)

    def _made(self, tensor: torch.Tensor, work: Work, known: Plan, site: Site) -> None:
        memory = self._checker.allocate(tensor, work.lane, site)
        if self.traced and not memory.pointer and tensor.device.type == self.traced:
            self._checker.watch_pointer(memory, tensor.untyped_storage().data_ptr())
        if not known.unwritten:
            self._checker.touch(tensor, work, write=True)
        elif self._poison is not None:
            self._poison(tensor)
            self._checker.touch(tensor, work, write=True)

    def _work(self, tensor: torch.Tensor, name: str, site: Site, works: dict[int, Work]) -> Work:
        lane = self.lanes.of_tensor(tensor)
        if tensor.is_cpu:
            lane = self._in_backward(lane)
        work = works.get(lane)
        if work is None:
            work = works[lane] = Work(self._order, lane, name, site)
        return work

    def _in_backward(self, lane: int) -> int:
        """Return the lane that the CPU's work counts as run on; *lane* outside of a backward."""
        if lane == HOST:
            return lane
        node = modes.current_backward_node()
        if node is not None:
            return self._backward.lane(node, lane)
        if self._backward.running:
            self._backward.end()
        return lane

    def _copy(self, known: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if inside_backend(3):
            return  # a copy of ours, which the seam reports with the stream that it really runs on
        into = result if isinstance(result, torch.Tensor) else args[0]
        source = args[1] if known.writes else args[0]
        new = not known.writes
        if source.device.type == into.device.type:
            self._touch(known, [source], [] if new else [into], [into] if new else [])
            return
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        self._checker.bury()
        if new:
            lane = self.lanes.of_tensor(into)
            self._checker.allocate(into, lane, here(3))
        self._transfer(into, source, None, known.name, here(3), waits=waits)

    def _transfer(
        self, into: torch.Tensor, source: torch.Tensor, stream: Any, name: str, site: Site, *, waits: bool
    ) -> None:
        """Note a copy between host and device, on *stream* (None: the device's current one)."""
        device_side = source if into.is_cpu else into
        lane = self.lanes.of_tensor(device_side) if stream is None else self.lanes.of_stream(stream)
        work = Work(self._order, lane, name, site)
        for tensor, write in ((source, False), (into, True)):
            # Page-locked memory is the device's to read and write; any other the host copies during the call.
            if tensor is device_side or tensor.is_pinned():
                self._checker.touch(tensor, work, write=write)
            else:
                if write:
                    self._order.wait_lane(HOST, lane)
                self._checker.touch(tensor, Work(self._order, HOST, name, site), write=write)
        if waits:
            self._order.wait_lane(HOST, lane)

    def escape(self, name: str, tensor: torch.Tensor, *, waits: bool) -> None:
        """Note that the host, or another library, gets at the memory of *tensor*."""
        with modes.no_function_modes(), self._checker.lock:
            if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
                return
            if tensor.layout is not torch.strided or tensor.is_meta:
                return
            self._checker.bury()
            works: dict[int, Work] = {}
            work = self._work(tensor, name, here(3), works)
            self._checker.touch(tensor, work, write=False)
            if waits:
                self._order.wait_lane(HOST, work.lane)
        if self._checker.has_new:
            self._checker.deliver()

    # -- collectives -------------------------------------------------------------------------------------

    def _collect(
        self, known: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        touched: list[tuple[torch.Tensor, bool]] = []
        for positions, write in ((known.reads, False), (known.writes, True)):
            for at in positions:
                found: _Tensors = []
                _flat(args[at] if at < len(args) else kwargs.get(known.names[at]), found)
                touched += [(tensor, write) for tensor in found if tensor.layout is torch.strided]
        site = here(3)
        name = known.name
        if self.traced and any(tensor.device.type == self.traced for tensor, _ in touched):
            return self._collect_traced(touched, name, site, call)
        result = call()
        own = _own_results(result) if known.results else []
        with modes.no_function_modes(), self._checker.lock:
            self._checker.bury()
            work = result[-1] if isinstance(result, tuple) else result
            functional = name.startswith("_c10d_functional.")
            waitable = not isinstance(work, torch.Tensor | list) and collectives.called_from_python(_caller(3))
            lane = self.lanes.of_tensor(touched[0][0]) if touched else self.lanes.current_cpu()
            if lane != HOST:
                lane = self._in_backward(lane)
            if functional or waitable:
                flight = self._order.add_lane(LaneKind.COLLECTIVE, f"the collective {name}")
                self._order.wait_lane(flight, lane)
                self._order.wait_lane(flight, HOST)
            else:
                flight = lane  # issued from C++, by DDP for instance, whose waits can't be seen
            job = Work(self._order, flight, name, site)
            for tensor in own:
                self._checker.allocate(tensor, lane, site)
            for tensor, write in (*touched, *((tensor, True) for tensor in own)):
                self._checker.touch(tensor, job, write=write)
            for tensor in own:
                self._functional[tensor.untyped_storage()._cdata] = flight
            if waitable and not functional:
                stand_in, boxed = collectives.watched(work, lambda: self._collected(flight))
                self._works.append(stand_in)
                result = (*result[:-1], boxed) if isinstance(result, tuple) else boxed
        if self._checker.has_new:
            self._checker.deliver()
        return result

    @property
    def _functional(self) -> dict[int, int]:
        return self.__dict__.setdefault("_functional_lanes", {})

    def _collected(self, flight: int) -> None:
        """The caller waited for a collective of the CPU: the host and its current stream come after it."""
        with self._checker.lock:
            self._order.wait_lane(HOST, flight)
            self._order.wait_lane(self.lanes.current_cpu(), flight)

    def _wait_tensor(self, tensor: torch.Tensor) -> None:
        flight = self._functional.pop(tensor.untyped_storage()._cdata, None)
        if flight is not None:
            self._collected(flight)

    def _collect_traced(
        self, touched: list[tuple[torch.Tensor, bool]], name: str, site: Site, call: Callable[[], Any]
    ) -> Any:
        """A collective of a GPU: torch's trace tells its stream and all of its edges while it is issued."""
        with modes.no_function_modes(), self._checker.lock:
            self._checker.bury()
            self._collective = (touched, name, site, self.lanes.of_tensor(touched[0][0]))
        result = call()
        with modes.no_function_modes(), self._checker.lock:
            if self._collective is not None:
                # No event on another stream: it ran on the current one.
                self._issue_collective(self._collective[3])
            for tensor in _own_results(result):
                if self._checker.memory_of(tensor) is None:
                    self._checker.allocate(tensor, self.lanes.of_tensor(tensor), site)
        if self._checker.has_new:
            self._checker.deliver()
        return result

    def _issue_collective(self, lane: int) -> None:
        assert self._collective is not None
        touched, name, site, _ = self._collective
        self._collective = None
        job = Work(self._order, lane, name, site)
        for tensor, write in touched:
            self._checker.touch(tensor, job, write=write)

    # -- the seam ----------------------------------------------------------------------------------------

    def __call__(self, notice: _observe.Notice) -> None:
        """Take in what a verb did."""
        with modes.no_function_modes(), self._checker.lock:
            self._checker.bury()
            if self._backward.running and modes.current_backward_node() is None:
                self._backward.end()
            self._notice(notice)
        if self._checker.has_new:
            self._checker.deliver()

    def _notice(self, notice: _observe.Notice) -> None:
        match notice:
            case _observe.Record(event=event, stream=stream):
                if not self._is_traced(stream):
                    self._order.record(self._event(event), self.lanes.of_stream(stream), here(3))
            case _observe.Wait(stream=stream, event=event, recorded=recorded):
                if not (recorded and self._is_traced(stream)):
                    self._order.wait(self.lanes.of_stream(stream), self._event(event), here(3))
            case _observe.Synchronize(target=target):
                self._synchronized(target)
            case _observe.Switch(stream=stream, previous=previous):
                if stream.device.type == "cpu" and previous.device.type == "cpu":
                    self._backward.switched(stream, previous)
            case _observe.Copy(destination=into, source=source, stream=stream):
                self._copied(into, source, stream)
            case _observe.RecordStream(tensor=tensor, stream=stream):
                self._checker.tell_allocator(tensor, self.lanes.of_stream(stream))
            case _observe.Access(tensor=tensor, stream=stream, write=write, operation=operation):
                work = Work(self._order, self.lanes.of_stream(stream), operation, here(3))
                self._checker.touch(tensor, work, write=write)

    def _copied(self, into: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        if source.device.type != into.device.type:
            self._transfer(into, source, stream, "copy", here(4), waits=False)
            return
        work = Work(self._order, self.lanes.of_stream(stream), "copy", here(4))
        self._checker.touch(source, work, write=False)
        self._checker.touch(into, work, write=True)

    def _synchronized(self, target: object) -> None:
        if isinstance(target, torch.device):
            self._order.host_waits_device(f"{target.type}:{target.index or 0}")
        elif isinstance(target, StreamLike) and isinstance(target, torch.Stream):
            self._order.wait_lane(HOST, self.lanes.of_stream(target))
        elif self.traced and isinstance(target, Event) and target.device.type == self.traced:
            self.gpu_sync_event(gpu_trace.event_handle(target.native))
        else:
            self._order.host_waits_event(self._event(target), here(4))

    def _is_traced(self, stream: Any) -> bool:
        return bool(self.traced) and stream.device.type == self.traced

    def _event(self, event: object) -> int:
        """Return a name for *event* that no other event ever has."""
        # Held until the end: an id would be given to another object. An event is small.
        key = id(event)
        if key not in self._events:
            self._events[key] = (event, "")
        return key

    # -- torch's trace of a GPU --------------------------------------------------------------------------

    def _handle_lane(self, stream: int) -> int:
        # torch makes the stream's device current around each of these calls.
        return self.lanes.of_handle(self.traced, self.lanes.backend(self.traced).current_index(), stream)

    def gpu_record(self, event: int, stream: int) -> None:
        """A record on the driver's stream *stream*."""
        with self._checker.lock:
            lane = self._handle_lane(stream)
            if self._collective is not None and lane != self._collective[3]:
                self._issue_collective(lane)
            self._order.record((self.traced, event), lane, here(2))

    def gpu_wait(self, event: int, stream: int) -> None:
        """A wait of the driver's stream *stream*."""
        with self._checker.lock:
            self._order.wait(self._handle_lane(stream), (self.traced, event), here(2))

    def gpu_forget_event(self, event: int) -> None:
        """The event was destroyed; its handle may come again."""
        with self._checker.lock:
            self._order.forget((self.traced, event))

    def gpu_sync_event(self, event: int) -> None:
        """The host waited for an event."""
        with self._checker.lock:
            self._order.host_waits_event((self.traced, event), here(2))

    def gpu_sync_stream(self, stream: int) -> None:
        """The host waited for a stream."""
        with self._checker.lock:
            self._order.wait_lane(HOST, self._handle_lane(stream))

    def gpu_sync_device(self) -> None:
        """The host waited for the current device."""
        with self._checker.lock:
            index = self.lanes.backend(self.traced).current_index()
            self._order.host_waits_device(f"{self.traced}:{index}")

    def gpu_free(self, pointer: int) -> None:
        """The allocator took a block back."""
        self._checker.free_pointer(pointer)


def _own_results(result: Any) -> _Tensors:
    found: _Tensors = []
    _flat(result, found)
    return found


def _caller(depth: int) -> FrameType:
    """Return the innermost frame that belongs neither to us nor to torch's machinery of modes."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith(("devstream.", "torch._dynamo", "torch._ops", "torch.utils"))
    ):
        frame = frame.f_back
    return frame


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Shows a `Watch` this thread's operations, also those of its backward passes."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: see Watch.operation
        """Run *func* and note what it touches."""
        if types:
            return NotImplemented  # a tensor of another library's class: what it does inside comes here again
        given = kwargs or {}
        return self._watch.operation(func, args, given, lambda: func(*args, **given))


class Escapes(TorchFunctionMode):
    """Shows a `Watch` the host reads that are no operation of torch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: see Watch.operation
        """Note a host read, then call *func*."""
        escape = _ESCAPES.get(func)
        if escape is not None and args and isinstance(args[0], torch.Tensor):
            self._watch.escape(escape[0], args[0], waits=escape[1])
        return func(*args, **(kwargs or {}))


def each_subscription(watch: Watch) -> Iterator[Any]:  # Any: contexts and handles
    """Yield what has to be closed again."""
    yield _observe.subscribe(watch)


__all__ = ["Escapes", "Operations", "Watch", "threading"]
