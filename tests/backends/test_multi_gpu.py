"""The laws across two devices of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import devstream
from devstream.exceptions import DeviceMismatchError

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]

N = 1 << 16
DEVICES = ("cuda:0", "cuda:1")


@pytest.fixture(autouse=True)
def warm() -> Iterator[None]:
    for device in DEVICES:
        torch.zeros(N, device=device).fill_(1).sum().item()
    yield
    for device in DEVICES:
        devstream.synchronize(device)


@pytest.mark.parametrize("kind", ["ours", "timed", "torch.Event", "torch.cuda.Event"])
@pytest.mark.parametrize("here", [0, 1])
def test_a_stream_of_one_device_waits_for_an_event_of_the_other(kind: str, here: int) -> None:
    there = 1 - here
    event = {
        "ours": lambda: devstream.Event(DEVICES[there]),
        "timed": lambda: devstream.Event(DEVICES[there], enable_timing=True),
        "torch.Event": lambda: torch.Event(DEVICES[there]),
        "torch.cuda.Event": torch.cuda.Event,
    }[kind]()
    producer, consumer = devstream.Stream(DEVICES[there]), devstream.Stream(DEVICES[here])
    values = torch.zeros(N, device=DEVICES[there])
    target = torch.zeros(N, device=DEVICES[here])
    target.copy_(values)  # opens what the two devices need between them
    for device in DEVICES:
        devstream.synchronize(device)
    latch = devstream.backend("cuda").hold(producer)
    with devstream.stream(producer):
        values.fill_(1)
        producer.record_event(event)
    consumer.wait_event(event)
    behind = consumer.record_event()
    assert not behind.query()
    latch.release()
    behind.synchronize()
    with devstream.stream(consumer):
        target.copy_(values, non_blocking=True)
    devstream.synchronize(DEVICES[here])
    assert target.sum().item() == N


def test_wait_stream_orders_across_devices() -> None:
    producer, consumer = devstream.Stream(DEVICES[0]), devstream.Stream(DEVICES[1])
    latch = devstream.backend("cuda").hold(producer)
    consumer.wait_stream(producer)
    behind = consumer.record_event()
    assert not behind.query()
    latch.release()
    behind.synchronize()


def test_a_stream_makes_its_device_current_and_restores_both() -> None:
    side = devstream.Stream(DEVICES[1])
    own = devstream.current_stream(DEVICES[1])
    assert torch.accelerator.current_device_index() == 0
    with devstream.stream(side):
        assert torch.accelerator.current_device_index() == 1
        assert torch.empty(1, device="cuda").device.index == 1
        assert devstream.current_stream() == side
        assert devstream.current_stream(DEVICES[0]) == devstream.default_stream(DEVICES[0])
    assert torch.accelerator.current_device_index() == 0
    assert devstream.current_stream(DEVICES[1]) == own


@pytest.mark.parametrize("current", [0, 1])
def test_every_call_acts_on_the_streams_own_device(current: int) -> None:
    with devstream.stream(devstream.Stream(DEVICES[current])):
        for device in DEVICES:
            stream, event = devstream.Stream(device), devstream.Event(device, enable_timing=True)
            assert str(stream.device) == device
            event.record(stream)
            event.synchronize()
            assert str(event.device) == device
            assert stream.query()
            stream.synchronize()
            assert str(devstream.default_stream(device).device) == device
            assert str(devstream.named_stream("laws", device).device) == device
            assert devstream.wrap(stream.native_handle, device) == stream
        assert torch.accelerator.current_device_index() == current


def test_an_event_of_one_device_is_not_recorded_on_another() -> None:
    """B36 of the bug log."""
    with pytest.raises(ValueError, match=r"cuda:0.*cuda:1") as caught:
        devstream.Event(DEVICES[0]).record(devstream.Stream(DEVICES[1]))
    assert isinstance(caught.value, DeviceMismatchError)
    bound = devstream.Event("cuda")
    bound.record(devstream.Stream(DEVICES[0]))
    with pytest.raises(DeviceMismatchError):
        bound.record(devstream.Stream(DEVICES[1]))


def test_a_native_event_of_one_device_is_not_recorded_on_another() -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.Stream(DEVICES[0]))
    with pytest.raises(DeviceMismatchError):
        devstream.Stream(DEVICES[1]).record_event(event)


def test_times_of_two_devices_are_not_compared() -> None:
    one, two = (devstream.Event(device, enable_timing=True) for device in DEVICES)
    one.record(devstream.Stream(DEVICES[0]))
    two.record(devstream.Stream(DEVICES[1]))
    two.synchronize()
    with pytest.raises(DeviceMismatchError, match="clocks"):
        one.elapsed_time(two)


def test_synchronize_waits_for_one_device_only() -> None:
    side = devstream.Stream(DEVICES[1])
    latch = devstream.backend("cuda").hold(side)
    event = side.record_event()
    devstream.synchronize(DEVICES[0])
    assert not event.query()
    latch.release()
    devstream.synchronize(DEVICES[1])
    assert event.query()


def test_carried_streams_are_right_on_both_devices() -> None:
    one, two = devstream.Stream(DEVICES[0]), devstream.Stream(DEVICES[1])
    seen: list[object] = []
    with devstream.stream(one), devstream.stream(two):
        carried = devstream.carry_streams(lambda: seen.extend(devstream.current_stream(d) for d in DEVICES))
        thread = threading.Thread(target=carried)
        thread.start()
        thread.join()
    assert seen == [one, two]


def test_an_index_past_the_last_device_is_refused() -> None:
    count = torch.accelerator.device_count()
    with pytest.raises(DeviceMismatchError, match=f"has {count} device"):
        devstream.Stream(f"cuda:{count}")
