"""The one seam for observation.

Every verb reports here once, after it has acted. The race checker, the recorder, the profiler marks and the
tests subscribe; nothing is patched. With nobody subscribed a verb pays one truth test of `subscribers`
(``bench/overhead.py`` prints what that costs).

What doesn't pass through our verbs and methods isn't seen here: ``with s:`` over a native stream, a
native event's own ``record()``, autograd's joins. Inside `subscribe`, ``devstream.stream(s)`` reports also
for native streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch

from devstream import _fork


@dataclass(frozen=True, slots=True)
class Record:
    """*event* was recorded on *stream*."""

    event: Any  # Any: ours, or a native event of any vendor
    stream: Any  # Any: a stream of any backend; the same below


@dataclass(frozen=True, slots=True)
class Wait:
    """*stream* waits for *event*; *recorded* is False where that was a no-op."""

    stream: Any
    event: Any
    recorded: bool


@dataclass(frozen=True, slots=True)
class Switch:
    """*stream* became current in this thread, in place of *previous*."""

    stream: Any
    previous: Any


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waited for *target*: a stream, an event or a ``torch.device``."""

    target: Any


@dataclass(frozen=True, slots=True)
class Happened:
    """The host asked by ``query()`` whether *target*, a stream or an event, is done, and it was."""

    target: Any


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from *source* to *destination* was issued to *stream*."""

    destination: torch.Tensor
    source: torch.Tensor
    stream: Any


@dataclass(frozen=True, slots=True)
class RecordStream:
    """*tensor*'s memory isn't handed out before *stream* has passed: the allocator was told, or we hold it."""

    tensor: torch.Tensor
    stream: Any


@dataclass(frozen=True, slots=True)
class Access:
    """Work on *stream* reads (or, with *write*, writes) *tensor*; *operation* names it."""

    tensor: torch.Tensor
    stream: Any
    write: bool
    operation: str


Notice: TypeAlias = Record | Wait | Switch | Synchronize | Happened | Copy | RecordStream | Access
Observer: TypeAlias = Callable[[Notice], None]

#: Who listens now. A tuple, replaced whole: a verb that runs in another thread sees the old or the new one.
subscribers: tuple[Observer, ...] = ()
_lock = threading.RLock()
_fork.renew(globals())


class Subscription:
    """Ends with `close`, or with its ``with`` block. Closing twice does nothing."""

    def __init__(self, observer: Observer) -> None:
        self._observer: Observer | None = observer

    def close(self) -> None:
        """Stop reporting to this observer."""
        global subscribers
        with _lock:
            if self._observer is None:
                return
            kept = list(subscribers)
            # By identity: two bound methods of equal objects compare equal, and would unsubscribe each other.
            del kept[next(i for i, other in enumerate(kept) if other is self._observer)]
            subscribers = tuple(kept)
            self._observer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def subscribe(observer: Observer) -> Subscription:
    """Report every notice to *observer*, from the thread that caused it, until the result is closed.

    An observer that raises makes the verb raise, after the verb has acted: that is how a checker stops a
    program at the faulty line.
    """
    global subscribers
    with _lock:
        subscribers = (*subscribers, observer)
    return Subscription(observer)


def answer(target: object, done: bool) -> bool:
    """Return *done*, the answer to ``target.query()``, and report a yes: the host knows as much as by blocking."""
    if done and subscribers:
        publish(Happened(target))
    return done


def publish(notice: Notice) -> None:
    """Give *notice* to everyone subscribed. Call it only under ``if _observe.subscribers:``."""
    for observer in subscribers:
        observer(notice)
