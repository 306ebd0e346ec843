"""Log-ratios between the current policy and the anchor policy, and the aggregation of token values to one number.

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
Aggregate = Literal["sequence_mean", "token_mean", "sum", "constant"]


def as_bool_mask(mask: Shaped[Tensor, "B T"], name: str = "mask") -> Bool[Tensor, "B T"]:
    """Return a bool, integer or float mask of 0 and 1 as a bool mask; errors call it `name`.

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
    """Raise ValueError if a tensor has another shape than `like`, which errors call `name`.

    Broadcasting would hide that the tensors are of different tokens."""
    for other, value in others.items():
        if value is not None and value.shape != like.shape:
            raise ValueError(
                f"{other}: expected the shape of {name}, {tuple(like.shape)}, got {tuple(value.shape)}. "
                + ("All [B,T] tensors must be aligned with the same tokens." if like.ndim == 2 else "")
            )


def masked_row_sum(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return the sum over the unmasked tokens of each row; 0 for a fully masked row."""
    return torch.where(mask, values, 0.0).sum(-1)


def masked_row_mean(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return the mean over the unmasked tokens of each row; 0 for a fully masked row."""
    return masked_row_sum(values, mask) / mask.sum(-1).clamp(min=1)


def token_log_ratio(
    logps: Float[Tensor, "B T"], old_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return the log importance ratio of each token, nats (GSPO, arXiv:2507.18071, eq. 3, in logs).

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
    """Return the length-normalised log-ratio of each sequence, nats per token (arXiv:2507.18071, eq. 7, in logs).

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
    """Return the log of the ratio that multiplies each token's advantage, nats, at the given level.

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
        own = log_ratio.masked_fill(log_ratio.isinf(), 0.0)  # a router-shift weight of 0: -inf - (-inf) is NaN
        return per_sequence.detach() + (own - own.detach())
    raise ValueError(unknown("ratio", level, get_args(RatioLevel)))


def at_least_float32(values: Tensor) -> Tensor:
    """Return `values` in float32, or as given if float64: a log-ratio is a small difference of large numbers."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


# -- aggregation -------------------------------------------------------------------------------------------------------


def aggregation_weights(
    mask: Shaped[Tensor, "B T"],
    how: Aggregate,
    *,
    length_constant: float | int = 1.0,
    local_normalizer: bool = False,
    total_sequences: float | int | Tensor | None = None,
    total_tokens: float | int | Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "B T"]:
    """Return the weight of each token in the aggregate; N counts rows with a token, M the unmasked tokens.

        "sequence_mean"  1/(N |y_i|)   GRPO, GSPO (arXiv:2507.18071, eqs 2, 13)
        "token_mean"     1/M           DAPO (arXiv:2503.14476, eq. 8)
        "sum"            1/N           MiniRL (arXiv:2512.01374): mean over sequences of a sum over tokens
        "constant"       1/(N L)       Dr.GRPO (arXiv:2503.20783), L = length_constant

    Differs: N does not count fully masked rows, so that adding one never changes the loss of the others. The
    papers' 1/G counts sequences that all have tokens; for these both agree.

    Args:
        mask: True or 1 on completion tokens.
        length_constant: L, tokens.
        local_normalizer: for "token_mean", a mean over these rows alone, weighted by their share of
            `total_sequences`: BNPO's normalisation, which depends on how a batch is cut into micro-batches.
        total_sequences, total_tokens: N and M of all micro-batches and processes of one optimiser step;
            default: those of `mask`.

    Returns:
        `[B,T]`, detached; 0 in padding.

    Raises:
        ValueError: an unknown `how`, a total that is no count, or a mask that is no mask.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> aggregation_weights(mask, "sequence_mean")[:, 0].tolist()
    [0.16666666666666666, 0.5]
    >>> aggregation_weights(mask, "token_mean")[:, 0].tolist()
    [0.25, 0.25]
    """
    counted = as_bool_mask(mask).to(dtype)
    lengths = counted.sum(-1, keepdim=True)
    local_sequences, local_tokens = (lengths > 0).sum().to(dtype), lengths.sum()
    sequences = _at_least_one(local_sequences if total_sequences is None else total_sequences)
    tokens = _at_least_one(local_tokens if total_tokens is None else total_tokens)
    match how:
        case "sequence_mean":
            return counted / lengths.clamp(min=1) / sequences
        case "token_mean" if local_normalizer:
            return counted / local_tokens.clamp(min=1) * (local_sequences / sequences)
        case "token_mean":
            return counted / tokens
        case "sum":
            return counted / sequences
        case "constant":
            return counted / (sequences * length_constant)
    raise ValueError(f"aggregate: expected sequence_mean, token_mean, sum or constant, got {how!r}.")


def weighted_sum(
    values: Float[Tensor, "B T"], weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Return `sum_it weights values` over the unmasked tokens; padding may hold anything, NaN included."""
    return (torch.where(mask, values, 0.0) * weights).sum()


def _at_least_one(total: float | int | Tensor) -> float | Tensor:
    """Return `total`, but at least 1: a denominator that is never 0. Without any token the numerator is 0 too."""
    if isinstance(total, Tensor):
        return total.clamp(min=1)
    if not 0 <= total < float("inf"):
        raise ValueError(f"total_sequences, total_tokens: expected a count of at least 0, got {total}.")
    return max(float(total), 1.0)
