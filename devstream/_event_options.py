"""Which options an event can have on a device."""

from __future__ import annotations

from devstream.abc import AnyBackend, Capability


def check_event_options(backend: AnyBackend, index: int, timing: bool, blocking: bool, interprocess: bool) -> None:
    """Raise where device *index* of *backend* can't have an event with all of these.

    Raises:
        UnsupportedError: the backend lacks what an option asks for.
        ValueError: two options exclude each other.
    """
    has = backend.capabilities(index)
    if timing and Capability.TIMING not in has:
        raise backend.lacks(Capability.TIMING, "Event(enable_timing=True), which elapsed_time needs,")
    if blocking and Capability.BLOCKING_EVENTS not in has:
        raise backend.lacks(Capability.BLOCKING_EVENTS, "Event(blocking=True)")
    if interprocess and Capability.IPC_EVENTS not in has:
        raise backend.lacks(Capability.IPC_EVENTS, "Event(interprocess=True)")
    if interprocess and timing:
        raise ValueError("an interprocess event keeps no time; give only one of interprocess, enable_timing")


__all__ = ["check_event_options"]
