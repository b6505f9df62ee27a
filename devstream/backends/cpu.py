"""The CPU as a device: the specification in code.

Work runs at once, in the order of its issue. Everything else is real: streams are distinct queues of one of two
(or more) virtual devices ``cpu:0`` and ``cpu:1``, the current stream belongs to the thread, events happen at a
time, waits bind to the record that was the last. torch knows only one CPU, so all tensors are on ``cpu``;
``cpu:0``'s streams say ``cpu`` too.

What a latch holds are events and waits, not work: tensor operations, copies and host functions issued behind
a latch run, and only their events wait for it.

torch makes its CPU streams with device index -1, and ours of ``cpu:0`` do likewise: a native stream of the same
id is equal to ours and hashes alike. A native stream that was made by hand with ``device_index=0`` is taken for
the same queue, but torch itself never finds it equal to one of index -1; compare what `devstream.wrap` returns.

[Note: When the host blocks on the CPU]
A stream's copies and host functions run on a thread. Tensor operations that come after them run in the caller,
at once; so whoever makes a stream current, or makes a current stream wait, blocks until that thread is done,
and gets the error that its work raised. What is launched on a stream that is current in any thread runs in the
caller, when everything launched before has run, or the operations there would overtake it. Nobody blocks on a
latch, because the caller is usually who will release it.

[Note: One stream in two threads]
What is launched on a stream runs one after the other, whichever threads launch it, and before the operations of
whoever makes the stream current later. But operations run at once in the thread that calls them, where nothing of
ours can hold them: those that two threads call on one stream at the same time, or one calls while another
launches a copy, overlap, where an accelerator would put them in some order. Under `devstream.testing.strict`
such a launch raises.

[Note: An error on a stream]
What a copy or host function raises is raised by whoever waits for it, and what comes behind it on its stream
doesn't run. `synchronize` of the stream or the device reports it and clears the stream for use.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from devstream import _compat, _objects, _observe
from devstream.abc import Capability
from devstream.backends._cpu_capture import Captured, Captures, CpuGraph
from devstream.backends._cpu_current import CurrentStreams, Threads
from devstream.backends._cpu_facts import CpuFacts
from devstream.backends._cpu_latch import CpuLatch
from devstream.backends._cpu_options import CpuOptions, refuse_foreign
from devstream.backends._cpu_queue import Point, Timeline, Worker, lost_at_fork
from devstream.backends._cpu_stream import CpuStream
from devstream.exceptions import DeviceMismatchError, StreamInUseError, StreamTypeError


class CpuEvent:
    """The native event of the CPU: the point of its last record."""

    __slots__ = ("__weakref__", "captured", "index", "point")

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.point: Point | None = None
        #: Where its last record is in a captured graph.
        self.captured: Captured | None = None

    def query(self) -> bool:
        """Say whether the last record has happened; True where there was none."""
        return self.point is None or self.point.happened

    def synchronize(self) -> None:
        """Block the host until the last record has happened."""
        cpu_timeline.wait(self.point)


cpu_timeline = Timeline()


class CpuBackend(CpuFacts[CpuStream, CpuEvent]):
    """Streams and events of the CPU (see the module's docstring)."""

    name: ClassVar[str] = "cpu"
    device_type = "cpu"
    context_reports: ClassVar[bool] = True
    works_in_threads: ClassVar[bool] = True

    def __init__(self, options: CpuOptions | None = None) -> None:
        self.options = options or CpuOptions()
        self.torch_type = _compat.cpu_stream_type()
        self._stream_class = type("CpuStream", (CpuStream,), {"_backend": self, "__module__": __name__})
        self._ids = itertools.count(1)
        # Re-entrant: the garbage collector may run a finalizer that makes a stream while this thread holds it.
        self._lock = threading.RLock()
        self._threads = Threads()
        #: What the calling thread chose.
        self.here = CurrentStreams(self._threads)
        self._streams: weakref.WeakValueDictionary[tuple[int, int], CpuStream] = weakref.WeakValueDictionary()
        self._defaults: dict[int, CpuStream] = {}
        self._captures = Captures(self)
        self._native_events: weakref.WeakKeyDictionary[torch.Event, CpuEvent] = weakref.WeakKeyDictionary()
        # By identity: two equal native streams each keep the queue alive.
        self._natives: dict[int, tuple[weakref.ref[torch.Stream], CpuStream]] = {}
        self._running: set[tuple[int, Point, weakref.ref[CpuStream]]] = set()
        #: The devices on which this forked process's parent left work of dropped streams, which never ends now.
        self._lost: set[int] = set()
        #: Queues a task in place of `launch`; set by `devstream.testing.cpu` under another schedule than inline.
        self.deferred: Callable[[Callable[[], None], CpuStream], None] | None = None
        #: Which stream made a storage; filled in by `devstream.testing.cpu(strict=True)`.
        self.owners: weakref.WeakKeyDictionary[torch.UntypedStorage, CpuStream] = weakref.WeakKeyDictionary()
        after_fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (alive := after_fork()) and alive())

    def unavailable_reason(self) -> str | None:
        """Say nothing: there is always a CPU."""
        return None

    def device_count(self) -> int:
        """Return the number of virtual devices."""
        return self.options.devices

    # -- streams -----------------------------------------------------------------------------------------

    def create_stream(self, index: int, *, priority: int = 0) -> CpuStream:
        """Return a new queue; unlike an accelerator's pool, never one that was handed out before."""
        if Capability.SIDE_STREAMS not in self.profile.capabilities:
            return self.default_stream(index)
        with self._lock:
            self.profile.check_queues(1 + sum(1 for at, number in list(self._streams) if at == index and number))
            # A native stream may have brought an id that the counter had not reached.
            stream_id = next(i for i in self._ids if (index, i) not in self._streams)
            return self._make(index, stream_id, priority)

    def _make(self, index: int, stream_id: int, priority: int = 0) -> CpuStream:
        with self._lock:
            known = self._streams.get((index, stream_id))
            if known is None:
                known = self._stream_class(self, index, stream_id, priority)
                known.granted_priority = priority
                self._streams[index, stream_id] = known
            return known

    def default_stream(self, index: int) -> CpuStream:
        """Return the queue that every thread starts on; its id is 0."""
        stream = self._defaults.get(index)
        if stream is None:
            stream = self._make(index, 0)
            self._defaults[index] = stream
        return stream

    def current_stream(self, index: int | None = None) -> CpuStream:
        """Return this thread's current queue."""
        index = self.here.device if index is None else index
        return self.here.chosen.get(index) or self.default_stream(index)

    def current_index(self) -> int:
        """Return this thread's current virtual device."""
        return self.here.device

    def set_stream(self, stream: CpuStream) -> None:
        """Make *stream* current, after its asynchronous work (see the note above)."""
        error = self._catch_up(stream)
        if error is not None:
            raise error
        index = self.stream_index(stream)
        self.here.choose(stream, index, device=index)

    def push(self, stream: CpuStream) -> None:
        """Enter ``with stream:``."""
        error = self._catch_up(stream)
        if error is not None:
            raise error
        before = self.current_stream(None)
        self.here.enter(stream, self.stream_index(stream))
        if _observe.subscribers:
            _observe.publish(_observe.Switch(stream, before))

    def pop(self, stream: CpuStream) -> None:
        """Leave the innermost ``with`` block of *stream* and restore what it replaced."""
        back = self.here.leave(stream) or self.default_stream(self.stream_index(stream))
        self._catch_up(back)  # its error is for who synchronizes: leaving a block must not fail
        if _observe.subscribers:
            _observe.publish(_observe.Switch(self.current_stream(None), stream))

    def stream_index(self, stream: CpuStream) -> int:
        """Return the virtual device of *stream*."""
        return max(stream.device_index, 0)

    def native_handle(self, stream: CpuStream) -> int:
        """Return the stream's id, which is the CPU's handle: 0 is the default stream."""
        self.profile.require(self, Capability.NATIVE_HANDLE, "native_handle")
        return stream.stream_id

    def adopt_stream(self, native: object) -> CpuStream:
        """Return the queue that a native ``torch.Stream`` of the CPU names by its id."""
        if isinstance(native, CpuStream) and native._backend is self:
            return native
        if isinstance(native, torch.Stream) and native.device_type == self.torch_type:
            index = max(native.device_index, 0)
            if index >= self.device_count():
                raise DeviceMismatchError(
                    operation="using a native stream",
                    first=f"it is on cpu:{index}",
                    second=f"the CPU has {self.device_count()} virtual devices",
                    advice="use devstream.testing.cpu(devices=...) for more",
                )
            if native.stream_id == 0:
                return self.default_stream(index)
            stream = self._make(index, native.stream_id)
            # As long as the native one lives, so does its queue.
            key, natives = id(native), self._natives
            if stream is not native and key not in natives:
                natives[key] = (weakref.ref(native, lambda _: natives.pop(key, None)), stream)
            return stream
        raise StreamTypeError(operation="a stream argument", got=native, expected="a stream of the CPU")

    def wrap_handle(self, handle: int, index: int, owner: object = None) -> CpuStream:
        """Return the live stream with this id."""
        self.profile.require(self, Capability.EXTERNAL_STREAMS, "wrapping a native handle")
        stream = self.default_stream(index) if handle == 0 else self._streams.get((index, handle))
        if stream is None and self.profile.foreign_handles:
            stream = self._make(index, handle)
            stream.foreign = True
        elif stream is None:
            raise ValueError(f"no live stream of cpu:{index} has the handle {handle}")
        return stream

    def query_stream(self, stream: CpuStream) -> bool:
        """Say whether nothing of *stream* is outstanding."""
        self._captures.refuse("query", stream)
        return not stream.lost and (stream.tail is None or stream.tail.happened)

    def synchronize_stream(self, stream: CpuStream) -> None:
        """Block until nothing of *stream* is outstanding."""
        self._captures.refuse("synchronize", stream)
        lost, stream.lost = stream.lost, False
        self._finish([stream.tail], [stream], lost=lost)

    def synchronize_device(self, index: int) -> None:
        """Block until nothing of any stream of the device is outstanding."""
        self._captures.refuse("synchronize", f"cpu:{index}")
        with self._lock:
            # valuerefs() is one step, where a stream may appear or die during a loop over items().
            alive = [stream for ref in self._streams.valuerefs() if (stream := ref()) is not None]
            streams = [stream for stream in alive if self.stream_index(stream) == index]
            # A stream that lives has them before its tail, and may have told of their errors.
            points = [point for at, point, ref in self._running if at == index and ref() is None]
            lost = index in self._lost or any(stream.lost for stream in streams)
            self._lost.discard(index)
            for stream in streams:
                stream.lost = False
        self._finish([*(stream.tail for stream in streams), *points], streams, lost=lost)
        with self._lock:
            self._running = {one for one in self._running if not one[1].happened}

    def _finish(self, points: Sequence[Point | None], streams: list[CpuStream], *, lost: bool) -> None:
        """Wait for all of *points*, then raise the first error; *streams* can be used again.

        *lost* says that work of this process's parent belongs to them as well.
        """
        first: Point | None = None
        for point in points:
            try:
                cpu_timeline.wait(point)
            except BaseException as error:
                if point is None or error is not point.error:  # not from the work: a Ctrl-C
                    raise
                first = first or point
        for stream in streams:
            if stream.tail is not None and stream.tail.happened and stream.tail.error is not None:
                stream.tail = None
        if lost:
            raise lost_at_fork()
        raised = None if first is None else first.failure()
        if raised is not None:
            raise raised

    # -- events ------------------------------------------------------------------------------------------

    def create_event(
        self, index: int | None, *, enable_timing: bool, blocking: bool, interprocess: bool
    ) -> CpuEvent:
        """Return a new event; every event of the CPU keeps time and sleeps in `synchronize`."""
        return CpuEvent(index)

    def adopt_event(self, native: object) -> CpuEvent:
        """Return the event behind a native one; torch's own CPU event can't even be recorded."""
        if isinstance(native, CpuEvent):
            return native
        if isinstance(native, torch.Event) and native.device.type == "cpu":
            with self._lock:
                return self._native_events.setdefault(native, CpuEvent(None))
        raise StreamTypeError(operation="an event argument", got=native, expected="an event of the CPU")

    def event_index(self, event: CpuEvent) -> int | None:
        """Return the virtual device that the event is bound to."""
        return event.index

    def is_recorded(self, event: CpuEvent) -> bool:
        """Say whether the event was ever recorded."""
        return event.point is not None

    def record_event(self, event: CpuEvent, stream: CpuStream) -> None:
        """Put a point at the end of *stream*."""
        if stream.foreign:
            raise refuse_foreign("recording an event on")
        event.index = self.stream_index(stream)
        if self._captures.record(event, stream):
            return
        event.point = cpu_timeline.after(queue=stream)

    def wait_event(self, stream: CpuStream, event: CpuEvent) -> None:
        """Put the event's present point before whatever *stream* does next."""
        if stream.foreign:
            raise refuse_foreign("waiting for an event on")
        if self._captures.wait(stream, event):
            return
        point = event.point
        if point is None or (point.happened and point.error is None):
            return
        cpu_timeline.after(point, queue=stream)
        if self._is_current(stream):
            error = self._catch_up(stream, point)
            if error is not None:
                raise error

    def query_event(self, event: CpuEvent) -> bool:
        """Say whether the event has happened."""
        self._captures.refuse("event.query", event)
        return event.query()

    def synchronize_event(self, event: CpuEvent) -> None:
        """Sleep until the event has happened."""
        self._captures.refuse("event.synchronize", event)
        event.synchronize()

    def elapsed_ms(self, start: CpuEvent, end: CpuEvent) -> float:
        """Return milliseconds by the host's clock, of a resolution below a microsecond."""
        assert start.point is not None
        assert end.point is not None
        return (end.point.time_ns - start.point.time_ns) / 1e6

    # -- what is asynchronous ----------------------------------------------------------------------------

    def launch(self, task: Callable[[], None], stream: CpuStream) -> None:
        """Run *task* in order on *stream*: on its thread, or in the caller where some thread has it current.

        Raises:
            StreamInUseError: another thread has it current, under `devstream.testing.strict`.
        """
        if self._captures.launch(task, stream):
            return
        if self.deferred is not None:
            self.deferred(task, stream)
            return
        index = self.stream_index(stream)
        if _objects.strict_depth:
            other = self._threads.who_chose(stream, index, beside=self.here.chosen)
            if other is not None:
                raise StreamInUseError(stream=stream, thread=other)
        inline = self.here.in_task(task, stream)
        if self._is_current(stream):
            if self.here.runs_task_of(stream):  # in its own turn, which ends only after this
                task()
            else:
                cpu_timeline.run(inline, stream)
            return

        def work() -> None:
            with self.here.running(stream, index):
                task()

        point = stream.worker.run(cpu_timeline, work, stream, inline=inline)
        with self._lock:
            # A stream may be dropped while it works, so the device keeps the points too.
            self._running = {one for one in self._running if not one[1].happened}
            self._running.add((index, point, weakref.ref(stream)))

    def clear_error(self, stream: CpuStream) -> None:
        """Make *stream* usable again after its work failed, once what was issued to it has run."""
        point = stream.tail
        if point is not None and self._catch_up(stream) is not None and stream.tail is point and point.happened:
            stream.tail = None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: CpuStream) -> None:
        """Copy on the stream's thread."""
        inference = torch.is_inference_mode_enabled()  # of the caller: it is where the destination was made

        def task() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                destination.copy_(source)

        self.launch(task, stream)

    def capture(self, issue: Callable[[], object], stream: CpuStream, *, pool: object = None) -> CpuGraph:
        """Record what is launched; memory is the CPU's own in any case. Tensor operations run at once, as ever."""
        return self._captures.capture(issue, stream, pool)

    def is_capturing(self) -> bool:
        """Say whether this thread's current stream is being captured."""
        return self._captures.holds(self.current_stream(None))

    def hold(self, stream: CpuStream) -> CpuLatch:
        """Hold what is recorded on *stream* from now on."""
        return CpuLatch(cpu_timeline.gate(held=True, queue=stream), _open, stream)

    # -- memory ------------------------------------------------------------------------------------------

    def record_stream(self, tensor: torch.Tensor, stream: CpuStream) -> None:
        """Do nothing more: the CPU frees memory only when nobody refers to it, and a copy's thread does."""
        self.profile.require(self, Capability.RECORD_STREAM, "record_stream")

    def allocation_stream(self, tensor: torch.Tensor) -> CpuStream | None:
        """Return the stream that made *tensor*, known under `devstream.testing.cpu(strict=True)`."""
        return self.owners.get(tensor.untyped_storage())

    # -- changes of state --------------------------------------------------------------------------------

    def change(self, **options: Any) -> CpuOptions:  # Any: the fields of CpuOptions have several types
        """Change some options and return the ones before."""
        before, self.options = self.options, replace(self.options, **options)
        return before

    def _is_current(self, stream: CpuStream) -> bool:
        """Say whether some thread issues operations to *stream*; each starts on the default stream."""
        return stream.stream_id == 0 or self._threads.who_chose(stream, self.stream_index(stream)) is not None

    def _catch_up(self, stream: CpuStream, point: Point | None = None) -> BaseException | None:
        """Block until the work of *stream* has run; its own task waits only for *point*, or it would never end."""
        return cpu_timeline.catch_up(point if self.here.runs_task_of(stream) else stream.tail)

    def _after_fork(self) -> None:
        # Threads don't survive a fork: what they had not finished never will be in the child.
        global cpu_timeline
        cpu_timeline = Timeline()
        self._lock = threading.RLock()
        self._lost.update(index for index, point, ref in self._running if not (point.happened or ref()))
        self._running = set()
        for stream in list(self._streams.values()):
            if stream.tail is not None and not stream.tail.happened:
                stream.tail, stream.lost = None, True
            stream.worker = Worker(f"devstream-cpu-{stream.device_index}-{stream.stream_id}")


def _open(gate: Point) -> None:
    cpu_timeline.open(gate)  # of now: a forked child has another
