"""Hold a CUDA stream from the host: the stream waits for a word of pinned memory, which takes no compute unit.

A spinning kernel would need a compiler, and a blocking host function would hold up every other one in the process.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import torch

from devstream import _fork
from devstream.exceptions import StreamError, UnsupportedError

#: A latch that nobody releases lets go after this many seconds, so that a failed test doesn't hang a machine.
LIMIT_S = 20.0

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ. Source: cuda.h, CUstreamWaitValue_flags, read November 2026

#: Words that a stream may still be about to read, each with the event behind its wait.
_words: list[tuple[torch.Tensor, torch.Event]] = []
_words_lock = threading.RLock()
_fork.renew(globals(), "_words_lock")


class MemoryLatch:
    """Holds one stream: *handle* is its ``cudaStream_t``."""

    def __init__(self, handle: int, stream: torch.Stream) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._pointer = ctypes.cast(self._word.data_ptr(), ctypes.POINTER(ctypes.c_int32))
        code = _wait_value()(
            ctypes.c_void_p(handle),
            ctypes.c_uint64(self._word.data_ptr()),
            ctypes.c_uint32(1),
            ctypes.c_uint(_EQUAL),
        )
        if code != 0:
            raise LatchError(code=code)
        behind = torch.Event(device=stream.device)
        behind.record(stream)
        with _words_lock:
            # The allocator may hand a freed word out again, and the stream would then wait for its new content.
            _words[:] = [(word, event) for word, event in _words if not event.query()]
            _words.append((self._word, behind))
        self._timer = threading.Timer(LIMIT_S, self.release)
        self._timer.daemon = True
        self._timer.start()

    def release(self) -> None:
        """Let the stream go on."""
        self._pointer[0] = 1
        self._timer.cancel()


class LatchError(StreamError):
    """The driver refused to hold a stream. Facts: *code* (a CUresult)."""

    def __init__(self, *, code: int) -> None:
        super().__init__(code=code)

    def __str__(self) -> str:
        return f"cuStreamWaitValue32 failed with CUresult {self.code}; this device or driver can't hold a stream"


def _wait_value() -> Any:  # Any: a foreign function of ctypes
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise UnsupportedError(
            operation="holding a stream",
            backend="cuda",
            capability=name,
            alternative="run this test where NVIDIA's driver library can be loaded",
        ) from error
    # The second version of the call is the one without the driver flag of the first (CUDA 12 and later).
    return getattr(library, "cuStreamWaitValue32_v2", None) or library.cuStreamWaitValue32
