"""K4: the current stream. Each test's first line names the row of the bug log and where it was reported."""

from __future__ import annotations

import warnings

import pytest
import torch

import devstream


def test_leaving_a_b_a_a_one_by_one_gives_a_b_a_and_the_first_again():
    """B18, pytorch/pytorch#176560."""
    base, a, b = devstream.current_stream("cpu"), devstream.Stream("cpu"), devstream.Stream("cpu")
    for s in (a, b, a, a):
        s.__enter__()
    seen = []
    for s in (a, a, b, a):
        s.__exit__(None, None, None)
        seen.append(devstream.current_stream("cpu"))
    assert seen == [a, b, a, base]


def test_one_stream_twice_in_one_with_restores():
    """B18, torch-spyre/torch-spyre#4418."""
    base, s = devstream.current_stream("cpu"), devstream.Stream("cpu")
    with pytest.raises(KeyError), s, s:
        raise KeyError("work")
    assert devstream.current_stream("cpu") is base


def test_a_plain_thread_starts_on_the_default_stream(in_thread):
    """B19, pytorch/pytorch#78824."""
    with devstream.stream(devstream.Stream("cpu")):
        assert in_thread(lambda: devstream.current_stream("cpu")) == devstream.default_stream("cpu")


def test_a_carried_function_runs_on_the_callers_stream(in_thread):
    """B19, pytorch/pytorch#78824."""
    side = devstream.Stream("cpu")
    with devstream.stream(side):
        carried = devstream.carry_streams(lambda: devstream.current_stream("cpu"))
    assert in_thread(carried) == side


def test_a_block_after_a_setter_brings_back_what_was_set(in_thread):
    """B20, cupy/cupy#7866."""

    def run():
        one, two = devstream.Stream("cpu"), devstream.Stream("cpu")
        devstream.set_stream(one)
        with devstream.stream(two):
            pass
        return devstream.current_stream("cpu") == one

    assert in_thread(run)


def test_an_event_recorded_inside_a_block_sits_on_the_blocks_stream(cpu):
    """B22, huggingface/trl#7195: made on the default stream, used inside ``with stream(s)``."""
    event, side = devstream.Event("cpu"), devstream.Stream("cpu")
    latch = cpu.hold(side)
    with devstream.stream(side):
        event.record()
    assert event.query() is False
    latch.release()
    assert event.query() is True


def test_recording_the_stream_that_made_the_tensor_warns_once_and_the_reader_not_at_all():
    """B23, huggingface/diffusers#12721."""
    from devstream.testing import cpu

    maker, reader = devstream.Stream("cpu"), devstream.Stream("cpu")
    with cpu(strict=True):
        with devstream.stream(maker):
            image = torch.ones(8) * 3
        with pytest.warns(devstream.DevstreamWarning, match="allocated on") as caught:
            devstream.record_stream(image, maker)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            devstream.record_stream(image, reader)
    assert (image - 3).abs().max() == 0


def test_a_stream_made_in_one_thread_works_in_another(in_thread):
    """B24, ml-explore/mlx-lm#1181."""
    side = devstream.Stream("cpu")

    def use():
        with devstream.stream(side):
            result = torch.ones(3).mul(2).sum()
            done = devstream.Event("cpu")
            done.record()
        done.synchronize()
        return result.item()

    assert in_thread(use) == 6.0
