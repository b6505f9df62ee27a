"""devstream/exceptions.py: the tree is the one that is drawn, and each error survives a process border."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re

import pytest
import torch

import devstream
from devstream import exceptions

#: One example of each class, its facts as a raiser passes them.
EXAMPLES = [
    exceptions.BackendNotFoundError(wanted="cdua", known=["cpu", "cuda"], decided_by="name="),
    exceptions.BackendUnavailableError(name="cuda", reason="no driver"),
    exceptions.BackendLoadError(name="npu", distribution="npu-pack", cause="ImportError: no libnpu"),
    exceptions.BackendConflictError(name="npu", first="pack-a (a:B)", second="pack-b (b:B)"),
    exceptions.UnsupportedError(
        operation="ipc_handle", backend="cpu", capability="Capability.IPC_EVENTS", alternative="use threads"
    ),
    exceptions.StreamTypeError(operation="record", got=3.5, expected="a stream"),
    exceptions.FileFormatError(path="a/plan.json", reason="schema 3 is newer than 2"),
    exceptions.MissingExtraError(operation="the picture", package="matplotlib", extra="plot"),
    exceptions.DeviceMismatchError(
        operation="record", first="the event is on cuda:0", second="stream 7 on cuda:1", advice="make another"
    ),
    exceptions.EventNotRecordedError(operation="wait", event="<event 4>"),
    exceptions.EventNotReadyError(event="<event 5>"),
    exceptions.TimingDisabledError(event="<event 6>"),
    exceptions.StreamNotEnteredError(stream="<stream 8>", thread="loader-1"),
    exceptions.StreamInUseError(stream="<stream 8>", thread="loader-1"),
    exceptions.ForkedProcessError(operation="current_stream", device="cuda:0"),
    exceptions.IpcHandleError(device="cuda:0", cause="invalid context"),
    exceptions.RaceError(races=["read before write: record an event after a.py:3", "two writers at a.py:5"]),
    exceptions.CaptureError(operation="synchronize", stream="<stream 9>"),
    exceptions.GraphError(graph="forward", problem="value 'a' is listed twice"),
    exceptions.WriteBackError(
        target="x", line="a.py:3", other="the record of event 1", other_line="a.py:5", advice="make a copy"
    ),
    exceptions.MissingWaitError(waits=["sin (a.py:3) on stream 1 does not wait for mm (a.py:2) on stream 0"]),
    exceptions.MeasurementError(what="matmul float32", device="cuda:0", cause="out of memory"),
    exceptions.DiagnosisError(function="step", phase="in a warm-up run", cause="ValueError: no", line="a.py:3"),
    exceptions.ProofError(program="forward", violations=["step 3 reads a before step 2 wrote it"]),
]
ADVICE = re.compile(
    r"\b(use|call|install|uninstall|repair|ask|make|run|choose|start|do it|enter|opens only|takes)\b",
    re.IGNORECASE,
)


def drawn_tree():
    """Return class name -> (name of its parent, name of the built-in type beside it or None) from the drawing."""
    found, above = {}, {}
    for line in exceptions.__doc__.splitlines():
        match = re.fullmatch(
            r"    (?P<branch>[│ ]*(?:[├└]─ )?)(?P<name>\w+(?:Error|Warning))(?: +\+ (?P<plus>\w+))?", line
        )
        if match:
            depth = len(match["branch"]) // 3
            above[depth] = match["name"]
            found[match["name"]] = (above.get(depth - 1) if depth else None, match["plus"])
    return found


def classes():
    return {
        name: item
        for name, item in vars(exceptions).items()
        if inspect.isclass(item) and issubclass(item, BaseException) and item.__module__ == exceptions.__name__
    }


def test_every_class_is_in_the_drawn_tree_and_nothing_else_is():
    assert sorted(drawn_tree()) == sorted(classes())
    assert len(drawn_tree()) >= 20


@pytest.mark.parametrize("name", sorted(classes()))
def test_a_class_has_the_parent_and_the_built_in_type_that_the_tree_draws(name):
    parent, plus = drawn_tree()[name]
    bases = [base.__name__ for base in classes()[name].__bases__]
    if parent is None:
        assert bases == [plus or "Exception"]
    else:
        assert bases == [parent] + ([plus] if plus else [])
    if plus:
        assert issubclass(classes()[name], getattr(builtins, plus))


def test_every_class_is_exported():
    assert sorted(exceptions.__all__) == sorted([*classes(), "warning"])


def test_there_is_an_example_of_every_error_that_is_raised():
    bases = {"DevstreamError", "BackendError", "OrderingError", "StreamError"}
    errors = {name for name, item in classes().items() if issubclass(item, devstream.DevstreamError)} - bases
    assert {type(example).__name__ for example in EXAMPLES} == errors


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_survives_pickling_with_its_facts_and_its_text(error):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert again.facts == error.facts
        assert str(again) == str(error)
        for name, value in error.facts.items():
            assert getattr(again, name) == value


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_a_message_holds_every_fact_and_says_what_to_do(error):
    text = str(error)
    for value in error.facts.values():
        for part in value if isinstance(value, tuple) else (value,):
            assert str(part) in text
    assert ADVICE.search(text)
    # A report of races is a page, not a sentence.
    assert "\n" not in text or isinstance(error, exceptions.RaceError)


def test_an_error_about_a_stream_keeps_only_text_of_it():
    stream = devstream.Stream("cpu")
    error = exceptions.CaptureError(operation="query", stream=stream)
    assert error.stream == repr(stream)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_error_about_a_tensor_is_small_and_picklable():
    error = exceptions.StreamTypeError(operation="record", got=torch.zeros(4), expected="a stream")
    assert isinstance(error.got, str)
    assert error.got.startswith("Tensor ")
    pickle.dumps(error)


def test_a_near_miss_is_offered_and_a_name_is_never_offered_for_itself():
    offered = exceptions.BackendNotFoundError(wanted="cdua", known=["cpu", "cuda"], decided_by="name=")
    assert "Did you mean 'cuda'?" in str(offered)
    same = exceptions.BackendNotFoundError(wanted="npu", known=["npu"], decided_by="name=")
    assert "Did you mean" not in str(same)


@pytest.mark.parametrize(
    ("cls", "facts", "words"),
    [
        (exceptions.EventOverwrittenWarning, {"event": "<event 4>"}, ["<event 4>", "one event per hand-over"]),
        (
            exceptions.RecordStreamWarning,
            {"stream": "<stream 3>"},
            ["allocated on <stream 3>", "the stream that reads"],
        ),
        (exceptions.BackendWarning, {"name": "rocm", "reason": "4 queues"}, ["'rocm'", "4 queues"]),
        (exceptions.CompileWarning, {"compiler": "inductor"}, ["'inductor'", 'backend="devstream"']),
        (exceptions.MissingWaitWarning, {"wait": "sin does not wait for mm"}, ["would race", "sin does not wait"]),
        (exceptions.GraphCaptureWarning, {"what": "forward", "reason": "a.py:3"}, ["forward", "a.py:3", "once"]),
        (exceptions.CacheWarning, {"path": "a/b.json", "reason": "damaged"}, ["a/b.json", "damaged"]),
        (exceptions.LatchDroppedWarning, {"stream": "<stream 5>"}, ["<stream 5>", "release()"]),
    ],
)
def test_a_warning_is_written_from_its_facts_and_survives_pickling(cls, facts, words):
    made = exceptions.warning(cls, **facts)
    assert isinstance(made, UserWarning)
    assert all(word in str(made) for word in words)
    assert str(pickle.loads(pickle.dumps(made))) == str(made)


@pytest.mark.parametrize("name", ["EventNotRecordedError", "TimingDisabledError"])
def test_the_two_errors_that_torch_raises_as_value_error_are_value_errors(name):
    assert issubclass(getattr(exceptions, name), ValueError)
    assert issubclass(getattr(exceptions, name), RuntimeError)
