"""Collectives of torch.distributed: the handle that a caller waits for, and how to stand in for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any


@lru_cache
def _watched_class() -> type:
    # Not at import: a torch that is built without distributed has no such class.
    from torch.distributed import Work  # noqa: PLC0415

    class WatchedWork(Work):
        """A collective in flight that tells when its caller has waited for it."""

        def __init__(self, inner: Work, waited: Callable[[], None]) -> None:
            super().__init__()
            self._inner, self._waited = inner, waited

        def wait(self, timeout: timedelta | None = None) -> bool:
            done = self._inner.wait() if timeout is None else self._inner.wait(timeout)
            self._waited()
            return done

        def synchronize(self) -> None:
            self._inner.synchronize()
            self._waited()

        def block_current_stream(self) -> None:
            self._inner.block_current_stream()
            self._waited()

        def is_completed(self) -> bool:
            done = self._inner.is_completed()
            if done:
                self._waited()
            return done

        def is_success(self) -> bool:
            return self._inner.is_success()

        def exception(self) -> Any:
            return self._inner.exception()

        def source_rank(self) -> int:
            return self._inner._source_rank()

        def _source_rank(self) -> int:
            return self._inner._source_rank()

        def result(self) -> Any:
            return self._inner.result()

        def get_future(self) -> Any:
            return self._inner.get_future()

    return WatchedWork


def watched(boxed: Any, waited: Callable[[], None]) -> Any:
    """Return a stand-in for the boxed Work that a collective returned; it calls *waited* when waited for."""
    from torch.distributed import Work  # noqa: PLC0415 - see above

    work = _watched_class()(Work.unbox(boxed), waited)
    return work, work.boxed()


@lru_cache
def _deferred_class() -> type:
    from torch.distributed import Work  # noqa: PLC0415 - see above

    class DeferredWork(Work):
        """A collective that is carried out later; *waited* is told of a wait, *done* carries it out."""

        def __init__(self, waited: Callable[[], None], done: Callable[[], None]) -> None:
            super().__init__()
            self._waited, self._done = waited, done

        def wait(self, timeout: timedelta | None = None) -> bool:
            self._waited()
            return True

        def synchronize(self) -> None:
            self._waited()

        def block_current_stream(self) -> None:
            self._waited()

        def is_completed(self) -> bool:
            self._done()
            return True

        def is_success(self) -> bool:
            self._done()
            return True

        def exception(self) -> None:
            return None

    return DeferredWork


def deferred(waited: Callable[[], None], done: Callable[[], None]) -> Any:
    """Return a ``Work``, and its boxed form, for a collective that is carried out later."""
    work = _deferred_class()(waited, done)
    return work, work.boxed()


def finish(result: Any) -> None:
    """Hold the host until the collective that returned *result* is over."""
    from torch.distributed import Work  # noqa: PLC0415 - see above

    Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()


def called_from_python(frame: Any) -> bool:
    """Say whether *frame* (the innermost outside of the modes) is torch.distributed's own Python."""
    return "/torch/distributed/" in frame.f_code.co_filename


__all__ = ["called_from_python", "deferred", "finish", "watched"]
