"""Log-probabilities at given ratios, and whole arguments of `policy_loss`."""

from dataclasses import replace

import torch

from moe_rl.objectives import OBJECTIVES, Correction, policy_loss


def double(rows, **options):
    return torch.tensor(rows, dtype=torch.float64, **options)


def at_ratios(ratios, requires_grad=True):
    """(logps, old_logps) with these token ratios; old_logps = -1."""
    old = torch.full_like(double(ratios), -1.0)
    return (old + double(ratios).log()).requires_grad_(requires_grad), old


def run(objective, ratios, advantages, mask=None, **options):
    logps, old = at_ratios(ratios)
    mask = torch.ones(old.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    out = policy_loss(objective, logps, old, double(advantages), mask, **options)
    (slope,) = torch.autograd.grad(out.loss, logps)
    return out, slope


def whole_of_the_loss(objective, rows, **options):
    """Random rows under an objective with every part that has metrics."""
    g = torch.Generator().manual_seed(2)
    old = -torch.rand(rows, 6, generator=g)
    tensors = {"logps": old + 0.3 * torch.randn(rows, 6, generator=g), "old_logps": old}
    tensors |= {"advantages": torch.randn(rows, generator=g), "mask": torch.rand(rows, 6, generator=g) < 0.7}
    tensors |= {"ref_logps": old - 0.1, "rollout_logps": old + 0.1 * torch.randn(rows, 6, generator=g)}
    tensors["route_weight"] = torch.rand(rows, 6, generator=g)
    return {**tensors, **options}


EVERYTHING = replace(
    OBJECTIVES["rspo"], kl_coef=0.1, corrections=(Correction("token_truncate", high=1.1), Correction("token_mask", 0.9))
)
