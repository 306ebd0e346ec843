"""Change metrics against brute-force Python sets, hand-counted examples, and what must not matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.routing import change, expert_load, packing
from moe_rl.routing.change import (
    ChangeCounts,
    change_counts,
    deviation_histogram,
    flips_per_token,
    jaccard,
    site_change,
    slot_change,
    token_change,
)
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.routes import RoutedExperts


def two_routings(seed: int, k: int = 3, experts: int = 7, b: int = 3, t: int = 4, sites: int = 3):
    """Ids before and after, close to each other, with some rows without a route on either side."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(b, t, sites, experts, generator=g)
    old = scores.topk(k).indices
    new = (scores + 0.2 * torch.rand(scores.shape, generator=g)).topk(k).indices
    for ids in (old, new):
        ids[torch.rand(b, t, sites, generator=g) < 0.15] = -1
    return old, new


cases = st.tuples(st.integers(0, 10**6), st.sampled_from([(1, 1), (1, 4), (2, 5), (3, 7), (8, 20), (5, 300)])).map(
    lambda drawn: two_routings(drawn[0], *drawn[1])
)


def brute_force(old: list, new: list) -> tuple[int, int] | None:
    """Slots changed and size of the union of one row, by Python's own sets; None without a route."""
    if -1 in old or -1 in new:
        return None
    return len(old) - len(set(old) & set(new)), len(set(old) | set(new))


@settings(deadline=None, max_examples=60)
@given(cases, st.booleans())
def test_every_metric_equals_python_sets(pair, as_routes):
    old, new = pair
    b, t, sites, k = old.shape
    names = [f"gate.{i}" for i in range(sites)]
    a, z = (RoutedExperts(x, names, 300) if as_routes else x for x in (old, new))
    slot, site, token = slot_change(a, z), site_change(a, z), token_change(a, z)
    flips, overlap, counts = flips_per_token(a, z), jaccard(a, z), change_counts(a, z)
    deviation, per_site = [0] * (k + 1), [[0] * (k + 1) for _ in range(sites)]
    flip_histogram, incomplete = [0] * (sites + 1), 0
    for i in range(b):
        for j in range(t):
            rows = [brute_force(old[i, j, s].tolist(), new[i, j, s].tolist()) for s in range(sites)]
            for s, row in enumerate(rows):
                changed, union = row or (0, k)
                assert slot[i, j, s].item() == pytest.approx(changed / k, abs=1e-7)
                assert site[i, j, s].item() == (changed > 0)
                assert overlap[i, j, s].item() == pytest.approx((k - changed) / union, abs=1e-7)
                if row:
                    deviation[changed] += 1
                    per_site[s][changed] += 1
            compared = [row for row in rows if row]
            flipped = sum(changed > 0 for changed, _ in compared)
            assert flips[i, j].item() == flipped
            assert token[i, j].item() == (flipped > 0)
            if compared:
                flip_histogram[flipped] += 1
                incomplete += len(compared) < sites
    assert counts.deviation.tolist() == deviation_histogram(a, z).tolist() == deviation
    assert counts.site_deviation.tolist() == per_site
    assert counts.flips.tolist() == flip_histogram
    assert counts.incomplete_tokens == incomplete
    assert counts.slots_changed == sum(d * n for d, n in enumerate(deviation))
    assert counts.slots_total == k * sum(deviation)
    assert (counts.sites_changed, counts.sites_total) == (sum(deviation[1:]), sum(deviation))
    assert (counts.tokens_changed, counts.tokens_total) == (sum(flip_histogram[1:]), sum(flip_histogram))


@settings(deadline=None, max_examples=60)
@given(cases, st.integers(0, 999))
def test_slot_order_and_direction_do_not_matter(pair, seed):
    old, new = pair
    shuffle = torch.randperm(old.shape[-1], generator=torch.Generator().manual_seed(seed))
    for metric in (slot_change, site_change, token_change, flips_per_token, jaccard, deviation_histogram):
        reference = metric(old, new)
        assert torch.equal(metric(old[..., shuffle], new), reference)
        assert torch.equal(metric(new, old), reference)


@settings(deadline=None, max_examples=60)
@given(cases, st.integers(0, 999))
def test_masked_tokens_do_not_matter(pair, seed):
    old, new = pair
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(old.shape[:2], generator=g) < 0.5
    other = torch.rand(*old.shape[:-1], 300, generator=g).topk(old.shape[-1]).indices
    scrambled = torch.where(mask[..., None, None], new, other)
    here, there = change_counts(old, new, mask), change_counts(old, scrambled, mask)
    assert torch.equal(here.site_deviation, there.site_deviation)
    assert torch.equal(here.flips, there.flips)
    # Only the tokens in the mask, and all of them: the same as taking them out first.
    alone = change_counts(old[mask], new[mask])
    assert torch.equal(here.site_deviation, alone.site_deviation)
    assert torch.equal(here.flips, alone.flips)


@settings(deadline=None, max_examples=60)
@given(cases)
def test_batches_add_up(pair):
    old, new = pair
    parts = [change_counts(old[i], new[i]) for i in range(len(old))]
    total, whole = parts[0] + parts[1] + parts[2], change_counts(old, new)
    assert torch.equal(total.site_deviation, whole.site_deviation)
    assert torch.equal(total.flips, whole.flips)
    assert total.incomplete_tokens == whole.incomplete_tokens


def test_a_hand_counted_example():
    # Two tokens, two sites, K = 2.
    old = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    new = torch.tensor([[[1, 0], [3, 4]], [[1, 0], [4, 5]]])
    #                    same     one       same     both
    assert slot_change(old, new).tolist() == [[0.0, 0.5], [0.0, 1.0]]
    assert jaccard(old, new).tolist() == [[1.0, pytest.approx(1 / 3)], [1.0, 0.0]]  # {3}/{2,3,4}
    counts = change_counts(old, new)
    assert counts.per_site_slots_changed.tolist() == [0, 3]
    assert counts.per_site_slots_total.tolist() == [4, 4]
    assert counts.per_site_changed.tolist() == [0, 2]
    assert counts.per_site_total.tolist() == [2, 2]
    rates = counts.rates()
    assert rates["slot_change"] == 3 / 8
    assert rates["site_change"] == 2 / 4
    assert rates["token_change"] == 1.0
    assert rates["flips_per_token"] == 1.0
    assert rates["jaccard"] == pytest.approx((1 + 1 + 1 / 3 + 0) / 4)


def test_the_unrouted_last_token_is_in_no_denominator():
    # 3 tokens, the last without a route; both others exchange one of two experts. Zero-filled instead of -1 the
    # last row would compare as a third, unchanged site.
    old = torch.tensor([[[[0, 1]], [[2, 3]], [[-1, -1]]]])
    new = torch.tensor([[[[0, 2]], [[2, 4]], [[5, 6]]]])
    assert slot_change(old, new).flatten().tolist() == [0.5, 0.5, 0.0]
    counts = change_counts(old, new)
    assert (counts.slots_changed, counts.slots_total) == (2, 4)
    assert (counts.sites_changed, counts.sites_total) == (2, 2)
    assert (counts.tokens_changed, counts.tokens_total) == (2, 2)


def test_nothing_to_compare_has_no_rate():
    rates = change_counts(torch.full((2, 3, 1, 2), -1), torch.zeros(2, 3, 1, 2, dtype=torch.long)).rates()
    assert all(math.isnan(rate) for rate in rates.values())


# Overdispersion


def flips_as_ids(changed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new ids (K = 1) that differ exactly where `changed [T,L]` is True."""
    return torch.zeros(*changed.shape, 1, dtype=torch.long), changed.long()[..., None]


def test_sites_that_flip_together_have_overdispersion_l():
    # All L = 5 sites flip on the same tokens: F = 5X, Var F = 25 p(1-p), independence gives 5 p(1-p).
    together = torch.tensor([True, False, False, True, False, False, False])[:, None].expand(-1, 5)
    assert change_counts(*flips_as_ids(together)).overdispersion == pytest.approx(5.0)


def test_one_flip_in_every_token_has_overdispersion_zero():
    # The flip moves over 3 sites, so F = 1 always: no variance, where independence gives 3 · 1/3 · 2/3.
    assert change_counts(*flips_as_ids(torch.eye(3, dtype=torch.bool))).overdispersion == 0.0


def test_every_combination_once_is_independence():
    # The full factorial of 4 sites is exactly independent with p = 1/2.
    grid = torch.cartesian_prod(*[torch.tensor([False, True])] * 4)
    assert change_counts(*flips_as_ids(grid)).overdispersion == pytest.approx(1.0)


def test_overdispersion_equals_the_variance_ratio_by_hand():
    changed = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    # F = 2, 0, 2, 0: variance 1. p = 1/2, 1/4, 1/4: Σ p(1-p) = 1/4 + 3/16 + 3/16 = 10/16.
    assert change_counts(*flips_as_ids(changed)).overdispersion == pytest.approx(1.6)


def test_overdispersion_is_not_computed_on_incomplete_tokens():
    old, new = flips_as_ids(torch.tensor([[True, False], [False, True]]))
    old[0, 1] = -1
    counts = change_counts(old, new)
    assert counts.incomplete_tokens == 1
    assert math.isnan(counts.overdispersion)


# Alignment of two RoutedExperts


def named(ids: torch.Tensor, sites: list[str], **kw) -> RoutedExperts:
    return RoutedExperts(ids, sites, 8, **kw)


def test_sites_are_matched_by_name_not_by_place():
    ids = torch.tensor([[[[0, 1], [2, 3]]]])
    old = named(ids, ["model.a", "model.b"])
    new = named(ids.flip(2), ["module.model.b", "module.model.a"])  # another order, another wrapping
    assert slot_change(old, new).tolist() == [[[0.0, 0.0]]]
    assert change_counts(old, new).sites == ("model.a", "model.b")


@pytest.mark.parametrize("swap", [False, True])
def test_a_missing_site_is_named(swap):
    ids = torch.tensor([[[[0, 1], [2, 3]]]])
    pair = [named(ids, ["a", "b"]), named(ids[:, :, :1], ["a"])]
    with pytest.raises(RoutingError, match=rf"site b is only in the {'new' if swap else 'old'} routes"):
        slot_change(*(pair[::-1] if swap else pair))


def test_routes_of_models_with_other_numbers_of_experts_are_refused():
    ids = torch.tensor([[[[0, 1], [2, 3]]]])
    for experts, said in ((16, "8 experts and the new ones of 16"), ((8, 16), r"8 experts and .* \(8, 16\)")):
        with pytest.raises(RoutingError, match=said):
            change_counts(named(ids, ["a", "b"]), RoutedExperts(ids, ["a", "b"], experts))
    two = RoutedExperts(ids, ["a", "b"], (8, 16))  # compared site by site, whatever their order
    assert change_counts(two, RoutedExperts(ids.flip(2), ["b", "a"], (16, 8))).sites_changed == 0


def test_routes_of_other_tokens_are_refused_under_the_mask():
    ids = torch.tensor([[[[0, 1]], [[2, 3]]]])
    old, new = (named(ids, ["a"], tokens=torch.tensor([tokens])) for tokens in ([5, 6], [5, 9]))
    with pytest.raises(RoutingError, match="position 1 is token 6 in the old and 9 in the new"):
        change_counts(old, new)
    # A token that is not counted may differ, and an unknown one contradicts nothing.
    assert change_counts(old, new, torch.tensor([[True, False]])).tokens_total == 1
    assert change_counts(old, named(ids, ["a"], tokens=torch.tensor([[5, -1]]))).tokens_total == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (torch.zeros(2, 3, 1, 2), torch.zeros(2, 3, 1, 2), "integer expert ids"),
        (torch.zeros(2, 3, 1, 2).long(), torch.zeros(2, 4, 1, 2).long(), "one shape"),
        (torch.full((1, 1, 1), -7), torch.zeros(1, 1, 1).long(), "hold -7"),
        (torch.zeros(1, 1, 300).long(), torch.zeros(1, 1, 300).long(), "at most 254 slots"),
        (torch.zeros(1, 1, 0).long(), torch.zeros(1, 1, 0).long(), "K is 0; at least 1"),
        (torch.zeros(1, 1, 1).long(), torch.full((1, 1, 1), 65535), "at most 65535"),
    ],
)
def test_ids_that_cannot_be_compared(old, new, message):
    with pytest.raises(RoutingError, match=message):
        slot_change(old, new)


def test_a_mask_of_another_shape_is_refused():
    ids = torch.zeros(2, 3, 1, 1, dtype=torch.long)
    with pytest.raises(RoutingError, match=r"mask must have the shape \[2, 3\]"):
        change_counts(ids, ids, torch.ones(2, 2, dtype=torch.bool))


def test_a_mask_of_0_and_1_counts_as_one_of_bool_and_weights_are_refused():
    old, new = torch.tensor([[[[0]], [[1]], [[2]]]]), torch.tensor([[[[0]], [[3]], [[4]]]])
    attention_mask = torch.tensor([[1, 1, 0]])  # as a tokenizer writes it: one of the two tokens that count changed
    for mask in (attention_mask, attention_mask.float(), attention_mask.bool()):
        assert change_counts(old, new, mask).rates()["slot_change"] == 0.5
        assert expert_load(new, mask, num_experts=5).tolist() == [[1, 0, 0, 1, 0]]
    for function in (lambda m: change_counts(old, new, m), lambda m: expert_load(new, m, num_experts=5)):
        with pytest.raises(RoutingError, match="expected only 0 and 1"):
            function(0.5 * attention_mask)


def test_counts_of_different_pairs_do_not_add():
    ids = torch.zeros(2, 3, 1, 1, dtype=torch.long)
    with pytest.raises(RoutingError, match=r"do not add: policies .* engines"):
        change_counts(ids, ids) + change_counts(ids, ids, pair="engines")
    of_a, of_b = (change_counts(named(ids, [site]), named(ids, [site])) for site in "ab")
    with pytest.raises(RoutingError, match=r"do not add: policies \('a',\) .* policies \('b',\)"):
        of_a + of_b


def test_counts_come_from_any_integer_dtype_and_any_leading_axes():
    old, new = two_routings(3, k=4, experts=200)
    reference = change_counts(old, new)
    for dtype in (torch.int16, torch.int32):
        assert torch.equal(change_counts(old.to(dtype), new.to(dtype)).site_deviation, reference.site_deviation)
    flat = change_counts(old.flatten(0, 1), new.flatten(0, 1))
    assert torch.equal(flat.flips, reference.flips)
    assert change_counts(old[:0], new[:0]).tokens_total == 0


def test_ids_in_two_packings_still_compare():
    # Small ids are packed as uint8, those of routes of 300 experts as uint16, with different sentinels.
    old, new = two_routings(5)
    small, large = old, RoutedExperts(new, ["a", "b", "c"], 300)
    assert torch.equal(slot_change(small, large), slot_change(old, new))
    assert torch.equal(change_counts(small, large).site_deviation, change_counts(old, new).site_deviation)


# The kernel


@settings(deadline=None, max_examples=60)
@given(cases, st.integers(1, 40), st.booleans())
def test_the_device_kernel_and_chunk_sizes_agree_with_the_cpu_kernel(pair, rows, ordered):
    old, new = (packing.compact(x.sort(-1).values if ordered else x) for x in pair)
    slots, counts = change.changed_slots(old, new), change_counts(*pair)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_CPU_ROWS", 4 * rows)
        chunked, in_parts = change.changed_slots(old, new), change_counts(*pair)
        patch.setattr(packing, "_differing_numpy", packing._differing_torch)
        device, on_device = change.changed_slots(old, new), change_counts(*pair)
    assert torch.equal(slots, chunked) and torch.equal(slots, device)
    for other in (in_parts, on_device):
        assert torch.equal(other.site_deviation, counts.site_deviation) and torch.equal(other.flips, counts.flips)
        assert other.incomplete_tokens == counts.incomplete_tokens


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8, 10, 16])
@pytest.mark.parametrize("experts", [40, 300])
def test_rows_of_every_width_compare(k, experts):
    """Rows are compared as words: of 1, 2, 4 or 8 bytes, one or several. One slot is exchanged, at every place."""
    old = torch.arange(20, 20 + k).repeat(2 * k, 1, 1)
    new = old.clone()
    new[range(k), 0, range(k)] = torch.arange(k) % 20
    changed = slot_change(*(RoutedExperts(x[None], ["a"], experts) for x in (old, new)))
    assert changed.flatten().tolist() == [pytest.approx(1 / k)] * k + [0.0] * k


@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 0), (0, 2), (2, 0), (2, 1), (2, 2)])
def test_rows_without_a_route_are_in_no_denominator_wherever_they_are(old, new):
    """0: routes everywhere; 1: none at one row; 2: none at all. One of four rows has another set."""
    ids = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    other = ids.clone()
    other[1, 1, 0] = 8
    sides = [ids, other]
    for side, missing in zip(sides, (old, new), strict=True):
        side[0, :missing] = -1
        side[1] = -1 if missing == 2 else side[1]
    counts = change_counts(*sides)
    assert counts.sites_total == (0 if 2 in (old, new) else 3)
    assert counts.sites_changed == (0 if 2 in (old, new) else 1)
    assert counts.incomplete_tokens == (0 if 2 in (old, new) else 1)


def test_an_expert_named_twice_counts_by_slot():
    """At hash-routed sites: a slot of the old row is shared if the new row names its expert at all."""
    rows = [([3, 3], [3, 3], 0), ([3, 3], [3, 4], 0), ([3, 4], [3, 3], 1), ([3, 3], [4, 4], 2)]
    old, new = (torch.tensor([row[side] for row in rows])[:, None] for side in (0, 1))
    assert (2 * slot_change(old, new)).flatten().tolist() == [expected for *_, expected in rows]


def test_the_largest_ids_do_not_meet_the_sentinel():
    # 254 and 255 as ids (so uint16), 65534 as the largest.
    for high in (254, 255, 256, 65534):
        old, new = torch.tensor([[[high, 0]]]), torch.tensor([[[1, high]]])
        assert slot_change(old, new).item() == 0.5


def test_a_change_count_is_built_by_hand_too():
    # Two sites, K = 1: 9 of 10 and 7 of 10 tokens unchanged.
    counts = ChangeCounts(torch.tensor([[9, 1], [7, 3]]), torch.tensor([7, 2, 1]))
    assert counts.rates()["site_change"] == 4 / 20
    assert counts.rates()["token_change"] == 3 / 10
    assert counts.pair == "policies"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("experts", [8, 300])
def test_a_cuda_device_gives_the_same(experts):
    old, new = two_routings(1, k=4, experts=experts)
    names = ["a", "b", "c"]
    here = [RoutedExperts(x, names, experts, tokens=torch.arange(12).view(3, 4)) for x in (old, new)]
    there = [x.to("cuda") for x in here]
    assert torch.equal(slot_change(*there).cpu(), slot_change(*here))
    assert torch.equal(change_counts(*there).site_deviation, change_counts(*here).site_deviation)
    assert torch.equal(slot_change(old.cuda(), new.cuda()).cpu(), slot_change(old, new))
    assert RoutedExperts(old.cuda(), names, experts).equal(here[0])
    mask = torch.rand(3, 4) < 0.6
    there_mask = mask.flip(1)
    assert there[0].realign(mask, there_mask).equal(here[0].realign(mask, there_mask))
    assert there[0].rows([2, 0]).select(["c", "a"]).equal(here[0].rows([2, 0]).select(["c", "a"]))
    assert RoutedExperts.cat([there[0], there[1]]).equal(RoutedExperts.cat(here))
    assert there[0].token_hash == here[0].token_hash
    assert there[0].to_frame().equals(here[0].to_frame())


def test_a_row_of_plain_ids_that_lacks_a_slot_has_no_route():
    old, new = torch.tensor([[[3, -1]], [[0, 1]]]), torch.tensor([[[3, 1]], [[1, 2]]])
    expected = {"slot": (1, 2), "site": (1, 1), "token": (1, 1)}
    assert change_counts(old, new).levels() == change_counts(new, old).levels() == expected
