"""What other compilers of stream code get wrong, each as a test that is named by what it protects.

The programs are in ``_faults.py``; ``bench/faults.py`` runs them through torch's own compiler as well.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

import pytest
import torch

import devstream
from devstream import _handles
from devstream.compiler import backend as compiler_backend
from devstream.compiler._program import Free, Hold, Record, Wait, Work
from devstream.testing.interleavings import machine, unordered

pytestmark = [
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


def compiled(function: Any, **options: Any) -> Any:
    torch.compiler.reset()
    given = {"regions": "eager", "missing_waits": "error", **options}
    return torch.compile(function, backend=compiler_backend.backend, fullgraph=True, options=given)


@pytest.fixture
def right(faults):
    """Run one program line by line and compiled, assert equal values, and return what was compiled."""

    def run(name: str, **options: Any) -> list[Any]:
        fault = faults.FAULTS[name]
        wanted = faults.run(fault, fault.make(faults.plain_api()), "cpu")
        programs: list[Any] = []

        def watch(_: str, program: Any) -> None:
            programs.append(program)

        compiler_backend.watchers.append(watch)
        try:
            fast = compiled(fault.make(faults.devstream_api("cpu")), **options)
            for _ in range(2):
                assert faults.agree(faults.run(fault, fast, "cpu"), wanted)
        finally:
            compiler_backend.watchers.remove(watch)
        for program in programs:
            assert not unordered(machine(program))
        return programs

    return run


def works(program: Any) -> list[tuple[int, Work]]:
    return [(place, step) for place, step in enumerate(program.steps) if isinstance(step, Work)]


def work_of(program: Any, node: str) -> tuple[int, Work]:
    return next((place, work) for place, work in works(program) if node in work.nodes)


def waits(program: Any, stream: int | None = None) -> list[int]:
    return [
        place
        for place, step in enumerate(program.steps)
        if isinstance(step, Wait) and stream in (None, step.stream)
    ]


# -- regions and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("regions", ["eager", "inductor"])
def test_no_buffer_is_used_again_while_another_stream_reads_it(right, regions):
    (program,) = right("buffer_with_a_reader_on_another_stream", regions=regions)
    reader, _ = work_of(program, "mm_1")
    given_back = [
        place for place, step in enumerate(program.steps) if isinstance(step, Free | Hold) and "mm" in step.values
    ]
    behind = [place for place in waits(program, program.slot["mm"].stream) if place > reader]
    assert given_back
    assert min(given_back) > min(behind)


def test_work_stays_behind_the_wait_in_front_of_it(right):
    (program,) = right("consumer_behind_a_wait")
    reader, work = work_of(program, "sum_1")
    assert any(place < reader for place in waits(program, work.stream))


def test_every_wait_for_an_event_holds_its_own_stream_back(right):
    (program,) = right("two_waits_for_one_event")
    for node in ("mul", "mul_1"):
        place, work = work_of(program, node)
        assert any(wait < place for wait in waits(program, work.stream))


def test_no_region_has_work_of_two_streams(right):
    for program in right("one_expression_on_two_streams"):
        for _, work in works(program):
            made = {program.slot[name].stream for name in work.outputs}
            assert made <= {work.stream}


def test_the_same_operations_on_other_streams_run_there(monkeypatch):
    """A cache of compiled code that knows operations only would run them on the streams of the first."""
    one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
    cpu, seen = devstream.backend("cpu"), []
    launch = cpu.launch
    monkeypatch.setattr(cpu, "launch", lambda task, stream: (seen.append(stream), launch(task, stream))[1])

    def on(first: Any, second: Any) -> Any:
        def function(x):
            for stream in (first, second):
                stream.wait_stream(devstream.current_stream("cpu"))
            with devstream.stream(first):
                a = x.sin()
            with devstream.stream(second):
                b = x.cos()
            for stream in (first, second):
                devstream.current_stream("cpu").wait_stream(stream)
            return a + b

        return function

    x = torch.ones(4)
    for first, second in ((one, two), (two, one)):
        seen.clear()
        torch.testing.assert_close(compiled(on(first, second))(x), x.sin() + x.cos())
        order = [stream for stream in seen if stream in (one, two)]
        assert order[:2] == [first, second]


def test_memory_goes_back_behind_all_its_readers_those_of_views_too(right):
    (program,) = right("memory_with_several_readers")
    storage = program.slot["mm"].storage
    readers = [place for place, work in works(program) if any(use.storage == storage for use in work.reads)]
    (gone,) = [
        place
        for place, step in enumerate(program.steps)
        if isinstance(step, Free | Hold) and step.storage == storage
    ]
    assert len({program.steps[place].stream for place in readers}) >= 2
    assert gone > max(readers)


def test_no_wait_is_added_only_so_that_memory_can_go_back(right):
    for name in ("memory_with_several_readers", "buffer_with_a_reader_on_another_stream"):
        (program,) = right(name)
        assert not [step for step in program.steps if isinstance(step, Wait) and step.op is None]


# -- backward --------------------------------------------------------------------------------------------


def test_every_reader_in_the_backward_waits(right):
    _, backward = right("two_readers_in_backward")
    for number, step in enumerate(backward.steps):
        if isinstance(step, Wait):
            rest = [*backward.steps[:number], *backward.steps[number + 1 :]]
            assert unordered(machine(dataclasses.replace(backward, steps=tuple(rest))))
    assert len({step.stream for step in backward.steps if isinstance(step, Wait)}) >= 3


def test_incoming_gradients_are_waited_for_and_outgoing_ones_joined(right):
    _, backward = right("gradients_in_and_out_of_a_side_stream")
    assert all(result.joined for result in backward.results)
    side = [(place, work.stream) for place, work in works(backward) if work.stream]
    first, stream = side[0]
    assert any(place < first for place in waits(backward, stream))
    assert any(place > side[-1][0] for place in waits(backward, 0))


def test_operations_of_several_results_train_on_a_side_stream(right):
    assert [program.name for program in right("several_results_on_a_side_stream")] == ["forward", "backward"]


def test_what_is_computed_again_in_the_backward_is_in_order(right):
    _, backward = right("checkpoint_over_streams")
    again = {
        work.stream for _, work in works(backward) if {"sin", "cos", "mm"} & {n.split("_")[0] for n in work.nodes}
    }
    assert len(again) >= 2


def test_nothing_is_saved_to_give_an_order(right):
    forward, _ = right("chain_that_saves_nothing")
    assert not [result for result in forward.results if result.saved]


def test_the_users_records_and_waits_are_not_run_again_in_the_backward(right):
    forward, backward = right("event_recorded_twice")
    assert sum(isinstance(step, Record) and step.op is not None for step in forward.steps) == 4
    assert not [step for step in backward.steps if getattr(step, "op", None) is not None]


def test_views_keep_their_streams_in_the_backward(right):
    forward, _ = right("views_on_two_streams")
    assert work_of(forward, "mm")[1].stream != work_of(forward, "mul")[1].stream


# -- records, waits, inputs ------------------------------------------------------------------------------


def test_one_expression_on_two_streams_stays_two(right):
    forward, _ = right("one_expression_on_two_streams")
    streams = [work.stream for _, work in works(forward) for node in work.nodes if node.startswith("sin")]
    assert len(set(streams)) == 2


def test_an_event_that_is_recorded_again_is_two_records(right):
    forward, _ = right("event_recorded_twice")
    records = [step.event for step in forward.steps if isinstance(step, Record) and step.op is not None]
    assert max(records.count(event) for event in records) == 2


def test_a_record_on_the_callers_stream_stands_for_the_work_in_front_of_it(right):
    (program,) = right("record_on_the_callers_stream")
    made, _ = work_of(program, "mm")
    records = [
        place
        for place, step in enumerate(program.steps)
        if isinstance(step, Record) and step.stream == 0 and step.op is not None
    ]
    assert any(place > made for place in records)
    reader, _ = work_of(program, "sin")
    assert reader > made


def test_an_inputs_change_is_behind_the_join(right):
    forward, _ = right("input_changed_on_a_side_stream")
    (back,) = [place for place, work in works(forward) if work.target]
    assert any(place > back for place in waits(forward, 0))


def test_blocks_of_the_current_stream_and_waits_without_work(right):
    right("blocks_without_work")


def test_methods_order_as_functions_do(right):
    (program,) = right("order_by_methods")
    assert sum(isinstance(step, Wait) and step.op is not None for step in program.steps) == 3


def test_code_outside_that_waits_for_an_event_finds_the_work_in_front_of_it():
    side, event = devstream.Stream("cpu"), devstream.Event("cpu")

    def function(x):
        side.wait_stream(devstream.current_stream("cpu"))
        with devstream.stream(side):
            y = x @ x
            event.record()
        return y

    cpu = devstream.backend("cpu")
    fast, x = compiled(function), torch.full((16, 16), 2.0)
    for _ in range(3):
        latch = cpu.hold(side)
        y = fast(x)
        assert not event.query()
        latch.release()
        event.wait()
        torch.testing.assert_close(y, x @ x)


# -- calls -----------------------------------------------------------------------------------------------


def test_the_backward_of_a_call_runs_on_the_streams_of_its_forward(right):
    right("two_calls_in_flight")


def test_calls_that_make_streams_and_events_leave_nothing_behind(faults):
    fault = faults.FAULTS["two_calls_in_flight"]
    fast = compiled(fault.make(faults.devstream_api("cpu")))
    with torch.no_grad():
        given = fault.arguments("cpu")
        sizes = []
        for _ in range(3):
            for _ in range(100):
                fast(*given)
            devstream.synchronize("cpu")
            fast(*given)
            gc.collect()
            sizes.append(len(_handles._owners))
    assert sizes[2] <= sizes[0] + 4


def test_two_threads_never_use_one_anothers_streams(faults, monkeypatch):
    fault = faults.FAULTS["gradients_in_and_out_of_a_side_stream"]
    wanted = faults.run(fault, fault.make(faults.plain_api()), "cpu")
    fast = [compiled(fault.make(faults.devstream_api("cpu")))]
    fast.append(torch.compile(
        fault.make(faults.devstream_api("cpu")),
        backend=compiler_backend.backend, fullgraph=True, options={"regions": "eager"},
    ))  # fmt: skip
    for one in fast:
        faults.run(fault, one, "cpu")
    wrong: list[int] = []

    def work(number: int) -> None:
        found = [faults.run(fault, fast[number], "cpu") for _ in range(20)]
        wrong.extend(number for one in found if not faults.agree(one, wanted))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("ask", ["event.query()", "side.query()", "event.elapsed_time(event)"])
def test_an_answer_of_the_moment_is_an_error_and_never_built_in(ask):
    side, event = devstream.Stream("cpu"), devstream.Event("cpu", enable_timing=True)
    names = {"side": side, "event": event}
    exec(f"def function(x):\n    return x + (1 if {ask} else -1)", names)
    with pytest.raises(Exception, match=r"can't be traced|is not supported"):
        compiled(names["function"])(torch.ones(2))
