"""Each metric against its peer's formula, written down once more from the peer's code, on random tensors."""

import math

import pytest
import torch

from moe_rl.measure.metrics import (
    extreme,
    load_violation,
    masked_mismatch_metrics,
    ratio_range_metrics,
    routing_confidence,
    variance,
)
from moe_rl.measure.peer_metrics import (
    OF_ENGINES,
    OF_TRUST_REGIONS,
    engine_metrics,
    gap_metrics,
    importance_weight_metrics,
    mismatch_metrics,
)
from moe_rl.objectives import OBJECTIVES, policy_loss
from moe_rl.routing import effective_sets, router_js

EPS = {"rel": 1e-6}  # verl adds 1e-8 to denominators


def scores(seed=0, rows=9, tokens=13, spread=0.3):
    g = torch.Generator().manual_seed(seed)
    new = -torch.rand(rows, tokens, generator=g, dtype=torch.float64) * 3 - 0.01
    old = (new + spread * torch.randn(rows, tokens, generator=g, dtype=torch.float64)).clamp(max=-0.001)
    mask = torch.rand(rows, tokens, generator=g) < 0.7
    mask[3] = False
    mask[4] = torch.arange(tokens) == 2
    return new, old, mask


def masked_mean(values, mask, axis=None):
    return (values * mask).sum(axis) / (mask.sum(axis) + 1e-8)


def nemo(prev, generation, mask):
    """`ClippedPGLossFn.__call__` and `compute_and_apply_seq_logprob_error_masking`."""
    error, m = (generation - prev).abs(), mask.double()
    mixture = (0.5 * prev.exp() + 0.5 * generation.exp()).log()
    a, b = ((x - mixture).exp() - (x - mixture) - 1 for x in (prev, generation))
    sequences = ((error * m).exp() * m).sum(-1) / m.sum(-1).clamp(min=1)
    sequences = sequences[mask.any(1)]
    return {
        "token_mult_prob_error": ((error * m).exp() * m).sum() / m.sum(),
        "seq_mult_prob_error_min": sequences.min(),
        "seq_mult_prob_error_mean": sequences.mean(),
        "seq_mult_prob_error_max": sequences.max(),
        "policy_kl_error": (((generation - prev).exp() - (generation - prev) - 1) * m).sum() / m.sum(),
        "js_divergence_error": ((0.5 * a + 0.5 * b) * m).sum() / m.sum(),
        "sampling_importance_ratio": ((prev - generation).exp() * m).sum() / m.sum(),
    }


def verl(old, rollout, mask):
    """`calculate_debug_metrics` and `compute_offpolicy_metrics`; rows with tokens, which verl takes for granted."""
    p, q = old.exp()[mask], rollout.exp()[mask]
    rows = mask.any(1)
    a, b = (masked_mean(x, mask, -1)[rows] for x in (old, rollout))
    total = ((old - rollout) * mask).sum(-1)[rows].clamp(-20, 20)
    return {
        "rollout_probs_diff_mean": (p - q).abs().mean(),
        "rollout_probs_diff_max": (p - q).abs().max(),
        "rollout_probs_diff_std": (p - q).abs().std(),
        "rollout_actor_probs_pearson_corr": torch.corrcoef(torch.stack([p, q], dim=0))[0][1],
        "log_ppl_diff": (b - a).mean(),
        "log_ppl_abs_diff": (b - a).abs().mean(),
        "ppl_ratio": (b - a).exp().mean(),
        "training_ppl": (-a).exp().mean(),
        "rollout_ppl": (-b).exp().mean(),
        "chi2_seq": (2.0 * total).exp().mean() - 1.0,
    }


@pytest.mark.parametrize("spread", [1e-3, 0.3, 2.0])
def test_mismatch_is_that_of_nemo_rl_and_of_verl(spread):
    new, old, mask = scores(spread=spread)
    expected = {**nemo(new, old, mask), **verl(new, old, mask)}
    garbage = torch.where(mask, old, float("nan"))
    found = mismatch_metrics(new, garbage, mask)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-6, abs=1e-9), name


def test_weights_are_accounted_for_as_in_verl():
    new, old, mask = scores(spread=0.8)
    low, high = 1 / 3, 3.0
    raw = (new - old).clamp(-20, 20).exp()
    weights = raw.clamp(max=high)
    normalised = weights / (masked_mean(weights, mask) + 1e-8)
    sequences = masked_mean(weights, mask, -1)[mask.any(1)]
    expected = {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_min": weights.masked_fill(~mask, math.inf).min(),
        "rollout_is_max": weights.masked_fill(~mask, -math.inf).max(),
        "rollout_is_oob_ratio": masked_mean(((raw < low) | (raw > high)).double(), mask),
        "rollout_is_eff_sample_size": 1.0 / masked_mean(normalised.square(), mask),
        "rollout_is_seq_max_deviation": (sequences - 1.0).abs().max(),
    }
    found = importance_weight_metrics(new - old, mask, low=low, high=high)
    assert {name: float(x) for name, x in found.items()} == pytest.approx(
        {name: float(x) for name, x in expected.items()}, **EPS
    )
    assert 0 < float(found["rollout_is_oob_ratio"]) < 1
    one_in_a_hundred = torch.full((1, 100), -15.0)
    one_in_a_hundred[0, 0] = 15.0
    found = importance_weight_metrics(one_in_a_hundred, torch.ones(1, 100, dtype=torch.bool))
    assert float(found["rollout_is_eff_sample_size"]) == pytest.approx(0.01, rel=1e-3)
    bounded = importance_weight_metrics(torch.full((1, 2), -50.0), torch.ones(1, 2, dtype=torch.bool))
    assert float(bounded["rollout_is_min"]) == pytest.approx(math.exp(-20))
    assert float(bounded["rollout_is_eff_sample_size"]) == pytest.approx(1)
    on_the_bounds = importance_weight_metrics(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), low=1.0, high=1.0)
    assert float(on_the_bounds["rollout_is_oob_ratio"]) == 0


def test_trust_region_is_accounted_for_as_in_prime_rl():
    # DPPO's mask: by p - q and the sign of the advantage; `_safe_mean` is a sum over a count of at least 1
    trainer, inference, mask = scores(spread=0.8)
    advantages = torch.randn(9, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64).expand(9, 13)
    shift, up = trainer.exp() - inference.exp(), advantages > 0
    high, low = up & (shift > 0.15), ~up & (shift < -0.15)
    kl = (trainer - inference).exp() - (trainer - inference) - 1

    def safe_mean(values, where):
        return float((values * where).sum() / max(int(where.sum()), 1))

    out = policy_loss("dppo_tv", trainer, inference, advantages, mask)
    low_and_padding = (out.clipped & ~up) | ~mask  # what is no token is not taken out either
    found = masked_mismatch_metrics(out.log_ratio, low_and_padding, out.clipped & up, mask)
    assert {name: float(x) for name, x in found.items()} == pytest.approx(
        {
            "is_masked": safe_mean(high | low, mask),
            "is_masked_low": safe_mean(low, mask),
            "is_masked_high": safe_mean(high, mask),
            "masked_mismatch_kl": safe_mean(kl, mask & (high | low)),
            "unmasked_mismatch_kl": safe_mean(kl, mask & ~(high | low)),
        }
    )
    assert 0 < float(found["is_masked_low"]) < 1 and 0 < float(found["is_masked_high"]) < 1
    assert OBJECTIVES["dppo_tv"].clip_low == 0.15


def test_range_of_ratios():
    new, old, mask = scores(spread=0.2)
    ratios = (new - old).exp()[mask]
    found = ratio_range_metrics(new - old, mask)
    assert float(found["probs_ratio_min"]) == float(ratios.min())
    assert float(found["probs_ratio_max"]) == float(ratios.max())
    assert float(found["outside_fraction"]) == sum(not 0.9 <= r <= 1.1 for r in ratios.tolist()) / len(ratios)


def test_load_violation_is_that_of_verl_and_of_prime_rl():
    # the numbers of verl's own test: even, and everything on one of four experts
    found = load_violation(torch.tensor([[2, 2, 2, 2], [0, 0, 8, 0]]))
    assert {name: x.tolist() for name, x in found.items()} == {
        "max_vio": [0.0, 3.0],
        "min_vio": [0.0, -1.0],
        "avg_vio": [0.0, 1.5],
    }
    load = torch.randint(0, 50, (5, 8), generator=torch.Generator().manual_seed(0)).double()
    expected = (load.max(1).values - load.mean(1)) / load.mean(1)
    torch.testing.assert_close(load_violation(load)["max_vio"], expected)
    without_idle = load + 1  # an expert that a site lacks is not one without tokens
    torch.testing.assert_close(
        load_violation(torch.cat([without_idle, -torch.ones(5, 3)], 1)), load_violation(without_idle)
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routing_confidence_is_that_of_prime_rl(score):
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    values = logits.softmax(1) if score == "softmax" else logits.sigmoid()
    chosen, ids = values.topk(2, dim=1)
    mass = chosen.sum() if score == "softmax" else (chosen / (values.sum(-1, keepdim=True) + 1e-20)).sum()
    ids = torch.cat([ids, torch.tensor([[-1, -1], [-1, 0], [1, -1]])])
    values = torch.cat([values, torch.rand(3, 8)])
    assert float(routing_confidence(values, ids)) == pytest.approx(float(mass) / 40, rel=1e-6)


def test_of_two_engines_everything_is_said_once():
    new, old, mask = scores(spread=0.2)
    found, gap = engine_metrics(new, old, mask), gap_metrics(new, old, mask)
    assert int(found["measured"]) == mask.sum() < mask.numel()
    assert {name: float(found[name]) for name in gap} == {name: float(value) for name, value in gap.items()}
    w = (new - old).exp()[mask]
    assert float(found["chi2_token"]) == pytest.approx(float(w.square().mean() - 1))
    assert float(found["ess_token"]) == pytest.approx(float(w.sum() ** 2 / (len(w) * w.square().sum())))
    # the perplexity ratio of a batch of one sequence is the inverse of GSPO's ratio
    one = mask & (torch.arange(9) == 0)[:, None]
    s = float(engine_metrics(new, old, one)["ppl_ratio"])
    assert s == pytest.approx(math.exp(-float((new - old)[0][mask[0]].mean())))


def test_no_number_is_sent_to_the_device_which_would_wait_for_it(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "new_tensor", lambda *_: pytest.fail("a copy from the host"))
    assert engine_metrics(*scores())["rollout_probs_diff_std"] > 0
    none, ids = torch.zeros(0, 2), torch.full((1, 1, 2), -1)
    assert variance(none[:, 0]).isnan() and extreme(none[:, 0], "max").isnan()
    assert router_js(none, none).shape == (0,) and effective_sets(ids, num_experts=4).isnan()


def test_of_a_single_token_there_is_neither_spread_nor_correlation():
    one = torch.full((1, 1), -1.0), torch.full((1, 1), -2.0), torch.ones(1, 1).bool()
    found = mismatch_metrics(*one)
    assert found["rollout_probs_diff_std"].isnan() and found["rollout_actor_probs_pearson_corr"].isnan()
    assert found["rollout_probs_diff_std"].dtype == torch.float64


def test_without_tokens_nothing_raises():
    new, old, mask = scores()
    none = torch.zeros_like(mask)
    for found in (
        mismatch_metrics(new, old, none),
        importance_weight_metrics(new - old, none),
        masked_mismatch_metrics(new - old, none, none, none),
        ratio_range_metrics(new - old, none),
    ):
        assert all(math.isnan(float(value)) for value in found.values())


def test_every_name_is_defined_once_and_every_definition_is_of_a_name():
    new, old, mask = scores()
    names = [
        *mismatch_metrics(new, old, mask),
        *importance_weight_metrics(new - old, mask),
        *ratio_range_metrics(new - old, mask),
        *masked_mismatch_metrics(new - old, mask, mask, mask),
    ]
    assert [metric.name for metric in (*OF_ENGINES, *OF_TRUST_REGIONS)] == names and len(set(names)) == len(names)
