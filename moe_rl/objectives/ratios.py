"""Log-ratios between the current policy and the one that the samples are anchored to.

`mask` is True (or 1) on completion tokens. Values under a False mask may be anything, NaN and inf included:
they reach neither a value nor a gradient, because they are replaced before any arithmetic.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from moe_rl.objectives.bounds import unknown

RatioLevel = Literal["token", "sequence", "sequence_token", "sequence_product"]


def as_bool_mask(mask: Shaped[Tensor, "B T"], name: str = "mask") -> Bool[Tensor, "B T"]:
    """A bool mask from a bool, integer or float 0/1 one, which an error calls `name`.

    Raises:
        ValueError: an entry is neither 0 nor 1 (weights are not masks: put them into the advantages).
    """
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"{name}: expected only 0 and 1 (or bool), got other values. A mask says which tokens count: it is neither "
            "labels nor weights, which belong into token-level advantages."
        )
    return mask != 0


def check_shapes(like: Tensor, others: Mapping[str, Tensor | None], name: str = "logps") -> None:
    """Raises ValueError where a tensor has another shape than `like`, which is called `name`: broadcasting would hide
    that tokens do not belong together."""
    for other, value in others.items():
        if value is not None and value.shape != like.shape:
            raise ValueError(
                f"{other}: expected the shape of {name}, {tuple(like.shape)}, got {tuple(value.shape)}. "
                + ("All [B,T] tensors must be aligned with the same tokens." if like.ndim == 2 else "")
            )


def masked_row_sum(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum over the unmasked tokens of each row; 0 for a fully masked row."""
    return torch.where(mask, values, 0.0).sum(-1)


def masked_row_mean(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Mean over the unmasked tokens of each row; 0 for a fully masked row."""
    return masked_row_sum(values, mask) / mask.sum(-1).clamp(min=1)


def token_log_ratio(
    logps: Float[Tensor, "B T"], old_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Log importance ratio of each token, nats (GSPO, arXiv:2507.18071, eq. 3, in logs).

        log w[i,t] = log pi(y[i,t] | x, y[i,<t]) - log pi_old(y[i,t] | x, y[i,<t])

    Args:
        logps: log-probabilities under the current policy, nats; the gradient flows through these only.
        old_logps: the same tokens under the anchor policy, nats; detached here.
        mask: True or 1 on completion tokens.

    Returns:
        `[B,T]`, with gradient; exactly 0 where the mask is False. Half precision is computed in float32.

    Raises:
        ValueError: shapes that differ, or a mask that is no mask.

    >>> old = torch.tensor([[-1.5, float("nan")]])
    >>> token_log_ratio(torch.tensor([[-1.0, -2.0]]), old, torch.tensor([[1, 0]]))
    tensor([[0.5000, 0.0000]])
    """
    check_shapes(logps, {"old_logps": old_logps, "mask": mask})
    keep = as_bool_mask(mask)
    new = torch.where(keep, at_least_float32(logps), 0.0)
    old = torch.where(keep, at_least_float32(old_logps.detach()), 0.0)
    return new - old


def sequence_log_ratio(
    logps: Float[Tensor, "B T"], old_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Length-normalised log ratio of each sequence, nats per token (arXiv:2507.18071, eq. 7, in logs).

        log s[i] = (1/|y[i]|) sum_t log w[i,t]

    Args and masking as in `token_log_ratio`.

    Returns:
        `[B]`, with gradient; 0 for a fully masked row.

    >>> sequence_log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.1]]), torch.tensor([[1, 1]]))
    tensor([0.3000])
    """
    return masked_row_mean(token_log_ratio(logps, old_logps, mask), as_bool_mask(mask))


def log_ratio_at_level(
    log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], level: RatioLevel
) -> Float[Tensor, "B T"]:
    """The log-ratio that multiplies each token's advantage, nats.

    - "token": log w[i,t] itself (arXiv:2507.18071, eq. 3)
    - "sequence": log s[i] on every token of the sequence (eq. 7)
    - "sequence_token": sg[log s[i]] + log pi - sg[log pi] (eq. 14): the value of s[i], but each token's
      gradient goes to its own log-probability, so that advantages can differ between tokens
    - "sequence_product": log of the product of w[i,t] over the sequence, on each of its tokens: the ratio of
      the sequences themselves, without the root (VESPO, arXiv:2602.10693)

    `log_ratio` is the output of `token_log_ratio`; the result is 0 in padding and keeps the gradient.
    """
    if level == "token":
        return log_ratio
    reduce = masked_row_sum if level == "sequence_product" else masked_row_mean
    per_sequence = torch.where(mask, reduce(log_ratio, mask)[:, None], 0.0)
    if level in ("sequence", "sequence_product"):
        return per_sequence
    if level == "sequence_token":
        return per_sequence.detach() + (log_ratio - log_ratio.detach())
    raise ValueError(unknown("ratio", level, get_args(RatioLevel)))


def at_least_float32(values: Tensor) -> Tensor:
    """Half-precision tensors in float32: a log-ratio is a small difference of large numbers."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
