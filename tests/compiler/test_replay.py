"""Compiled functions as device graphs: each call gives what the launched one gives, and what it gave stays."""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import devstream
from devstream.compiler import backend as compiler_backend
from devstream.exceptions import CaptureError, GraphCaptureWarning

pytestmark = [
    # Dynamo makes an object of torch.autograd.Function, and looks at the gradient of every argument.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:backend 'rocm'"),
    pytest.mark.filterwarnings("error::devstream.exceptions.GraphCaptureWarning"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Counted:
    """A graph that counts its replays."""

    def __init__(self, graph: Any, counts: Counter[str]) -> None:
        self._graph, self._counts = graph, counts
        self.pool = graph.pool

    def replay(self, stream: Any) -> None:
        self._counts["replayed"] += 1
        self._graph.replay(stream)


@pytest.fixture
def counts(where: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many graphs were captured and how often one was replayed."""
    backend, found = devstream.backend(where), Counter[str]()
    capture = backend.capture

    def spy(issue: Callable[[], object], stream: Any, *, pool: object = None) -> Counted:
        graph = capture(issue, stream, pool=pool)
        found["captured"] += 1
        return Counted(graph, found)

    monkeypatch.setattr(backend, "capture", spy)
    return found


def compiled(function: Any, **options: Any) -> Any:
    torch.compiler.reset()
    options = {"regions": "eager", "mode": "reduce-overhead", **options}
    return torch.compile(function, backend=compiler_backend.backend, fullgraph=True, options=options)


def two_branches(side: Any) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        here = devstream.current_stream(x.device.type)
        side.wait_stream(here)
        with devstream.stream(side):
            y = torch.relu(x @ w)
        z = torch.sin(x @ v)
        here.wait_stream(side)
        return (y * z).sum(1)

    return function


class Case:
    """Two branches with two parameters, in eager and as graphs."""

    def __init__(self, where: str, fast: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.where, self.side = where, devstream.Stream(where)
        self.eager = two_branches(self.side)
        self.fast = fast or compiled(self.eager, **options)
        self.parameters = [torch.nn.Parameter(torch.randn(4, 4).to(where)) for _ in range(2)]

    def batch(self, rows: int = 3) -> torch.Tensor:
        # Of the host's: while one thread captures, no other can draw on the device.
        return torch.randn(rows, 4).to(self.where)

    def gradients(self, function: Any, x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(function(x, *self.parameters).sum(), self.parameters))

    def check(self, x: torch.Tensor) -> None:
        """Hold one call and its gradients against eager's; keep nothing of either."""
        close(self.fast(x, *self.parameters).detach(), self.eager(x, *self.parameters).detach())
        # Another tensor, or it would be taken for a buffer that the user fills again and again.
        close(self.gradients(self.fast, x.clone()), self.gradients(self.eager, x))

    def warm(self) -> None:
        """Get to the third call, from which on all is replayed."""
        for _ in range(3):
            self.check(self.batch())


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4, equal_nan=True)


@pytest.fixture
def case(where: str, counts: Counter[str]) -> Case:
    made = Case(where)
    made.warm()
    counts.clear()
    return made


# -- what is captured ------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_training_is_one_graph_forward_and_one_backward(where, counts, late):
    case = Case(where)
    optimizer = torch.optim.SGD(case.parameters, lr=0.1)
    for number in range(6):
        x = case.batch()
        wanted = case.gradients(case.eager, x)
        if not late:
            optimizer.zero_grad()
        loss = case.fast(x, *case.parameters).sum()
        close(loss, case.eager(x, *case.parameters).sum())
        optimizer.zero_grad()
        loss.backward()
        close([one.grad for one in case.parameters], wanted)
        optimizer.step()  # in place: the next call has to see it
        assert counts["replayed"] == 2 * number
    # Gradients that the next forward still finds are kept from it, with graphs that share no memory.
    assert counts["captured"] == (4 if late else 2)


def test_mode_is_taken_as_an_argument_too(where, counts):
    function = two_branches(devstream.Stream(where))
    torch.compiler.reset()
    fast = torch.compile(function, backend=compiler_backend.backend, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(3, 4, device=where)
    for _ in range(3):
        close(fast(x, x.T @ x, x.T @ x), function(x, x.T @ x, x.T @ x))
    assert counts["replayed"] == 2


def test_every_program_of_the_suite(where, counts, suite_program):
    sides = devstream.Stream(where), devstream.Stream(where)
    # All on one stream: with two, eager mode gives memory away that the other stream still reads.
    here = devstream.current_stream(where)
    eager, fast = suite_program.make(where, here, here), compiled(suite_program.make(where, *sides))

    def run(function: Any, seed: int) -> list[Any]:
        torch.manual_seed(seed)
        arguments = [one.detach() + seed / 4 for one in suite_program.arguments(where)]
        for number, one in enumerate(arguments):
            one.requires_grad_(suite_program.gradients and number not in suite_program.plain)
        results = torch.utils._pytree.tree_leaves(function(*(one * 1 for one in arguments)))
        asked = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
        if asked:
            sum((one * one).sum() for one in asked).backward()
        kept = [one.detach() if isinstance(one, torch.Tensor) else one for one in results]
        return [*kept, *(one.grad for one in arguments)]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GraphCaptureWarning)
        for seed in range(4):
            got, wanted = run(fast, seed), run(eager, seed)
            for one, other in zip(got, wanted, strict=True):
                if isinstance(other, torch.Tensor):
                    close(one, other)
                else:
                    assert one == other
    reasons = [str(one.message) for one in said if issubclass(one.category, GraphCaptureWarning)]
    assert counts["replayed"] or reasons, "neither replayed nor told why"


# -- what a call gave stays ------------------------------------------------------------------------------


def test_results_that_are_kept_are_never_overwritten(case):
    batches = [case.batch() for _ in range(6)]
    with torch.no_grad():
        kept = [case.fast(x, *case.parameters) for x in batches]
        close(kept, [case.eager(x, *case.parameters) for x in batches])


@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_large_result_that_is_kept_costs_one_launched_call_and_then_a_copy(where, counts, all_of_them):
    case = Case(where)
    with torch.no_grad():
        case.fast(case.batch(5000), *case.parameters)
        batches = [case.batch(5000) for _ in range(6)]
        kept = []
        for x in batches:
            if not all_of_them:
                kept = kept[-1:]
            kept.append(case.fast(x, *case.parameters))
        close(kept, [case.eager(x, *case.parameters) for x in batches[-len(kept) :]])
    # Who keeps the very first one for good has its graph's memory, so there is another graph.
    assert counts == {"captured": 1 + all_of_them, "replayed": 5}


def test_gradients_that_are_kept_are_never_overwritten(case):
    batches = [case.batch() for _ in range(4)]
    kept = [case.gradients(case.fast, x) for x in batches]
    close(kept, [case.gradients(case.eager, x) for x in batches])


def test_gradients_add_up(case, counts):
    for _ in range(3):
        batches = [case.batch() for _ in range(4)]
        for one in case.parameters:
            one.grad = None
        for x in batches:
            case.fast(x, *case.parameters).sum().backward()
        each = [case.gradients(case.eager, x) for x in batches]
        close([one.grad for one in case.parameters], [sum(parts) for parts in zip(*each, strict=True)])
    assert counts["captured"] <= 3, "a forward that shares no memory with its backwards, of which there are two"
    assert counts["replayed"] == 24


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_calls_under_way_each_have_their_memory(case, order):
    batches = [case.batch() for _ in range(3)]
    results = [case.fast(x, *case.parameters).sum() for x in batches]
    for number in order:
        got = torch.autograd.grad(results[number], case.parameters)
        close(list(got), case.gradients(case.eager, batches[number]))


def test_memory_does_not_grow_with_the_steps(case, counts):
    losses = []
    for _ in range(10):
        loss = case.fast(case.batch(), *case.parameters).sum()
        loss.backward()
        losses.append(loss.detach())
        for one in case.parameters:
            one.grad = None
    assert counts == {"replayed": 20}


def test_a_call_whose_backward_never_comes_gives_its_memory_back(case, counts):
    for _ in range(8):
        case.fast(case.batch(), *case.parameters)
    gc.collect()
    case.check(case.batch())
    assert counts["captured"] == 0


def test_a_graph_of_autograd_that_is_kept_can_be_walked_again(where, counts):
    with torch._functorch.config.patch(donated_buffer=False):
        case = Case(where)
        case.warm()
        x = case.batch()
        loss = case.fast(x, *case.parameters).sum()
        first = torch.autograd.grad(loss, case.parameters, retain_graph=True)
        second = torch.autograd.grad(loss, case.parameters)
    wanted = case.gradients(case.eager, x)
    close([list(first), list(second)], [wanted, wanted])


def test_a_result_changed_in_place_changes_nothing_later(case):
    x = case.batch()
    with torch.no_grad():
        case.fast(x, *case.parameters).zero_()
    case.check(x)


# -- what a call is given --------------------------------------------------------------------------------


def test_a_parameter_that_moves_is_seen(case, counts):
    for _ in range(2):
        case.parameters[0].data = torch.randn(4, 4, device=case.where)
        case.check(case.batch())
        case.check(case.batch())
    assert counts["captured"] <= 4, "a forward and a backward for each move"


def test_a_parameter_that_moves_each_time_is_copied_in_the_end(case, counts):
    kept = []
    for _ in range(8):
        kept.append(torch.randn(4, 4, device=case.where))
        case.parameters[0].data = kept[-1]
        case.check(case.batch())
    counts.clear()
    kept.append(torch.randn(4, 4, device=case.where))
    case.parameters[0].data = kept[-1]
    case.check(case.batch())
    assert counts["captured"] == 0
    assert counts["replayed"]


def test_an_input_that_is_filled_again_is_read_where_it_lies(where, counts):
    case = Case(where)
    x = case.batch()
    for _ in range(4):
        x.copy_(case.batch())
        close(case.gradients(case.fast, x), case.gradients(case.eager, x))
    assert counts["captured"] == 2
    for _ in range(3):
        case.check(case.batch())  # and now it is elsewhere, each time
    assert counts["captured"] == 4


def test_buffers_and_inputs_that_the_function_changes(where, counts):
    side = devstream.Stream(where)
    norm = torch.nn.BatchNorm1d(4).to(where)

    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream(where))
        with devstream.stream(side):
            y = norm(x)
            count.add_(1)
        devstream.current_stream(where).wait_stream(side)
        return y

    fast = compiled(function)
    own = torch.zeros((), device=where)
    for number in range(1, 6):
        x, fresh = torch.randn(8, 4, device=where), torch.zeros((), device=where)
        state = {name: one.clone() for name, one in norm.state_dict().items()}
        fast(x, own)
        fast(x, fresh)
        got = {name: one.clone() for name, one in norm.state_dict().items()}
        norm.load_state_dict(state)
        function(x, torch.zeros((), device=where))
        function(x, torch.zeros((), device=where))
        close(got, dict(norm.state_dict()))
        assert (int(own), int(fresh)) == (number, 1)
    assert counts["replayed"] >= 4


def test_a_change_of_what_was_saved_is_still_torchs_error(case):
    for _ in range(3):
        x = case.batch().requires_grad_()
        loss = case.fast(x, *case.parameters).sum()
        torch.autograd.grad(loss, [x], retain_graph=False)
    loss = case.fast(x, *case.parameters).sum()
    with torch.no_grad():
        case.parameters[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_dropout_draws_anew_and_the_backward_knows_what(where, counts):
    side = devstream.Stream(where)

    def function(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream(where))
        with devstream.stream(side):
            y = functional.dropout(x, 0.5)
        devstream.current_stream(where).wait_stream(side)
        return y

    fast = compiled(function, regions="eager" if where == "cpu" else "inductor")
    masks = []
    for _ in range(5):
        x = torch.ones(64, device=where, requires_grad=True)
        y = fast(x)
        y.sum().backward()
        close(x.grad, y.detach())
        masks.append(tuple(y.tolist()))
    assert len(set(masks)) == 5
    assert counts["replayed"] == 8


def test_graphs_for_each_size_up_to_the_limit(where, counts):
    case = Case(where, graph_sizes=2)
    torch._dynamo.mark_dynamic(first := case.batch(3), 0)
    case.check(first)
    for rows in (5, 3, 5, 5, 3):
        case.check(case.batch(rows))
    assert counts["captured"] == 4
    (reason,) = reasons(lambda: case.check(case.batch(7)))
    assert "graphs for 2 sizes are there" in reason
    case.check(case.batch(3))


def test_more_calls_under_way_than_the_limit(where, counts):
    case = Case(where, graph_calls=2)
    case.warm()
    batches = [case.batch() for _ in range(4)]
    with pytest.warns(GraphCaptureWarning, match="2 calls are under way"):
        results = [case.fast(x, *case.parameters).sum() for x in batches]
    for x, loss in zip(batches, results, strict=True):
        close(list(torch.autograd.grad(loss, case.parameters)), case.gradients(case.eager, x))


# -- order -----------------------------------------------------------------------------------------------


def test_a_replay_comes_behind_what_its_streams_hold(case):
    x = case.batch()
    done = devstream.Event(case.where)
    with devstream.testing.latch(case.side), torch.no_grad():
        case.fast(x, *case.parameters)
        done.record(devstream.current_stream(case.where))
        assert not done.query()
    done.synchronize()


def test_a_side_stream_comes_behind_the_replay(case):
    here = devstream.Stream(case.where)
    done = devstream.Event(case.where)
    x = case.batch()
    devstream.synchronize(case.where)
    with devstream.testing.latch(here), torch.no_grad():
        with devstream.stream(here):
            kept = case.fast(x, *case.parameters)
        done.record(case.side)
        assert not done.query()
    done.synchronize()
    close(kept, case.eager(x, *case.parameters).detach())


def test_events_of_the_user_mean_what_they_mean(where, counts):
    side = devstream.Stream(where)

    def function(x: torch.Tensor, before: Any, after: Any) -> torch.Tensor:
        side.wait_event(before)
        with devstream.stream(side):
            y = torch.sin(x)
        after.record(side)
        return y

    fast = compiled(function)
    x, holder = torch.randn(8, device=where), devstream.Stream(where)
    for _ in range(4):
        before, after = devstream.Event(where), devstream.Event(where)
        before.record()
        devstream.current_stream(where).wait_event(after)
        close(fast(x, before, after), torch.sin(x))
        after.synchronize()
    before, after = devstream.Event(where), devstream.Event(where)
    with devstream.testing.latch(holder):
        before.record(holder)
        y = fast(x, before, after)
        assert not after.query()
    after.synchronize()
    close(y, torch.sin(x))
    assert counts["replayed"] == 4


def test_threads_and_models(where, counts):
    """Three threads, two of them in one model, which share its compiled code as well."""
    first = Case(where)
    second = Case(where, fast=first.fast)
    second.parameters = [torch.nn.Parameter(one.detach() * 2) for one in first.parameters]
    for case in (first, second) * 3:
        case.check(case.batch())
    errors: list[BaseException] = []

    def work(case: Case) -> None:
        try:
            for _ in range(10):
                case.check(case.batch())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in (first, first, second)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphCaptureWarning)  # more calls at once than graphs are kept for
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert counts["replayed"]


# -- what can't be captured ------------------------------------------------------------------------------


def reasons(call: Callable[[], object], times: int = 4) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [str(one.message) for one in caught if issubclass(one.category, GraphCaptureWarning)]


def test_a_host_that_waits_is_named_with_its_line(where, counts):
    side = devstream.Stream(where)

    def function(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream(where))
        with devstream.stream(side):
            y = torch.sin(x)
        side.synchronize()
        return y + 1

    line = function.__code__.co_firstlineno + 4
    fast, x = compiled(function), torch.randn(4, device=where)
    (reason,) = reasons(lambda: close(fast(x), torch.sin(x) + 1))
    assert f"the host waits in it ({__file__.rpartition('/')[2]}:{line})" in reason.replace(
        __file__, __file__.rpartition("/")[2]
    )
    assert not counts


def test_an_event_that_keeps_time_is_named(where, counts):
    side = devstream.Stream(where)

    def function(x: torch.Tensor, event: Any) -> torch.Tensor:
        with devstream.stream(side):
            event.record()
        return x + 1

    fast, x = compiled(function), torch.randn(4, device=where)
    timed = devstream.Event(where, enable_timing=True)
    (reason,) = reasons(lambda: fast(x, timed))
    assert "keeps time" in reason
    assert "test_replay.py:" in reason


def test_an_operation_that_fails_in_a_capture_is_named_and_the_function_runs_launched(where, counts, monkeypatch):
    case = Case(where)
    backend = devstream.backend(where)
    capture = backend.capture

    def spoiled(issue: Callable[[], object], stream: Any, *, pool: object = None) -> Any:
        def both() -> None:
            issue()
            backend.query_stream(stream)

        return capture(both, stream, pool=pool)

    monkeypatch.setattr(backend, "capture", spoiled)
    found = reasons(lambda: case.check(case.batch()))
    assert len(found) == 1
    assert "its capture failed" in found[0]
    assert "query" in found[0]
    assert counts == {}


def test_inside_the_users_own_capture_it_is_a_part_of_that(case):
    backend, stream = devstream.backend(case.where), devstream.Stream(case.where)
    x = case.batch()
    results: list[torch.Tensor] = []
    with torch.no_grad():
        case.fast(x, *case.parameters)  # not in the middle of a choice
        if case.where == "cpu":  # where operations run at once, so no graph could hold its results
            with pytest.raises(CaptureError, match="calling a compiled function"):
                backend.capture(lambda: results.append(case.fast(x, *case.parameters)), stream)
            return
        graph = backend.capture(lambda: results.append(case.fast(x, *case.parameters)), stream)
    x.copy_(case.batch())
    graph.replay(backend.current_stream(None))
    close(results[0], case.eager(x, *case.parameters).detach())


@pytest.mark.cuda
def test_pageable_memory_is_named_and_pinned_memory_is_captured():
    side = devstream.Stream("cuda")

    def function(host: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream("cuda"))
        with devstream.stream(side):
            y = host.to("cuda", non_blocking=True) * 2
        devstream.current_stream("cuda").wait_stream(side)
        return y

    fast = compiled(function)
    pinned = torch.randn(64).pin_memory()
    for _ in range(4):
        torch.cuda.synchronize()
        pinned.normal_()
        close(fast(pinned).cpu(), pinned * 2)
    (reason,) = reasons(lambda: fast(torch.randn(64)))
    assert "pageable" in reason
    assert "test_replay.py:" in reason


@pytest.mark.cuda
def test_no_memory_of_a_graph_is_lost_when_its_function_goes():
    case = Case("cuda")
    case.warm()
    for one in case.parameters:
        one.grad = None
    del case
    torch.compiler.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        case = Case("cuda")
        case.warm()
        del case
        torch.compiler.reset()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.parametrize(
    ("options", "words"),
    [({"graph_sizes": 0}, "graph_sizes.*0.*1 or more"), ({"graph_calls": True}, "graph_calls")],
)
def test_wrong_limits(options, words):
    with pytest.raises(Exception, match=words):
        compiled(lambda x: x + 1, **options)(torch.ones(1))


def test_random_numbers_that_the_host_draws_are_named_where_the_host_runs_once(where, counts):
    """Regions that run node by node draw through a generator that nobody can make in a capture."""
    if where == "cpu":
        pytest.skip("a replay runs the host's code again")
    side = devstream.Stream(where)

    def function(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(devstream.current_stream(where))
        with devstream.stream(side):
            y = functional.dropout(x, 0.5)
        devstream.current_stream(where).wait_stream(side)
        return y

    fast = compiled(function)
    x = torch.ones(64, device=where)
    with pytest.warns(GraphCaptureWarning, match="the host draws its random numbers"):
        masks = {tuple(fast(x).tolist()) for _ in range(4)}
    assert len(masks) == 4
    assert not counts


def test_random_numbers_go_on_after_a_capture_that_failed(where, counts):
    """Torch leaves the generator of a capture that is not valid waiting for its end."""
    backend, stream = devstream.backend(where), devstream.Stream(where)
    other = devstream.Stream(where)

    def issue() -> None:
        other.wait_stream(stream)
        with devstream.stream(other):
            torch.zeros(4, device=where).add_(1)
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        backend.capture(issue, stream)
    assert torch.rand(4, device=where).shape == (4,)
    case = Case(where)
    case.warm()
    assert counts["replayed"]
