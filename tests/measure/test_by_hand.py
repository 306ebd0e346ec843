"""Metrics of a few tokens by hand: signs, sequences without tokens, clamps, sites that did not change."""

import copy
import math

import pytest
import torch
from test_decompose import build, moved

from moe_rl.measure.decompose import Decomposition, decompose
from moe_rl.measure.gradients import gradient_metrics
from moe_rl.measure.metrics import as_logits, ratio_metrics, router_metrics, routing_ratio_metrics
from moe_rl.measure.noise_floor import position_metrics
from moe_rl.measure.peer_metrics import importance_weight_metrics, mismatch_metrics
from moe_rl.routing import RoutedExperts

LN2 = math.log(2)


def test_k1_is_of_the_old_policy():
    found = ratio_metrics(torch.tensor([[LN2, 0.0]], dtype=torch.float64), torch.ones(1, 2))
    assert float(found["k1"]) == pytest.approx(-LN2 / 2)


def test_a_sequence_without_a_token_is_none():
    d = torch.tensor([[0.0, 2 * LN2], [-2 * LN2, 99.0], [99.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert float(ratio_metrics(d, mask)["max_token_kl_mean"]) == pytest.approx(2.25 / 2)  # 3 - 2 ln 2 and -3/4 + 2 ln 2
    found = routing_ratio_metrics({"natural": d}, torch.zeros_like(d), mask)
    assert float(found["var_sequence_natural"]) == pytest.approx(4.5 * LN2**2)


def test_dropout_has_no_part(text):
    old = build()
    for module in old.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    new = moved(old)
    expected = decompose(old, new, *text, per_site=True)
    found = decompose(old.train(), new.train(), *text, per_site=True)
    for name in ("log_ratio", "weight", "routing", "site_alone", "site_last"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=0)


def test_a_site_that_did_not_change_has_no_effect(text):
    old = build()
    new = copy.deepcopy(old)
    with torch.no_grad():
        new.model.layers[1].mlp.gate.weight.mul_(-1)  # nothing before it moved: the first site chooses as before
    found = decompose(old, new, *text, per_site=True)
    assert (found.site_alone[0] == 0).all() and (found.site_last[0] == 0).all()
    assert torch.equal(found.site_alone[1], found.replay_effect) and (found.replay_effect != 0).any()


def test_positions_leave_out_what_either_side_has_no_route_for():
    ids = torch.tensor([[[[0]], [[1]], [[2]]]])
    whole = RoutedExperts(ids, ["a"], 4)
    short = RoutedExperts(torch.where(torch.arange(3)[None, :, None, None] < 2, 3 - ids, -1), ["a"], 4)
    mask = torch.ones(1, 3, dtype=torch.bool)
    for pair in ((whole, short), (short, whole)):
        assert [x.tolist() for x in position_metrics(*pair, mask).values()] == [[1, 1, 0], [1, 1, 0]]


def test_halves_are_compared_with_each_other():
    one, other = ({"w": torch.tensor(values)} for values in ([1.0, 0.0], [1.0, 1.0]))
    found = gradient_metrics({"w": torch.tensor([0.0, 5.0])}, one, (one, other), [])
    assert found["gradient_halves_cosine"] == pytest.approx(math.sqrt(0.5))


def test_nothing_measured_is_0():
    one = torch.ones(2, 1, dtype=torch.float64)
    routes = RoutedExperts(torch.zeros(2, 1, 1, 1, dtype=torch.long), ["gate"], 2)
    d = Decomposition(-2 * one, -1.5 * one, -2.25 * one, -1 * one, torch.tensor([[True], [False]]), routes, routes)
    assert d.sequence(d.log_ratio).tolist() == [1.0, 0.0]


def test_verls_bounds():
    mask = torch.ones(1, 2, dtype=torch.bool)
    far = mismatch_metrics(torch.full((1, 2), -1.0), torch.full((1, 2), -16.0), mask)
    assert float(far["chi2_seq"]) == pytest.approx(math.exp(40) - 1)
    low = importance_weight_metrics(torch.full((1, 2), math.log(0.25)), mask)
    assert float(low["rollout_is_seq_max_deviation"]) == pytest.approx(0.75)


def test_the_margin_is_the_old_one():
    old, new = torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[0.0, 1.0, 2.0]])
    # the third logit moved by 2/3 from the mean change; half the old margin is 1
    assert float(router_metrics([old], [new], k=1)["shift_over_margin"]) == pytest.approx(2 / 3)


def test_positive_logits_are_no_softmax():
    logits = torch.tensor([[0.5, 2.0], [1.0, 0.0]])
    assert as_logits(logits) is logits
