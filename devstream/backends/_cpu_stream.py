"""The stream of the CPU's backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from devstream import _compat
from devstream._objects import Stream
from devstream.backends._cpu_queue import Point, Worker
from devstream.exceptions import StreamNotEnteredError

if TYPE_CHECKING:
    from devstream.backends._cpu_current import CurrentStreams
    from devstream.backends.cpu import CpuBackend


class CpuStream(Stream):
    """A queue of the CPU. ``with s:`` makes it current in this thread."""

    tail: Point | None
    worker: Worker
    granted_priority = 0
    foreign = False  # another library's, under a profile
    #: Whether the parent of this forked process left work here that never ends now.
    lost: bool = False

    def __new__(cls, backend: CpuBackend, index: int, stream_id: int, requested_priority: int = 0) -> Self:
        """Return the stream with this id; only the backend calls it."""
        # torch has one CPU: its index is -1.
        self = _compat.stream_from_ids(cls, stream_id, index or -1, backend.torch_type)
        self.tail = None
        self.requested_priority = requested_priority
        self.worker = Worker(f"devstream-cpu-{index}-{stream_id}")
        return self

    # A signal's handler (Ctrl-C) may raise between any two calls. Whatever is done is inside the try statements,
    # and can be undone or done again, so the thread never keeps a stream whose block it isn't in.

    def __enter__(self) -> Self:
        here: CurrentStreams = self._backend.here  # type: ignore[attr-defined]
        depth = len(here.blocks)
        try:
            self._backend.push(self)  # type: ignore[attr-defined]
            return self
        except BaseException:
            here.abandon(depth)
            raise

    def __exit__(self, *exc_info: object) -> None:
        depth = -1
        try:
            depth = len(self._backend.here.blocks)  # type: ignore[attr-defined]
            self._backend.pop(self)  # type: ignore[attr-defined]
        except StreamNotEnteredError:
            raise
        except BaseException:
            here: CurrentStreams = self._backend.here  # type: ignore[attr-defined]
            if depth in {-1, len(here.blocks)}:
                here.leave(self)
            raise

    # torch compares ids, and two backends of the CPU each count their own.

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CpuStream) and other._backend is not self._backend:
            return False
        return torch.Stream.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        # From torch 2.14 on it leaves what is no stream to Python.
        return equal if equal is NotImplemented else not equal

    __hash__ = torch.Stream.__hash__


__all__ = ["CpuStream"]
