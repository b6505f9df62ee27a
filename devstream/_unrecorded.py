"""A wait for an event that was never recorded: it orders nothing, which is logged once a line, or an error."""

from __future__ import annotations

import logging
import sys

from devstream.exceptions import EventNotRecordedError

_log = logging.getLogger("devstream")

_logged: set[tuple[str, int]] = set()


def tell_unrecorded_wait(event: object, *, strict: bool) -> None:
    """Log that the caller's line waits for *event*, which was never recorded; raise where *strict*."""
    if strict:
        raise EventNotRecordedError(operation="wait", event=event)
    # Once a line: rings of buffers wait for their not yet recorded events on purpose, in every step.
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("devstream."):
        frame = frame.f_back
    site = (frame.f_code.co_filename, frame.f_lineno)
    if site not in _logged:
        _logged.add(site)
        _log.warning("%s:%d waits for an event that was never recorded: %r orders nothing", *site, event)


__all__ = ["tell_unrecorded_wait"]
