"""RSPO's weight of tokens: by hand, against loops, and where nothing moved."""

import math

import pytest
import torch

from moe_rl.measure.router_shift import chosen_scores, shift_weight
from moe_rl.routing import RoutedExperts, RoutingError

B, T, L, K, E = 2, 3, 2, 2, 5


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    old, new = ([torch.randn(B * T, E, generator=generator, dtype=torch.float64) for _ in range(L)] for _ in range(2))
    ids = torch.stack([logits.topk(K).indices.view(B, T, K) for logits in old], 2)
    return old, new, RoutedExperts(ids, [f"layers.{i}.gate" for i in range(L)], E)


def test_gamma_of_identical_policies_is_one(case):
    old, _, routes = case
    scores = chosen_scores(old, routes)
    assert torch.equal(shift_weight(scores, scores), torch.ones(B, T, dtype=torch.float64))


def test_gamma_against_loops(case):
    old, new, routes = case
    gamma = shift_weight(chosen_scores(new, routes), chosen_scores(old, routes))

    def log_r(logits, expert):
        return float(logits[expert]) - math.log(sum(math.exp(float(x)) for x in logits))

    for b in range(B):
        for t in range(T):
            row, delta = b * T + t, 0.0
            for site in range(L):
                for expert in routes.ids[b, t, site].tolist():
                    delta += abs(log_r(new[site][row], expert) - log_r(old[site][row], expert)) / (L * K)
            assert float(gamma[b, t]) == pytest.approx(math.exp(-delta), abs=1e-12)


def test_gamma_by_hand():
    """Two sites, E = 2, K = 1. Site 0: r(e) 1/2 -> 3/4, |Δ log| = ln 1.5. Site 1: 3/4 -> 1/4, |Δ log| = ln 3."""
    old = [torch.tensor([[1.0, 1.0]]).log(), torch.tensor([[3.0, 1.0]]).log()]
    new = [torch.tensor([[3.0, 1.0]]).log(), torch.tensor([[1.0, 3.0]]).log()]
    routes = RoutedExperts(torch.zeros(1, 1, 2, 1, dtype=torch.long), ("a", "b"), 2)
    gamma = shift_weight(chosen_scores(new, routes), chosen_scores(old, routes))
    assert gamma.item() == pytest.approx(math.exp(-(math.log(1.5) + math.log(3)) / 2))


def test_only_experts_of_the_old_policy_count():
    """Expert 2 gains from expert 3 and neither was active: no shift."""
    old, new = [torch.tensor([[8.0, 4.0, 1.0, 3.0]]).log()], [torch.tensor([[8.0, 4.0, 3.0, 1.0]]).log()]
    routes = RoutedExperts(torch.tensor([0, 1]).view(1, 1, 1, 2), ("a",), 4)
    assert shift_weight(chosen_scores(new, routes), chosen_scores(old, routes)).item() == pytest.approx(1.0)


def test_where_there_is_no_route_nothing_has_shifted(case):
    old, new, routes = case
    ids = routes.ids
    ids[1, 2] = -1  # the last sampled token
    scores = [chosen_scores(logits, RoutedExperts(ids, routes.sites, E)) for logits in (old, new)]
    assert all((score[1, 2] == 0).all() and (score[:, :2] < 0).all() for score in scores)
    assert shift_weight(*scores)[1, 2] == 1 > shift_weight(*scores)[0, 0]


def test_low_precision_logits_are_scored_in_float32(case):
    old, _, routes = case
    low = [logits.bfloat16() for logits in old]
    assert torch.equal(chosen_scores(low, routes), chosen_scores([logits.float() for logits in low], routes))


def test_probabilities_in_place_of_logits_are_seen_for_what_they_are(case):
    old, _, routes = case
    given = chosen_scores([logits.softmax(-1) for logits in old], routes)
    torch.testing.assert_close(given, chosen_scores(old, routes))


def test_the_weight_is_detached_and_its_floor_left_to_the_objective(case):
    old, _, routes = case
    moved = [(10 * logits).requires_grad_() for logits in old]
    gamma = shift_weight(chosen_scores(moved, routes), chosen_scores(old, routes))
    assert not gamma.requires_grad and float(gamma.min()) < 0.8


def test_logits_of_other_sites_are_refused(case):
    old, _, routes = case
    with pytest.raises(RoutingError, match="router logits of 1 sites and its routes have 2"):
        chosen_scores(old[:1], routes)
