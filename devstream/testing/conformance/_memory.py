"""Laws about data: copies, gradients, and memory that two streams share."""

from __future__ import annotations

import torch

from devstream import _streams as verbs
from devstream.abc import Capability
from devstream.exceptions import DeviceMismatchError, StreamTypeError, UnsupportedError
from devstream.testing._latch import latch
from devstream.testing.conformance._subject import Subject


class MemoryLaws:
    """Copies, gradients and shared memory follow the order of the streams."""

    def test_a_copy_is_done_when_an_event_after_it_has_happened(self, subject: Subject) -> None:
        """`Backend.copy` is in the stream's order, to and from the host, also with pageable memory."""
        stream = subject.side_stream()
        there = torch.zeros(1 << 16, device=subject.device())
        back = torch.zeros(1 << 16)
        verbs.synchronize(subject.device())
        for value in (1.0, 2.0, 3.0):
            host = torch.full((1 << 16,), value)
            subject.backend.copy(there, host, stream)
            subject.backend.copy(back, there, stream)
            event = subject.mark(stream)
            assert subject.finishes(event.synchronize), "Event.synchronize after a copy must return"
            assert back.eq(value).all(), "Backend.copy: Event.synchronize returned before the copy was done"

    def test_a_copy_is_waited_for_by_another_stream(self, subject: Subject) -> None:
        """What waits for an event behind a copy sees the copied values, and the host behind a device wait too."""
        stream = subject.side_stream()
        reader = subject.side_stream(beside=(stream,))
        host = torch.full((1 << 16,), 5.0)
        there, read = (torch.zeros(1 << 16, device=subject.device()) for _ in range(2))
        verbs.synchronize(subject.device())
        subject.backend.copy(there, host, stream)
        reader.wait_event(stream.record_event())
        with verbs.stream(reader):
            read.copy_(there)
        assert subject.finishes(lambda: verbs.synchronize(subject.device())), "synchronize must return"
        assert read.cpu().eq(5.0).all(), "a stream that waited for a copy read a value from before it"

    def test_a_copy_leaves_the_current_stream_alone(self, subject: Subject) -> None:
        """`Backend.copy` to a stream doesn't make it current."""
        before = verbs.current_stream()
        subject.backend.copy(torch.zeros(4), torch.ones(4, device=subject.device()), subject.side_stream())
        assert verbs.current_stream() == before, "Backend.copy must leave the current stream as it was"

    def test_a_plain_copy_to_the_host_is_complete_when_it_returns(self, subject: Subject) -> None:
        """``tensor.cpu()`` under a stream gives the finished values, without a synchronize by the user."""
        stream = subject.side_stream()
        stream.wait_stream(verbs.current_stream())
        with verbs.stream(stream):
            for value in (1.0, 2.0, 3.0):
                made = torch.full((1 << 16,), value, device=subject.device()) * 2
                assert made.cpu().eq(2 * value).all(), "tensor.cpu() returned before the values were there"

    def test_the_backward_of_two_streams_gives_the_gradient(self, subject: Subject) -> None:
        """d/dx of a product whose factors were made on two streams, with the forward's own waits, is right."""
        base, side = verbs.current_stream(), subject.side_stream()
        device = subject.device()
        for _ in range(3):
            x = torch.ones(256, device=device, requires_grad=True)
            side.wait_stream(base)
            with verbs.stream(side):
                doubled = x * 2
                event = verbs.Event()
                event.record()
            tripled = x * 3
            base.wait_event(event)
            (doubled * tripled).sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None, "backward must reach the leaf"
            assert x.grad.cpu().eq(12.0).all(), "the gradient of 6 x^2 at 1 must be 12"

    def test_a_backward_through_a_side_stream_joins_the_leaf(self, subject: Subject) -> None:
        """A gradient made on a side stream is there for the stream that called backward: 6.0 for 2 x * 3."""
        base, side = verbs.current_stream(), subject.side_stream()
        x = torch.ones(256, device=subject.device(), requires_grad=True)
        side.wait_stream(base)
        with verbs.stream(side):
            doubled = x * 2
        base.wait_stream(side)
        (given,) = torch.autograd.grad((doubled * 3).sum(), x)
        assert given.cpu().eq(6.0).all(), "torch.autograd.grad must give 6.0"
        assert verbs.current_stream() == base, "backward must leave the current stream as it was"

    def test_record_stream_keeps_memory_for_the_stream_that_reads_it(self, subject: Subject) -> None:
        """Memory told of by ``record_stream`` isn't handed out before the reading stream has passed."""
        subject.needs(Capability.RECORD_STREAM)
        side, device = subject.side_stream(), subject.device()
        target = torch.zeros(1 << 16, device=device)
        source = torch.full((1 << 16,), 7.0, device=device)
        # Kernels are loaded before the latch; see assert_ordered.
        target.copy_(source).fill_(0.0)
        verbs.synchronize(device)
        with latch(side):
            with verbs.stream(side):
                target.copy_(source)
            verbs.record_stream(source, side)
            del source
            others = [torch.full((1 << 16,), 9.0, device=device) for _ in range(4)]
        verbs.synchronize(device)
        assert target.cpu().eq(7.0).all(), "record_stream: the memory was handed out before its reader had passed"
        del others

    def test_record_stream_refuses_what_it_cannot_do(self, subject: Subject) -> None:
        """No tensor, a tensor of another device type, and a backend without the capability are each an error."""
        stream, backend = subject.side_stream(), subject.backend
        subject.error(StreamTypeError, lambda: verbs.record_stream([1.0], stream), "tensor")  # type: ignore[arg-type]
        other = torch.empty(1, device="meta")
        subject.error(DeviceMismatchError, lambda: verbs.record_stream(other, stream), "meta")
        if Capability.RECORD_STREAM not in backend.capabilities(0):
            tensor = torch.zeros(1, device=subject.device())
            words = ("record_stream", repr(backend.name))
            subject.error(UnsupportedError, lambda: verbs.record_stream(tensor, stream), *words)


__all__ = ["MemoryLaws"]
