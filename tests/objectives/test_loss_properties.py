"""What must hold for every preset on any shape, mask and log-ratio."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.objectives import OBJECTIVES, LossOutput, policy_loss

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30]


def optional_inputs(name, rollout, gamma):
    needs = OBJECTIVES[name].needs
    return {k: v for k, v in {"rollout_logps": rollout, "route_weight": gamma}.items() if k in needs}


def draw_batch(seed, rows, tokens, spread, token_advantages, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def normal(scale):
        return (torch.randn(rows, tokens, generator=g, dtype=torch.float64) * scale).to(dtype)

    old = -normal(1.0).abs()
    batch = {
        "logps": old + normal(spread),
        "old_logps": old,
        "advantages": normal(1.0) if token_advantages else normal(1.0)[:, 0],
        "mask": torch.rand(rows, tokens, generator=g) < 0.6,
    }
    return batch, old + normal(0.3), torch.rand(rows, tokens, generator=g, dtype=torch.float64).to(dtype)


def evaluate(name, batch, **options) -> tuple[LossOutput, torch.Tensor]:
    logps = batch["logps"].clone().requires_grad_()
    out = policy_loss(name, **{**batch, "logps": logps}, **options)
    return out, torch.autograd.grad(out.loss, logps)[0]


SHAPES = {"rows": st.integers(1, 5), "tokens": st.integers(1, 6), "seed": st.integers(0, 10**6)}


@pytest.mark.parametrize("name", OBJECTIVES)
@given(**SHAPES, token_advantages=st.booleans(), kind=st.sampled_from(GARBAGE))
@settings(max_examples=8, deadline=None)
def test_padding_never_matters(name, rows, tokens, seed, token_advantages, kind):
    batch, rollout, gamma = draw_batch(seed, rows, tokens, 0.3, token_advantages)
    out, slope = evaluate(name, batch, **optional_inputs(name, rollout, gamma))
    keep = batch["mask"]

    def wider(x, fill):  # two more columns, an empty row, garbage wherever the mask is False
        if x.dim() == 1:
            return torch.cat([x, x.new_full((1,), fill)])
        big = x.new_full((rows + 1, tokens + 2), fill)
        big[:rows, 1 : tokens + 1] = torch.where(keep, x, fill)
        return big

    padded = {key: wider(value, kind) for key, value in batch.items() if key != "mask"}
    padded["mask"] = torch.zeros(rows + 1, tokens + 2, dtype=torch.bool)
    padded["mask"][:rows, 1 : tokens + 1] = keep
    out_padded, slope_padded = evaluate(name, padded, **optional_inputs(name, wider(rollout, kind), wider(gamma, kind)))
    torch.testing.assert_close(out_padded.loss, out.loss, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(slope_padded[:rows, 1 : tokens + 1], slope, rtol=1e-13, atol=1e-14)
    assert (slope_padded[~padded["mask"]] == 0).all()
    assert torch.equal(out_padded.clipped[:rows, 1 : tokens + 1], out.clipped)
    assert not (out_padded.clipped & ~padded["mask"]).any()
    for key, value in out.metrics.items():
        torch.testing.assert_close(out_padded.metrics[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_80_nats_stay_finite_and_are_counted(name, dtype):
    batch, rollout, gamma = draw_batch(7, 6, 5, 0.1, False, dtype)
    batch["mask"][:] = True
    batch["old_logps"], rollout = batch["old_logps"] - 81.0, rollout - 81.0  # so that no probability exceeds 1
    batch["logps"] = batch["old_logps"] + 80.0 * torch.tensor([[1, 1, -1, 0, 1]] * 6, dtype=dtype)
    batch["logps"][1], batch["logps"][2] = batch["old_logps"][1] + 80, batch["old_logps"][2] - 80
    out, slope = evaluate(name, batch, **optional_inputs(name, rollout, gamma))
    assert torch.isfinite(out.loss) and torch.isfinite(slope).all()
    anchored = OBJECTIVES[name].anchor == "old"
    assert out.metrics["extreme_tokens"] == 4 * 4 + 5 + 5 or not anchored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "gspo_token", "gmpo", "sapo", "cispo", "dual_clip"])
def test_overflowing_ratios_that_the_gate_bounds_leave_no_trace(name, dtype):
    # e^5000 is inf in any dtype; with A > 0 the gate bounds it, and 0 * inf must not become a NaN gradient
    logps = torch.tensor([[5000.0, 5000.0], [0.0, 0.0]], dtype=dtype)
    batch = {
        "logps": logps,
        "old_logps": torch.zeros(2, 2, dtype=dtype),
        "advantages": torch.ones(2, dtype=dtype),
        "mask": torch.ones(2, 2, dtype=torch.bool),
    }
    out, slope = evaluate(name, batch)
    assert torch.isfinite(out.loss) and torch.isfinite(slope).all()
    assert out.metrics["extreme_tokens"] == 2


def test_what_no_gate_bounds_is_reported_not_hidden():
    z = torch.zeros(1, 1)
    out, _ = evaluate("grpo", {"logps": z + 5000, "old_logps": z, "advantages": -z[:, 0] - 1, "mask": z == 0})
    assert out.loss == float("inf") and out.metrics["extreme_tokens"] == 1


@pytest.mark.parametrize("name", [n for n, o in OBJECTIVES.items() if not o.local_normalizer])  # BNPO: below
@given(**SHAPES, token_advantages=st.booleans(), cut=st.integers(0, 5))
@settings(max_examples=8, deadline=None)
def test_micro_batches_sum_to_the_batch(name, rows, tokens, seed, token_advantages, cut):
    batch, rollout, gamma = draw_batch(seed, rows, tokens, 0.3, token_advantages)
    out, slope = evaluate(name, batch, **optional_inputs(name, rollout, gamma))
    totals = {
        "total_tokens": int(batch["mask"].sum()),
        "total_sequences": batch["mask"].any(-1).sum(),
    }
    loss, slopes, counts = 0.0, [], 0
    for part in (slice(0, cut), slice(cut, None)):
        micro = {key: value[part] for key, value in batch.items()}
        if len(micro["mask"]) == 0:
            continue
        options = optional_inputs(name, rollout[part], gamma[part])
        micro_out, micro_slope = evaluate(name, micro, **options, **totals)
        loss, counts = loss + micro_out.loss, counts + micro_out.metrics["clipped_tokens"]
        slopes.append(micro_slope)
    torch.testing.assert_close(loss, out.loss, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(torch.cat(slopes), slope, rtol=1e-13, atol=1e-14)
    assert counts == out.metrics["clipped_tokens"]


def test_bnpo_is_the_mean_of_local_token_means():
    # two micro-batches of two rows each: 1/2 (mean of their tokens) each, as TRL's gradient accumulation has it
    batch, _, _ = draw_batch(5, 4, 6, 0.3, False)
    batch["mask"][:, 0] = True
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    got = sum(evaluate("bnpo", part, total_sequences=4)[0].loss for part in parts)
    means = [evaluate("bnpo", part)[0].loss for part in parts]
    torch.testing.assert_close(got, sum(means) / 2)
    assert not torch.isclose(got, evaluate("bnpo", batch)[0].loss)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_order_of_rows_does_not_matter_and_zero_advantages_give_zero(name):
    batch, rollout, gamma = draw_batch(11, 5, 4, 0.3, False)
    out, slope = evaluate(name, batch, **optional_inputs(name, rollout, gamma))
    order = torch.tensor([3, 1, 4, 0, 2])
    turned, slope_turned = evaluate(
        name, {k: v[order] for k, v in batch.items()}, **optional_inputs(name, rollout[order], gamma[order])
    )
    torch.testing.assert_close(turned.loss, out.loss)
    torch.testing.assert_close(slope_turned, slope[order])
    batch["advantages"] = torch.zeros(5, dtype=torch.float64)
    out, slope = evaluate(name, batch, **optional_inputs(name, rollout, gamma))
    assert out.loss == 0 and (slope == 0).all() and not out.clipped.any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_without_any_token_is_zero_with_a_graph(name):
    nan = torch.full((2, 3), float("nan"))
    batch = {"logps": nan, "old_logps": nan, "advantages": nan[:, 0], "mask": torch.zeros(2, 3)}
    out, slope = evaluate(name, batch, **optional_inputs(name, nan, nan))
    assert out.loss == 0 and (slope == 0).all()
    assert all(torch.isfinite(value) for value in out.metrics.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_number_is_sent_to_the_device_which_would_wait_for_it(name, monkeypatch):
    batch, rollout, gamma = draw_batch(0, 2, 3, 0.2, False)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a copy from the host"))
    assert evaluate(name, batch, **optional_inputs(name, rollout, gamma))[0].metrics
