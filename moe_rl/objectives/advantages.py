"""Rewards -> advantages. Rows of one group are adjacent: group g holds rows g*G .. (g+1)*G - 1."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Scale = Literal["std", "none", "batch"]


def group_advantages(
    rewards: Float[Tensor, " B"], group_size: int, scale: Scale = "std", eps: float = 1e-4
) -> Float[Tensor, " B"]:
    """Outcome supervision: each reward against the mean of its group (arXiv:2507.18071, eqs 3 and 6).

        "std"    A_i = (r_i - mean(group)) / (std(group) + eps)      GRPO, GSPO
        "none"   A_i =  r_i - mean(group)                            Dr.GRPO (arXiv:2503.20783), MiniRL
        "batch"  A_i = (r_i - mean(group)) / (std(batch) + eps)      arXiv:2508.08221

    Differs: the papers leave the standard deviation unspecified; here it is the unbiased one (divisor G - 1)
    plus eps, as in TRL.

    Args:
        rewards: finite, `[B]`, the rows of one group adjacent.
        group_size: G; must divide B.
        scale: "std", "none" or "batch".
        eps: added to the standard deviation, in units of reward.

    Returns:
        `[B]`, detached. A group of equal rewards gives exactly 0, whatever the rounding of its mean.

    Raises:
        ValueError: G does not divide B, a reward is not finite, or an unknown scale.

    >>> group_advantages(torch.tensor([0.0, 2.0, 1.0, 1.0]), group_size=2, scale="none")
    tensor([-1.,  1.,  0.,  0.])
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale: expected 'std', 'none' or 'batch', got {scale!r}.")
    groups = _as_groups(rewards, group_size)
    centred = _centre(groups)
    if scale == "none":
        return centred.flatten()
    spread = _unbiased_std(groups.flatten()) if scale == "batch" else _unbiased_std(groups)[:, None]
    return (centred / (spread + eps)).flatten()


def _as_groups(rewards: Float[Tensor, " B"], group_size: int) -> Float[Tensor, "N G"]:
    """`[B]` -> `[N,G]`, checked, detached, at least float32."""
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(
            f"group_size: {group_size} does not divide the {rewards.shape[0]} rewards into whole groups; "
            "was a batch cut inside a group?"
        )
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise ValueError(f"rewards: expected finite numbers, got {rewards[bad].tolist()} at rows {bad}.")
    values = rewards.detach()
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return values.reshape(-1, group_size)


def _centre(groups: Float[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """Minus the group's mean; exactly 0 where all rewards of a group are equal (a rounded mean would not be)."""
    all_equal = (groups == groups[:, :1]).all(-1, keepdim=True)
    return torch.where(all_equal, 0.0, groups - groups.mean(-1, keepdim=True))


def _unbiased_std(values: Float[Tensor, "*N G"]) -> Float[Tensor, "*N"]:
    """Standard deviation over the last axis with divisor G - 1; 0 for a single value."""
    if values.shape[-1] < 2:
        return values.new_zeros(values.shape[:-1])
    return values.std(-1, correction=1)
