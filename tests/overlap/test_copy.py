"""Copies that order after their producer, keep their source, and say when they are done."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch

import devstream
from devstream import _observe, _registry
from devstream.abc import AnyBackend, Capability
from devstream.backends.cpu import CpuBackend
from devstream.exceptions import BlockingCopyWarning, CaptureError, DeviceMismatchError, StreamTypeError
from devstream.overlap import _copy, copy
from devstream.testing import latch

N = 1 << 12


def on(device: torch.device, value: float) -> torch.Tensor:
    """Return a tensor on *device*; the CPU's tensors know one CPU only."""
    return torch.full((N,), value, device="cpu" if device.type == "cpu" else device)


def needs_held_copies(backend: AnyBackend, device: torch.device) -> None:
    assert Capability.ASYNC_COPY in backend.capabilities(device.index)


def test_a_copy_to_the_device_has_the_values_once_its_event_was_waited_for(device: torch.device) -> None:
    source = torch.arange(N)
    there, ready = copy(source, device)
    ready.wait(devstream.current_stream(device))
    assert there.device.type == device.type
    assert torch.equal(there.cpu(), source)


def test_a_copy_to_the_host_has_the_values_once_its_event_was_synchronized(device: torch.device) -> None:
    host, ready = copy(on(device, 7.0), "cpu")
    ready.synchronize()
    assert host.device.type == "cpu"
    assert host.eq(7.0).all()


def test_the_event_has_not_happened_while_the_copy_is_held(device: torch.device) -> None:
    side = devstream.Stream(device)
    with latch(side) as held:
        host, ready = copy(on(device, 3.0), "cpu", stream=side)
        assert not ready.query()
        held.release()
        ready.synchronize()
    assert host.eq(3.0).all()


def test_the_caller_goes_on_while_the_copy_is_held(backend: AnyBackend, device: torch.device) -> None:
    side = devstream.Stream(device)
    before = on(device, 1.0)
    with latch(side) as held:
        copied, ready = copy(before, device, stream=side)
        other = on(device, 2.0) * 3
        assert other.eq(6.0).all().item()
        assert not ready.query()
        held.release()
    ready.synchronize()
    assert copied.eq(1.0).all()


def test_a_copy_comes_after_the_stream_that_is_current_at_the_call(device: torch.device) -> None:
    producer = devstream.Stream(device)
    source = on(device, 1.0)
    devstream.synchronize(device)
    with latch(producer) as held:
        with devstream.stream(producer):
            made = source * 5
            host, ready = copy(made, "cpu")
        assert not ready.query()
        held.release()
        ready.synchronize()
    assert host.eq(5.0).all()


def test_the_source_may_be_dropped_before_the_copy_has_happened(device: torch.device) -> None:
    side = devstream.Stream(device)
    source = on(device, 9.0)
    devstream.synchronize(device)
    with latch(side) as held:
        host, ready = copy(source, "cpu", stream=side)
        del source
        gc.collect()
        others = [on(device, -1.0) for _ in range(8)]  # would get the memory of the source if it were free
        held.release()
        ready.synchronize()
    assert host.eq(9.0).all()
    assert len(others) == 8


def test_the_destination_may_be_dropped_before_the_copy_has_happened(device: torch.device) -> None:
    side = devstream.Stream(device)
    source = torch.full((N,), 4.0)
    with latch(side) as held:
        there, ready = copy(source, device, stream=side)
        del there
        gc.collect()
        later = on(device, 1.0)
        held.release()
        ready.synchronize()
    assert later.eq(1.0).all()


def test_a_pageable_source_may_be_changed_at_once_where_there_is_pinned_memory(
    backend: AnyBackend, device: torch.device
) -> None:
    side, source = devstream.Stream(device), torch.full((N,), 2.0)
    with latch(side) as held:
        there, ready = copy(source, device, stream=side)
        if Capability.PINNED_MEMORY in backend.capabilities(device.index):
            source.fill_(-1.0)
        held.release()
        ready.synchronize()
    assert there.eq(2.0).all()


def test_a_pageable_source_does_not_wait_for_the_current_stream_where_there_is_pinned_memory(
    backend: AnyBackend, device: torch.device
) -> None:
    if Capability.PINNED_MEMORY not in backend.capabilities(device.index):
        pytest.skip(f"backend {backend.name!r} has no Capability.PINNED_MEMORY")
    busy = devstream.Stream(device)
    copy(torch.full((N,), 1.0), device)[1].synchronize()  # takes the memory that the copy below needs
    with latch(busy) as held:
        with devstream.stream(busy):
            there, ready = copy(torch.full((N,), 2.0), device)
            ready.synchronize()  # would never return if the copy came after what holds the current stream
        held.release()
    assert there.eq(2.0).all()


def test_many_copies_in_flight_each_keep_their_own_values(device: torch.device) -> None:
    copies = [copy(torch.full((N,), float(number)), device) for number in range(32)]
    for number, (there, ready) in enumerate(copies):
        ready.synchronize()
        assert there.eq(float(number)).all()


def test_the_same_device_gives_a_copy_and_not_the_tensor_itself(device: torch.device) -> None:
    source = on(device, 1.0)
    snapshot, ready = copy(source, source.device)
    ready.synchronize()
    source.fill_(2.0)
    assert snapshot.eq(1.0).all()


def test_a_copy_on_the_current_stream_is_in_order(device: torch.device) -> None:
    here = devstream.current_stream(device)
    there, _ = copy(torch.full((N,), 6.0), device, stream=here)
    assert (there + 1).eq(7.0).all()


@pytest.mark.parametrize(
    "source",
    [
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
        torch.arange(24)[::2],
        torch.arange(4).expand(3, 4),
        torch.arange(48).reshape(1, 2, 4, 6).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.arange(8).to(torch.bfloat16),
        torch.tensor([1 + 2j, 3 - 4j]),
    ],
    ids=["scalar", "empty", "transposed", "with gaps", "expanded", "channels last", "bool", "bfloat16", "complex"],
)
def test_every_shape_and_type_goes_there_and_back(device: torch.device, source: torch.Tensor) -> None:
    there, ready = copy(source, device)
    ready.wait(devstream.current_stream(device))
    back, returned = copy(there, "cpu")
    returned.synchronize()
    assert back.dtype == source.dtype
    assert torch.equal(back, source)


def test_autograd_does_not_see_the_copy(device: torch.device) -> None:
    there, ready = copy(torch.ones(4, requires_grad=True), device)
    ready.synchronize()
    assert not there.requires_grad


def test_the_seam_sees_one_copy_after_the_producers_record(device: torch.device) -> None:
    seen: list[_observe.Notice] = []
    side = devstream.Stream(device)
    source = on(device, 1.0)
    with _observe.subscribe(seen.append):
        there, ready = copy(source, "cpu", stream=side)
    ready.synchronize()
    kinds = [type(one) for one in seen]
    assert kinds.count(_observe.Copy) == 1
    assert kinds.index(_observe.Wait) < kinds.index(_observe.Copy)
    (copied,) = [one for one in seen if isinstance(one, _observe.Copy)]
    assert copied.destination is there
    assert copied.stream == side


def test_copies_of_one_direction_share_one_stream(device: torch.device) -> None:
    seen: list[_observe.Notice] = []
    with _observe.subscribe(seen.append):
        events = [copy(torch.ones(4), device)[1] for _ in range(3)]
    for ready in events:
        ready.synchronize()
    streams = {one.stream for one in seen if isinstance(one, _observe.Copy)}
    assert len(streams) == 1


@pytest.mark.filterwarnings("ignore")  # of torch, about the kinds below
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [1, 2], r"not \[1, 2\]"),
        (lambda: None, "not None"),
        (lambda: torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.ones(2, 2).to_sparse_csc(), "layout torch.sparse_csc"),
        (lambda: torch.ones(4, 4).to_sparse_bsr(2), "layout torch.sparse_bsr"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "layout torch.jagged"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8), "quantized"),
        (
            lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
            "quantized",
        ),
    ],
)
def test_what_is_no_dense_strided_tensor_is_refused_and_leaves_the_stream_usable(
    device: torch.device, make: Callable[[], torch.Tensor], words: str
) -> None:
    side, wrong = devstream.Stream(device), make()
    with pytest.raises(StreamTypeError, match=f"dense strided tensor.*{words}"):
        copy(wrong, device, stream=side)
    there, ready = copy(torch.ones(4), device, stream=side)
    ready.synchronize()
    side.synchronize()
    assert there.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int2, torch.uint1, torch.bits8])
def test_elements_that_torch_cannot_copy_are_copied_as_bytes(device: torch.device, dtype: torch.dtype) -> None:
    side = devstream.Stream(device)
    source = torch.arange(24, dtype=torch.uint8).reshape(4, 6)[:, ::2].view(dtype)
    there, ready = copy(source, device, stream=side)
    ready.wait(devstream.current_stream(device))
    back, returned = copy(there, "cpu", stream=side)
    returned.synchronize()
    assert there.dtype == back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), source.view(torch.uint8))


def test_a_device_for_a_stream_is_refused(device: torch.device) -> None:
    with pytest.raises(StreamTypeError):
        copy(torch.ones(4), device, stream="cpu")  # type: ignore[arg-type]


# -- what is kept until a copy is done --------------------------------------------------------------------


class Asked:
    """An event, and its backend, that raises *error* when it is asked, or says *done*."""

    native = None

    def __init__(self, *, error: Exception | None = None, done: bool = False) -> None:
        self.error, self.done = error, done
        self._backend = self

    def query_event(self, native: object) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


def test_what_cannot_be_asked_now_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = (Asked(error=CaptureError(operation="query", stream="x")), (torch.ones(1),))
    broken, waiting, done = (
        (Asked(error=OSError("no device")), (torch.ones(1),)),
        (Asked(), (torch.ones(1),)),
        (Asked(done=True), (torch.ones(1),)),
    )
    monkeypatch.setattr(_copy, "_kept", [done, capturing, waiting])
    copy(torch.ones(1), "cpu")[1].synchronize()
    assert _copy._kept == [capturing, waiting]
    monkeypatch.setattr(_copy, "_kept", [done, broken, waiting])
    with pytest.raises(OSError, match="no device"):
        copy(torch.ones(1), "cpu")
    assert _copy._kept == [broken, waiting]


def test_a_finalizer_of_what_was_kept_may_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, made = torch.ones(1), []
    weakref.finalize(kept, lambda: made.append(copy(torch.ones(2), "cpu")))
    monkeypatch.setattr(_copy, "_kept", [(Asked(done=True), (kept,))])
    del kept
    thread = threading.Thread(target=lambda: copy(torch.ones(1), "cpu"), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    ((there, ready),) = made
    ready.synchronize()
    assert there.tolist() == [1, 1]


# -- a device without page-locked memory ------------------------------------------------------------------


class UnpinnedBackend(CpuBackend):
    """Streams of the CPU for the device type ``meta``, whose tensors have no values."""

    name: ClassVar[str] = "unpinned"

    def __init__(self) -> None:
        super().__init__()
        self.device_type = "meta"

    def capabilities(self, index: int) -> Capability:
        return super().capabilities(index) & ~Capability.RECORD_STREAM


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_copy, "_warned", set())
    _registry.register("meta", UnpinnedBackend)
    yield
    _registry.unregister("meta")


@pytest.mark.usefixtures("unpinned")
def test_a_copy_that_must_block_says_so_once() -> None:
    with pytest.warns(BlockingCopyWarning, match="from host to device") as caught:
        copy(torch.ones(4), "meta")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy(torch.ones(4), "meta")


@pytest.mark.usefixtures("unpinned")
def test_a_stream_of_neither_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceMismatchError, match="stream is on cpu:0"):
        copy(torch.ones(4), "meta", stream=devstream.Stream("cpu"))


@pytest.mark.usefixtures("unpinned")
def test_tensors_are_held_until_the_event_where_the_allocator_cannot_be_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side = devstream.Stream("meta")
        with latch(side) as held:
            _, ready = copy(torch.ones(4), "meta", stream=side)
            assert any(event is ready for event, _ in _copy._kept)
            held.release()
            ready.synchronize()
        copy(torch.ones(4), "meta", stream=side)
        assert not any(event is ready for event, _ in _copy._kept)


def test_a_copy_in_inference_mode_has_the_values(device: torch.device) -> None:
    with torch.inference_mode():
        there, ready = copy(on(device, 3.0), device)
        ready.synchronize()
        assert there.eq(3.0).all()
