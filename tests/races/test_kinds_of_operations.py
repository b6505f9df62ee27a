"""Operations of many kinds: the checker lets them pass, and the schedules give eager's numbers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import devstream
from devstream.testing import cpu

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(quantiz|TypedStorage|torch.ao|sparse).*"),
    pytest.mark.filterwarnings("ignore:.*Sparse.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning"),  # torch's own forward mode, from 2.14
]

KINDS = {}


def kind(function):
    KINDS[function.__name__] = function
    return function


@kind
def nested():
    made = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    return (made * 2).to_padded_tensor(0).sum().item()


@kind
def jagged():
    made = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    return (made * 2).values().sum().item()


@kind
def zero_tensor():
    return (torch._efficientzerotensor(3) + torch.ones(3)).sum().item()


@kind
def conjugate():
    c = torch.ones(3, dtype=torch.complex64).conj()
    return (c * c).real.sum().item()


@kind
def forward_mode():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        return forward_ad.unpack_dual(dual * dual).tangent.sum().item()


@kind
def jvp():
    return torch.func.jvp(lambda v: v.sin() * 2, (torch.ones(3),), (torch.ones(3),))[1].sum().item()


@kind
def sparse():
    return (torch.eye(3).to_sparse() @ torch.ones(3, 3)).sum().item()


@kind
def changes_of_shape_in_place():
    x = torch.zeros(4, 4)
    x.t_()
    x.unsqueeze_(0)
    x.resize_(2, 2)
    x.set_(torch.ones(3))
    return x.sum().item()


@kind
def out_that_is_resized():
    out = torch.empty(0)
    torch.add(torch.ones(3), 1, out=out)
    return out.sum().item()


@kind
def foreach():
    tensors = [torch.ones(3), torch.ones(2)]
    torch._foreach_add_(tensors, 1)
    return sum(one.sum().item() for one in torch._foreach_mul(tensors, 2))


@kind
def several_results():
    values, _ = torch.ones(5).topk(2)
    return values.sum().item() + torch.ones(4, 4).max(0).values.sum().item()


@kind
def indexing():
    x = torch.zeros(5, 5)
    x[torch.tensor([0, 1])] = 1
    x[x > 0] = 2
    x[:, 2] += 1
    return x.sum().item()


@kind
def attention():
    q = torch.ones(1, 1, 4, 8)
    return nn.functional.scaled_dot_product_attention(q, q, q).sum().item()


@kind
def recurrent():
    torch.manual_seed(0)
    return nn.GRU(3, 4)(torch.ones(2, 1, 3))[0].sum().item()


@kind
def reentrant_checkpoint():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(model, x, use_reentrant=True).sum().backward()
    return x.grad.sum().item()


@kind
def saved_and_loaded():
    file = io.BytesIO()
    torch.save(torch.ones(3) * 2, file)
    file.seek(0)
    return torch.load(file).sum().item()


@kind
def copied():
    return copy.deepcopy(nn.Linear(2, 2)).weight.shape[0]


@kind
def linear_algebra():
    return torch.linalg.svd(torch.eye(3))[1].sum().item() + torch.fft.fft(torch.ones(4)).real.sum().item()


@kind
def optimizers():
    total = 0.0
    for optimizer in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.LBFGS):
        weight = nn.Parameter(torch.ones(3))
        chosen = optimizer([weight], lr=0.1)

        def closure(weight=weight, chosen=chosen):
            chosen.zero_grad()
            loss = (weight * weight).sum()
            loss.backward()
            return loss

        chosen.step(closure)
        total += weight.sum().item()
    return total


@kind
def random_numbers():
    torch.manual_seed(1)
    drawn = torch.randperm(5).tolist()[0] + torch.bernoulli(torch.full((4,), 0.5)).sum().item()
    return drawn + torch.randint(0, 9, (3,)).sum().item() + torch.multinomial(torch.ones(4), 2).sum().item()


UNDER = {
    "racecheck": devstream.racecheck,
    "poison": lambda: devstream.racecheck(poison=True),
    "lazy": lambda: cpu(schedule="lazy"),
    "random": lambda: cpu(schedule="random", seed=3),
}


@pytest.mark.parametrize("under", UNDER.values(), ids=UNDER)
@pytest.mark.parametrize("program", KINDS.values(), ids=KINDS)
def test_it_gives_eager_s_number(program, under):
    expected = program()
    with under():
        assert program() == expected
