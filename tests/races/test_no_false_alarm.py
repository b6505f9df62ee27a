"""Correct programs, in which the checker finds nothing; each beside its broken twin where there is one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import devstream
from devstream import overlap
from devstream.testing import cpu

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=KINDS)
def device(request):
    return torch.device(request.param)


@pytest.fixture
def races():
    with devstream.racecheck(on_race="collect") as found:
        yield found


def fork(device):
    here, side = devstream.current_stream(device), devstream.Stream(device)
    side.wait_stream(here)
    return here, side


def test_two_streams_may_write_the_halves_of_a_buffer_of_odd_length(device, races):
    """B95: 0 reports; an overlap by one byte: 1 report."""
    buffer = torch.zeros(2049, dtype=torch.uint8, device=device)
    here, side = fork(device)
    with devstream.stream(side):
        buffer[:1024].fill_(1)
    buffer[1024:].fill_(2)
    assert races == []
    here.wait_stream(side)
    side.wait_stream(here)
    with devstream.stream(side):
        buffer[:1025].fill_(1)
    buffer[1024:].fill_(2)
    assert len(races) == 1


def test_two_streams_may_write_interleaved_columns(device, races):
    matrix = torch.zeros(64, 2, device=device)
    _, side = fork(device)
    with devstream.stream(side):
        matrix[:, 0].fill_(1)
    matrix[:, 1].fill_(2)
    assert races == []
    matrix[3].fill_(4)
    assert len(races) == 1


def test_a_block_reused_in_order_is_no_race(device, races):
    here, side = devstream.current_stream(device), devstream.Stream(device)
    for _ in range(5):
        x = torch.ones(1024, device=device)
        side.wait_stream(here)
        with devstream.stream(side):
            y = x * 2
        here.wait_stream(side)
        del x
        y + torch.ones(1024, device=device)
        y.record_stream(here) if device.type == "cuda" else devstream.record_stream(y, here)
        del y
    assert races == []


def test_a_block_that_is_freed_before_the_wait_and_not_reused_is_no_race(device, races):
    here, side = devstream.current_stream(device), devstream.Stream(device)
    x = torch.ones(1024, device=device)
    side.wait_stream(here)
    with devstream.stream(side):
        y = x * 2
    del x
    here.wait_stream(side)
    y + torch.ones(1024, device=device)
    assert races == []


def train(device, model, make_input, steps=3):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(make_input()).square().mean().backward()
        optimizer.step()


class TwoBranches(nn.Module):
    """Two branches on two streams, joined, as the README shows."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        here, side = devstream.current_stream(x.device), devstream.named_stream("branch", x.device)
        side.wait_stream(here)
        with devstream.stream(side):
            left = self.left(x).relu()
        right = self.right(x).relu()
        here.wait_stream(side)
        devstream.record_stream(left, here)
        return self.last(left * right)


def test_autograd_s_own_waits_and_accumulation_are_edges(device, races):
    model = TwoBranches().to(device)
    train(device, model, lambda: torch.randn(8, 16, device=device))
    assert races == []


def test_a_backward_under_a_side_stream_is_ordered_with_that_stream(device, races):
    model = TwoBranches().to(device)
    here, side = fork(device)
    with devstream.stream(side):
        model(torch.randn(8, 16, device=device)).sum().backward()
        total = sum(p.grad.sum() for p in model.parameters())
    here.wait_stream(side)
    devstream.record_stream(total, here)
    total.item()
    assert races == []


def test_gradients_used_on_another_stream_than_backward_s_race(device, races):
    model = TwoBranches().to(device)
    _, side = fork(device)
    with devstream.stream(side):
        loss = model(torch.randn(8, 16, device=device)).sum()
        loss.backward()
    model.last.weight.grad.sum()
    assert races


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_checkpointed_and_double_backward_have_no_race(device, races):
    from torch.utils.checkpoint import checkpoint

    model = TwoBranches().to(device)
    x = torch.randn(8, 16, device=device, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert races == []


def test_a_conv_net_trains_without_a_race(device, races):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
        nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10), nn.LogSoftmax(-1),
    ).to(device)  # fmt: skip
    train(device, model, lambda: torch.randn(4, 3, 16, 16, device=device))
    assert races == []


def test_a_transformer_trains_without_a_race(device, races):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    train(device, model, lambda: torch.randn(2, 5, 16, device=device))
    assert races == []


def test_an_lstm_trains_without_a_race(device, races):
    model = nn.LSTM(8, 8, 2, batch_first=True).to(device)
    train(device, OnlyValues(model), lambda: torch.randn(2, 5, 8, device=device))
    assert races == []


class OnlyValues(nn.Module):
    def __init__(self, lstm):
        super().__init__()
        self.lstm = lstm

    def forward(self, x):
        return self.lstm(x)[0]


def test_a_model_of_transformers_trains_without_a_race(device, races):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(device)
    tokens = torch.randint(0, 64, (2, 16), device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert races == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_data_loader_and_a_prefetcher_have_no_race(device, races, workers):
    data = torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=workers)
    total = 0.0
    for (batch,) in loader:
        moved, ready = overlap.copy(batch, device)
        ready.wait(devstream.current_stream(device))
        devstream.record_stream(moved, devstream.current_stream(device))
        total += moved.sum().item()
    assert total == sum(range(24))
    assert races == []


def test_threads_that_hand_work_on_have_no_race(device, races):
    side, found = devstream.Stream(device), []
    x = torch.ones(64, device=device)
    side.wait_stream(devstream.current_stream(device))

    def work():
        with devstream.stream(side):
            found.append(x * 2)
            side.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (found[0] + 1).sum().item() == 192
    assert races == []


def test_copies_of_overlap_are_ordered_by_their_event(device, races):
    x = torch.ones(64, device=device)
    there, ready = overlap.copy(x, "cpu")
    ready.synchronize()
    assert there.sum().item() == 64
    assert races == []
    there, ready = overlap.copy(x, "cpu")
    x.fill_(3)  # the copy may still read it
    assert len(races) == 1
    ready.synchronize()


def test_a_query_that_says_yes_is_as_good_as_waiting(device, races):
    _, side = fork(device)
    with devstream.stream(side):
        y = torch.ones(64, device=device) * 2
        done = side.record_event()
    while not done.query():
        pass
    (y + 1).sum().item()
    assert races == []


def test_inference_mode_autocast_and_vmap_have_no_race(device, races):
    model = nn.Linear(8, 8).to(device)
    with torch.inference_mode():
        model(torch.randn(2, 8, device=device)).sum().item()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        model(torch.randn(2, 8, device=device)).sum().backward()
    torch.func.vmap(torch.func.grad(lambda v: model(v).sum()))(torch.randn(4, 8, device=device))
    assert races == []


def test_a_compiled_function_runs_eagerly_under_the_checker_and_is_checked(device):
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(1) or graph.forward(*args)

    side = devstream.Stream(device)

    def function(v):
        with devstream.stream(side):
            return (v * 2).relu()

    compiled = torch.compile(lambda v: (v * 2).relu(), backend=backend)
    x = torch.ones(8, device=device)
    compiled(x)
    devstream.synchronize(device)
    with devstream.racecheck(on_race="collect") as races:
        assert compiled(torch.ones(8, device=device)).sum().item() == 16
        assert races == []
        torch.compile(function, backend=backend)(torch.ones(8, device=device))
    assert len(races) == 1
    assert runs == [1]


def test_sparse_and_empty_tensors_are_taken(races):
    torch.eye(3).to_sparse() @ torch.ones(3, 3)
    torch.empty(0).sum().item()
    torch.ones(2, 3, device="meta") + 1
    assert races == []


@pytest.mark.slow
def test_the_demonstration_has_no_race(capsys, tmp_path, races):
    from devstream.__main__ import main

    arguments = ["--device", "cpu", "--steps", "2", "--size", "tiny", "--picture", str(tmp_path / "a.png")]
    assert main(["demo", *arguments]) == 1  # so few steps don't train, which it says
    assert races == []


def test_higher_order_operations_are_taken(races):
    found = torch.cond(torch.ones(()) > 0, lambda v: v.sin(), lambda v: v.cos(), (torch.ones(3),))
    assert found.tolist() == torch.ones(3).sin().tolist()
    assert races == []


@pytest.mark.parametrize("backend", ["eager", "devstream"])
def test_a_function_that_must_compile_whole_runs_eagerly_under_the_checker(device, backend):
    model = TwoBranches().to(device)
    step = torch.compile(lambda v: model(v).square().mean(), backend=backend, fullgraph=True)
    with devstream.racecheck():
        step(torch.randn(8, 16, device=device)).backward()
    if device.type == "cpu":
        with cpu(schedule="lazy"):
            assert step(torch.randn(8, 16)).item() > 0


def test_after_the_block_functions_compile_again(device):
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(1) or graph.forward(*args)

    compiled = torch.compile(lambda v: v * 2, backend=backend, fullgraph=True)
    with devstream.racecheck():
        compiled(torch.ones(8, device=device))
    assert runs == []
    compiled(torch.ones(8, device=device))
    assert runs == [1]
