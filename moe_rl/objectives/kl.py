"""Three estimators of KL(pi || pi_ref) from tokens sampled by pi (Schulman, joschu.net/blog/kl-approx.html).

With d = log pi_ref - log pi of the sampled token, nats:

    k1 = -d              unbiased, negative as often as not; as a loss its gradient is zero in expectation
    k2 = d^2 / 2         biased, low variance; its gradient is that of the KL (on-policy)
    k3 = e^d - d - 1     unbiased, never negative; GRPO's choice (DeepSeekMath, arXiv:2402.03300, eq. 4)

"Unbiased" refers to the value, for samples of pi itself. For the other direction, swap the arguments; always state
which policy the samples are from.
"""

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from moe_rl.objectives.ratios import check_shapes, token_log_ratio

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logps: Float[Tensor, "B T"],
    ref_logps: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    estimator: KLEstimator = "k3",
) -> Float[Tensor, "B T"]:
    """Return an estimate of KL(pi || pi_ref) for each token, nats; the module's docstring has the equations.

    Args:
        logps: current policy, nats; with gradient.
        ref_logps: reference policy, nats; detached here.
        mask: True or 1 on completion tokens.
        estimator: "k1", "k2" or "k3".

    Returns:
        `[B,T]` with gradient; exactly 0 in padding. k3 uses `expm1`, which keeps its relative accuracy where
        the policies nearly agree.

    Raises:
        ValueError: an unknown estimator, shapes that differ, or a mask that is no mask.

    >>> kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]]), "k1")
    tensor([[0.5000]])
    """
    check_shapes(logps, {"ref_logps": ref_logps, "mask": mask})
    d = -token_log_ratio(logps, ref_logps, mask)
    match estimator:
        case "k1":
            return -d
        case "k2":
            return 0.5 * d.square()
        case "k3":
            return torch.expm1(d) - d
    raise ValueError(f"estimator: expected 'k1', 'k2' or 'k3', got {estimator!r}.")
