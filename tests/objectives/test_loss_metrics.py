"""The metrics of the loss: goldens by hand, definitions, and that they keep no graph."""

import math
from dataclasses import replace

import pytest
import torch
from loss_helpers import EVERYTHING, at_ratios, double, run, whole_of_the_loss

from moe_rl.objectives import LOSS_METRICS, OBJECTIVES, TokenValues, loss_metrics, policy_loss
from moe_rl.objectives import loss as loss_module


def test_metrics_golden():
    # ratios 1.5, 0.5 | 0.5 of three unmasked tokens, as in the GRPO golden; A = 2 and 0
    out, _ = run("grpo", [[1.5, 0.5], [0.5, 1.5]], [2.0, 0.0], mask=[[1, 1], [1, 0]])
    m = {name: value.item() for name, value in out.metrics.items()}
    assert (m["tokens"], m["sequences"], m["live_tokens"]) == (3, 2, 2)
    assert (m["clipped_tokens"], m["clipped_high_tokens"], m["clipped_low_tokens"]) == (1, 1, 0)
    assert m["clipped_sequences"] == 1
    assert m["gate_ratio_mean"] == pytest.approx((1.5 + 0.5 + 0.5) / 3)
    assert m["extreme_tokens"] == 0
    torch.testing.assert_close(out.sequence_log_ratio, double([math.log(0.75) / 2, math.log(0.5)]))
    assert not any(value.requires_grad for value in out.metrics.values())
    assert repr(out).startswith("LossOutput(loss=") and "log_ratio" not in repr(out)  # no pages of numbers in a cell
    assert not (out.log_ratio.requires_grad or out.sequence_log_ratio.requires_grad)


def test_the_mean_over_one_token_is_its_value():
    out, _ = run("grpo", [[1.5]], [1.0])
    assert out.metrics["gate_ratio_mean"].item() == pytest.approx(1.5)


def test_clip_counts_by_sign():
    # A > 0: 1.5 above 1.27, 0.5 not; A < 0: 0.5 below 0.8, 1.5 not; 5 above the ceiling 3 is neither low nor high
    out, _ = run("dual_clip", [[1.5, 0.5, 1.0], [0.5, 1.5, 5.0]], [1.0, -1.0])
    m = {name: value.item() for name, value in out.metrics.items()}
    assert (m["clipped_tokens"], m["clipped_low_tokens"], m["clipped_high_tokens"]) == (3, 1, 1)


@pytest.mark.parametrize("objective", ["grpo", "dual_clip", "gspo", "cispo", "sapo"])
def test_tokens_above_the_ceiling_are_counted_whatever_the_objective_does_with_them(objective):
    # of A > 0 none; of A < 0 the 3.1 and the 5, not the 2.9, and not the 7 that is masked out
    out, _ = run(objective, [[4.0, 9.0, 1.0, 1.0], [3.1, 2.9, 5.0, 7.0]], [1.0, -1.0], mask=[[1] * 4, [1, 1, 1, 0]])
    assert out.metrics["ceiling_tokens"].item() == 2


def test_a_clip_of_whole_sequences_is_counted_by_their_ratio():
    """Every token of a clipped sequence is, be its own ratio on the other side of 1."""
    objective = replace(OBJECTIVES["grpo"], gate="sequence_clip")
    out, _ = run(objective, [[0.9, 3.0], [1.1, 0.3]], [1.0, -1.0])  # s is 1.64 and 0.57
    m = {name: value.item() for name, value in out.metrics.items()}
    assert (m["clipped_tokens"], m["clipped_low_tokens"], m["clipped_high_tokens"]) == (4, 2, 2)
    assert m["gate_ratio_mean"] == pytest.approx((math.sqrt(2.7) + math.sqrt(0.33)) / 2)


def test_engine_metrics_golden():
    # w = pi_old/mu = 4 and 1: TIS 2 keeps 2 and 1; MIS 3 drops the first
    logps, old = at_ratios([[1.0, 1.0]], requires_grad=False)
    rollout = old - double([[math.log(4.0), 0.0]])
    arguments = (logps, old, double([1.0]), torch.tensor([[1, 1]]))
    m = {k: v.item() for k, v in policy_loss("grpo_tis", *arguments, rollout_logps=rollout).metrics.items()}
    assert m["correction_weight_mean"] == pytest.approx(1.5)
    assert (m["correction_weight_min"], m["correction_weight_max"]) == (1.0, 2.0)
    assert (m["correction_dropped_tokens"], m["correction_truncated_tokens"]) == (0, 1)
    assert m["engine_kl_k1"] == pytest.approx(-math.log(4.0) / 2)
    assert m["engine_kl_k3"] == pytest.approx((4 - 1 - math.log(4.0)) / 2)
    assert m["engine_log_weight_abs_max"] == pytest.approx(math.log(4.0))
    m = {k: v.item() for k, v in policy_loss("grpo_mis", *arguments, rollout_logps=rollout).metrics.items()}
    assert (m["correction_dropped_tokens"], m["correction_truncated_tokens"]) == (1, 0)
    assert (m["correction_weight_min"], m["correction_weight_max"]) == (0.0, 1.0)


def test_route_weight_metrics_golden():
    logps, old = at_ratios([[1.0, 1.0, 7.0]], requires_grad=False)
    gamma = double([[0.5, 0.9, 0.1]])
    m = policy_loss("rspo", logps, old, double([1.0]), torch.tensor([[1, 1, 0]]), route_weight=gamma).metrics
    assert m["route_weight"].item() == pytest.approx(0.7) and m["route_weight_floored"].item() == 0.5


def test_every_metric_of_the_loss_is_defined_and_every_definition_is_of_one():
    tensors = whole_of_the_loss(EVERYTHING, 5)
    metrics = policy_loss(EVERYTHING, **tensors).metrics
    assert list(metrics) == [metric.name for metric in LOSS_METRICS]
    assert all(metric.unit and metric.definition for metric in LOSS_METRICS)
    unconditional = [metric.name for metric in LOSS_METRICS if not metric.when]
    plain = {name: tensors[name] for name in ("logps", "old_logps", "advantages", "mask")}
    assert list(policy_loss("grpo", **plain).metrics) == unconditional


def test_metrics_of_a_minibatch_are_those_of_its_micro_batches_joined():
    tensors = whole_of_the_loss(EVERYTHING, 7)
    whole = policy_loss(EVERYTHING, **tensors)
    parts = [
        policy_loss(EVERYTHING, **{k: v[rows] for k, v in tensors.items()}).tokens
        for rows in (slice(0, 3), slice(3, 7))
    ]
    names = [name for name, _ in parts[0].items()]
    joined = loss_metrics(TokenValues(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names}))
    assert all(torch.equal(joined[name], value) for name, value in whole.metrics.items())


def test_metrics_are_computed_when_asked_for(monkeypatch):
    calls = []
    monkeypatch.setattr(loss_module, "loss_metrics", lambda values: calls.append(values) or {})
    out, _ = run("grpo", [[1.5, 0.5]], [1.0])
    assert not calls
    assert out.metrics is out.metrics and len(calls) == 1


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_but_the_loss_keeps_the_graph(name):
    o = replace(OBJECTIVES[name], kl_coef=0.1)
    tensors = {k: v.requires_grad_() if k.endswith("logps") else v for k, v in whole_of_the_loss(o, 4).items()}
    if o.route_weight == "none":
        del tensors["route_weight"]
    out = policy_loss(o, **tensors)
    assert out.loss.requires_grad
    assert not any(value.requires_grad for _, value in out.tokens.items())
    assert not any(value.requires_grad for value in [*out.metrics.values(), out.sequence_log_ratio])
