"""On which stream a backward operation counts as run, on the CPU.

On an accelerator autograd runs each backward operation on the stream of its forward, and puts in the waits. On
the CPU it runs them where ``backward()`` was called. A program must not race on the one and be right on the other.
So here they count as run on the stream of their forward, one after another, after the caller's earlier work and
before its later. A missing wait *inside* one backward (in a hook, say) isn't found on the CPU for that.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Any, Protocol

import torch

from devstream._compat import modes


class _Waits(Protocol):
    def wait_lane(self, lane: int, other: int) -> None: ...


class _Streams(Protocol):
    def of_stream(self, stream: Any) -> int: ...  # Any: streams of the CPU; the same below


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The number of the next autograd node at each change of the current stream, and the lanes around it.
        self.numbers: list[int] = []
        self.lanes: list[int] = []
        self.before: int | None = None
        #: The lane that called backward, and the lane of the last backward operation.
        self.caller: int | None = None
        self.last = 0


class Backward:
    """Follows which stream the CPU's autograd nodes were made on."""

    def __init__(self, order: _Waits, lanes: _Streams) -> None:
        self._order, self._lanes = order, lanes
        self._here = _Thread()
        self._switching: set[int] = set()

    def switched(self, stream: Any, previous: Any) -> None:  # Any: streams of the CPU
        """Note that nodes made by this thread from now on belong to *stream*."""
        here, number, lane = self._here, modes.next_node_number(), self._lanes.of_stream(stream)
        self._switching.add(threading.get_ident())
        if here.caller is None and modes.current_backward_node() is not None:
            # The first that is seen of a backward is a hook that chooses a stream.
            here.caller = here.last = self._lanes.of_stream(previous)
        if here.before is None:
            here.before = self._lanes.of_stream(previous)
        if here.numbers and here.numbers[-1] == number:
            here.lanes[-1] = lane
        elif (here.lanes[-1] if here.lanes else here.before) != lane:
            here.numbers.append(number)
            here.lanes.append(lane)

    def lane(self, node: torch.autograd.graph.Node, current: int) -> int:
        """Return the lane of an operation of *node*, after autograd's own waits."""
        here = self._here
        if here.caller is None:
            here.caller = here.last = current
        if current != here.caller:
            return current  # a forward that is run again, or a hook, chose this stream itself
        lane = self._forward_lane(node, here.caller)
        if lane != here.last:
            self._order.wait_lane(lane, here.last)
            here.last = lane
        return lane

    def _forward_lane(self, node: torch.autograd.graph.Node, caller: int) -> int:
        number = modes.node_number(node)
        here = self._here
        # Numbers are each thread's own: with several threads that switch, a node doesn't tell whose it is.
        if number is None or here.before is None or len(self._switching) > 1:
            return caller
        at = bisect_right(here.numbers, number)
        return here.before if at == 0 else here.lanes[at - 1]

    def verb(self) -> None:
        """Note that a hook calls a verb: to it the caller's stream stands for the backward so far."""
        here = self._here
        if here.caller is not None:
            self._order.wait_lane(here.caller, here.last)
            here.last = here.caller

    @property
    def running(self) -> bool:
        """Whether this thread's last operation belonged to a backward."""
        return self._here.caller is not None

    def end(self) -> None:
        """Let the caller's stream come after the backward that is over."""
        here = self._here
        if here.caller is not None:
            self._order.wait_lane(here.caller, here.last)
            here.caller = None


__all__ = ["Backward"]
