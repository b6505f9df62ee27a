"""Every form of stream code traces with ``fullgraph=True`` and means what eager means."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import devstream

ONE, TWO = devstream.Stream("cpu"), devstream.Stream("cpu")
DONE, READY = devstream.Event("cpu"), devstream.Event("cpu")
NATIVE = torch.Stream(stream_id=901, device_index=-1, device_type=torch.Stream(device="cpu").device_type)
NATIVE_EVENT = torch.Event(device="cpu")
BOX = {"stream": ONE, "event": DONE}


class Pair(NamedTuple):
    stream: Any
    event: Any


def x() -> torch.Tensor:
    return torch.arange(4.0)


def block(t):
    with devstream.stream(ONE):
        y = t + 1
    return y * 2


def block_of_a_stream_itself(t):
    with ONE:
        y = t + 1
    return y * 2


def block_as(t):
    with devstream.stream(ONE) as s:
        y = t + 1
        DONE.record(s)
    return y


def block_of_none(t):
    with devstream.stream(None):
        return t + 1


def nested(t):
    with devstream.stream(ONE):
        y = t + 1
        with devstream.stream(TWO):
            z = t * 2
        y = y + 3
    return y + z


def same_twice(t):
    with devstream.stream(ONE), devstream.stream(ONE):
        y = t + 1
    return y * 2


def record_and_wait(t):
    with devstream.stream(ONE):
        y = t + 1
        DONE.record()
    DONE.wait(TWO)
    with devstream.stream(TWO):
        return y * 2


def record_on_a_stream(t):
    with devstream.stream(ONE):
        y = t + 1
    DONE.record(ONE)
    DONE.wait()
    return y * 2


def by_methods_of_streams(t):
    with devstream.stream(ONE):
        y = t + 1
    ONE.record_event(DONE)
    TWO.wait_event(DONE)
    with devstream.stream(TWO):
        y = y * 2
    devstream.current_stream().wait_stream(TWO)
    return y - 1


def record_event_alone(t):
    with devstream.stream(ONE):
        y = t + 1
    done = ONE.record_event()
    TWO.wait_event(done)
    with devstream.stream(TWO):
        return y * 2


def current_inside_and_outside(t):
    outer = devstream.current_stream()
    ONE.wait_stream(outer)
    with devstream.stream(ONE):
        inner = devstream.current_stream()
        y = t + 1
        READY.record(inner)
    outer.wait_event(READY)
    with devstream.stream(outer):
        return y * 2


def named_and_default(t):
    with devstream.stream(devstream.named_stream("forms", "cpu")):
        y = t + 1
    with devstream.stream(devstream.default_stream("cpu:1")):
        z = t + 2
    DONE.record(devstream.named_stream("forms", "cpu"))
    DONE.wait()
    return y + z


def made_inside(t):
    side, done = devstream.Stream("cpu"), devstream.Event("cpu")
    with devstream.stream(side):
        y = t + 1
        done.record()
    devstream.current_stream().wait_event(done)
    return y * 2


def made_inside_and_returned(t):
    side, done = devstream.Stream("cpu"), devstream.Event("cpu", enable_timing=True)
    with devstream.stream(side):
        y = t + 1
        done.record()
    return y, side, done


def synchronized(t):
    with devstream.stream(ONE):
        y = t + 1
        DONE.record()
    ONE.synchronize()
    z = y * 2
    DONE.synchronize()
    z = z - 1
    devstream.synchronize("cpu")
    return z + 5


def memory_of_a_tensor(t):
    y = t + 1
    devstream.record_stream(y, ONE)
    with devstream.stream(ONE):
        return y * 2


def wrapped_native(t):
    with devstream.stream(devstream.wrap(NATIVE)):
        y = t + 1
        DONE.record()
    DONE.wait()
    return y


def native_in_our_verbs(t):
    with devstream.stream(NATIVE):
        y = t + 1
    DONE.record(NATIVE)
    DONE.wait(NATIVE)
    ONE.wait_stream(NATIVE)
    return y * 2


def native_event_in_our_methods(t):
    with devstream.stream(ONE):
        y = t + 1
        ONE.record_event(NATIVE_EVENT)
    TWO.wait_event(NATIVE_EVENT)
    with devstream.stream(TWO):
        return y * 2


def held_in_globals(t):
    with devstream.stream(BOX["stream"]):
        y = t + 1
        BOX["event"].record()
    BOX["event"].wait()
    return y


def after_an_input_was_changed(t):
    with devstream.stream(ONE):
        t.add_(1)
        DONE.record()
    DONE.wait()
    return t * 2


FORMS = [
    block, block_of_a_stream_itself, block_as, block_of_none, nested, same_twice, record_and_wait,
    record_on_a_stream, by_methods_of_streams, record_event_alone, current_inside_and_outside,
    named_and_default, made_inside, made_inside_and_returned, synchronized, memory_of_a_tensor,
    wrapped_native, native_in_our_verbs, native_event_in_our_methods, held_in_globals,
    after_an_input_was_changed,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_form_means_what_eager_means(agreement, form):
    agreement.agree(form, (x(),), (x() + 1,))


def test_arguments_are_the_objects_of_each_call(agreement):
    def program(t, stream, event):
        with devstream.stream(stream):
            y = t + 1
            event.record()
        event.wait()
        return y

    calls = [(x(), devstream.Stream("cpu"), devstream.Event("cpu")) for _ in range(3)]
    agreement.agree(program, *calls)
    assert all(event.recorded for _, _, event in calls)


def test_objects_in_a_tuple_a_named_tuple_and_a_dict_are_found(agreement):
    def program(t, pair, both, table):
        with devstream.stream(pair.stream):
            y = t + 1
            pair.event.record()
        with devstream.stream(both[0]):
            both[1].wait()
            y = y * 2
        table["done"].record()
        return y

    def call():
        new = devstream.Stream
        return (
            x(),
            Pair(new("cpu"), devstream.Event("cpu")),
            (new("cpu"), devstream.Event("cpu")),
            {"done": devstream.Event("cpu")},
        )

    agreement.agree(program, call(), call())


def test_objects_of_a_module_are_found(agreement):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.side, self.done = devstream.Stream("cpu"), devstream.Event("cpu")

        def forward(self, t):
            with devstream.stream(self.side):
                y = t + 1
                self.done.record()
            self.done.wait()
            return y

    layer = Layer()
    agreement.agree(layer, (x(),), (x(),))
    assert layer.done.recorded


def test_an_event_made_inside_can_be_kept_on_an_object(agreement):
    class Box:
        done: Any = None

    box = Box()

    def program(t):
        done = devstream.Event("cpu")
        with devstream.stream(ONE):
            y = t + 1
            done.record()
        box.done = done
        return y

    backend = agreement.Backend()
    torch.compiler.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    compiled(x())
    first = box.done
    compiled(x())
    assert first is not box.done
    assert first.recorded
    assert box.done.recorded
    assert backend.compiled == 1


def test_a_rebound_global_is_the_new_object(agreement):
    box = {"stream": devstream.Stream("cpu"), "event": devstream.Event("cpu")}

    def program(t):
        with devstream.stream(box["stream"]):
            y = t + 1
            box["event"].record()
        return y

    compiled = torch.compile(program, backend=agreement.Backend(), fullgraph=True)
    compiled(x())
    old = box["event"]
    box.update(stream=devstream.Stream("cpu"), event=devstream.Event("cpu"))
    compiled(x())
    assert old is not box["event"]
    assert box["event"].recorded


def test_one_stream_under_two_names_is_one_queue(agreement):
    def program(t, a, b):
        with devstream.stream(a):
            y = t + 1
        with devstream.stream(b):
            z = y * 2
        DONE.record(b)
        return z

    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    backend = agreement.Backend()
    torch.compiler.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    same = devstream.wrap(torch.Stream(stream_id=one.stream_id, device_index=-1, device_type=one.device_type))
    for a, b in ((one, two), (one, same), (two, one)):
        backend.log = agreement.Log()
        got = compiled(x(), a, b)
        wanted, log = agreement.eager_log(program, x(), a, b)
        assert backend.log.lines == log.lines
        torch.testing.assert_close(got, wanted)


def test_the_caller_s_current_stream_is_asked_at_each_call(agreement):
    def program(t):
        y = t + 1
        devstream.current_stream().wait_stream(ONE)
        return y

    backend = agreement.Backend()
    torch.compiler.reset()
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    compiled(x())
    with devstream.stream(TWO):
        backend.log = agreement.Log()
        compiled(x())
        _, log = agreement.eager_log(program, x())
    assert backend.log.lines == log.lines
    assert backend.compiled == 1


def test_what_is_returned_can_be_used(agreement):
    compiled = torch.compile(made_inside_and_returned, backend=agreement.Backend(), fullgraph=True)
    _, stream, event = compiled(x())
    _, other, later = compiled(x())
    assert stream != other
    assert event is not later
    assert event.recorded
    assert event.device == torch.device("cpu", 0)
    event.wait(other)
    later.record(stream)
    assert event.query()
    assert event.elapsed_time(later) >= 0


def test_a_returned_event_can_be_passed_in_again(agreement):
    def order(t, event):
        event.wait(ONE)
        return t + 1

    make = torch.compile(made_inside_and_returned, backend=agreement.Backend(), fullgraph=True)
    take = torch.compile(order, backend=agreement.Backend(), fullgraph=True)
    _, _, event = make(x())
    take(x(), event)
    assert event.recorded
    take(x(), event)


def test_marks_name_streams_and_epochs(agreement):
    captured = agreement.agree(record_and_wait, (x(),)).captured[0]
    marks = [
        devstream.compiler.mark_of(node) for node in captured.module.graph.nodes if node.op == "call_function"
    ]
    assert marks == [(1, 0), (2, 1)]
    record, wait = captured.operations
    assert (record.kind, record.stream, record.ends) == ("record", 1, ((1, 0),))
    assert (wait.kind, wait.stream, wait.ends) == ("wait", 2, ((2, 0),))
    assert record.event == wait.event
    assert "record_and_wait" in record.line
    assert "test_capture_forms.py" in record.line


def test_the_captured_graph_has_nothing_of_streams_left(agreement):
    captured = agreement.agree(made_inside, (x(),)).captured[0]
    text = captured.module.code
    assert "devstream" not in text
    assert "external_object" not in text
    assert all("stream" not in (node.meta.get("custom") or {}) for node in captured.module.graph.nodes)
    assert len(captured.inputs) == 1
