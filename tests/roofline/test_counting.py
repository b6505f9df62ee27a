"""What a function does, counted: FLOPs, bytes, and where they come from."""

from __future__ import annotations

import inspect
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from devstream.roofline.counting import count
from devstream.roofline.formulas import CONTRACTIONS, OPERATOR_CLASSES, nbytes


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Bert(nn.Module):
    """BERT with its masked-language head, as it is trained."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(self.words(tokens) + self.places), 0.1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def flops_by_class(counted):
    found = defaultdict(float)
    for op in counted.ops:
        found[op.what.operator_class] += op.what.counts.flops
    return found


# -- FLOPs -----------------------------------------------------------------------------------------------


@pytest.fixture
def models():
    torch.manual_seed(0)
    conv = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
    )
    return {
        "block": (Block(32, 4), torch.randn(2, 16, 32)),
        "conv": (conv, torch.randn(2, 3, 8, 8)),
        "mlp": (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(4, 8)),
    }


@pytest.mark.parametrize("name", ["conv", "mlp"])
def test_contractions_have_the_flops_that_torch_counts(models, name):
    model, x = models[name]
    with FlopCounterMode(display=False) as torchs:
        model(x).sum().backward()
    ours = flops_by_class(count(lambda: model(x).sum()))
    assert sum(ours[one] for one in CONTRACTIONS) == torchs.get_total_flops()


def test_attention_has_torchs_flops_and_a_causal_mask_halves_them(models):
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    plain = flops_by_class(count(lambda: F.scaled_dot_product_attention(q, k, v)))["attention"]
    causal = flops_by_class(count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)))["attention"]
    assert plain == (4 + 10) * 2 * 4 * 16 * 16 * 8
    assert causal == plain / 2


def test_of_a_bert_large_training_step_matmuls_are_over_99_percent_of_the_flops():
    """The published share, counted on meta tensors: nothing is computed.

    Source: Ivanov, Dryden, Ben-Nun, Li and Hoefler, "Data Movement Is All You Need", 2021, table of operator
    classes of BERT-large: tensor contractions 99.80 %, normalisation 0.17 %, element-wise 0.03 %.
    """
    with torch.device("meta"):
        model = Bert(layers=24, width=1024, heads=16, vocabulary=30522, length=512)
        tokens, target = (torch.zeros(8, 512, dtype=torch.long) for _ in range(2))
    counted = count(model, tokens, target)
    flops = flops_by_class(counted)
    total = sum(flops.values())
    assert sum(flops[one] for one in CONTRACTIONS) / total > 0.99
    assert 0 < flops["normalisation"] / total < 0.004
    assert 0 < flops["pointwise"] / total < 0.004
    # Against the closed form: 6 FLOPs a weight and token, and the attention's two products, forward and backward.
    weights = 24 * 12 * 1024**2 + 30522 * 1024
    attention = 24 * 8 * 16 * (512**2 * 64) * (4 + 8)  # not the fused kernel, which computes one product again
    assert sum(flops[one] for one in CONTRACTIONS) == pytest.approx(6 * weights * 8 * 512 + attention, rel=0.001)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None)
def test_matmuls_have_the_flops_of_their_shape_in_every_form(batch, m, n, k):
    a, b = torch.zeros(batch, m, k), torch.zeros(batch, k, n)
    for call in (lambda: a @ b, lambda: a[0] @ b[0], lambda: a[0] @ b[0, :, 0], lambda: F.linear(a, b[0].t())):
        with FlopCounterMode(display=False) as torchs:
            call()
        (op,) = [op for op in count(call).ops if op.what.operator_class == "matmul"] or [None]
        if op is not None and "mv" not in op.name and "dot" not in op.name:  # torch has no formula for these
            assert op.what.counts.flops == torchs.get_total_flops()
            assert 2 * torch.tensor(op.what.counts.shape).prod() == op.what.counts.flops


def test_inference_mode_counts_what_composite_operations_are_made_of():
    layer, x = nn.Linear(8, 16), torch.randn(4, 8)
    with torch.inference_mode():
        (op,) = count(layer, x).ops
    assert op.what.counts.flops == 2 * 4 * 8 * 16


# -- bytes -----------------------------------------------------------------------------------------------


def only(call):
    (op,) = count(call).ops
    return op


x = torch.randn(64, 32)
idx = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("call", "read", "write"),
    [
        (lambda: torch.add(x, 1), 1, 1),
        (lambda: torch.mul(x, x), 1, 1),  # one operand, twice: read once
        (lambda: x.clone().add_(1), 2, 2),
        (x.sum, 1, 1 / 2048),
        (lambda: torch.zeros(64, 32), 0, 1),
        (x.t, 0, 0),
        (lambda: torch.empty(64, 32), 0, 0),
        (lambda: x.expand(5, 64, 32) + 1, 1, 5),  # what is expanded is read once
        (lambda: torch.cat([x, x.clone()]), 1 + 2, 1 + 2),
        (lambda: torch.empty(64, 32).copy_(x), 1, 1),
        (lambda: F.layer_norm(x, (32,)), 1, 1 + 2 / 32),
        (lambda: F.softmax(x, -1), 1, 1),
        (x.relu, 1, 1),
    ],
)
def test_each_operand_is_moved_once(call, read, write):
    ops = count(call).ops
    size = nbytes(x)
    assert sum(op.what.counts.read_bytes for op in ops) == pytest.approx(read * size)
    assert sum(op.what.counts.write_bytes for op in ops) == pytest.approx(write * size)


def test_a_look_up_moves_the_rows_that_it_takes_and_not_the_table():
    table = torch.randn(10_000, 16)
    op = only(lambda: F.embedding(idx, table))
    assert op.what.counts.read_bytes == 3 * 16 * 4 + 3 * 8
    assert op.what.counts.write_bytes == 3 * 16 * 4
    assert op.what.operator_class == "data movement"


def test_its_backward_writes_the_whole_tables_gradient():
    table = torch.randn(1000, 16, requires_grad=True)
    ops = {op.name: op.what.counts for op in count(lambda: F.embedding(idx, table).pow(2).sum()).ops}
    assert ops["aten.embedding_dense_backward.default"].write_bytes == 1000 * 16 * 4 + 3 * 16 * 4


def test_an_optimizer_is_a_class_of_its_own():
    layer = nn.Linear(8, 8)
    for one in layer.parameters():
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    optimizer.step()
    (op,) = [op for op in count(optimizer.step).ops if op.what.operator_class == "optimizer"]
    # Weight, gradient and two states are read; all but the gradient are written.
    assert op.what.counts.read_bytes >= 4 * (64 + 8) * 4
    assert op.what.counts.write_bytes >= 3 * (64 + 8) * 4


@pytest.mark.cuda
def test_copies_over_the_link_are_counted_by_direction_and_kind_of_memory():
    there = torch.zeros(1024, device="cuda")
    pinned = torch.zeros(1024, pin_memory=True)

    def run():
        there.copy_(pinned, non_blocking=True)
        there.cpu()
        return there[0].item()

    ways = [op.what.counts.link_bytes for op in count(run).ops if op.what.operator_class == "link"]
    assert ways == [{"h2d pinned": 4096.0}, {"d2h pageable": 4096.0}, {"d2h pageable": 4.0}]


# -- where it comes from ---------------------------------------------------------------------------------


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    (offset,) = [number for number, line in enumerate(lines) if text in line]
    return first + offset


def test_every_operation_of_forward_and_backward_knows_its_module_and_line(models):
    model, x = models["block"]
    ops = count(model, x.requires_grad_()).ops
    down = [op for op in ops if op.module == "Block.down"]
    assert [op.backward for op in down if op.what.operator_class == "matmul"] == [False, True, True]
    expected = line_of(Block.forward, "self.down(")
    assert {op.line.rpartition(":")[2] for op in down} == {str(expected)}
    assert all(op.line.split(":")[0].endswith("test_counting.py") for op in ops if op.line)
    assert all(op.module.startswith("Block") for op in ops if op.what.operator_class in CONTRACTIONS)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2  # the backward's own line


def test_a_backward_in_python_has_its_own_line():
    ops = count(lambda: Double.apply(torch.ones(3, requires_grad=True))).ops
    (backward,) = [op for op in ops if op.backward]
    assert backward.line.endswith(f":{line_of(Double.backward, 'own line')}")


def test_what_checkpointing_computes_again_is_counted_with_its_module_and_line(models):
    model, x = models["mlp"]
    plain = count(model, x)
    again = count(lambda: checkpoint(model, x, use_reentrant=False))
    matmuls = [op for op in again.ops if op.what.operator_class == "matmul"]
    assert len(matmuls) > len([op for op in plain.ops if op.what.operator_class == "matmul"])
    assert {op.module for op in matmuls} == {"Sequential.0", "Sequential.2"}


def test_a_function_that_runs_its_own_backward_is_not_differentiated_again(models):
    model, x = models["mlp"]

    def step():
        loss = model(x).sum()
        loss.backward()
        return loss

    assert len(count(step).ops) == len(count(lambda: model(x).sum()).ops)


def test_gradients_are_left_as_they_were(models):
    model, x = models["mlp"]
    weight = model[0].weight
    count(model, x)
    assert weight.grad is None
    weight.grad = kept = torch.full_like(weight, 7.0)
    count(model, x)
    assert weight.grad is kept
    assert (kept == 7).all()


def test_the_result_is_the_one_without_counting(models):
    model, x = models["block"]
    expected = model(x)
    seen = []
    count(lambda: seen.append(model(x)))
    assert torch.equal(seen[0], expected)


def test_a_compiled_function_is_counted_as_it_is_written(models):
    model, x = models["mlp"]
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    assert [op.name for op in count(compiled, x).ops] == [op.name for op in count(model, x).ops]
    assert {op.module for op in count(compiled, x).ops if op.module} >= {"Sequential.0", "Sequential.2"}


def test_no_hook_is_left_behind_even_where_the_function_raises():
    from torch.nn.modules import module

    def fail():
        raise KeyError("no")

    before = len(module._global_forward_pre_hooks), len(module._global_forward_hooks)
    with pytest.raises(KeyError):
        count(fail)
    count(nn.Linear(2, 2), torch.zeros(1, 2))
    assert (len(module._global_forward_pre_hooks), len(module._global_forward_hooks)) == before


# -- what is kept ----------------------------------------------------------------------------------------


def test_what_the_forward_saves_is_known_with_who_made_it():
    layer = nn.Linear(32, 256, bias=False)
    counted = count(lambda: F.gelu(layer(x)).sum())
    largest = counted.kept[0]
    assert largest.size_bytes == 64 * 256 * 4
    assert counted.ops[largest.maker].name.startswith("aten.mm")
    # The result of GELU is summed, which saves nothing of it.
    assert sum(one.size_bytes == largest.size_bytes for one in counted.kept) == 1


def test_the_largest_block_that_was_made_is_known_with_its_maker():
    counted = count(lambda: torch.zeros(4).sum() + torch.zeros(100, 100).sum())
    size, maker = counted.largest
    assert size == 40_000
    assert counted.ops[maker].name == "aten.zeros.default"


def test_every_class_is_one_that_tables_know(models):
    for model, x in models.values():
        assert {op.what.operator_class for op in count(model, x).ops} <= set(OPERATOR_CLASSES)


def test_a_bag_of_look_ups_moves_the_rows_that_it_sums():
    table = nn.EmbeddingBag(10_000, 16, mode="sum")
    picks = torch.zeros(4, 8, dtype=torch.long)
    with torch.no_grad():
        bag = [op for op in count(table, picks).ops if "embedding_bag" in op.name]
    assert sum(op.what.counts.read_bytes for op in bag) < 32 * 16 * 4 + 10 * 32 * 8
    assert {op.what.operator_class for op in bag} == {"data movement"}


def test_a_matmul_says_where_its_rows_begin():
    """A vocabulary of an odd size, as weight and as transposed one, and rows of a part of a tensor."""
    x = torch.randn(8, 16)
    even, odd, part = torch.randn(16, 12), torch.randn(16, 11), torch.randn(16, 13)[:, :12]

    def alignment(function, *arguments) -> int:
        return count(function, *arguments).ops[0].what.counts.alignment

    assert [alignment(torch.mm, x, one) for one in (even, odd, part)] == [16, 4, 4]
    assert alignment(F.linear, x, torch.randn(11, 16)) == 4  # the result's rows
    assert alignment(torch.mm, x.half(), even.half()) == 8


def test_attention_has_a_shape_of_heads_rows_and_depth():
    q, k = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 16, 4)
    ops = count(F.scaled_dot_product_attention, q, k, k).ops
    (one,) = [op.what.counts for op in ops if op.what.operator_class == "attention"]
    assert one.shape == (6, 8, 1, 16)
