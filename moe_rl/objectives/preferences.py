"""Losses on preference pairs: the reward model of iterative GRPO, and DPO with its place among the other methods.

Source: DeepSeekMath (arXiv:2402.03300), algorithm 1 for the reward model, A.1 for the unified view of the methods.

Every method's gradient is an expectation of GC(q, o, t) * grad log pi(o_t | q, o_<t); they differ in the data
and in the gradient coefficient GC:

    SFT          1                            human demonstrations            preset "sft"
    RFT          1[correct]                   samples of the initial policy   preset "rft"
    online RFT   1[correct]                   samples of the current policy   preset "online_rft"
    DPO          sigma(margin), below         pairs                           `dpo_coefficients`
    PPO          A_t of a value model         samples of the current policy   preset "ppo"
    GRPO         A_t + beta (pi_ref/pi - 1)   samples of the current policy   preset "grpo" with kl_coef

`moe_rl.objectives.gradient.token_weights` computes the coefficient of every preset on real tensors.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from moe_rl.objectives.ratios import as_bool_mask, check_shapes, masked_row_sum, token_log_ratio


def sequence_margin(
    logps: Float[Tensor, "B T"], ref_logps: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Return log pi(y) - log pi_ref(y) of each sequence, nats, summed over its tokens; with gradient."""
    return masked_row_sum(token_log_ratio(logps, ref_logps, mask), as_bool_mask(mask))


def dpo_coefficients(
    chosen_margin: Float[Tensor, " B"], rejected_margin: Float[Tensor, " B"], beta: float | int = 0.1
) -> Float[Tensor, " B"]:
    """Return DPO's gradient coefficient of each pair (arXiv:2402.03300, A.1.4).

        GC = sigma( beta (rejected_margin - chosen_margin) )

    Every token of the chosen response has the coefficient +beta GC, every token of the rejected one -beta GC. GC is in
    (0, 1), small where the policy already prefers the chosen response, and detached.

    Differs: the paper drops the constant factor beta.

    Raises:
        ValueError: shapes that differ: every response would be paired with every other.

    >>> dpo_coefficients(torch.tensor([1.0]), torch.tensor([1.0]))
    tensor([0.5000])
    """
    check_shapes(chosen_margin, {"rejected_margin": rejected_margin}, "chosen_margin")
    return torch.sigmoid(beta * (rejected_margin - chosen_margin)).detach()


def dpo_loss(
    chosen_margin: Float[Tensor, " B"], rejected_margin: Float[Tensor, " B"], beta: float | int = 0.1
) -> Float[Tensor, ""]:
    """Return the loss of direct preference optimisation (DPO; arXiv:2305.18290, eq. 7), a mean over pairs.

        L = -mean log sigma( beta (chosen_margin - rejected_margin) )

    Args:
        chosen_margin, rejected_margin: `sequence_margin` of the preferred and of the other response, nats.
        beta: strength of the tie to the reference policy.

    Returns:
        A scalar with gradient.

    Raises:
        ValueError: shapes that differ: every response would be paired with every other.
    """
    check_shapes(chosen_margin, {"rejected_margin": rejected_margin}, "chosen_margin")
    return -functional.logsigmoid(beta * (chosen_margin - rejected_margin)).mean()


def reward_model_loss(chosen_scores: Float[Tensor, " B"], rejected_scores: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Return the Bradley-Terry loss of a reward model, -mean log sigma(s_chosen - s_rejected) (arXiv:2203.02155).

    Raises:
        ValueError: shapes that differ: every response would be paired with every other.
    """
    check_shapes(chosen_scores, {"rejected_scores": rejected_scores}, "chosen_scores")
    return dpo_loss(chosen_scores, rejected_scores, beta=1.0)


def historical_sample(
    new: int, history: int, fraction: float | int = 0.1, *, generator: torch.Generator | None = None
) -> Int[Tensor, " H"]:
    """Draw the historical samples to mix with `new` fresh ones, such that historical ones are `fraction` of the mix.

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
