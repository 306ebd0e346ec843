"""Iterative GRPO (arXiv:2402.03300, algorithm 1): reference and reward model follow the policy.

Resetting the reference is the training loop's work. Here are the two pure parts of retraining a learned
reward model; with verifiable rewards neither is needed.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from moe_rl.objectives.ratios import check_shapes


def reward_model_loss(chosen_scores: Float[Tensor, " B"], rejected_scores: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Bradley-Terry loss of a reward model, -mean log sigma(s_chosen - s_rejected) (arXiv:2203.02155).

    Raises:
        ValueError: shapes that differ: every response would be paired with every other.
    """
    check_shapes(chosen_scores, {"rejected_scores": rejected_scores}, "chosen_scores")
    return -functional.logsigmoid(chosen_scores - rejected_scores).mean()


def historical_sample(
    new: int, history: int, fraction: float | int = 0.1, *, generator: torch.Generator | None = None
) -> Int[Tensor, " H"]:
    """Which historical samples to mix with `new` fresh ones, so that they are `fraction` of the whole.

        H = round( new * fraction / (1 - fraction) ), at most all of them        (10% in arXiv:2402.03300)

    Args:
        new: number of fresh comparisons.
        history: number of stored ones to draw from, without replacement.
        fraction: share of historical samples in the mix, in [0, 1).
        generator: makes the draw reproducible.

    Returns:
        Indices into the history.

    Raises:
        ValueError: a negative count, or a fraction outside [0, 1).

    >>> len(historical_sample(new=90, history=1000))
    10
    """
    if new < 0 or history < 0:
        raise ValueError(f"historical_sample: counts must not be negative, got new={new}, history={history}.")
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"historical_sample: fraction must be in [0, 1), got {fraction}.")
    wanted = round(new * fraction / (1.0 - fraction))
    return torch.randperm(history, generator=generator)[:wanted]
