"""devstream/testing/_call.py: an operation that is run later gives what it would have given at its issue."""

from __future__ import annotations

import torch

from devstream.testing._call import Call

ADD, RAND, NORMAL = torch.ops.aten.add.Tensor, torch.ops.aten.rand.default, torch.ops.aten.normal_.default


def test_it_gives_the_same_values_later():
    call = Call(ADD, (torch.ones(2), 1), {})
    assert call.state is None
    assert call.again().tolist() == [2, 2]


def test_random_numbers_are_those_of_the_issue_and_disturb_no_others():
    torch.manual_seed(0)
    call = Call(RAND, ([3],), {})
    drawn = call.once().tolist()
    following = torch.rand(2).tolist()
    torch.manual_seed(0)
    torch.rand(3)
    assert call.again().tolist() == drawn
    assert torch.rand(2).tolist() == following


def test_an_own_generator_is_the_one_whose_state_is_kept():
    own = torch.Generator().manual_seed(4)
    call = Call(torch.ops.aten.rand.generator, ([2],), {"generator": own})
    drawn = call.once().tolist()
    torch.rand(3, generator=own)
    assert call.again().tolist() == drawn


def test_a_change_in_place_draws_its_numbers_at_the_issue():
    torch.manual_seed(0)
    expected = torch.empty(3).normal_().tolist()
    after = torch.rand(1).item()
    torch.manual_seed(0)
    target = torch.zeros(3)
    call = Call(NORMAL, (target, 0.0, 1.0), {})
    call.draw([target])
    assert target.tolist() == [0, 0, 0]
    assert torch.rand(1).item() == after
    call.again()
    assert target.tolist() == expected


def test_what_it_holds_is_its_own():
    x = torch.ones(2)
    call = Call(torch.ops.aten.cat.default, ([x, x],), {})
    held = call.hold()
    assert [one.data_ptr() for one in held] == [x.data_ptr()] * 2
    assert all(one is not x for one in held)
    assert call.again().tolist() == [1] * 4
    call.drop()
    assert call._args == ()
