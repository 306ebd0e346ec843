"""Optional measurements around the updates of a step: noise floor, gradients, decomposition of the log-ratio."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.measure.decompose import decompose_update
from moe_rl.measure.gradients import gradient_metrics, loss_gradient
from moe_rl.measure.noise_floor import NoiseFloor, floor_metrics
from moe_rl.measure.scoring import TokenBatch, score_live
from moe_rl.measure.weights import copy_weights
from moe_rl.routing import replay_routes
from moe_rl.training.batch import Batch


class Decomposition:
    """The decomposition of the log-ratio after each update into weights, routes and their interaction, also by site.

    Costs 3 + 2L forwards per update at L routing sites, and a CPU copy of the weights. The old weights are those at the
    beginning of the step; under rollout lag these are newer than the policy that sampled the batch.
    """

    def __init__(self, policy: nn.Module, part: Batch, temperature: float):
        self.policy, self.text = policy, TokenBatch(*part.tokens, temperature)
        self.weights, self.old = copy_weights(policy), score_live(policy, self.text)

    def shares(self) -> dict[str, Any]:
        """Return the shares of weights, routes and interaction in the updates so far; names as in the catalogue."""
        found = decompose_update(self.policy, self.weights, self.text, self.old, per_site=True)
        sites = found.site_shares()
        assert sites is not None
        by_site = {f"site_{name}": values for name, values in sites.rows().items()}
        return {**found.shares().rows(), "replay_effect_var": sites.whole, "site_names": sites.sites, **by_site}


def replay_gradients(policy: nn.Module, part: Batch, loss: Callable[[Batch], Tensor]) -> dict[str, Any]:
    """Return metrics that compare gradients of a loss on the probed responses under live and under old routes.

    The gradients of two halves of the responses, under live routing, are compared as well.

    loss: makes the forward, too."""

    def gradient(rows: Tensor) -> dict[str, Tensor]:
        policy.train()  # as in the updates
        return loss_gradient(policy, loss(part.rows(rows)))

    rows = torch.arange(len(part))
    natural = gradient(rows)
    with replay_routes(policy, part.routes):
        replayed = gradient(rows)
    halves = gradient(rows[::2]), gradient(rows[1::2])
    policy.eval()
    return gradient_metrics(natural, replayed, halves, part.routes.sites)


def noise_floor_rows(policy: nn.Module, part: Batch, temperature: float, bf16: bool) -> list[dict[str, Any]]:
    """Return rows of kind "floor", one per variant of the noise floor: the policy against itself at equal weights.

    A variant that kernels or memory do not allow has no row, but a warning with the reason."""
    text = TokenBatch(*part.tokens, temperature)
    base, floor = score_live(policy, text), NoiseFloor(bf16)
    mask = text.completion_mask.cpu()
    rows = [
        {"variant": name, "detail": detail, **floor_metrics(mask, base, scored)}
        for name, detail, scored in floor.variants(policy, text)
    ]
    for variant, reason in floor.left_out.items():
        warnings.warn(f"noise floor: {variant} is left out, it cannot be run here: {reason}", stacklevel=2)
    return rows
