"""Predictive Routing Replay, PR² (arXiv 2606.00395): sample under the routes that are expected after the next updates.

PR² is R3 with another sampler: the policy itself, whose routers choose by the sum of their logits and the output of a
linear map of their input, which is trained to predict how the logits will have moved.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl.measure.logprobs import causal_lm, evaluating
from moe_rl.policy.tiny import ModelError
from moe_rl.rollout import Rollout
from moe_rl.routing import RoutingError, predicted_routes, record_router_logits
from moe_rl.training.batch import Batch, Totals
from moe_rl.training.scorers import EngineRoutes, Scorer, Seen


class RoutePredictor:
    """Linear maps W, one per router and zero at first, that predict from a router's input h how its logits z will move.

    While responses are sampled, experts are the top k of z + W h. After each update but the first of a batch, at which
    nothing has moved yet, W makes a step on the gradient of

        sum over sites of the mean over tokens of KL( softmax(z_now) || softmax(z_old + W h_old) )

    z_now: the policy's logits in the update's forward, which follows the replayed routes. z_old, h_old: logits and
    inputs of the old policy under the routes of the rollout.

    Differs: W has an AdamW of its own, without weight decay, whose gradient is not clipped together with the policy's.
    W learns from all tokens of a batch, whose h, z and predictions are kept until the batch's last update: B T L
    (H + 2 E) fp32 numbers, which suits small models. Public code takes only some of the responses.

    Args:
        model: the policy, in one process.
        learning_rate: learning rate of the maps, warmed up as the policy's.
        betas: of AdamW, those of the policy.

    Raises:
        ModelError: the routers' logits are not linear maps of the same widths at all sites.
    """

    def __init__(self, model: nn.Module, learning_rate: float, betas: tuple[float, float]):
        lm = causal_lm(model)
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=lm.device)
        try:
            with torch.no_grad(), evaluating(lm), record_router_logits(lm) as seen:
                lm(tokens, use_cache=False)
            inputs, logits = seen.inputs, seen.logits
        except RoutingError as error:
            raise ModelError(f"method.replay: PR2 does not go with this model: {error}") from error
        if bool(logits.isnan().any()):
            raise ModelError("method.replay: PR2 does not go with this model: a site looks experts up by token id")
        shape = logits.shape[2], logits.shape[3], inputs.shape[3]
        self.weights = nn.Parameter(torch.zeros(shape, device=logits.device, dtype=logits.dtype))
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW([self.weights], learning_rate, betas=betas, weight_decay=0.0)
        self._found, self._tokens = [0.0, 0.0], 0  # sums over the micro-batches since the last step

    def applied(self, policy: nn.Module) -> AbstractContextManager[None]:
        """Context manager: `policy` chooses its experts by the predicted logits."""
        return predicted_routes(policy, self.weights.detach())

    def watch(self, policy: nn.Module) -> AbstractContextManager[Any]:
        """Context manager around the forward of an update; its value is the argument `watched` of `backward`."""
        return record_router_logits(policy)

    def backward(self, part: Batch, watched: Any, totals: Totals) -> None:
        """Add the gradient of the divergence on a micro-batch, summed over its tokens, prompts included."""
        assert part.router_inputs is not None and part.router_logits is not None and part.router_predicted is not None
        there = part.attention_mask.bool()
        inputs, old, now = (x[there] for x in (part.router_inputs, part.router_logits, watched.logits))
        divergence(now, old + torch.einsum("nlh,leh->nle", inputs, self.weights)).backward()
        # Logged is what was predicted before this batch's updates, from which the present maps have learned.
        self._found[0] += float(divergence(now, part.router_predicted[there]))
        self._found[1] += float(divergence(now, old))
        self._tokens += len(now)

    def clip(self) -> Tensor:
        """Return the norm of the gradient, which is not clipped."""
        assert self.weights.grad is not None
        return torch.linalg.vector_norm(self.weights.grad)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the maps, by name."""
        yield "predictor", self.weights

    def step(self, warmup: float, hold: bool) -> dict[str, Any]:
        """Make one optimizer step at `warmup` times the learning rate (with `hold` none); return mean divergences.

        `predictor_kl` compares z_now with the logits that were predicted when the batch was scored,
        `predictor_kl_unmoved` with z_old; nats, mean over tokens and sites."""
        assert self.weights.grad is not None
        self.weights.grad /= self._tokens
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * warmup
        if not hold:
            self.optimizer.step()
        self.optimizer.zero_grad()
        predicted, unmoved = (x / (self._tokens * len(self.weights)) for x in self._found)
        self._found, self._tokens = [0.0, 0.0], 0
        return {"predictor_kl": predicted, "predictor_kl_unmoved": unmoved}

    def tensors(self) -> dict[str, Tensor]:
        """Return the maps and their optimizer's state, for a checkpoint."""
        own = self.optimizer.state.get(self.weights, {})
        return {"weights": self.weights.detach(), **{f"adam.{name}": value for name, value in own.items()}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the maps and their optimizer's state from what `tensors` returned."""
        with torch.no_grad():
            self.weights.copy_(tensors["weights"])
        own = {name.removeprefix("adam."): value for name, value in tensors.items() if name != "weights"}
        if own:
            device = self.weights.device
            self.optimizer.state[self.weights] = {k: v if k == "step" else v.to(device) for k, v in own.items()}


def divergence(now: Float[Tensor, "n L E"], predicted: Float[Tensor, "n L E"]) -> Float[Tensor, ""]:
    """Return KL( softmax(now) || softmax(predicted) ), nats, summed over tokens and sites.

    >>> now, predicted = torch.tensor([[[1.0, 1.0]]]).log(), torch.tensor([[[3.0, 1.0]]]).log()
    >>> divergence(now, predicted)  # log(1/2) - (log(3/4) + log(1/4)) / 2
    tensor(0.1438)
    """
    p, q = now.log_softmax(-1), predicted.log_softmax(-1)
    return (p.exp() * (p - q)).sum()


class PredictedRoutes(EngineRoutes):
    """Scorer of a second pass of the old policy, under the predicted routes by which it sampled (PR2).

    It gives log-probabilities, and the routers' inputs, logits and predicted logits."""

    def __init__(
        self, policy: nn.Module, temperature: float, predictor: RoutePredictor, readers: Sequence[Scorer] = ()
    ):
        super().__init__(policy, temperature, readers)
        self.predictor = predictor

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        with record_router_logits(self.policy) as reading:
            said = super().say(part, seen, watched)
        inputs, logits = reading.inputs, reading.logits
        predicted = logits + torch.einsum("btlh,leh->btle", inputs, self.predictor.weights.detach())
        return said | {"router_inputs": inputs, "router_logits": logits, "router_predicted": predicted}
