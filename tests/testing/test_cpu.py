"""`devstream.testing.cpu` and `strict`."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

import devstream
from devstream import _objects
from devstream.exceptions import (
    DeviceMismatchError,
    EventNotRecordedError,
    EventOverwrittenWarning,
    RecordStreamWarning,
)
from devstream.testing import cpu, strict


@pytest.fixture
def side():
    return devstream.Stream("cpu")


# -- strict ----------------------------------------------------------------------------------------------


def test_under_strict_a_wait_for_an_unrecorded_event_raises(side):
    with strict(), pytest.raises(EventNotRecordedError, match="never recorded"):
        devstream.Event("cpu").wait(side)
    devstream.Event("cpu").wait(side)


def test_under_strict_a_record_that_nobody_saw_is_not_overwritten_in_silence(side):
    event = devstream.Event("cpu")
    event.record(side)
    with strict(), pytest.warns(EventOverwrittenWarning, match="recorded again"):
        event.record(side)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        event.record(side)


@pytest.mark.parametrize("look", [lambda e, s: e.wait(s), lambda e, s: e.synchronize(), lambda e, s: e.query()])
def test_under_strict_a_record_that_somebody_saw_may_be_replaced(side, look):
    event = devstream.Event("cpu")
    with strict():
        for _ in range(2):
            event.record(side)
            look(event, side)


def test_strict_nests_and_reaches_every_thread(side):
    before = _objects.strict_depth
    caught = []

    def wait():
        try:
            devstream.Event("cpu").wait(side)
        except EventNotRecordedError as error:
            caught.append(error)

    with strict():
        with strict():
            pass
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert _objects.strict_depth == before


def test_strict_counts_right_from_many_threads():
    before = _objects.strict_depth

    def enter_and_leave():
        for _ in range(500):
            with strict():
                pass

    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _objects.strict_depth == before


# -- options ---------------------------------------------------------------------------------------------


def test_options_hold_inside_the_block_only():
    with cpu(devices=3) as backend:
        assert backend.device_count() == 3
        assert devstream.Stream("cpu:2").device == torch.device("cpu", 2)
        with cpu(devices=4):
            assert backend.device_count() == 4
        assert backend.device_count() == 3
    assert backend.device_count() == 2
    with pytest.raises(DeviceMismatchError):
        devstream.Stream("cpu:2")


@pytest.mark.parametrize("option", [{"schedule": "tomorrow"}, {"profile": "abacus"}])
def test_an_unknown_option_is_refused_and_changes_nothing(option):
    before = devstream.backend(name="cpu").options
    with pytest.raises(devstream.UnsupportedError, match=r"tomorrow|abacus"), cpu(**option):
        pass
    assert devstream.backend(name="cpu").options == before


def test_an_exception_brings_the_options_back():
    with pytest.raises(ZeroDivisionError), cpu(devices=3, strict=True):
        raise ZeroDivisionError
    assert devstream.backend(name="cpu").device_count() == 2
    assert _objects.strict_depth == 0


# -- who made a tensor -----------------------------------------------------------------------------------


def test_record_stream_of_the_owner_warns(side):
    with cpu(strict=True):
        with devstream.stream(side):
            tensor = torch.ones(2)
        view = tensor[1:]
        with pytest.warns(RecordStreamWarning, match="allocated on"):
            devstream.record_stream(view, side)
        devstream.record_stream(tensor, devstream.Stream("cpu"))


def test_an_operation_that_reads_another_devices_tensor_raises():
    one = devstream.Stream("cpu:1")
    unowned = torch.ones(2)
    with cpu(strict=True):
        on_zero = torch.ones(2)
        with devstream.stream(one), pytest.raises(DeviceMismatchError, match=r"cpu:0.*cpu:1.*copy the tensor"):
            on_zero + 1
        with devstream.stream(one):
            unowned + 1
            on_one = torch.empty(2)
            on_one.copy_(on_zero)
            assert (on_one + 1).tolist() == [2, 2]
    with devstream.stream(one):
        on_zero + 1


def test_streams_of_one_device_share_its_tensors(side):
    with cpu(strict=True):
        tensor = torch.ones(2)
        with devstream.stream(side):
            tensor.add_(1)
            assert (tensor * 2).tolist() == [4, 4]


def test_an_in_place_operation_keeps_the_owner(side):
    with cpu(strict=True) as backend:
        tensor = torch.ones(2)
        with devstream.stream(side):
            tensor.mul_(2)
            tensor.view(2).mul_(2)
        assert backend.allocation_stream(tensor) == devstream.default_stream("cpu")


def test_backward_stays_on_its_device():
    with cpu(strict=True), devstream.stream(devstream.Stream("cpu:1")):
        x = torch.ones(2, requires_grad=True)
        (x * 3).sum().backward()
        assert x.grad.tolist() == [3, 3]


def test_owners_are_forgotten_at_the_end():
    with cpu(strict=True) as backend:
        tensor = torch.ones(2)
        assert backend.allocation_stream(tensor) is not None
    assert backend.allocation_stream(tensor) is None
