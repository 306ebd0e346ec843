"""Advantages of RLOO, RFT, process supervision and GDPO, computed from rewards. Rows of one group are adjacent."""

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from moe_rl.objectives.advantages import as_groups, centre, check_finite, check_groups, group_advantages, unbiased_std
from moe_rl.objectives.ratios import as_bool_mask, at_least_float32, check_shapes


def leave_one_out_advantages(rewards: Shaped[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Return each reward minus the mean of the other rewards in its group (RLOO, arXiv:2402.14740).

        A_i = r_i - (1/(G-1)) sum_{j != i} r_j = G/(G-1) (r_i - mean(group))

    Args, exact zeros and Raises as in `group_advantages`; also raises ValueError for G < 2.

    >>> leave_one_out_advantages(torch.tensor([3.0, 1.0]), group_size=2)
    tensor([ 2., -2.])
    """
    if group_size < 2:
        raise ValueError(f"group_size: leaving one out needs at least 2 in a group, got {group_size}.")
    return (centre(as_groups(rewards, group_size)) * (group_size / (group_size - 1))).flatten()


def accepted_advantages(rewards: Float[Tensor, " B"], threshold: float | int = 0.5) -> Float[Tensor, " B"]:
    """Return 1 where the reward is above `threshold`, else 0: the coefficient of RFT (arXiv:2402.03300, A.1).

    Raises:
        ValueError: a reward is not finite.
    """
    check_finite(rewards)
    return (rewards.detach() > threshold).to(rewards.dtype)


def process_advantages(
    rewards: Shaped[Tensor, "B T"],
    step_ends: Shaped[Tensor, "B T"],
    group_size: int,
    scale: Literal["std", "none"] | str = "std",
    eps: float | int = 1e-4,
) -> Float[Tensor, "B T"]:
    """Return the advantages of process supervision: sums of normalised step rewards (arXiv:2402.03300, 4.1.3).

        r~_i[j] = (r_i[j] - mean(R)) / (std(R) + eps)
        A[i,t]  = sum of r~_i[j] over the steps j that end at or after t

    where R holds all step rewards of a group. Tokens after the last step get 0.

    Differs: the paper leaves the standard deviation unspecified; here it is the unbiased one plus eps.

    Args:
        rewards: `[B,T]`, the reward of a step at its last token; other entries are ignored.
        step_ends: True or 1 at the last token of each step.
        group_size: G rows, adjacent; must divide B.
        scale: "std", or "none" to subtract the mean only.
        eps: added to the standard deviation, units of reward.

    Returns:
        `[B,T]`, detached. A group whose step rewards are all equal gives exactly 0.

    Raises:
        ValueError: G does not divide B, a step reward is not finite, an unknown scale, a negative eps, shapes that
            differ, or `step_ends` of other values than 0 and 1.

    >>> ends = torch.tensor([[True, True], [False, True]])
    >>> process_advantages(torch.tensor([[0.0, 3.0], [9.0, 3.0]]), ends, group_size=2, scale="none")
    tensor([[-1.,  1.],
            [ 1.,  1.]])
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale: expected 'std' or 'none', got {scale!r}.")
    if not eps >= 0:
        raise ValueError(f"eps: expected a number of at least 0, got {eps}.")
    check_shapes(rewards, {"step_ends": step_ends}, "rewards")
    check_groups(rewards.shape[0], group_size)
    step_ends = as_bool_mask(step_ends, "step_ends")
    values = at_least_float32(rewards.detach())
    if (odd := (step_ends & ~values.isfinite()).nonzero()).numel():
        row, token = odd[0].tolist()
        raise ValueError(f"rewards: expected finite numbers, got {values[row, token]} at row {row}, token {token}.")
    advantages = torch.zeros_like(values)
    for start in range(0, values.shape[0], group_size):
        rows = slice(start, start + group_size)
        ends = step_ends[rows]
        steps = values[rows][ends]
        if steps.numel() == 0:
            continue
        centred = centre(steps[None])[0]
        spread = unbiased_std(steps) + eps if scale == "std" else 1.0
        normalised = torch.where(centred == 0, 0.0, centred / spread)  # 0, not 0/0, even with eps = 0
        advantages[rows] = torch.zeros_like(values[rows]).masked_scatter(ends, normalised)
    return advantages.flip(-1).cumsum(-1).flip(-1)


def decoupled_advantages(
    rewards: Float[Tensor, "B R"],
    group_size: int,
    weights: Float[Tensor, " R"] | None = None,
    eps: float | int = 1e-4,
) -> Float[Tensor, " B"]:
    """Return the advantages of GDPO: each of R rewards is normalised in its group, and their sum over the batch.

        S_i = sum_k w_k A_i[k],   A_i = (S_i - mean(S)) / (std(S) + eps)          (arXiv:2601.05242)

    with A_i[k] = `group_advantages` of reward k. Summing first would let different combinations of rewards
    collapse into one advantage.

    Differs: mean(S), which is 0 in exact arithmetic, is not subtracted, so that a group whose rewards are all
    equal keeps exactly 0. The standard deviations are unbiased, plus eps, as in TRL.

    Args:
        rewards: finite, `[B,R]`.
        group_size: G; must divide B.
        weights: finite, `[R]`; default 1 each.
        eps: added to both standard deviations.

    Returns:
        `[B]`, detached.

    Raises:
        ValueError: as `group_advantages`; rewards that are not `[B,R]`; weights that are not `[R]`, or not finite.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards: expected two axes [B,R], a column for each reward, got {list(rewards.shape)}.")
    if weights is not None and (weights.shape != rewards.shape[1:] or not bool(weights.isfinite().all())):
        raise ValueError(
            f"weights: expected a finite number for each of {rewards.shape[1]} rewards, [R], got {weights.tolist()}."
        )
    per_reward = torch.stack([group_advantages(column, group_size, "std", eps) for column in rewards.unbind(-1)], -1)
    summed = per_reward.sum(-1) if weights is None else (per_reward * weights).sum(-1)
    return torch.where(summed == 0, 0.0, summed / (unbiased_std(summed) + eps))  # 0, not 0/0, even with eps = 0
