"""`policy_loss` and `token_weights` against an independent reference, on awkward batches with garbage in padding."""

import pytest
import reference_losses as reference
import torch

from moe_rl.objectives import OBJECTIVES, policy_loss, token_weights

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30)


def batch(seed, token_advantages, spread):
    """6 rows of 5: full, a hole in the middle, length 1, empty, zero advantage, full."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(6, 5, generator=g, dtype=torch.float64) * scale

    mask = torch.tensor(
        [[1, 1, 1, 1, 1], [1, 0, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    ).bool()
    old = -normal(2.0).abs() - 0.1
    tensors = {
        "logps": old + normal(spread),
        "old": old,
        "rollout": old + normal(0.4),
        "gamma": torch.rand(6, 5, generator=g, dtype=torch.float64).clamp(min=0.3),
        "adv": normal(1.0) if token_advantages else normal(1.0)[:, :1].expand(6, 5).clone(),
    }
    tensors["adv"][4] = 0.0
    rows = [{key: value[i][mask[i]].tolist() for key, value in tensors.items()} for i in range(6) if mask[i].any()]
    for k, (key, value) in enumerate(tensors.items()):
        if key != "adv" or token_advantages:
            value[~mask] = GARBAGE[k % 4]
    if not token_advantages:
        tensors["adv"] = tensors["adv"][:, 0].clone()
        tensors["adv"][3] = float("nan")  # the empty row
    return tensors, mask, rows


def arguments(name, tensors):
    optional = {"rollout_logps": tensors["rollout"]}
    if OBJECTIVES[name].route_weight != "none":
        optional["route_weight"] = tensors["gamma"]
    return optional


def scatter(per_row, mask, fill):
    filled = torch.full(mask.shape, fill, dtype=torch.bool if fill is False else torch.float64)
    for i, values in zip(mask.any(-1).nonzero().flatten().tolist(), per_row, strict=True):
        filled[i, mask[i]] = torch.tensor(values, dtype=filled.dtype)
    return filled


@pytest.mark.parametrize("token_advantages", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_gradient_and_clip(name, token_advantages):
    clipped_total = 0
    for seed in range(8):
        # small steps meet GSPO's narrow range on both sides, large ones the ranges of the others
        tensors, mask, rows = batch(seed, token_advantages, spread=1e-3 if seed % 2 else 0.5)
        expected, clipped = reference.loss(name, rows)
        slopes = scatter(reference.gradient(name, rows), mask, 0.0)
        clipped = scatter(clipped, mask, False)
        logps = tensors["logps"].requires_grad_()
        inputs = (name, logps, tensors["old"], tensors["adv"], mask)
        out = policy_loss(*inputs, **arguments(name, tensors))
        out.loss.backward()
        torch.testing.assert_close(out.loss.item(), expected.real, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(logps.grad, slopes, rtol=1e-11, atol=1e-12)
        assert torch.equal(out.clipped, clipped)
        analysed = token_weights(*inputs, **arguments(name, tensors))
        torch.testing.assert_close(analysed.weight, -slopes, rtol=1e-11, atol=1e-12)
        assert torch.equal(analysed.clipped, clipped)
        clipped_total += int(clipped.sum())
    never = {"cispo", "sapo", "vespo", "drpo", "sft", "rft", "online_rft"}
    assert (clipped_total == 0) == (name in never)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo", "cispo"])
def test_lower_precision_agrees(name, dtype):
    tensors, mask, _ = batch(0, False, 0.5)
    inputs = [tensors["logps"], tensors["old"], tensors["adv"]]
    low = [x.to(dtype) for x in inputs]
    exact = policy_loss(name, *[x.double() for x in low], mask)
    rough = policy_loss(name, *low, mask)
    assert rough.loss.dtype == torch.float32
    torch.testing.assert_close(rough.loss.double(), exact.loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(rough.clipped, exact.clipped)
