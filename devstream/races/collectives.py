"""Collectives: work that runs beside every stream from its issue until somebody waits for it.

On a GPU torch's trace tells the collective's stream and its events. On the CPU each collective in flight is a lane
of its own, and its caller is given a stand-in for the ``Work``, whose ``wait()`` tells. What C++ issues there, as
DDP's reducer does, can't be followed like that, since nobody sees its waits; it counts as the current stream's.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from devstream._compat import collectives as torch_collectives
from devstream._compat import modes
from devstream.races.checker import Checker, Work
from devstream.races.lanes import Lanes
from devstream.races.model import LaneKind
from devstream.races.operations import Plan, Tensors, flat
from devstream.races.order import HOST
from devstream.races.sites import Site, here

#: Functional collectives in flight that are remembered before those whose results are gone are looked for.
_FUNCTIONAL_KEPT = 256

Touched = list[tuple[torch.Tensor, bool]]


class Collectives:
    """Follows collectives into *checker*.

    Args:
        own_lane: returns the lane that work on a tensor, issued now, goes to.
    """

    def __init__(self, checker: Checker, lanes: Lanes, own_lane: Callable[[torch.Tensor], int]) -> None:
        self._checker, self._lanes, self._own_lane = checker, lanes, own_lane
        self._order = checker.order
        # Until their callers hold them.
        self._works: deque[object] = deque(maxlen=64)
        # Lanes of collectives that are over. They serve again, or each collective would make every clock longer.
        self._idle: set[int] = set()
        self._functional: dict[int, int] = {}
        #: The device type whose collectives torch's trace follows; "" where there is no trace.
        self.traced = ""
        # The one that is being issued on a GPU, until an event of its stream shows which that is; then its work.
        self._issuing: tuple[Touched, str, Site, int] | None = None
        self._issued: Work | None = None

    def run(self, known: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Issue a collective by *call*, and note what it touches until it is waited for."""
        touched: Touched = []
        for positions, write in ((known.reads, False), (known.writes, True)):
            for at in positions:
                found: Tensors = []
                flat(args[at] if at < len(args) else kwargs.get(known.names[at]), found)
                touched += [(tensor, write) for tensor in found if tensor.layout is torch.strided]
        site = here(3)
        if self.traced and any(tensor.device.type == self.traced for tensor, _ in touched):
            return self._run_traced(touched, known.name, site, call)
        result = call()
        made: Tensors = []
        if known.results:
            flat(result, made)
        with modes.no_function_modes(), self._checker.lock:
            self._checker.bury()
            return self._in_flight(known.name, touched, made, result, site)

    def _in_flight(self, name: str, touched: Touched, made: Tensors, result: Any, site: Site) -> Any:
        functional = name.startswith("_c10d_functional.")
        work = result[-1] if isinstance(result, tuple) else result
        waitable = not functional and issued_from_python()
        lane = self._own_lane(touched[0][0]) if touched else HOST
        flight = self._take_lane(lane) if functional or waitable else lane
        job = Work(self._order, flight, name, site)
        if len(self._functional) > _FUNCTIONAL_KEPT:  # results that were dropped without a wait
            self._functional = {key: one for key, one in self._functional.items() if self._checker.knows(key)}
        for tensor in made:
            self._checker.allocate(tensor.untyped_storage(), lane, site)
            self._functional[tensor.untyped_storage()._cdata] = flight
        for tensor, write in (*touched, *((tensor, True) for tensor in made)):
            self._checker.touch(tensor, tensor.untyped_storage(), job, write=write)
        if not waitable:
            return result
        stand_in, boxed = torch_collectives.watched(work, self._end_of(flight, host=name == "c10d.barrier"))
        self._works.append(stand_in)
        return (*result[:-1], boxed) if isinstance(result, tuple) else boxed

    def _take_lane(self, issuer: int) -> int:
        self._order.wait_lane(issuer, HOST)
        # Only one that the issuer comes after: the lane's own order must not stand for a wait that isn't there.
        lane = next((lane for lane in self._idle if self._order.follows(issuer, lane)), None)
        if lane is None:
            lane = self._order.add_lane(LaneKind.COLLECTIVE, "a collective")
        self._idle.discard(lane)
        self._order.wait_lane(lane, issuer)
        return lane

    def _end_of(self, lane: int, *, host: bool) -> Callable[[], None]:
        over = False

        def waited() -> None:
            nonlocal over
            if not over:  # by the second wait the lane may be another collective's
                over = True
                self._end(lane, host=host)

        return waited

    def _end(self, lane: int, *, host: bool = False) -> None:
        """Let the current stream, and perhaps the host, come after a collective that was waited for.

        The host's side of a wait is Gloo's alone: NCCL's ``wait()`` holds only the current stream, and so here.
        """
        with self._checker.lock:
            if host or not self._lanes.cpu_is_device:
                self._order.wait_lane(HOST, lane)
            self._order.collect(lane, self._lanes.current_cpu(), here())
            self._idle.add(lane)

    def wait_tensor(self, tensor: torch.Tensor) -> None:
        """A functional collective was waited for by its result. Hold the lock."""
        lane = self._functional.pop(tensor.untyped_storage()._cdata, None)
        if lane is not None:
            self._end(lane)

    # -- on a GPU ----------------------------------------------------------------------------------------

    def _run_traced(self, touched: Touched, name: str, site: Site, call: Callable[[], Any]) -> Any:
        with modes.no_function_modes(), self._checker.lock:
            self._checker.bury()
            issuer = self._own_lane(touched[0][0])
            self._issuing, self._issued = (touched, name, site, issuer), None
        try:
            result = call()
        finally:
            with modes.no_function_modes(), self._checker.lock:
                self.recorded_on(None)
        made: Tensors = []
        flat(result, made)
        with modes.no_function_modes(), self._checker.lock:
            for tensor in made:
                storage = tensor.untyped_storage()
                if self._checker.memory_of(storage) is None and self._issued is not None:
                    # By the work's own time, which lies before its event.
                    self._checker.allocate(storage, issuer, site)
                    self._checker.touch(tensor, storage, self._issued, write=True)
        return result

    def recorded_on(self, lane: int | None) -> None:
        """Take the lane of an event, if it isn't the issuer's, for the collective's. Hold the lock.

        None ends the issue: without such an event the collective runs on its issuer's stream.
        """
        if self._issuing is None or lane == self._issuing[3]:
            return
        touched, name, site, issuer = self._issuing
        self._issuing = None
        self._issued = Work(self._order, issuer if lane is None else lane, name, site)
        for tensor, write in touched:
            self._checker.touch(tensor, tensor.untyped_storage(), self._issued, write=write)


def issued_from_python() -> bool:
    """Say whether torch.distributed's Python issues the collective, so that its ``Work`` can be stood in for.

    Told by the innermost frame that belongs neither to us nor to torch's machinery of modes.
    """
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith(("devstream.", "torch._", "torch.utils"))
    ):
        frame = frame.f_back
    return torch_collectives.called_from_python(frame)


__all__ = ["Collectives", "issued_from_python"]
