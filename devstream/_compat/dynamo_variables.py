"""Dynamo's variables: what our functions, our streams and native events are while it traces. Imports Dynamo."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn  # Any: Dynamo's types are private, and some differ from release to release

import torch
from torch._dynamo import graph_bytecode_inputs as table
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.exc import RestartAnalysis, Unsupported, unimplemented
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.streams import EventVariable, StreamContextVariable, StreamVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from devstream._compat import dynamo

_log = logging.getLogger("devstream")
_breaks_logged: set[tuple[str, int]] = set()

_MUTATION_ADVICE = (
    'Or record a devstream.Event: with backend="devstream" the change is written back on its stream '
    "before the event."
)


class Trace:
    """What a rule may do while Dynamo traces. Arguments and results named *variable* are Dynamo's."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx

    @property
    def graph(self) -> Any:
        """The graph that is being made, one object a compilation."""
        return self._tx.output

    @property
    def under_inductor(self) -> bool:
        """Whether the graph goes to torch's Inductor, which orders stream code wrongly or not at all.

        Torch 2.11 has no streams there; 2.12 to 2.15 lose waits, reuse memory that another stream reads, or fail.
        """
        found: Any = self._tx.output.compiler_fn
        for _ in range(8):  # what torch wraps around a backend
            name = getattr(found, "_compiler_name", None) or getattr(found, "compiler_name", None)
            if name == "inductor" or found is torch._inductor.compile:
                return True
            inner = getattr(found, "_torchdynamo_orig_backend", None) or getattr(found, "compiler_fn", None)
            if inner is None:
                return False
            found = inner
        return False

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
        return getattr(torch.ops.streams, f"{operation}_event").default

    def constant(self, value: object) -> Any:
        """Return the variable of a Python constant."""
        return VariableTracker.build(self._tx, value)

    def emit(self, op: Any, *args: Any) -> Any:
        """Put a call of *op* into the graph and return the variable of its result."""
        plain = tuple(arg.as_proxy() if isinstance(arg, VariableTracker) else arg for arg in args)
        proxy = self._tx.output.create_proxy("call_function", op, plain, {})
        return wrap_fx_proxy(tx=self._tx, proxy=proxy)

    def attribute(self, variable: Any, name: str) -> Any:
        """Return the variable of ``object.name``, read anew at each call of the compiled function."""
        value = getattr(variable.value, name)
        return VariableBuilder(self._tx, AttrSource(variable.source, name))(value)

    def inline(self, function: Any, *variables: Any, **named: Any) -> Any:
        """Trace a call of *function*."""
        return self._tx.inline_user_function_return(UserFunctionVariable(function), list(variables), named)

    def entered(self, device_type: str, index: int | None) -> Any:
        """Return the variable of the stream whose block was entered last, on this device; None where none was."""
        for stream in reversed(self._tx.symbolic_stream_state.cur_stream_stack):
            if isinstance(stream, LazyVariableTracker) and not stream.is_realized():
                continue  # torch's own entry for the ambient stream of its accelerator
            device = stream.device
            if device.type == device_type and index in (None, max(device.index or 0, 0)):
                return stream
        return None

    def block(self, stream: Any) -> Any:
        """Return the variable of a block of the stream *stream*; each block has one of its own."""
        return BlockVariable(stream)

    def slot(self, variable: Any) -> int | None:
        """Return the place of a stream or native event in Dynamo's table; None for any other variable."""
        found = getattr(variable, "user_object_index", None)
        return found if isinstance(found, int) else None

    def register(
        self, kind: type, value: Any, *, source: Any = None, construct: Callable[[int, Any], None] | None = None
    ) -> Any:
        """Give *value* a place in Dynamo's table, filled at each call from *source* or by *construct*."""
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

        def construct(index: int, codegen: Any) -> None:
            codegen.add_push_null(lambda: codegen.load_import_from(table.__name__, "stash_graph_created_object"))
            codegen.add_push_null(lambda: codegen.load_import_from(module, function))
            for argument in arguments:
                codegen.append_output(codegen.create_load_const(argument))
            codegen.extend_output(create_call_function(len(arguments), False))
            codegen.extend_output(create_call_function(1, False))

        return self.register(OurStreamVariable, value, construct=construct)

    def refuse(self, operation: str, reason: str, advice: str) -> NoReturn:
        """Break the graph here; under ``fullgraph=True`` that is an error with these words."""
        unimplemented(
            gb_type=f"devstream: {operation} can't be traced",
            context=operation,
            explanation=reason,
            hints=[advice],
        )
        raise AssertionError(operation)  # unimplemented raises


def _watch(tx: Any, block: Any) -> None:
    """Say once a line when the graph breaks inside *block*."""
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


class TracedVariable(VariableTracker):
    """A `Traced` that Dynamo met."""

    def __init__(self, value: dynamo.Traced, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value

    def python_type(self) -> type:
        return dynamo.Traced

    def as_python_constant(self) -> dynamo.Traced:
        return self.value

    def call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        values = [arg.realize() for arg in args]
        named = {name: value.realize() for name, value in kwargs.items()}
        result = self.value.rule(Trace(tx), *values, **named)
        return Trace(tx).constant(None) if result is None else result


class ClassVariable(UserDefinedClassVariable):
    """A class of ours whose objects are of a subclass where traced code makes them."""

    def call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # With its source, since Dynamo makes an object only of a class that it can name.
        assert self.source is not None
        cls: Any = self.value
        made = VariableBuilder(tx, AttrSource(self.source, "_made_as"))(cls._made_as)
        return made.call_function(tx, args, kwargs)


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

    def var_getattr(self, tx: Any, name: str) -> Any:  # up to torch 2.13
        return self._device(tx) if name == "device" else super().var_getattr(tx, name)

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:  # torch 2.14 and later
        parent: Any = super()
        return self._device(tx) if name == "device" else parent.tp_getattro_impl(tx, name)

    def _device(self, tx: Any) -> Any:
        # The function is traced anew for a stream of another device, if there is a way to find it again.
        trace = Trace(tx)
        return trace.constant(self.value.device) if self.source is None else trace.attribute(self, "device")

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "__init__":  # of a stream that our __new__ has made
            return Trace(tx).constant(None)
        method = dynamo.stream_methods.get(name)
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


# -- the table ---------------------------------------------------------------------------------------------


def _build_event(builder: Any, value: torch.Event) -> Any:
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    return Trace(builder.tx).register(NativeEventVariable, value, source=builder.source)


def _build_traced(builder: Any, value: dynamo.Traced) -> Any:
    builder.install_guards(GuardBuilder.ID_MATCH)
    return TracedVariable(value, source=builder.source)


def _build_class(builder: Any, value: type) -> Any:
    builder.install_guards(GuardBuilder.CLASS_MATCH)
    return ClassVariable(value, source=builder.source)


def _build_stream(builder: Any, value: torch.Stream) -> Any:
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    trace = Trace(builder.tx)
    var = trace.register(OurStreamVariable, value, source=builder.source)
    found = builder.tx.output.side_effects.track_object_existing(value, var)
    if hasattr(type(value), "_compiled_handle"):  # a plug-in's own class has none, and is found by its place alone
        handle = trace.attribute(found, "_compiled_handle")
        trace.emit(dynamo.bind_op(), handle, var.user_object_index)
    return found


def register(types: list[type]) -> None:
    """Let Dynamo build a variable of ours for each object of exactly these types."""
    # One table a setting of trace_numpy; both are cached for the process.
    for trace_numpy in (True, False):
        dispatch = VariableBuilder._type_dispatch_impl(trace_numpy)
        for cls in types:
            dispatch[cls] = _builder_of(cls)


def register_classes() -> None:
    """Let Dynamo make objects of the classes in `dynamo.made_classes`."""
    VariableBuilder._id_dispatch().update({id(cls): _build_class for cls in dynamo.made_classes})


def _builder_of(cls: type) -> Callable[[Any, Any], Any]:
    if cls is dynamo.Traced:
        return _build_traced
    return _build_event if issubclass(cls, torch.Event) else _build_stream


def native_event_classes() -> list[type]:
    """Return torch's classes of events where torch refuses a record after an input was changed (from 2.13)."""
    if not hasattr(OutputGraph, "check_event_record_after_input_mutation"):
        return []
    return [torch.Event, *torch.Event.__subclasses__()]


def restart() -> NoReturn:
    """Have Dynamo trace the present frame anew."""
    # The second attempt takes another way from here on, which the log of the first would call a fault.
    InstructionTranslator.current_tx().speculation_log.clear()
    raise RestartAnalysis(restart_reason="devstream installed its trace rules")


__all__ = ["Trace", "native_event_classes", "register", "restart"]
