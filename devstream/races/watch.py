"""Turns what torch and the seam report into what the checker knows: work on lanes, edges, the life of memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from devstream import _observe
from devstream._compat import gpu_trace, modes
from devstream._compat.modes import DispatchMode, TorchFunctionMode
from devstream._objects import Event, as_stream
from devstream.races.backward import Backward
from devstream.races.checker import Checker, Memory, Work
from devstream.races.collectives import Collectives
from devstream.races.gpu import GpuListener
from devstream.races.lanes import Lanes
from devstream.races.operations import Kind, Plan, Tensors, flat, plan
from devstream.races.order import HOST
from devstream.races.poison import poison, poison_freed
from devstream.races.sites import Site, here, inside_backend

#: Methods that hand a tensor's memory to the host without an operation of torch -> their name in reports, and
#: whether the host has waited for the current stream by then, as the copy behind them does on an accelerator.
_ESCAPES: dict[Any, tuple[str, bool]] = {  # Any: methods of tensors, of several kinds
    torch.Tensor.tolist: ("tolist", True),
    torch.Tensor.numpy: ("numpy", True),
    torch.Tensor.__array__: ("numpy", True),
    torch.Tensor.cpu: ("cpu", True),
    torch.Tensor.__repr__: ("print", True),
    torch.Tensor.data_ptr: ("data_ptr", False),
    torch.Tensor.__dlpack__: ("dlpack", False),
}


class Watch:
    """Feeds *checker* from the seam, from this thread's operations, and from a GPU's own trace."""

    def __init__(self, checker: Checker, *, spoil: bool = False) -> None:
        self._checker = checker
        self._order = checker.order
        self.lanes = Lanes(self._order)
        self._backward = Backward(self._order, self.lanes)
        self.plans: dict[Any, Plan] = {}  # Any: torch's OpOverload, a private class
        self.spoils = spoil
        if spoil:
            checker.on_freed = self._spoil
        self._events: dict[int, tuple[object, int]] = {}
        self._event_numbers = itertools.count(1)
        self._collectives = Collectives(checker, self.lanes, self.lane)
        #: The device type whose native calls torch reports by itself; "" where none does.
        self.traced = ""

    def listen_to(self, device_type: str) -> GpuListener:
        """Return what takes in torch's own trace of devices of a type, whose verbs the seam then need not tell."""
        self.traced = self._collectives.traced = device_type
        self._checker.seen |= {device_type}
        return GpuListener(device_type, self._checker, self.lanes, self._collectives)

    # -- operations --------------------------------------------------------------------------------------

    def plan_of(self, operation: Any) -> Plan:  # Any: torch's OpOverload, a private class
        """Return what *operation* does with its arguments, worked out once."""
        known = self.plans[operation] = plan(operation)
        return known

    def other(self, known: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Run an operation that is more than its reads and writes by *call*, and note what it did."""
        if self.spoils:
            with self._checker.lock:
                self._checker.bury()  # before this operation is given the freed memory
        if known.kind is Kind.PLAIN:
            result = call()
            self.plain(known, args, kwargs, result)
            return result
        if known.kind is Kind.COLLECTIVE:
            result = self._collectives.run(known, args, kwargs, call)
        else:
            result = call()
            with modes.no_function_modes(), self._checker.lock:
                if known.kind is Kind.COPY:
                    self._copy(known, args, kwargs, result)
                elif known.kind is Kind.RECORD_STREAM:
                    self._checker.tell_allocator(args[0], self.lanes.of_stream(as_stream(args[1])[1]))
                else:
                    self._collectives.wait_tensor(args[0])
        self._deliver()
        return result

    def _deliver(self) -> None:
        if self._checker.has_new:
            self._checker.deliver()

    def plain(self, known: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what an operation read and wrote, after it was issued."""
        reads: Tensors = []
        writes: Tensors = []
        count = len(args)
        for at in known.reads:
            value = args[at] if at < count else kwargs.get(known.names[at])
            if type(value) is torch.Tensor:
                reads.append(value)
            elif value is not None and type(value) is not int and type(value) is not float:
                flat(value, reads)
        for at in known.writes:
            flat(args[at] if at < count else kwargs.get(known.names[at]), writes)
        made: Tensors = []
        if known.results:
            if type(result) is torch.Tensor:
                made.append(result)
            else:
                flat(result, made)
        if not (reads or writes or made):
            return
        with modes.no_function_modes(), self._checker.lock:
            self._touch(known, reads, writes, made)
        self._deliver()

    def _touch(self, known: Plan, reads: Tensors, writes: Tensors, made: Tensors) -> None:
        checker = self._checker
        if checker.dead:
            checker.bury()
        site = here(4)
        # One device is the rule, and asking each tensor for its lane would cost more than all the rest.
        first = (reads or writes or made)[0]
        alone, work = first.get_device(), self._work(first, known.name, site)
        others: dict[int, Work] = {}
        own: set[int] = set()
        last: torch.Tensor | None = None
        for tensor in reads:
            if tensor is last or not _has_memory(tensor):
                continue  # the same one twice, as in x * x
            last = tensor
            storage = tensor.untyped_storage()
            own.add(storage._cdata)
            of = work if tensor.get_device() == alone else self._beside(others, tensor, work)
            checker.touch(tensor, storage, of, write=False)
        for tensor in writes:
            if _has_memory(tensor):
                storage = tensor.untyped_storage()
                own.add(storage._cdata)
                of = work if tensor.get_device() == alone else self._beside(others, tensor, work)
                checker.touch(tensor, storage, of, write=True)
        for tensor in made:
            if _has_memory(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in own:  # else it is an argument's memory after all
                    of = work if tensor.get_device() == alone else self._beside(others, tensor, work)
                    self._made(tensor, storage, of, known)
        if known.host_waits:
            for of in (work, *others.values()):
                if of.lane != HOST:
                    self._order.wait_lane(HOST, of.lane)

    def _work(self, tensor: torch.Tensor, name: str, site: Site) -> Work:
        by_autograd = modes.current_backward_node() is not None
        return Work(self._order, self.lane(tensor), name, site, by_autograd=by_autograd)

    def _beside(self, others: dict[int, Work], tensor: torch.Tensor, work: Work) -> Work:
        """Return the part of an operation that is on another device than *work*."""
        index = tensor.get_device()
        found = others.get(index)
        if found is None:
            found = others[index] = self._work(tensor, work.name, work.site)
        return found

    def _made(self, tensor: torch.Tensor, storage: torch.UntypedStorage, work: Work, known: Plan) -> None:
        unwritten = known.unwritten
        if self.spoils and unwritten:
            poison(tensor)
            unwritten = False
        self._own(tensor, storage, self._checker.make(tensor, storage, work, written=not unwritten))

    def _own(self, tensor: torch.Tensor, storage: torch.UntypedStorage, memory: Memory) -> None:
        """Note what is needed to see the end of new memory, and to spoil it then."""
        if self.spoils:
            memory.device = tensor.device
        if self.traced and tensor.is_cuda and not memory.pointer:
            self._checker.watch_pointer(memory, storage.data_ptr())

    def _spoil(self, memory: Memory) -> None:
        # On the CPU memory goes back only when nothing runs on it any more: there is no late reader to show.
        if memory.device is None or memory.device.type == "cpu" or memory.home is None:
            return
        stream = self.lanes.stream_of(memory.home)
        if stream is not None:
            poison_freed(memory.size_bytes, memory.device, stream)

    def _touch_one(self, tensor: torch.Tensor, work: Work, *, write: bool) -> None:
        self._checker.touch(tensor, tensor.untyped_storage(), work, write=write)

    def lane(self, tensor: torch.Tensor) -> int:
        """Return the lane that work on *tensor* counts as run on."""
        lane = self.lanes.of_tensor(tensor)
        if lane == HOST or not tensor.is_cpu:
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
        if source.is_meta or into.is_meta:
            return
        new = not known.writes
        if source.device.type == into.device.type:
            self._touch(known, [source], [] if new else [into], [into] if new else [])
            return
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        self._checker.bury()
        if new:
            lane = self.lanes.of_tensor(into)
            storage = into.untyped_storage()
            self._own(into, storage, self._checker.allocate(storage, lane, here(3)))
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
                self._touch_one(tensor, work, write=write)
            else:
                host = self.lane(tensor)
                if write:
                    self._order.wait_lane(host, lane)
                self._touch_one(tensor, Work(self._order, host, name, site), write=write)
        if waits:
            self._order.wait_lane(HOST, lane)

    def escape(self, name: str, tensor: torch.Tensor, *, waits: bool) -> None:
        """Note that the host, or another library, gets at the memory of *tensor*."""
        with modes.no_function_modes(), self._checker.lock:
            if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
                return
            if not _has_memory(tensor):
                return
            self._checker.bury()
            work = self._work(tensor, name, here(3))
            self._touch_one(tensor, work, write=False)
            if waits:
                self._order.wait_lane(HOST, work.lane)
        if self._checker.has_new:
            self._checker.deliver()

    # -- the seam ----------------------------------------------------------------------------------------

    def __call__(self, notice: _observe.Notice) -> None:
        """Take in what a verb did."""
        with modes.no_function_modes(), self._checker.lock:
            self._checker.bury()
            if self._backward.running:
                if modes.current_backward_node() is None:
                    self._backward.end()
                else:
                    self._backward.verb()
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
            case _observe.Synchronize(target=target) | _observe.Happened(target=target):
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
                self._touch_one(tensor, work, write=write)

    def _copied(self, into: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        if source.device.type != into.device.type:
            self._transfer(into, source, stream, "copy", here(4), waits=False)
            return
        work = Work(self._order, self.lanes.of_stream(stream), "copy", here(4))
        self._touch_one(source, work, write=False)
        self._touch_one(into, work, write=True)

    def _synchronized(self, target: object) -> None:
        if isinstance(target, torch.device):
            self._order.host_waits_device(f"{target.type}:{target.index or 0}")
        elif not isinstance(target, Event):
            self._order.wait_lane(HOST, self.lanes.of_stream(target))
        elif self.traced and isinstance(target, Event) and target.device.type == self.traced:
            self._order.host_waits_event((self.traced, gpu_trace.event_handle(target.native)), here(4))
        else:
            self._order.host_waits_event(self._event(target), here(4))

    def _is_traced(self, stream: Any) -> bool:
        return bool(self.traced) and stream.device.type == self.traced

    def _event(self, event: object) -> int:
        """Return a number for *event* that no other event ever has."""
        known = self._events.get(id(event))
        if known is not None:
            return known[1]
        key, number = id(event), next(self._event_numbers)

        def gone(_: object) -> None:
            # Each wait_stream makes an event: what is known of dead ones must not pile up.
            self._events.pop(key, None)
            self._order.forget(number)

        try:
            held: object = weakref.ref(event, gone)
        except TypeError:  # a plug-in's event without weak references is kept alive until the end
            held = event
        self._events[key] = (held, number)
        return number


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


class Operations(DispatchMode):
    """Shows a `Watch` this thread's operations, also those of its backward passes."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: operations, arguments and results are of every type
        """Run *func* and note what it touches."""
        if types and modes.acts_for_itself(types):
            return NotImplemented  # a tensor of another library's class: what it does inside comes here again
        watch = self._watch
        known = watch.plans.get(func) or watch.plan_of(func)
        if known.nothing:
            return func(*args, **kwargs) if kwargs else func(*args)
        if known.kind is not Kind.PLAIN or watch.spoils:
            given = kwargs or {}
            return watch.other(known, args, given, lambda: func(*args, **given))
        result = func(*args, **kwargs) if kwargs else func(*args)
        watch.plain(known, args, kwargs or {}, result)
        return result


class Escapes(TorchFunctionMode):
    """Shows a `Watch` the host reads that are no operation of torch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: operations, arguments and results are of every type
        """Note a host read, then call *func*."""
        escape = _ESCAPES.get(func)
        if escape is not None and args and isinstance(args[0], torch.Tensor):
            self._watch.escape(escape[0], args[0], waits=escape[1])
        return func(*args, **(kwargs or {}))


__all__ = ["Escapes", "Operations", "Watch"]
