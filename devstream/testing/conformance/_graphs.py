"""Laws about graphs: what is captured doesn't run, and what is replayed is what was captured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from devstream import _streams as verbs
from devstream.abc import Capability
from devstream.exceptions import CaptureError, UnsupportedError
from devstream.testing._latch import latch
from devstream.testing.conformance._subject import Subject


class GraphLaws:
    """A capture takes the work of a stream and of those that it brings in; a replay issues it again."""

    def test_a_capture_runs_nothing_and_each_replay_runs_it_on_the_values_of_then(self, subject: Subject) -> None:
        """What was issued in a capture reads, at each replay, what its memory holds by then."""
        subject.needs(Capability.GRAPH_CAPTURE)
        stream, copier = subject.side_stream(), subject.backend
        source, target = self._pair(subject)
        graph = copier.capture(lambda: copier.copy(target, source, stream), stream)
        verbs.synchronize(subject.device())
        assert target.cpu().eq(0).all(), "what is captured must not run"
        for value in (3.0, 4.0):
            source.fill_(value)
            graph.replay(verbs.current_stream(subject.device()))
            verbs.synchronize(subject.device())
            assert target.cpu().eq(value).all(), "a replay must read what the memory holds now"

    def test_a_capture_takes_in_the_streams_that_wait_for_it(self, subject: Subject) -> None:
        """Work on a stream that waits for the captured one is captured as well, in its order."""
        subject.needs(Capability.GRAPH_CAPTURE)
        stream = subject.side_stream()
        side = subject.side_stream(beside=(stream,))
        source, between = self._pair(subject)
        target = torch.zeros_like(source)

        def issue() -> None:
            subject.backend.copy(between, source, stream)
            side.wait_stream(stream)
            subject.backend.copy(target, between, side)
            stream.wait_stream(side)

        graph = subject.backend.capture(issue, stream)
        source.fill_(5.0)
        verbs.synchronize(subject.device())
        assert target.cpu().eq(0).all(), "what a stream of the capture got must not run either"
        graph.replay(verbs.current_stream(subject.device()))
        verbs.synchronize(subject.device())
        assert target.cpu().eq(5.0).all(), "the order between the streams of a capture must be in its graph"

    def test_a_replay_is_in_its_streams_order(self, subject: Subject) -> None:
        """A replay comes behind what its stream holds, and what its stream gets later comes behind the replay."""
        subject.needs(Capability.GRAPH_CAPTURE)
        stream = subject.side_stream()
        other = subject.side_stream(beside=(stream,))
        source, target = self._pair(subject)
        graph = subject.backend.capture(lambda: subject.backend.copy(target, source, stream), stream)
        source.fill_(8.0)
        verbs.synchronize(subject.device())
        gate = threading.Event()
        with latch(other):
            if subject.backend.works_in_threads:  # where a latch holds events, and a task holds work
                subject.backend.launch(lambda: (gate.wait(subject.patience_s), None)[1], other)
            graph.replay(other)
            mark = subject.mark(other)
            assert subject.stays(mark), "what comes behind a replay must come behind what its stream holds"
            if subject.backend.works_in_threads:
                assert target.eq(0).all(), "a replay must come behind what its stream holds"
            gate.set()
        assert subject.finishes(mark.synchronize), "a stream must go on behind a replay"
        assert target.cpu().eq(8.0).all(), "what comes behind a replay must come behind all its work"

    def test_a_stream_that_is_not_joined_is_named(self, subject: Subject) -> None:
        """B57 of the bug log: the error holds the stream, and the line that brought it in."""
        subject.needs(Capability.GRAPH_CAPTURE)
        stream = subject.side_stream()
        side = subject.side_stream(beside=(stream,))
        source, target = self._pair(subject)

        def issue() -> None:
            side.wait_stream(stream)
            subject.backend.copy(target, source, side)

        self._refuses(
            lambda: subject.backend.capture(issue, stream),
            "a capture that ends with a stream not joined",
            "not joined",
            repr(side),
            "forked at",
        )
        self._works(subject, stream, side)

    def test_a_question_in_a_capture_is_refused_and_the_capture_goes_on(self, subject: Subject) -> None:
        """B59 of the bug log: asking a stream or an event would end the capture, so it is an error before that."""
        subject.needs(Capability.GRAPH_CAPTURE)
        stream = subject.side_stream()
        event = subject.mark(subject.side_stream(beside=(stream,)))
        verbs.synchronize(subject.device())
        source, target = self._pair(subject)

        def issue() -> None:
            assert subject.backend.is_capturing(), "is_capturing() must say so in a capture"
            for question in (stream.query, stream.synchronize, event.query, event.synchronize):
                self._refuses(question, "a question in a capture", "captured into a graph")
            subject.backend.copy(target, source, stream)

        assert not subject.backend.is_capturing(), "is_capturing() must say no outside"
        graph = subject.backend.capture(issue, stream)
        source.fill_(2.0)
        graph.replay(verbs.current_stream(subject.device()))
        verbs.synchronize(subject.device())
        assert target.cpu().eq(2.0).all(), "a refused question must leave the capture as it was"

    def test_an_error_in_a_capture_is_raised_and_ends_it(self, subject: Subject) -> None:
        """What the captured code raises comes through, and the stream works again."""
        subject.needs(Capability.GRAPH_CAPTURE)
        stream = subject.side_stream()

        def issue() -> None:
            raise KeyError("from the captured code")

        subject.error(KeyError, lambda: subject.backend.capture(issue, stream), "from the captured code")
        self._works(subject, stream)

    def test_two_graphs_of_one_pool(self, subject: Subject) -> None:
        """A graph that takes an earlier one's pool leaves what is still referred to as it was."""
        subject.needs(Capability.GRAPH_CAPTURE)
        stream, backend = subject.side_stream(), subject.backend
        source, target = self._pair(subject)
        last = torch.zeros_like(source)
        first = backend.capture(lambda: backend.copy(target, source, stream), stream)
        second = backend.capture(lambda: backend.copy(last, target, stream), stream, pool=first.pool)
        source.fill_(6.0)
        for graph in (first, second):
            graph.replay(verbs.current_stream(subject.device()))
        verbs.synchronize(subject.device())
        assert last.cpu().eq(6.0).all(), "graphs of one pool must each do what was captured"

    def test_a_capture_is_refused_where_there_is_none(self, subject: Subject) -> None:
        """A backend without the capability says so."""
        if Capability.GRAPH_CAPTURE in subject.backend.capabilities(0):
            return
        stream, backend = verbs.current_stream(subject.device()), subject.backend
        subject.error(UnsupportedError, lambda: backend.capture(lambda: None, stream), "GRAPH_CAPTURE")
        assert not backend.is_capturing()

    def _refuses(self, call: Callable[[], object], what: str, *words: str) -> None:
        text = None
        try:
            call()
        except CaptureError as error:
            text = str(error)
        assert text is not None, f"{what} must be refused"
        for word in words:
            assert word in text, f"the error must say {word!r}, but says: {text}"

    def _pair(self, subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = (torch.zeros(1 << 10, device=subject.device()) for _ in range(2))
        target.copy_(source)  # a kernel's first launch loads it, which a capture may not
        verbs.synchronize(subject.device())
        return source, target

    def _works(self, subject: Subject, *streams: Any) -> None:
        for stream in streams:
            source, target = self._pair(subject)
            source.fill_(1.0)
            verbs.synchronize(subject.device())
            subject.backend.copy(target, source, stream)
            assert subject.finishes(stream.synchronize), "a stream must be usable after a capture that failed"
            assert target.cpu().eq(1.0).all(), "a stream must do its work after a capture that failed"


__all__ = ["GraphLaws"]
