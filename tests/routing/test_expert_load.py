"""Expert load, its balance, and the experts a sequence uses, counted by hand and by Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_helpers import random_ids

from moe_rl.routing import active_set_churn, effective_sets, expert_load, load_cv, load_entropy, packing, router_stats
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.routes import RoutedExperts


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9999), st.sampled_from([5, 300]))
def test_load_counts_what_python_counts(seed, experts):
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(2, 3, 2, experts, generator=g).topk(2).indices
    ids[torch.rand(2, 3, 2, generator=g) < 0.3] = -1
    mask = torch.rand(2, 3, generator=g) < 0.7
    expected = torch.zeros(2, experts, dtype=torch.long)
    for b, t, site in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(2)).tolist():
        for expert in ids[b, t, site].tolist():
            if mask[b, t] and expert >= 0:
                expected[site, expert] += 1
    assert torch.equal(expert_load(ids, mask, num_experts=experts), expected)
    assert torch.equal(expert_load(RoutedExperts(ids, ["a", "b"], experts), mask), expected)


def test_the_unrouted_last_token_is_credited_to_nobody():
    # Zero-filled, it would raise the load of expert 0 from 0 to 1.
    ids = torch.tensor([[[[1, 2]], [[2, 3]], [[-1, -1]]]])
    assert expert_load(ids, num_experts=4).tolist() == [[0, 1, 2, 1]]
    ids[0, 2, 0, 1] = 3  # a row with one -1 has no route either
    assert expert_load(ids, num_experts=4).tolist() == [[0, 1, 2, 1]]


def test_sets_are_counted_over_rows_with_a_route():
    ids = torch.tensor([[[[0, 1]], [[1, 0]], [[-1, -1]], [[2, 3]]]])
    mask = torch.tensor([[True, True, True, False]])
    assert effective_sets(ids, mask, num_experts=4).tolist() == pytest.approx([1.0])
    assert effective_sets(ids, ~mask & mask, num_experts=4).isnan().all()


@pytest.mark.parametrize(("experts", "size"), [(128, 1), (129, 2), (32769, 4)])
def test_sets_are_counted_in_as_few_bytes_as_their_ids_need(experts, size, monkeypatch):
    """All ids at once were int64, eight times what most routes take."""
    ids, held = torch.tensor([[[0, experts - 1]], [[experts - 1, 0]], [[1, experts - 1]], [[-1, -1]]]), []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: held.append(cat(parts)) or held[-1])
    shares = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    assert effective_sets(ids, num_experts=experts).item() == pytest.approx(shares.pow(-shares).prod().item())
    assert [rows.itemsize for rows in held] == [size]


def test_balance_by_hand():
    # Even; all on 2 of 8, where CV = sqrt(8/2 - 1) and the entropy is ln 2; nothing at all.
    load = torch.tensor([[5] * 8, [20, 20, 0, 0, 0, 0, 0, 0], [0] * 8])
    assert load_cv(load)[:2].tolist() == pytest.approx([0.0, math.sqrt(3)])
    assert load_entropy(load)[:2].tolist() == pytest.approx([math.log(8), math.log(2)])
    assert load_cv(load)[2].isnan()
    assert load_entropy(load)[2].isnan()


def test_churn_of_the_experts_that_a_sequence_uses_by_hand():
    # One site, K = 2. Sequence 0 used {0,1,2}, then {0,1,3,4}: 2 of 4 are new. Sequence 1: {0,1} both times,
    # though every token changed its experts. Its third token is not counted, sequence 2 has no route.
    old = torch.tensor([[[0, 1], [1, 2], [1, 2]], [[0, 1], [1, 0], [2, 3]], [[-1, -1]] * 3])[:, :, None]
    new = torch.tensor([[[0, 1], [3, 4], [0, 3]], [[1, 0], [0, 1], [4, 3]], [[0, 1]] * 3])[:, :, None]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()
    assert active_set_churn(old, new, mask, num_experts=5)[:2].tolist() == [[0.5], [0.0]]
    assert active_set_churn(old, old, mask, num_experts=5).tolist() == [[0.0]] * 3
    unrouted = old.clone()
    unrouted[0, 1:] = -1  # tokens that the sampler never fed back are no change
    assert active_set_churn(unrouted, old, mask, num_experts=5)[0].tolist() == [0.0]
    assert active_set_churn(old[:0], new[:0], num_experts=5).shape == (0, 1), "of no sequence"


def test_churn_of_routes_matches_sites_by_name():
    ids = torch.tensor([[[[0, 1], [2, 3]]]])
    old, new = RoutedExperts(ids, ["a", "b"], 4), RoutedExperts(ids.flip(2), ["b", "a"], 4)
    assert active_set_churn(old, new).tolist() == [[0.0, 0.0]]
    of_eight = RoutedExperts(torch.tensor([[[[0, 1], [2, 7]]]]), ["a", "b"], 8)
    assert active_set_churn(ids, of_eight, num_experts=4).tolist() == [[0.0, 0.5]], "the wider of the two"


def test_counts_do_not_depend_on_how_many_tokens_are_taken_at_a_time(monkeypatch):
    old, new = (random_ids(3, 5, 2, 2, 8, seed) for seed in (0, 1))
    old[0, 2, 1] = -1
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.7

    def counts():
        one = [count(old, mask, num_experts=8) for count in (expert_load, effective_sets)]
        return [*one, active_set_churn(old, new, mask, num_experts=8)]

    whole = counts()
    monkeypatch.setattr(packing, "_IDS", 2 * 2 * 2)  # two tokens
    assert [len(ids) for _, ids in router_stats._parts(old, 8, None)] == [2] * 7 + [1]
    assert all(torch.equal(a, b) for a, b in zip(whole, counts(), strict=True))


def test_churn_of_routes_that_do_not_belong_together_is_refused():
    ids = torch.tensor([[[[0, 1]], [[2, 3]]]])
    old = RoutedExperts(ids, ["a"], 8)
    with pytest.raises(RoutingError, match="8 experts and the new ones of 16"):
        active_set_churn(old, RoutedExperts(ids, ["a"], 16))
    with pytest.raises(RoutingError, match="site b is only in the new routes"):
        active_set_churn(old, RoutedExperts(ids.expand(1, 2, 2, 2), ["a", "b"], 8))
    of_3, of_4 = (RoutedExperts(ids, ["a"], 8, tokens=[[1, token]]) for token in (3, 4))
    with pytest.raises(RoutingError, match="different tokens: sequence 0, position 1 is token 3 in the old and 4"):
        active_set_churn(of_3, of_4)
    assert active_set_churn(of_3, of_4, torch.tensor([[1, 0]])).tolist() == [[0.0]]
    for new in (RoutedExperts(ids[:, :1], ["a"], 8), ids[:, :1]):  # two tokens against one
        with pytest.raises(RoutingError, match=r"old \[1, 2, 1, 2\] and new \[1, 1, 1, 2\] must have one shape"):
            active_set_churn(old, new, num_experts=8)


def test_mistakes():
    ids = torch.tensor([[[[0, 4]]]])
    with pytest.raises(RoutingError, match="pass num_experts="):
        expert_load(ids)
    with pytest.raises(RoutingError, match=r"ids from 0 to 4, expected -1\.\.3"):
        expert_load(ids, num_experts=4)
    with pytest.raises(RoutingError, match=r"mask must have the shape \[1, 1\]"):
        expert_load(ids, torch.ones(2, 1, dtype=torch.bool), num_experts=5)


@pytest.mark.parametrize("count", [expert_load, effective_sets, lambda ids, **kw: active_set_churn(ids, ids, **kw)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_router_logits_are_no_ids(count, dtype):
    with pytest.raises(RoutingError, match=r"expected integer expert ids .* router logits or gate weights\?"):
        count(torch.ones(1, 2, 1, 2, dtype=dtype), num_experts=4)


def test_sites_with_fewer_experts_are_not_averaged_over_columns_that_they_lack():
    # Both sites use 2 experts evenly: of 4, CV = sqrt(4/2 - 1) = 1; of 64, sqrt(64/2 - 1).
    routes = RoutedExperts(torch.tensor([[[[0, 1], [0, 1]]] * 3]), ["a", "b"], [4, 64])
    load = expert_load(routes)
    assert load[0, :5].tolist() == [3, 3, 0, 0, -1] and load.clamp(min=0).sum(-1).tolist() == [6, 6]
    for counts in (load, load + load):
        assert load_cv(counts).tolist() == pytest.approx([1.0, math.sqrt(31)])
        assert load_entropy(counts).tolist() == pytest.approx([math.log(2)] * 2)
