"""How the values of tokens become one number, and what weight each token has in it."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Aggregate = Literal["sequence_mean", "token_mean", "sum", "constant"]


def aggregation_weights(
    mask: Bool[Tensor, "B T"],
    how: Aggregate,
    *,
    length_constant: float | int = 1.0,
    local_normalizer: bool = False,
    total_sequences: float | int | Tensor | None = None,
    total_tokens: float | int | Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "B T"]:
    """The weight of each token in the aggregate; N counts rows with a token, M the unmasked tokens.

        "sequence_mean"  1/(N |y_i|)   GRPO, GSPO (arXiv:2507.18071, eqs 2, 13)
        "token_mean"     1/M           DAPO (arXiv:2503.14476, eq. 8)
        "sum"            1/N           MiniRL (arXiv:2512.01374): mean over sequences of a sum over tokens
        "constant"       1/(N L)       Dr.GRPO (arXiv:2503.20783), L = length_constant

    Differs: N does not count fully masked rows, so that adding one never changes the loss of the others. The
    papers' 1/G counts sequences that all have tokens; there both agree.

    Args:
        mask: bool, True on completion tokens.
        length_constant: L, tokens.
        local_normalizer: for "token_mean", a mean over these rows alone, weighted by their share of
            `total_sequences`: BNPO's normalisation, which depends on how a batch is cut into micro-batches.
        total_sequences, total_tokens: N and M of all micro-batches and processes of one optimiser step;
            default those of `mask`.

    Returns:
        `[B,T]`, detached; 0 in padding.

    Raises:
        ValueError: an unknown `how`.

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> aggregation_weights(mask, "sequence_mean")[:, 0].tolist()
    [0.16666666666666666, 0.5]
    >>> aggregation_weights(mask, "token_mean")[:, 0].tolist()
    [0.25, 0.25]
    """
    live = mask.to(dtype)
    lengths = live.sum(-1, keepdim=True)
    local_sequences, local_tokens = (lengths > 0).sum().to(dtype), lengths.sum()
    sequences = _at_least_one(local_sequences if total_sequences is None else total_sequences)
    tokens = _at_least_one(local_tokens if total_tokens is None else total_tokens)
    match how:
        case "sequence_mean":
            return live / lengths.clamp(min=1) / sequences
        case "token_mean" if local_normalizer:
            return live / local_tokens.clamp(min=1) * (local_sequences / sequences)
        case "token_mean":
            return live / tokens
        case "sum":
            return live / sequences
        case "constant":
            return live / (sequences * length_constant)
    raise ValueError(f"aggregate: expected sequence_mean, token_mean, sum or constant, got {how!r}.")


def weighted_sum(
    values: Float[Tensor, "B T"], weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """`sum_it weights values` over the unmasked tokens; padding may hold anything, NaN included."""
    return (torch.where(mask, values, 0.0) * weights).sum()


def _at_least_one(total: float | int | Tensor) -> float | Tensor:
    """A denominator that is never 0: without any token the numerator is 0 too."""
    return total.clamp(min=1) if isinstance(total, Tensor) else max(float(total), 1.0)
