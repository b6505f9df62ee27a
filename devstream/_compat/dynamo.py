"""How code of ours is traced: rules for Dynamo, and when it gets them. Doesn't import Dynamo itself.

Dynamo turns each object that it meets into a variable; which variable, it looks up by the object's exact type.
`install` adds types of ours to that table (`devstream._compat.dynamo_variables`), and changes nothing else:

- `Traced`, a function with two meanings: its ``eager`` one, and a ``rule`` that acts on a `Trace`;
- our stream classes, and those of plug-ins. Dynamo takes each subclass of ``torch.Stream`` for a native stream
  and replaces its methods by its own, which know native events only; our variable inlines functions of ours
  instead (`stream_methods`);
- torch's event classes, for one more advice in an error of torch's.

[Note: When the rules are installed]
`devstream.compiler` installs them when it is imported, before anything is traced for it. For another compiler a
`Traced` that is met before is inlined by Dynamo like any Python object; its ``__call__`` then installs the
rules and has Dynamo start the frame anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any  # Any: Dynamo's types are private

import torch

from devstream import _fork

_lock = threading.RLock()
_fork.renew(globals())
_installed = False
_stream_classes: set[type] = set()

#: Classes that traced code makes objects of their `_made_as` of, a subclass, instead.
made_classes: list[type] = []
#: The functions that Dynamo inlines for the methods of our streams.
stream_methods: dict[str, Callable[..., Any]] = {}
#: Gives the operator that puts a stream's handle and slot into the graph.
bind_op: Callable[[], Any]


class Traced:
    """A function that runs *eager* when called, and *rule* (given a `Trace` and the arguments) under Dynamo."""

    __slots__ = ("eager", "name", "rule")

    def __init__(self, name: str, rule: Callable[..., Any], eager: Callable[..., Any]) -> None:
        self.name, self.rule, self.eager = name, rule, eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _install_and_restart()
        return self.eager(*args, **kwargs)


def add_stream_classes(classes: Collection[type]) -> None:
    """Let Dynamo trace streams of exactly these classes by our rules; they then live as long as the process."""
    if _stream_classes.issuperset(classes):
        return
    with _lock:
        _stream_classes.update(classes)
        installed = _installed
    if installed:
        from devstream._compat import dynamo_variables  # noqa: PLC0415 - see above

        dynamo_variables.register(list(classes))


def install() -> None:
    """Add our types to Dynamo's table; imports Dynamo. Needless once Dynamo has a hook for it."""
    global _installed
    if _installed:
        return
    # Before the lock: an import may wait for another thread's.
    from devstream._compat import dynamo_variables as variables  # noqa: PLC0415 - see above

    with _lock:
        if not _installed:
            variables.register([Traced, *_stream_classes, *variables.native_event_classes()])
            variables.register_classes()
            _installed = True


def tell(methods: dict[str, Callable[..., Any]], bind: Callable[[], Any]) -> None:
    """Set `stream_methods` and `bind_op`."""
    global bind_op
    stream_methods.update(methods)
    bind_op = bind


def _install_and_restart() -> None:
    """Install the rules and have the frame traced anew; Dynamo runs this function itself while it traces."""
    install()
    from devstream._compat import dynamo_variables  # noqa: PLC0415 - see above

    dynamo_variables.restart()


# What torch._dynamo.assume_constant_result does; it can't be called without importing Dynamo.
_install_and_restart._dynamo_marked_constant = True  # type: ignore[attr-defined]

__all__ = ["Traced", "add_stream_classes", "install", "made_classes", "tell"]
