"""Rewards -> advantages. Rows of one group are adjacent: group g holds rows g*G .. (g+1)*G - 1."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from moe_rl.objectives.ratios import at_least_float32

Scale = Literal["std", "none", "batch"]


def group_advantages(
    rewards: Shaped[Tensor, " B"], group_size: int, scale: Scale | str = "std", eps: float | int = 1e-4
) -> Float[Tensor, " B"]:
    """Outcome supervision: each reward against the mean of its group (arXiv:2507.18071, eqs 3 and 6).

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
    return torch.where(centred == 0, 0.0, centred / (spread + eps)).flatten()  # 0, not 0/0, even with eps = 0


def leave_one_out_advantages(rewards: Shaped[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Each reward against the mean of the others in its group (RLOO, arXiv:2402.14740).

        A_i = r_i - (1/(G-1)) sum_{j != i} r_j = G/(G-1) (r_i - mean(group))

    Args, exact zeros and Raises as in `group_advantages`; also raises ValueError for G < 2.

    >>> leave_one_out_advantages(torch.tensor([3.0, 1.0]), group_size=2)
    tensor([ 2., -2.])
    """
    if group_size < 2:
        raise ValueError(f"group_size: leaving one out needs at least 2 in a group, got {group_size}.")
    return (_centre(_as_groups(rewards, group_size)) * (group_size / (group_size - 1))).flatten()


def accepted_advantages(rewards: Float[Tensor, " B"], threshold: float | int = 0.5) -> Float[Tensor, " B"]:
    """1 where the reward is above `threshold`, else 0: the coefficient of RFT (arXiv:2402.03300, A.1)."""
    return (rewards.detach() > threshold).to(rewards.dtype)


def process_advantages(
    rewards: Float[Tensor, "B T"],
    step_ends: Bool[Tensor, "B T"],
    group_size: int,
    scale: Literal["std", "none"] | str = "std",
    eps: float | int = 1e-4,
) -> Float[Tensor, "B T"]:
    """Process supervision: normalised step rewards, summed to returns-to-go (arXiv:2402.03300, 4.1.3).

        r~_i[j] = (r_i[j] - mean(R)) / (std(R) + eps)
        A[i,t]  = sum of r~_i[j] over the steps j that end at or after t

    where R holds all step rewards of a group. Tokens after the last step get 0.

    Differs: the paper leaves the standard deviation unspecified; here it is unbiased, plus eps.

    Args:
        rewards: `[B,T]`, the reward of a step at its last token; anything elsewhere.
        step_ends: True at the last token of each step.
        group_size: G rows, adjacent; must divide B.
        scale: "std", or "none" for the mean only.
        eps: added to the standard deviation, units of reward.

    Returns:
        `[B,T]`, detached. A group whose step rewards are all equal gives exactly 0.

    Raises:
        ValueError: G does not divide B, a step reward is not finite, or an unknown scale.

    >>> ends = torch.tensor([[True, True], [False, True]])
    >>> process_advantages(torch.tensor([[0.0, 3.0], [9.0, 3.0]]), ends, group_size=2, scale="none")
    tensor([[-1.,  1.],
            [ 1.,  1.]])
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale: expected 'std' or 'none', got {scale!r}.")
    _check_groups(rewards.shape[0], group_size)
    values = at_least_float32(rewards.detach())
    advantages = torch.zeros_like(values)
    for start in range(0, values.shape[0], group_size):
        rows = slice(start, start + group_size)
        ends = step_ends[rows]
        steps = values[rows][ends]
        _check_finite(steps)
        if steps.numel() == 0:
            continue
        centred = _centre(steps[None])[0]
        normalised = centred / (_unbiased_std(steps) + eps) if scale == "std" else centred
        advantages[rows] = torch.zeros_like(values[rows]).masked_scatter(ends, normalised)
    return advantages.flip(-1).cumsum(-1).flip(-1)


def decoupled_advantages(
    rewards: Float[Tensor, "B R"],
    group_size: int,
    weights: Float[Tensor, " R"] | None = None,
    eps: float | int = 1e-4,
) -> Float[Tensor, " B"]:
    """GDPO: each of R rewards normalised in its group, then summed, then normalised over the batch.

        S_i = sum_k w_k A_i[k],   A_i = (S_i - mean(S)) / (std(S) + eps)          (arXiv:2601.05242)

    with A_i[k] = `group_advantages` of reward k. Summing first would let different combinations of rewards
    collapse into one advantage.

    Differs: mean(S), which is 0 in exact arithmetic, is not subtracted, so that a group whose rewards are all
    equal keeps exactly 0. The standard deviations are unbiased, plus eps, as in TRL.

    Args:
        rewards: finite, `[B,R]`.
        group_size: G; must divide B.
        weights: `[R]`; default 1 each.
        eps: added to both standard deviations.

    Returns:
        `[B]`, detached.

    Raises:
        ValueError: as `group_advantages`.
    """
    per_reward = torch.stack([group_advantages(column, group_size, "std", eps) for column in rewards.unbind(-1)], -1)
    summed = per_reward.sum(-1) if weights is None else (per_reward * weights).sum(-1)
    return summed / (_unbiased_std(summed) + eps)


def _as_groups(rewards: Shaped[Tensor, " B"], group_size: int) -> Float[Tensor, "N G"]:
    """`[B]` -> `[N,G]`, checked, detached, at least float32."""
    _check_groups(rewards.shape[0], group_size)
    _check_finite(rewards)
    values = at_least_float32(rewards.detach() if rewards.is_floating_point() else rewards.float())
    return values.reshape(-1, group_size)


def _check_groups(rows: int, group_size: int) -> None:
    if group_size < 1 or rows % group_size:
        raise ValueError(
            f"group_size: {group_size} does not divide the {rows} rows into whole groups; "
            "was a batch cut inside a group?"
        )


def _check_finite(rewards: Tensor) -> None:
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise ValueError(f"rewards: expected finite numbers, got {rewards[bad].tolist()} at rows {bad}.")


def _centre(groups: Float[Tensor, "N G"]) -> Float[Tensor, "N G"]:
    """Minus the group's mean; exactly 0 in a group of equal rewards (a rounded mean would not be)."""
    all_equal = (groups == groups[:, :1]).all(-1, keepdim=True)
    return torch.where(all_equal, 0.0, groups - groups.mean(-1, keepdim=True))


def _unbiased_std(values: Float[Tensor, "*N G"]) -> Float[Tensor, "*N"]:
    """Standard deviation over the last axis with divisor G - 1; 0 for a single value."""
    if values.shape[-1] < 2:
        return values.new_zeros(values.shape[:-1])
    return values.std(-1, correction=1)
