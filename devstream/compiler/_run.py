"""Programs at run time: the call's record, the events that calls share, and the function that runs the steps."""

from __future__ import annotations

import itertools
import linecache
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any  # Any: streams, events and values of every kind

import torch

from devstream import _handles, _objects, _streams
from devstream.abc import AnyBackend, Capability
from devstream.compiler._emit import Plan, emit, pooled
from devstream.exceptions import CaptureError

_files = itertools.count(1)


@dataclass(slots=True, weakref_slot=True)
class CallRecord:
    """What the backward needs of its forward call.

    Attributes:
        streams: by number; 0 is the stream that was current at the call.
        events: for each stream that made saved values, the event behind which they are there.
        take: the memory of the graphs that the call ran as, None where it was launched.
    """

    streams: tuple[Any, ...]
    events: dict[int, Any] = field(default_factory=dict)
    take: Any = None


class _Current(threading.local):
    """What the call that this thread is in has resolved: its streams and its user's events."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []


_current = _Current()


class entered:  # noqa: N801 - a context manager
    """Let the program that is called inside find these streams and events."""

    __slots__ = ("_call",)

    def __init__(self, streams: tuple[Any, ...], events: tuple[Any, ...]) -> None:
        self._call = (streams, events)

    def __enter__(self) -> None:
        _current.calls.append(self._call)

    def __exit__(self, *exception: object) -> None:
        _current.calls.pop()


class Holds:
    """Values that streams may still use after their call, with the events after which they don't."""

    def __init__(self, backend: AnyBackend) -> None:
        self._backend = backend
        self._held: deque[tuple[tuple[Any, ...], tuple[Any, ...]]] = deque()

    def hold(self, events: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        """Keep *values* until all of *events* have happened."""
        self._held.append((events, values))

    def sweep(self) -> None:
        """Let go of what is over, from the oldest on."""
        while self._held:
            try:
                entry = self._held.popleft()
            except IndexError:  # another thread sweeps as well
                return
            over = False
            try:
                over = all(self._backend.query_event(event) for event in entry[0])
            except CaptureError:  # no event can be asked while a stream is captured
                return
            finally:
                if not over:
                    self._held.appendleft(entry)
            if not over:
                return

    def __len__(self) -> int:
        return len(self._held)


class Runner:
    """Runs one program.

    Args:
        plan: the program with its code.
        backend: whose streams they are.
        ambient: for each stream beyond the function's own, the device whose current stream it is.
        backward: whether it finds its call's record by the token among its arguments.
    """

    def __init__(
        self, plan: Plan, backend: AnyBackend, *, ambient: Sequence[str] = (), backward: bool = False
    ) -> None:
        self._boxed_call = True  # on the instance: AOT Autograd copies its dict to a wrapper
        self.plan, self.backend, self.backward = plan, backend, backward
        self.source = emit(plan)
        self.holds = Holds(backend)
        self._ambient = tuple(torch.device(device).index or 0 for device in ambient)
        self._pool: deque[tuple[Any, ...]] = deque()
        self.recorders = pooled(plan)
        self._token = plan.parameters.index(plan.token) if backward and plan.token is not None else None
        self._completions = tuple((one.stream, one.event) for one in plan.program.completions)
        self._given = frozenset(one.event for one in plan.program.given)
        self._call = self.function(self.source, {})

    def function(self, source: str, instead: dict[str, Any]) -> Callable[..., tuple[Any, ...]]:
        """Return the function that *source* defines; *instead* gives other meanings to names that it calls."""
        backend = self.backend
        names: dict[str, Any] = {
            "record": backend.record_event,
            "wait": backend.wait_event,
            "switch": backend.set_stream,
            "launch": self._launch,
            "there": self._there,
            "fresh": self.fresh,
            "take": self._take,
            "give": self._give,
            "hold": self.holds.hold,
            "lend": self._lend,
            "current": lambda stream: backend.current_stream(backend.stream_index(stream)),
            "user_record": self.user_record,
            "user_wait": self.user_wait,
            "synchronize": self._synchronize,
            "record_stream": _streams.record_stream,
            "write": _write,
            **{f"f{number}": one.code for number, one in self.plan.code.items()},
            **instead,
        }
        if self.plan.numbers is not None:
            names["numbers"] = self.plan.numbers.code
        file = f"<devstream program {next(_files)}: {self.plan.program.name}>"
        # So that a traceback through the program shows its lines.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), names)
        call: Callable[..., tuple[Any, ...]] = names["call"]
        return call

    # -- calls -------------------------------------------------------------------------------------------

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        """Issue the program; *args* is emptied.

        Raises:
            CaptureError: the user captures, on a device whose operations run at once.
        """
        if self.backend.works_in_threads and self.backend.is_capturing():
            raise CaptureError(
                operation="calling a compiled function",
                stream=self.backend.current_stream(None),
                advice='compile it with mode="reduce-overhead", which captures it, or capture on an accelerator',
            )
        if self.holds:
            self.holds.sweep()
        if self.backward:
            return self._backward(args)
        streams, events = _current.calls[-1]
        record, token = None, None
        if self.plan.token is not None:
            record = CallRecord(streams)
            token = _handles.new_handle(record, keep=True)
        kept: dict[int, Any] = {}
        results = self._issue(args, self._all(streams), events, {}, kept, token)
        if record is not None:
            record.events = {stream: kept[event] for stream, event in self._completions}
        return results

    def _issue(self, args: list[Any], streams: tuple[Any, ...], *others: Any) -> tuple[Any, ...]:
        try:
            return self._call(args, streams, *others)
        except BaseException:
            # The caller gets the error now; nobody else shall get it again from the streams that it passed.
            for stream in streams:
                self.backend.clear_error(stream)
            raise

    def _all(self, streams: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self._ambient:
            return streams
        return (*streams, *map(self.backend.current_stream, self._ambient))

    def _backward(self, args: list[Any]) -> tuple[Any, ...]:
        backend = self.backend
        assert self._token is not None
        record: CallRecord = _handles.owner_of(args[self._token])
        home = record.streams[0]
        here = backend.current_stream(backend.stream_index(home))
        # Of streams that got nothing from the forward, whatever they did is over for what is read here.
        given = record.events if self._given <= record.events.keys() else self._events(record)
        if backend.stream_key(here) == backend.stream_key(home):
            return self._issue(args, self._all(record.streams), (), given, {}, None)
        outside = [one for one in args if isinstance(one, torch.Tensor)]
        results = self.elsewhere(
            lambda: self._issue(args, self._all(record.streams), (), given, {}, None), home, here, outside
        )
        self._lend(results, here)
        return results

    def _events(self, record: CallRecord) -> dict[int, Any]:
        events = dict(record.events)
        for stream in self._given - events.keys():
            events[stream] = self.fresh(record.streams[stream])
            self.backend.record_event(events[stream], record.streams[stream])
        return events

    def elsewhere(
        self, issue: Callable[[], tuple[Any, ...]], home: Any, here: Any, outside: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Run where the forward ran; *here* gave the tangents and gets the gradients.

        *outside* is kept until *issue*'s work is done.
        """
        backend = self.backend
        before, after = self.fresh(here), self.fresh(home)
        backend.record_event(before, here)
        previous = backend.current_stream(None)
        backend.set_stream(home)
        try:
            backend.wait_event(home, before)
            results = issue()
            backend.record_event(after, home)
        finally:
            backend.set_stream(here)
            backend.set_stream(previous)
        backend.wait_event(here, after)
        self.holds.hold((after,), tuple(outside))
        return results

    # -- what the text calls -----------------------------------------------------------------------------

    user_record = staticmethod(_objects.record)
    user_wait = staticmethod(_objects.wait)

    def fresh(self, stream: Any) -> Any:
        """Return a new event for *stream* to record."""
        return self.backend.create_event(
            self.backend.stream_index(stream), enable_timing=False, blocking=False, interprocess=False
        )

    def _take(self, streams: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return self._pool.pop()
        except IndexError:
            return tuple(self.fresh(streams[recorder]) for recorder in self.recorders)

    def _give(self, events: tuple[Any, ...]) -> None:
        # A wait has bound to its record already when the call is issued, where the vendor defines it so.
        if self.backend.rerecord_overwrites:
            self._pool.append(events)

    def _lend(self, values: Sequence[Any], stream: Any) -> None:
        """Tell the allocator that *stream* will use memory which belongs to another one."""
        if Capability.RECORD_STREAM not in self.backend.stream_capabilities(stream):
            return
        for one in values:
            if isinstance(one, torch.Tensor) and one.device.type == self.backend.device_type:
                self.backend.record_stream(one, stream)

    def _launch(self, job: Callable[[], None], stream: Any) -> None:
        inference = torch.is_inference_mode_enabled()

        def task() -> None:
            # A thread has modes of its own.
            with torch.inference_mode(inference), torch.no_grad():
                job()

        self.backend.launch(task, stream)

    def _there(self, stream: Any, back: Any) -> None:
        """Wait until what *stream*'s thread makes is there, and order nothing by it."""
        self.backend.set_stream(stream)
        self.backend.set_stream(back)

    def _synchronize(self, streams: Sequence[Any]) -> None:
        for index in dict.fromkeys(map(self.backend.stream_index, streams)):
            self.backend.synchronize_device(index)


def calls_streams() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the streams and the user's events of the call that this thread is in."""
    return _current.calls[-1]


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


__all__ = ["CallRecord", "Holds", "Runner", "calls_streams", "entered"]
