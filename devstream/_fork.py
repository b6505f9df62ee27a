"""Locks in a forked child: another thread of the parent may hold one, and that thread doesn't exist there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


def renew(scope: dict[str, Any], name: str = "_lock", make: Callable[[], Any] = threading.RLock) -> None:
    """Give the module whose names are *scope* a new lock as *name*, made by *make*, in every forked child.

    Re-entrant by default: the garbage collector may run a finalizer that needs the lock while its thread holds it.
    """
    os.register_at_fork(after_in_child=lambda: scope.__setitem__(name, make()))
