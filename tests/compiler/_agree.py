"""Run a program in eager and compiled, and compare what it gives and in which order it works on which stream."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import devstream
from devstream import _observe, compiler


class Log(TorchDispatchMode):
    """Operations with their streams, records, waits and synchronizations; objects by their order of appearance."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, ...]] = []
        self._names: dict[Any, str] = {}
        self._kept: list[object] = []  # so that no identity comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # A handle that an event makes is no work of the program.
        if name not in ("detach", "lift_fresh", "alias", "empty") and not _is_handle(result):
            self.lines.append((name, self._stream(devstream.current_stream("cpu"))))
        return result

    def notice(self, notice: Any) -> None:
        match notice:
            case _observe.Record():
                self.lines.append(("record", self._event(notice.event), self._stream(notice.stream)))
            case _observe.Wait():
                self.lines.append(("wait", self._event(notice.event), self._stream(notice.stream)))
            case _observe.Synchronize():
                self.lines.append(("synchronize", self._target(notice.target)))
            case _observe.RecordStream():
                self.lines.append(("record_stream", self._stream(notice.stream)))

    def _stream(self, stream: Any) -> str:
        backend = devstream.backend("cpu")
        return self._name("stream", backend.stream_key(backend.adopt_stream(stream)))

    def _event(self, event: Any) -> str:
        native = event.native if isinstance(event, devstream.Event) else event
        self._kept.append(native)
        return self._name("event", id(native))

    def _target(self, target: Any) -> str:
        if isinstance(target, torch.device):
            return str(target)
        return self._stream(target) if isinstance(target, torch.Stream) else self._event(target)

    def _name(self, kind: str, key: Any) -> str:
        kin = sum(1 for name in self._names.values() if name.startswith(kind))
        return self._names.setdefault((kind, key), f"{kind} {kin}")


def _is_handle(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.dtype == torch.int64 and result.dim() == 0


class Backend:
    """`devstream.compiler.interpret`, which also counts compilations and logs each call."""

    def __init__(self) -> None:
        self.compiled = 0
        self.captured: list[compiler.Captured] = []
        self.log = Log()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1
        self.captured.append(compiler.capture(graph))
        inner = compiler.interpret(graph, inputs)

        def run(*arguments: Any) -> Any:
            with self.log, _observe.subscribe(self.log.notice):
                return inner(*arguments)

        return run


def eager_log(program: Any, *arguments: Any) -> tuple[Any, Log]:
    log = Log()
    with log, _observe.subscribe(log.notice):
        return program(*arguments), log


def agree(program: Any, *calls: tuple[Any, ...], compilations: int = 1) -> Backend:
    """Check that *program* gives the same values in the same order, eager and compiled, for each of *calls*."""
    backend = Backend()
    torch.compiler.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for arguments in calls:
        backend.log = Log()
        got = compiled(*_fresh(arguments))
        wanted, log = eager_log(program, *_fresh(arguments))
        for one, other in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            else:
                assert isinstance(one, type(other))
        assert backend.log.lines == log.lines, f"\n{backend.log.lines}\n{log.lines}"
        assert log.lines, "the program did nothing that could be compared"
    assert backend.compiled == compilations
    return backend


def _fresh(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy the tensors, which a program may change."""
    return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in arguments)
