"""The wrappers of random operators, taken apart; compiled programs with them are in tests/compiler."""

from operator import getitem

import pytest
import torch

from devstream._compat.rng import state_of, take_apart, uses_generator, with_state

rand = torch.ops.aten.rand.default
wrappers = torch._prims.rng_prims


def test_an_operator_repeated_from_a_state_draws_the_same_and_leaves_the_generator():
    state = state_of("cpu")
    first = torch.rand(8)
    now = torch.get_rng_state()
    assert torch.equal(with_state("cpu", state, rand, [8]), first)
    assert torch.equal(torch.get_rng_state(), now)


def test_an_operator_that_fails_leaves_the_generator():
    state = state_of("cpu")
    torch.rand(3)
    now = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        with_state("cpu", state, rand, [-1])
    assert torch.equal(torch.get_rng_state(), now)


def halves(operator, *args, made):
    """Return a forward and a backward as the partitioner leaves them."""
    fw, bw = torch.fx.Graph(), torch.fx.Graph()
    wrapped = fw.call_function(wrappers.run_and_save_rng_state, (operator, *args))
    state, out = (fw.call_function(getitem, (wrapped, one)) for one in (0, 1))
    state.meta["val"], out.meta["val"] = torch.get_rng_state(), made
    fw.output((out, state))
    given = bw.placeholder("rng_state_output_0")
    given.meta["val"] = torch.get_rng_state()
    bw.output((bw.call_function(wrappers.run_with_rng_state, (given, operator, *args)),))
    return fw, bw


def run(graph, *given):
    return torch.fx.GraphModule(torch.nn.Module(), graph)(*given)


def test_both_halves_draw_the_same():
    fw, bw = halves(rand, [8], made=torch.empty(8))
    repeated = []
    take_apart(fw, repeated)
    take_apart(bw, repeated)
    assert [one.name for one in fw.output_node().args[0]][1] == "rng_state_output_0"
    assert [uses_generator(one) for one in fw.nodes if one.op == "call_function"] == [True, False]
    assert [uses_generator(one) for one in bw.nodes if one.op == "call_function"] == [True]
    out, state = run(fw)
    torch.rand(5)
    assert torch.equal(run(bw, state)[0], out)
    assert all("val" in one.meta for one in (*fw.nodes, *bw.nodes) if one.op == "call_function")


def test_seeds_are_kept_in_the_place_of_the_state():
    import torch._inductor.inductor_prims as prims

    fw, bw = halves(prims.seeds, 2, torch.device("cpu"), made=torch.zeros(2, dtype=torch.int64))
    repeated = []
    take_apart(fw, repeated)
    take_apart(bw, repeated)
    seeds, kept = run(fw)
    assert kept is seeds
    assert torch.equal(run(bw, kept)[0], seeds)
    assert not any(one.op == "call_function" for one in bw.nodes)
    assert bw.find_nodes(op="placeholder")[0].meta["val"].dtype == torch.int64
