"""`latch`: hold a stream, look, release, look again. That is how a test sees order without sleeping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from devstream._objects import as_stream
from devstream.abc import Latch, StreamArg


@contextmanager
def latch(stream: StreamArg) -> Iterator[Latch]:
    """Keep what is issued to *stream* inside the block from happening, until `Latch.release` or the block's end.

    Work on an accelerator, and events, waits and copies on every backend, stay behind the latch. The host isn't
    held: blocking on the stream inside the block, before the release, blocks for ever.

    Args:
        stream: any stream that devstream takes.

    Raises:
        UnsupportedError: the backend has no `Backend.hold`.
    """
    backend, own = as_stream(stream)
    held = backend.hold(own)
    try:
        yield held
    finally:
        held.release()


__all__ = ["latch"]
