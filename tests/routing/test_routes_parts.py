"""RoutedExperts: parts of a batch, parts put together, and routes aligned with other padding."""

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_helpers import SITES, example, random_ids

from moe_rl.routing.change import change_counts, deviation_histogram
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.router_stats import active_set_churn, effective_sets, expert_load
from moe_rl.routing.routes import RoutedExperts

# Parts


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (1, [1]),
        (-1, [2]),
        (slice(0, 2), [0, 1]),
        (slice(None, None, 2), [0, 2]),
        ([2, 0, 2], [2, 0, 2]),
        (torch.tensor([2, 1]), [2, 1]),
        (torch.tensor([True, False, True]), [0, 2]),
        ([False, True, True], [1, 2]),
        (torch.tensor([False] * 3), []),
        (slice(None, None, -1), [2, 1, 0]),
        ([], []),
        (np.array([2, 1]), [2, 1]),
        (np.argsort([5, 7, 6])[::-1], [1, 2, 0]),
        (torch.tensor([2, 1], dtype=torch.uint8), [2, 1]),  # ids of rows, which torch would take for a mask
    ],
)
def test_rows_takes_what_indexing_takes(index, expected):
    routes = example()
    assert routes.has_live, "known, but not of its parts"
    part = routes.rows(index)
    assert torch.equal(part.ids, routes.ids[expected])
    assert torch.equal(part.tokens, routes.tokens[expected])
    assert part.has_live == (2 in expected)


@pytest.mark.parametrize("index", [3, [0, 7], [0.0, 1.0], torch.tensor([True, False])])
def test_rows_that_are_not_there_are_refused(index):
    with pytest.raises(RoutingError, match="B = 3"):
        example().rows(index)


def test_columns_are_a_range(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    with pytest.raises(RoutingError, match=r"columns: expected a slice of token positions, .* got 1"):
        example().columns(1)  # took away the axis of tokens


def test_rows_works_where_torch_lacks_uint16_kernels():
    ids = random_ids(3, 2, 1, 2, 400)
    assert torch.equal(RoutedExperts(ids, ["gate"], 400).rows([2, 0]).ids, ids[[2, 0]])


def test_select_reorders_sites():
    routes = example()
    part = routes.select([1, 0])
    assert part.sites == (SITES[1], SITES[0])
    assert torch.equal(part.ids, routes.ids[:, :, [1, 0]])
    assert torch.equal(part.tokens, routes.tokens)


@pytest.mark.parametrize("one", [np.int64(1), np.uint8(1), torch.tensor(1), np.array(1), -1])
def test_one_site_may_be_any_integer(one):
    assert example().select(one).sites == example().select([one]).sites == (SITES[1],)


def test_the_sites_with_few_experts_are_routes_like_any_others(tmp_path):
    """The packed dtype is that of the most experts; a part that kept it was saved and could not be loaded, and -1 of
    one dtype became 255 of the other when it was joined with routes of its own width."""
    both = RoutedExperts([[[[1, 2], [300, 4]], [[-1, -1], [5, 6]]]], SITES, [4, 512])
    part, few = both.select(0), RoutedExperts([[[[1, 2]], [[-1, -1]]]], SITES[:1], 4)
    assert part.equal(few) and part.packed.dtype == torch.uint8
    assert RoutedExperts.cat([part, few]).ids.tolist() == 2 * few.ids.tolist()
    part.save(tmp_path / "part.safetensors")
    assert RoutedExperts.load(tmp_path / "part.safetensors").equal(few)


def test_a_part_without_the_live_rows_has_none():
    ids = random_ids(1, 3, 2, 2, 8)
    ids[0, 2, 1] = -1
    routes = RoutedExperts(ids, SITES, 8, tokens=torch.tensor([[5, 6, 7]]))
    assert routes.has_live
    assert [routes.select(site).has_live for site in (0, 1)] == [False, True]
    for part, live in ((slice(2), False), (slice(1, 3), True)):
        columns = routes.columns(part)
        assert columns.has_live is live and torch.equal(columns.ids, ids[:, part])
        assert columns.tokens.tolist() == [[5, 6, 7][part]]
    halves = [routes.columns(slice(2)), routes.columns(slice(1, 3))]
    for known in (False, True):
        assert not known or [half.has_live for half in halves] == [False, True]
        assert RoutedExperts.cat(halves).has_live and RoutedExperts.cat(halves[::-1]).has_live
    assert not RoutedExperts.cat(halves[:1] * 2).has_live


@pytest.mark.parametrize("num_experts", [8, 300])
def test_tokens_are_taken_from_anywhere_and_none_has_no_route(num_experts):
    routes = RoutedExperts(random_ids(2, 2, 1, 2, num_experts), ["gate"], num_experts, tokens=[[5, 6], [7, 8]])
    taken = routes.take(torch.tensor([[3, -1, 0]]))
    assert taken.tokens.tolist() == [[8, -1, 5]]
    assert torch.equal(taken.ids[0, [0, 2]], routes.ids[[1, 0], [1, 0]]) and taken.live[0, :, 0].tolist() == [0, 1, 0]


def test_cat_undoes_rows():
    routes = example()
    assert RoutedExperts.cat([routes.rows(0), routes.rows([1, 2])]).equal(routes)
    assert RoutedExperts.cat(routes.rows(row) for row in range(3)).equal(routes)


def test_cat_keeps_what_parts_agree_on():
    a = example()
    b = RoutedExperts(a.ids, SITES, 8, meta={"model": "tiny", "seed": 1})
    both = RoutedExperts.cat([a, b])
    assert both.meta == RoutedExperts.cat([b, a]).meta == {"model": "tiny"}
    assert torch.equal(both.tokens, torch.cat([a.tokens, torch.full((3, 4), -1, dtype=torch.int32)]))
    hashed = RoutedExperts(torch.zeros(3, 4, 2, 2, dtype=torch.int64), SITES, 8, meta={"hash_routed": list(SITES)})
    assert RoutedExperts.cat([a, hashed]).meta == {"hash_routed": list(SITES)}  # else `load` would refuse its rows
    of_one = RoutedExperts(a.ids, SITES, 8, meta={"hash_routed": [SITES[1]]})
    assert RoutedExperts.cat([a, of_one]).meta == {"hash_routed": [SITES[1]]}
    with pytest.raises(RoutingError, match="T = 1, part 0 has 4"):
        RoutedExperts.cat([a, RoutedExperts(a.ids[:, :1], SITES, 8)])
    with pytest.raises(RoutingError, match="part 1 has other sites"):
        RoutedExperts.cat([a, RoutedExperts(a.ids, SITES[::-1], 8)])


# Alignment


@pytest.mark.parametrize("num_experts", [8, 300])
def test_left_padding_to_right_padding(num_experts):
    # Token ids double as expert ids, so that a route that goes astray from its token shows.
    tokens = torch.tensor([[0, 0, 5, 6], [0, 1, 2, 3]])
    left = torch.tensor([[False, False, True, True], [False, True, True, True]])
    ids = torch.where(left, tokens, -1)[:, :, None, None]
    routes = RoutedExperts(ids, ["gate"], num_experts, tokens=tokens)
    right = torch.tensor([[True, True, False], [True, True, True]])
    moved = routes.realign(left, right)
    assert moved.ids[..., 0, 0].tolist() == [[5, 6, -1], [1, 2, 3]]
    assert moved.tokens.tolist() == [[5, 6, -1], [1, 2, 3]]
    assert moved.has_live
    assert moved.realign(right, left).ids.tolist() == routes.ids.tolist()


def test_the_last_generated_token_has_no_route():
    # generate() on prompts of 2 gave 2 tokens: 4 tokens, 3 rows. Packed to another place, the last is -1.
    routes = RoutedExperts(torch.tensor([[[[1]], [[2]], [[3]]]]), ["gate"], 4, tokens=torch.tensor([[11, 12, 13]]))
    all_four = torch.ones(1, 4, dtype=torch.bool)
    moved = routes.realign(all_four, torch.tensor([[0, 1, 1, 1, 1]]))
    assert moved.ids.flatten().tolist() == [-1, 1, 2, 3, -1]
    assert moved.tokens.tolist() == [[-1, 11, 12, 13, -1]]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([5, 400]))
def test_realign_there_and_back_is_the_identity_on_routed_tokens(seed, num_experts):
    generator = torch.Generator().manual_seed(seed)
    here = torch.rand(3, 6, generator=generator) < 0.5
    there = torch.stack([torch.randperm(9, generator=generator) < n for n in here.sum(-1)])
    ids = random_ids(3, 6, 2, 3, num_experts, seed).masked_fill(~here[:, :, None, None], -1)
    routes = RoutedExperts(ids, SITES, num_experts)
    moved = routes.realign(here, there)
    assert torch.equal(moved.ids[there], ids[here])
    assert torch.equal(moved.live.all(-1), ~there)
    assert moved.realign(there, here).equal(routes)


def test_masks_that_do_not_fit_are_told_where():
    routes = example()
    ones = torch.ones(3, 4, dtype=torch.bool)
    fewer = ones.clone()
    fewer[1, 0] = False
    with pytest.raises(RoutingError, match="sequence 1 has 4 tokens in from_mask and 3 in to_mask"):
        routes.realign(ones, fewer)
    with pytest.raises(RoutingError, match=r"from_mask must be \[B,T\] = \[3,4\]"):
        routes.realign(torch.ones(3, 6, dtype=torch.bool), ones)
    with pytest.raises(RoutingError, match="to_mask must be"):
        routes.realign(ones, ones[:2])
    with pytest.raises(RoutingError, match="to_mask: expected only 0 and 1"):
        routes.realign(ones, torch.where(ones, 5, -100))  # labels


@pytest.mark.parametrize("mask", [[[True] * 4] * 3, np.ones((3, 4), dtype=bool)], ids=["list", "array"])
def test_masks_that_are_no_tensors_are_refused_with_what_makes_one(mask, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests, where no types are checked
    routes, ones = example(), torch.ones(3, 4, dtype=torch.bool)
    for take in (
        lambda: change_counts(routes, routes, mask),
        lambda: deviation_histogram(routes, routes, mask),
        lambda: expert_load(routes, mask),
        lambda: effective_sets(routes, mask),
        lambda: active_set_churn(routes, routes, mask),
        lambda: routes.to_frame(mask),
        lambda: RoutedExperts.from_vllm([np.ones((4, 2, 2), dtype=int)] * 3, SITES, 8, mask=mask),
    ):
        with pytest.raises(RoutingError, match=r"^mask must be a tensor, .*(list|ndarray): torch\.as_tensor\(mask\)"):
            take()
    for masks, name in (((mask, ones), "from_mask"), ((ones, mask), "to_mask")):
        with pytest.raises(RoutingError, match=rf"{name} must be a tensor"):
            routes.realign(*masks)
