"""Dynamo: how code of ours is traced. The only file that names Dynamo's variables and builders.

Dynamo turns each object that it meets into a variable; which variable, it looks up by the object's exact type. This
module adds two types of ours to that table (`install`), and nothing else of Dynamo is changed:

- `Traced`, a function with two meanings: its ``eager`` one, and a ``rule`` that acts on a `Trace`;
- our stream classes. Dynamo takes each subclass of ``torch.Stream`` for a native stream and replaces its methods by
  its own, which know native events only; our variable inlines functions of ours instead (`trace_methods`).

[Note: When the rules are installed]
Importing Dynamo takes a second, so ``import devstream`` doesn't. A `Traced` that is met before the rules are
installed is inlined by Dynamo like any Python object; its ``__call__`` then installs them and has Dynamo
start the frame anew.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn  # Any: Dynamo's variables are of private classes

import torch

_log = logging.getLogger("devstream")
_lock = threading.Lock()
_installed = False
_stream_classes: set[type] = set()
_breaks_logged: set[tuple[str, int]] = set()


class Traced:
    """A function that runs *eager* when called, and *rule* (given a `Trace` and the arguments) under Dynamo."""

    __slots__ = ("eager", "name", "rule")

    def __init__(self, name: str, rule: Callable[..., Any], eager: Callable[..., Any]) -> None:
        self.name, self.rule, self.eager = name, rule, eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _install_and_restart()
        return self.eager(*args, **kwargs)


def add_stream_class(cls: type) -> None:
    """Let Dynamo inline the methods of *cls*, a class of our streams, instead of its own."""
    with _lock:
        _stream_classes.add(cls)
        if _installed:
            _register([cls])


def install() -> None:
    """Add our types to Dynamo's table; imports Dynamo. Needless once Dynamo has a hook for it."""
    global _installed
    with _lock:
        if not _installed:
            _register([Traced, *_stream_classes, *_native_event_classes()])
            _installed = True


def is_loaded() -> bool:
    """Say whether Dynamo has been imported already."""
    return "torch._dynamo" in sys.modules


def _install_and_restart() -> None:
    """Install the rules; Dynamo evaluates this function itself while it traces (see below)."""
    from torch._dynamo.exc import RestartAnalysis
    from torch._dynamo.symbolic_convert import InstructionTranslator

    install()
    # The second attempt takes another way from here on, which the log of the first would call a fault.
    InstructionTranslator.current_tx().speculation_log.clear()
    raise RestartAnalysis(restart_reason="devstream installed its trace rules")


# What torch._dynamo.assume_constant_result does; it can't be called without importing Dynamo.
_install_and_restart._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _register(types: list[type]) -> None:
    from torch._dynamo.variables.builder import VariableBuilder

    # One table a setting of trace_numpy; both are cached for the process.
    for trace_numpy in (True, False):
        table = VariableBuilder._type_dispatch_impl(trace_numpy)
        for cls in types:
            table[cls] = _variables()[_builder_of(cls)]


def _builder_of(cls: type) -> str:
    if cls is Traced:
        return "build_traced"
    return "build_event" if issubclass(cls, torch.Event) else "build_stream"


def _native_event_classes() -> list[type]:
    """Return torch's classes of events, where torch refuses a record after an input was changed (2.13 and later)."""
    from torch._dynamo.output_graph import OutputGraph

    if not hasattr(OutputGraph, "check_event_record_after_input_mutation"):
        return []
    return [torch.Event, *torch.Event.__subclasses__()]


def _watch(tx: Any, block: Any) -> None:
    """Say once a line when the graph breaks inside *block*."""
    from torch._dynamo.exc import Unsupported

    place = (tx.f_code.co_filename, tx.lineno)

    def given_up() -> None:
        error = sys.exc_info()[1]
        if block.left or tx.one_graph or not isinstance(error, Unsupported) or place in _breaks_logged:
            return
        _breaks_logged.add(place)
        reason = str(error).partition("\n")[0]
        _log.warning(
            "%s:%d: the graph breaks in this stream block, so its function runs in eager: %s", *place, reason
        )

    tx.output.add_cleanup_hook(given_up)


_made_variables: dict[str, Any] = {}
_bind_op: Callable[[], Any]


_stream_methods: dict[str, Callable[..., Any]] = {}


def trace_methods(methods: dict[str, Callable[..., Any]]) -> None:
    """Let Dynamo inline these functions for the methods of our streams."""
    _stream_methods.update(methods)


def tell_slots(bind_op: Callable[[], Any]) -> None:
    """Let the variable of a stream put this operator, with the stream's handle and slot, into the graph."""
    global _bind_op
    _bind_op = bind_op


_MUTATION_ADVICE = 'Or record a devstream.Event: with backend="devstream" the change is written back on its stream before the event.'


def _variables() -> dict[str, Any]:
    """Return the builders of our two variables, whose base classes exist only once Dynamo is imported."""
    if _made_variables:
        return _made_variables
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.streams import EventVariable, StreamContextVariable, StreamVariable

    class TracedVariable(VariableTracker):
        """A `Traced` that Dynamo met."""

        def __init__(self, value: Traced, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.value = value

        def python_type(self) -> type:
            return Traced

        def as_python_constant(self) -> Traced:
            return self.value

        def call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            values = [arg.realize() for arg in args]
            named = {name: value.realize() for name, value in kwargs.items()}
            result = self.value.rule(Trace(tx), *values, **named)
            return Trace(tx).constant(None) if result is None else result

    class BlockVariable(StreamContextVariable):
        """One ``with`` block of a stream; its value is the stream, where torch's is None."""

        def enter(self, tx: Any, *args: Any) -> Any:
            super().enter(tx, *args)
            # A graph break in here makes the whole frame run in eager: a graph of half a block has half its order.
            tx.active_generic_context_managers.append(self)
            self.left = False
            _watch(tx, self)
            return self.stream

        def exit(self, tx: Any, *args: Any) -> Any:
            self.left = True
            tx.active_generic_context_managers.remove(self)
            return super().exit(tx, *args)

    class OurStreamVariable(StreamVariable):
        """A stream of ours, whose methods are functions of ours."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.open_blocks: list[Any] = []

        def python_type(self) -> type:
            return type(self.value)

        def enter(self, tx: Any, *args: Any) -> Any:
            # One variable a block: torch's own can't be entered again before it is left.
            self.open_blocks.append(BlockVariable(self))
            return self.open_blocks[-1].enter(tx, *args)

        def exit(self, tx: Any, *args: Any) -> Any:
            return self.open_blocks.pop().exit(tx, *args)

        def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
            if name == "__init__":  # of a stream that our __new__ has made
                return Trace(tx).constant(None)
            method = _stream_methods.get(name)
            if method is not None:
                return Trace(tx).inline(method, self, *args, **kwargs)
            return super().call_method(tx, name, args, kwargs)

    class NativeEventVariable(EventVariable):
        """A native event; torch's own variable, with one more advice in an error."""

        def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
            try:
                return super().call_method(tx, name, args, kwargs)
            except RuntimeError as error:
                if type(error) is not RuntimeError or name != "record":
                    raise
                raise RuntimeError(f"{error}\n{_MUTATION_ADVICE}") from error

    def build_event(builder: Any, value: torch.Event) -> Any:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return Trace(builder.tx).register(NativeEventVariable, value, source=builder.source)

    def build_traced(builder: Any, value: Traced) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        return TracedVariable(value, source=builder.source)

    def build_stream(builder: Any, value: torch.Stream) -> Any:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        trace = Trace(builder.tx)
        var = trace.register(OurStreamVariable, value, source=builder.source)
        found = builder.tx.output.side_effects.track_object_existing(value, var)
        handle = trace.attribute(found, "handle")
        trace.emit(_bind_op(), handle, var.user_object_index)
        return found

    _made_variables.update(
        build_traced=build_traced,
        build_stream=build_stream,
        build_event=build_event,
        OurStreamVariable=OurStreamVariable,
        BlockVariable=BlockVariable,
    )
    return _made_variables


class Trace:
    """What a rule may do while Dynamo traces. Arguments and results named *variable* are Dynamo's."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx

    @property
    def graph(self) -> Any:
        """The graph that is being made, one object a compilation."""
        return self._tx.output

    def is_none(self, variable: Any) -> bool:
        """Say whether *variable* is the constant None."""
        return bool(variable.is_python_constant()) and variable.as_python_constant() is None

    def kind(self, variable: Any) -> type:
        """Return the class of the object that *variable* stands for."""
        value = getattr(variable, "value", None)
        # The variable of a native event can't tell its class on torch 2.11.
        return type(value) if isinstance(value, torch.Event) else variable.python_type()

    def native_order(self, operation: str) -> Any:
        """Return torch's own operator that records or waits for a native event."""
        import torch._dynamo.variables.streams

        return getattr(torch.ops.streams, f"{operation}_event").default

    def constant(self, value: object) -> Any:
        """Return the variable of a Python constant."""
        from torch._dynamo.variables.base import VariableTracker

        return VariableTracker.build(self._tx, value)

    def emit(self, op: Any, *args: Any) -> Any:
        """Put a call of *op* into the graph and return the variable of its result."""
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.builder import wrap_fx_proxy

        plain = tuple(arg.as_proxy() if isinstance(arg, VariableTracker) else arg for arg in args)
        proxy = self._tx.output.create_proxy("call_function", op, plain, {})
        return wrap_fx_proxy(tx=self._tx, proxy=proxy)

    def attribute(self, variable: Any, name: str) -> Any:
        """Return the variable of ``object.name``, read anew at each call of the compiled function."""
        from torch._dynamo.source import AttrSource
        from torch._dynamo.variables.builder import VariableBuilder

        value = getattr(variable.value, name)
        return VariableBuilder(self._tx, AttrSource(variable.source, name))(value)

    def inline(self, function: Any, *variables: Any, **named: Any) -> Any:
        """Trace a call of *function*."""
        from torch._dynamo.variables.functions import UserFunctionVariable

        return self._tx.inline_user_function_return(UserFunctionVariable(function), list(variables), named)

    def entered(self, device_type: str, index: int | None) -> Any:
        """Return the variable of the stream whose block was entered last, on this device; None where none was."""
        from torch._dynamo.variables.lazy import LazyVariableTracker

        for stream in reversed(self._tx.symbolic_stream_state.cur_stream_stack):
            if isinstance(stream, LazyVariableTracker) and not stream.is_realized():
                continue  # torch's own entry for the ambient stream of its accelerator
            device = stream.device
            if device.type == device_type and index in (None, max(device.index or 0, 0)):
                return stream
        return None

    def block(self, stream: Any) -> Any:
        """Return the variable of a block of the stream *stream*; each block has one of its own."""
        return _variables()["BlockVariable"](stream)

    def slot(self, variable: Any) -> int | None:
        """Return the place of a stream or native event in Dynamo's table; None for any other variable."""
        found = getattr(variable, "user_object_index", None)
        return found if isinstance(found, int) else None

    def register(
        self, kind: type, value: Any, *, source: Any = None, construct: Callable[[int, Any], None] | None = None
    ) -> Any:
        """Give *value* a place in Dynamo's table, filled at each call from *source* or by *construct*."""
        from torch._dynamo import graph_bytecode_inputs as table
        from torch._dynamo.utils import set_example_value

        if construct is None:
            index = table.register_user_object(value, source)
        else:
            index = table.register_graph_created_object(value, construct)
        proxy = self._tx.output.create_proxy("call_function", table.get_external_object_by_index, (index,), {})
        set_example_value(proxy.node, value)
        kwargs = {} if source is None else {"source": source}
        return kind(proxy, value, user_object_index=index, **kwargs)

    def made_stream(self, value: torch.Stream, module: str, function: str, *arguments: object) -> Any:
        """Return the variable of *value*, a stream that each call makes by ``module.function(*arguments)``."""
        from torch._dynamo import graph_bytecode_inputs as table
        from torch._dynamo.bytecode_transformation import create_call_function

        def construct(index: int, codegen: Any) -> None:
            codegen.add_push_null(lambda: codegen.load_import_from(table.__name__, "stash_graph_created_object"))
            codegen.add_push_null(lambda: codegen.load_import_from(module, function))
            for argument in arguments:
                codegen.append_output(codegen.create_load_const(argument))
            codegen.extend_output(create_call_function(len(arguments), False))
            codegen.extend_output(create_call_function(1, False))

        return self.register(_variables()["OurStreamVariable"], value, construct=construct)

    def refuse(self, operation: str, reason: str, advice: str) -> NoReturn:
        """Break the graph here; under ``fullgraph=True`` that is an error with these words."""
        from torch._dynamo.exc import unimplemented

        unimplemented(
            gb_type=f"devstream: {operation} can't be traced",
            context=operation,
            explanation=reason,
            hints=[advice],
        )
        raise AssertionError(operation)  # unimplemented raises


__all__ = ["Trace", "Traced", "add_stream_class", "install", "is_loaded", "tell_slots", "trace_methods"]
