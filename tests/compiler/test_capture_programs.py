"""Stream code inside ordinary Python: loops, helpers, generators, exceptions, modules."""

from __future__ import annotations

import pytest
import torch

import devstream

ONE, TWO = devstream.Stream("cpu"), devstream.Stream("cpu")
DONE = devstream.Event("cpu")


def ring(t):
    events = [devstream.Event("cpu") for _ in range(3)]
    for i, event in enumerate(events):
        with devstream.stream(ONE if i % 2 else TWO):
            t = t + i
            event.record()
    for event in events:
        event.wait()
    return t


def loop(t):
    for _ in range(3):
        with devstream.stream(ONE):
            t = t + 1
        TWO.wait_stream(ONE)
        with devstream.stream(TWO):
            t = t * 2
        ONE.wait_stream(TWO)
    return t


def helper(t, stream=None):
    with devstream.stream(stream):
        return t * 3


def optional_stream(t):
    return helper(t) + helper(t, ONE)


def exception_leaves_the_block(t):
    try:
        with devstream.stream(ONE):
            t = t + 1
            raise ValueError
    except ValueError:
        pass
    return t * 2


def early_return(t):
    with devstream.stream(ONE):
        if t.dim() == 1:
            return t + 1
    return t


def generator(t):
    def parts():
        with devstream.stream(ONE):
            yield t + 1

    return sum(parts()) * 2


def another_device(t):
    there = devstream.current_stream("cpu:1")
    with devstream.stream(there):
        y = t + 1
    ONE.wait_stream(there)
    return y


def keywords(t):
    DONE.record(stream=ONE)
    DONE.wait(stream=TWO)
    TWO.wait_event(event=DONE)
    TWO.wait_stream(stream=ONE)
    ONE.record_event(event=DONE)
    return t + 1


def events_in_a_returned_list(t):
    events = []
    for _ in range(2):
        event = devstream.Event("cpu")
        with devstream.stream(ONE):
            t = t + 1
            event.record()
        events.append(event)
    return t, events


PROGRAMS = [
    ring,
    loop,
    optional_stream,
    exception_leaves_the_block,
    early_return,
    generator,
    another_device,
    keywords,
    events_in_a_returned_list,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_means_what_eager_means(agreement, program):
    agreement.agree(program, (torch.arange(4.0),), (torch.ones(4),))


def test_one_event_under_two_names(agreement):
    def program(t, a, b):
        with devstream.stream(ONE):
            t = t + 1
            a.record()
        b.wait(TWO)
        return t

    event, other = devstream.Event("cpu"), devstream.Event("cpu")
    other.record()
    t = torch.ones(2)
    agreement.agree(program, (t, event, event), (t, event, other), compilations=2)


def test_dynamic_shapes_keep_their_streams(agreement):
    def program(t):
        with devstream.stream(ONE):
            return t * t.shape[0]

    agreement.agree(program, (torch.ones(3),), (torch.ones(5),), (torch.ones(7),), compilations=2)


def test_modules_with_streams_of_their_own(agreement):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.side = torch.nn.Linear(4, 4), devstream.Stream("cpu")
            self.events = [devstream.Event("cpu") for _ in range(2)]

        def forward(self, t):
            with devstream.stream(self.side):
                y = self.linear(t)
                self.events[0].record()
            self.events[0].wait()
            return y

    agreement.agree(torch.nn.Sequential(Layer(), Layer()), (torch.ones(4),), (torch.zeros(4),))
