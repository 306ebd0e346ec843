"""Divergences, margins and router shift against hand computations and identities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.routing import boundary_margin, router_js, router_kl, site_change
from moe_rl.routing.errors import RoutingError

LN2 = math.log(2.0)


def test_kl_and_js_by_hand():
    # p = (3/4, 1/4), q = (1/4, 3/4), m = (1/2, 1/2).
    old = torch.tensor([3.0, 1.0], dtype=torch.float64).log()
    new = torch.tensor([1.0, 3.0], dtype=torch.float64).log()
    # KL = 3/4 ln 3 - 1/4 ln 3 = ½ ln 3
    assert router_kl(old, new).item() == pytest.approx(0.5 * math.log(3))
    # JS = 3/4 ln(3/2) + 1/4 ln(1/2)
    assert router_js(old, new).item() == pytest.approx(0.75 * math.log(1.5) - 0.25 * LN2)


def test_kl_is_from_old_to_new():
    # p = (1/2, 1/2), q = (3/4, 1/4): KL(p||q) = ½ ln(2/3) + ½ ln 2 = ½ ln(4/3).
    old, new = torch.zeros(2), torch.tensor([3.0, 1.0]).log()
    assert router_kl(old, new).item() == pytest.approx(0.5 * math.log(4 / 3))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9999))
def test_divergences_are_bounded_symmetric_and_blind_to_a_shift_of_logits(seed):
    g = torch.Generator().manual_seed(seed)
    old, new = (5 * torch.randn(3, 2, 6, generator=g, dtype=torch.float64) for _ in range(2))
    assert (router_kl(old, new) >= 0).all()
    assert ((router_js(old, new) >= 0) & (router_js(old, new) <= LN2 + 1e-12)).all()
    torch.testing.assert_close(router_js(old, new), router_js(new, old))
    torch.testing.assert_close(router_kl(old + 3.0, new - 7.0), router_kl(old, new))
    assert router_kl(old, old + 1.0).abs().max() < 1e-12


def test_disjoint_routers_are_ln2_apart_without_overflow():
    old, new = torch.tensor([200.0, -200.0]), torch.tensor([-200.0, 200.0])
    assert router_js(old, new).item() == pytest.approx(LN2)
    assert router_kl(old, new).item() == pytest.approx(400.0)


def test_low_precision_logits_are_compared_in_float32():
    old = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert router_kl(old, old + 1).dtype == torch.float32


def test_margin_by_hand_and_its_meaning():
    scores = torch.tensor([[4.0, 1.0, 3.0, 0.5]])
    assert boundary_margin(scores, 1).tolist() == [1.0]  # 4 - 3
    assert boundary_margin(scores, 2).tolist() == [2.0]  # 3 - 1
    # Moving each score by less than half of the margin cannot exchange an expert; by more, it can.
    push = torch.tensor([[0.0, 1.0, -1.0, 0.0]])
    for size, flips in ((0.99, False), (1.01, True)):
        moved = (scores + size * push).topk(2).indices
        assert site_change(scores.topk(2).indices, moved).item() == flips


@pytest.mark.parametrize("k", [0, 4])
def test_no_boundary_no_margin(k):
    with pytest.raises(RoutingError, match="has no boundary"):
        boundary_margin(torch.zeros(4), k)


def test_excluded_experts_add_nothing_to_divergences():
    # Expert 2 is excluded (-inf) on both sides: the values of the two that remain. Only in the new one: KL is infinite,
    # JS is not: p = (1/2, 1/2), q = (1, 0), m = (3/4, 1/4).
    inf = math.inf
    old = torch.tensor([3.0, 1.0, 0.0]).log().requires_grad_()
    new = torch.tensor([1.0, 3.0, 0.0]).log().requires_grad_()
    assert old[2].item() == -inf and router_kl(old, new).item() == pytest.approx(0.5 * math.log(3))
    assert router_js(old, new).item() == pytest.approx(0.75 * math.log(1.5) - 0.25 * LN2)
    for divergence in (router_kl, router_js):
        gradients = torch.autograd.grad(divergence(old, new), (old, new))
        assert all(bool(g.isfinite().all()) and g[2] == 0 for g in gradients)
    half, one = torch.zeros(2), torch.tensor([0.0, -inf])
    assert router_kl(half, one).item() == inf
    assert router_kl(one, half).item() == pytest.approx(LN2)
    assert router_kl(torch.tensor([0.0, -200.0]), one).item() == 0  # e^-200 is 0 in float32
    js = 0.5 * (0.5 * math.log(2 / 3) + 0.5 * LN2) + 0.5 * math.log(4 / 3)
    assert router_js(half, one).item() == pytest.approx(js)
