"""Do a stream and an event belong together? If not, the error that says so."""

from __future__ import annotations

from devstream.abc import AnyBackend
from devstream.exceptions import DeviceMismatchError


def describe(stream: object, backend: AnyBackend) -> str:
    """Return the words for a stream in messages: its id and its device."""
    index = backend.stream_index(stream)
    return f"stream {getattr(stream, 'stream_id', '?')} on {backend.device_type}:{index}"


def same_device(  # noqa: PLR0917 - two triples, in the order of the sentence
    operation: str,
    event_backend: AnyBackend,
    event_index: int | None,
    event: object,
    stream_backend: AnyBackend,
    stream_index: int,
    stream: object,
) -> None:
    """Raise `DeviceMismatchError` where an event can't be recorded or waited for on a stream.

    *operation* is ``"record"`` or ``"wait"``. *event_index* is the device that the event is bound to, None where
    any will do.
    """
    if event_backend is stream_backend and event_index in (None, stream_index):
        return
    wanted = f"{stream_backend.device_type}:{stream_index}"
    at = "" if event_index is None else f":{event_index}"
    one_backend = event_backend is stream_backend
    raise DeviceMismatchError(
        operation=operation,
        first=f"the event is on {event_backend.device_type}{at}{_of(event_backend, one_backend)}",
        second=f"{describe(stream, stream_backend)}{_of(stream_backend, one_backend)}",
        advice=(
            f'make the event with devstream.Event("{wanted}")'
            if operation == "record" and one_backend
            else "only streams and events of one backend can wait for each other; synchronize the event instead"
        ),
    )


def _of(backend: AnyBackend, one_backend: bool) -> str:
    # Two backends may serve one device type, so the device alone doesn't tell them apart.
    return "" if one_backend else f" (backend {backend.name!r})"


__all__ = ["describe", "same_device"]
