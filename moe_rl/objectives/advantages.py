"""Group advantages of GRPO and GSPO, computed from rewards; other methods' advantages are in `other_advantages`.

Rows of one group are adjacent: group g holds rows g*G .. (g+1)*G - 1.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from moe_rl.objectives.ratios import at_least_float32

Scale = Literal["std", "none", "batch"]


def group_advantages(
    rewards: Shaped[Tensor, " B"], group_size: int, scale: Scale | str = "std", eps: float | int = 1e-4
) -> Float[Tensor, " B"]:
    """Return each reward minus its group's mean, scaled by `scale` (outcome supervision; arXiv:2507.18071, eqs 3, 6).

        "std"    A_i = (r_i - mean(group)) / (std(group) + eps)      GRPO, GSPO
        "none"   A_i =  r_i - mean(group)                            Dr.GRPO (arXiv:2503.20783), MiniRL
        "batch"  A_i = (r_i - mean(group)) / (std(batch) + eps)      arXiv:2508.08221

    Differs: the papers leave the standard deviation unspecified; here it is the unbiased one (divisor G - 1)
    plus eps, as in TRL.

    Args:
        rewards: finite, `[B]`, the rows of one group adjacent; integers and bools (0/1) count as float32.
        group_size: G; must divide B.
        scale: "std", "none" or "batch".
        eps: added to the standard deviation, in units of reward.

    Returns:
        `[B]`, detached. A group of equal rewards gives exactly 0, whatever the rounding of its mean.

    Raises:
        ValueError: rewards that are not `[B]`, G does not divide B, a reward is not finite, an unknown scale, or a
            negative eps.

    >>> group_advantages(torch.tensor([0.0, 2.0, 1.0, 1.0]), group_size=2, scale="none")
    tensor([-1.,  1.,  0.,  0.])
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale: expected 'std', 'none' or 'batch', got {scale!r}.")
    if not eps >= 0:
        raise ValueError(f"eps: expected a number of at least 0, got {eps}.")
    groups = as_groups(rewards, group_size)
    centred = centre(groups)
    if scale == "none":
        return centred.flatten()
    spread = unbiased_std(groups.flatten()) if scale == "batch" else unbiased_std(groups)[:, None]
    return torch.where(centred == 0, 0.0, centred / (spread + eps)).flatten()  # 0, not 0/0, even with eps = 0


def as_groups(rewards: Shaped[Tensor, " B"], group_size: int) -> Float[Tensor, "N G"]:
    """Return rewards `[B]` as groups `[N,G]`: checked, detached and at least float32."""
    if not isinstance(rewards, Tensor):
        raise ValueError(f"rewards: expected a tensor [B], got {type(rewards).__name__}: torch.tensor(rewards).")
    if rewards.ndim != 1:
        raise ValueError(f"rewards: expected one axis [B], the rows of a group adjacent, got {list(rewards.shape)}.")
    check_groups(rewards.shape[0], group_size)
    check_finite(rewards)
    values = at_least_float32(rewards.detach())
    return values.reshape(-1, group_size)


def check_groups(rows: int, group_size: int) -> None:
    """Raise ValueError unless `group_size` is at least 1 and divides the number of rows."""
    if group_size < 1 or rows % group_size:
        raise ValueError(
            f"group_size: {group_size} does not divide the {rows} rows into whole groups; "
            "was a batch cut inside a group?"
        )


def check_finite(rewards: Tensor) -> None:
    """Raise ValueError if a reward is not finite."""
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise ValueError(f"rewards: expected finite numbers, got {rewards[bad].tolist()} at rows {bad}.")


def centre(groups: Float[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """Return rewards minus their group's mean: exactly 0 in a group of equal rewards, however their mean is rounded."""
    all_equal = (groups == groups[:, :1]).all(-1, keepdim=True)
    return torch.where(all_equal, 0.0, groups - groups.mean(-1, keepdim=True))


def unbiased_std(values: Float[Tensor, "*N G"]) -> Float[Tensor, "*N"]:
    """Return the standard deviation over the last axis with divisor G - 1; 0 for a single value."""
    if values.shape[-1] < 2:
        return values.new_zeros(values.shape[:-1])
    return values.std(-1, correction=1)
