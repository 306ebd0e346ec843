"""PPO with a value model: rewards of tokens, generalised advantages and the clipped value loss.

GRPO was made to do without the value model. Tokens under a False mask are skipped: the unmasked tokens of a
row are its time steps, in order, whatever lies between them. A response is an episode; after its last token
the value is 0.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from moe_rl.objectives.ratios import (
    aggregation_weights,
    as_bool_mask,
    at_least_float32,
    check_shapes,
    token_log_ratio,
    weighted_sum,
)


def token_rewards(
    rewards: Float[Tensor, " B"],
    mask: Shaped[Tensor, "B T"],
    *,
    kl_coef: float | int = 0.0,
    logps: Float[Tensor, "B T"] | None = None,
    ref_logps: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return token rewards: the response's reward on its last token, minus PPO's KL penalty on every token.

        r[i,t] = 1[t last] R_i - kl_coef (log pi_old - log pi_ref)[i,t]          (arXiv:2402.03300, eq. 2)

    Args:
        rewards: `[B]`.
        mask: True or 1 on completion tokens; a row without any gets no reward.
        kl_coef: beta of the penalty; if it is not 0, both log-probabilities are needed.
        logps, ref_logps: the policy that sampled and the reference, nats.

    Returns:
        `[B,T]`, detached; 0 in padding.

    Raises:
        ValueError: rewards that are not `[B]`; a mask that is no mask; `kl_coef` is not 0 and a log-probability is
            missing or of another shape than the mask.
    """
    if rewards.shape != mask.shape[:1]:  # broadcasting would give one reward to every response
        raise ValueError(f"rewards: expected one for each of {len(mask)} responses, [B], got {list(rewards.shape)}.")
    mask = as_bool_mask(mask)
    after = mask.flip(-1).cumsum(-1).flip(-1)
    values = torch.where(mask & (after == 1), at_least_float32(rewards.detach())[:, None], 0.0)
    if kl_coef == 0.0:
        return values
    if logps is None or ref_logps is None:
        raise ValueError("token_rewards: kl_coef is not 0, so logps and ref_logps are both needed.")
    return values - kl_coef * token_log_ratio(logps.detach(), ref_logps, mask)


def generalized_advantages(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    gamma: float | int = 1.0,
    lam: float | int = 0.95,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return the advantages and returns of generalised advantage estimation (arXiv:1506.02438, eqs 11-16).

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   return_t = A_t + V_t

    with V = A = 0 after the last token.

    Args:
        rewards: `[B,T]`, e.g. of `token_rewards`.
        values: V of the state in which token t is chosen, `[B,T]`, units of reward; detached.
        mask: True or 1 on completion tokens.
        gamma, lam: discount and trace decay, fractions. lam=1 gives Monte Carlo returns minus values.

    Returns:
        advantages and returns, `[B,T]`, detached, 0 in padding.

    Raises:
        ValueError: shapes that differ, or a mask that is no mask.

    >>> r, v = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    >>> generalized_advantages(r, v, torch.tensor([[True, True]]), lam=1.0)[0].tolist()
    [[0.5, 0.75]]
    """
    check_shapes(values, {"rewards": rewards, "mask": mask}, "values")
    mask = as_bool_mask(mask)
    reward = torch.where(mask, at_least_float32(rewards.detach()), 0.0)
    value = torch.where(mask, at_least_float32(values.detach()), 0.0)
    advantages = torch.zeros_like(value)
    next_value = value.new_zeros(value.shape[0])
    next_advantage = value.new_zeros(value.shape[0])
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        next_value = torch.where(mask[:, t], value[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
    return advantages, advantages + value


def whiten(
    advantages: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"], eps: float | int = 1e-8
) -> Float[Tensor, "B T"]:
    """Return advantages normalised to mean 0 and unbiased variance 1 over the unmasked tokens; 0 in padding.

    PPO codes do this. Fewer than two tokens, or equal advantages, have no variance: the result is then 0 everywhere,
    whatever the rounding of their mean.

    Raises:
        ValueError: shapes that differ, or a mask that is no mask.
    """
    check_shapes(advantages, {"mask": mask}, "advantages")
    mask = as_bool_mask(mask)
    counted = advantages.detach()[mask]
    if counted.numel() < 2 or bool((counted == counted[0]).all()):
        return torch.zeros_like(advantages)
    scaled = (advantages.detach() - counted.mean()) / (counted.std(correction=1) + eps)
    return torch.where(mask, scaled, 0.0)


def value_loss(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    clip: float | int | None = 0.2,
    *,
    total_tokens: float | int | Tensor | None = None,
) -> Float[Tensor, ""]:
    """Return PPO's value loss: the clipped regression of the value head on the returns, a mean over tokens.

        L = (1/M) sum_it 1/2 max( (V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2 )

    This is the form of OpenAI baselines and TRL; the PPO paper has the unclipped one (`clip=None`).

    Args:
        values: of the current value head, units of reward; with gradient.
        old_values, returns: detached here.
        mask: True or 1 on completion tokens; padding may hold anything.
        clip: the largest distance of V from V_old in the second term, units of reward; None for no clip.
        total_tokens: M over all micro-batches of an optimiser step; default this mask's.

    Returns:
        A scalar with gradient; 0 without tokens.

    Raises:
        ValueError: shapes that differ, a mask that is no mask, a negative clip, or a total that is no count.
    """
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip: expected a distance of at least 0, or None for no clip, got {clip}.")
    check_shapes(values, {"old_values": old_values, "returns": returns, "mask": mask}, "values")
    mask = as_bool_mask(mask)
    value = torch.where(mask, at_least_float32(values), 0.0)
    old = torch.where(mask, at_least_float32(old_values.detach()), 0.0)
    target = torch.where(mask, at_least_float32(returns.detach()), 0.0)
    error = (value - target).square()
    if clip is not None:
        near = old + (value - old).clamp(-clip, clip)
        error = torch.maximum(error, (near - target).square())
    weights = aggregation_weights(mask, "token_mean", total_tokens=total_tokens, dtype=error.dtype)
    return weighted_sum(0.5 * error, weights, mask)
