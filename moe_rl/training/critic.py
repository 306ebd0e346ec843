"""PPO's value model (arXiv:1707.06347): for each token, a prediction of the reward that its state leads to.

There are two kinds. `separate` is the usual one: a backbone as large as the policy's, the cost that GRPO saves. `head`
is the smallest possible one: a linear map of the policy's own last hidden states, detached, so that the policy is
trained by the same gradient as in any other arm.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.measure.logprobs import causal_lm
from moe_rl.measure.metrics import variance
from moe_rl.measure.other_heads import backbone_of
from moe_rl.measure.weights import KEPT_FP32
from moe_rl.objectives import generalized_advantages, token_rewards, value_loss, whiten
from moe_rl.training.batch import Batch, Totals
from moe_rl.training.config import OptimConfig, ValueConfig
from moe_rl.training.optimizer import make_optimizer
from moe_rl.training.ranks import Ranks
from moe_rl.training.scorers import Scorer, Seen

ROUNDING = 1e-5
"""Relative rounding error of a return that is summed in fp32 over a response."""


class ScalarModel(nn.Module):
    """A model with one output per token: a copy of a language model's backbone and a linear head that begins at 0."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        lm = causal_lm(policy)
        self.trunk = copy.deepcopy(backbone_of(lm)).requires_grad_(True)
        self.head = scalar_head(lm)
        self._positions = "position_ids" in inspect.signature(type(self.trunk).forward).parameters

    def forward(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Return the head's value of the state after each token; values on padding are arbitrary."""
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
        if self._positions:
            inputs["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        hidden = self.trunk(**inputs, use_cache=False).last_hidden_state
        return apply_head(self.head, hidden).clone()  # not a view, about which FSDP2 would warn


def scalar_head(lm: Any) -> nn.Linear:
    """Return a linear head `[H] -> [1]` in fp32 (float64 for a float64 model), all zero: it gives 0 before training."""
    weight = lm.get_output_embeddings().weight
    head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    setattr(head, KEPT_FP32, True)  # stays fp32 even if the backbone is gathered in 16 bits
    return head


def apply_head(head: nn.Module, hidden: Float[Tensor, "B T H"]) -> Float[Tensor, "B T"]:
    """Return a scalar head's value of each hidden state, computed in the head's dtype."""
    rows = hidden.to(next(head.parameters()).dtype).flatten(0, 1)  # FSDP2 warns about outputs that are views
    return head(rows).view(hidden.shape[:2])


def optimizer_of(module: nn.Module, learning_rate: float, optim: OptimConfig) -> torch.optim.Optimizer:
    """Return an optimizer of the policy's kind for all parameters of a module, with its own learning rate."""
    group = {"params": list(module.parameters()), "lr": learning_rate}
    return make_optimizer([group], optim.betas, optim.weight_decay, optim.master_weights)


class Critic(Scorer):
    """The value model with its own optimizer and learning rate."""

    def __init__(self, policy: nn.Module, config: ValueConfig, optim: OptimConfig, ranks: Ranks):
        self.config, self.optim, self.ranks = config, optim, ranks
        module = scalar_head(causal_lm(policy)) if config.model == "head" else ScalarModel(policy)
        self._loss = 0.0  # sum over the micro-batches since the last step
        self.model, self.optimizer = ranks.prepare(module, optimizer_of(module, config.learning_rate, optim))

    @contextmanager
    def watch(self, policy: nn.Module) -> Iterator[list[Tensor]]:
        """Context manager: collect the policy's last hidden states, call by call, if the value model is a head."""
        states: list[Tensor] = []
        if self.config.model != "head":
            yield states
            return
        output = causal_lm(policy).get_output_embeddings()
        handle = output.register_forward_pre_hook(lambda _, args: states.append(args[0].detach()))
        try:
            yield states
        finally:
            handle.remove()

    def say(self, part: Any, seen: Seen, watched: list[Tensor]) -> dict[str, Tensor]:
        """Return the value predictions (`values`) for a part of the rollout."""
        return {"values": self.values(part, watched)}

    def values(self, part: Any, states: list[Tensor]) -> Float[Tensor, "B T"]:
        """Return V of the state in which token t is chosen, for each completion token; 0 elsewhere. With gradient.

        Args:
            part: a Batch or Rollout.
            states: hidden states that `watch` collected in the policy's call on this part.
        """
        if self.config.model == "head":
            if not states or states[-1].shape[:2] != part.input_ids.shape:
                raise RuntimeError(
                    "value.model: the policy's output head did not see one hidden state per token, so no value can be "
                    "read off it; value.model='separate' does not need them"
                )
            after = apply_head(self.model, states[-1])
        else:
            after = self.model(part.input_ids, part.attention_mask)
        return torch.where(part.completion_mask, F.pad(after[:, :-1], (1, 0)), 0.0)

    def advantages(
        self, rewards: Float[Tensor, " B"], values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], dict[str, Any]]:
        """Return generalised advantages, returns, and metrics to log. The reward comes with a response's last token.

        explained_variance = 1 - Var(return - V) / Var(return), over tokens; 0 for a value model that knows nothing, NaN
        if returns differ by no more than their rounding error.
        """
        config = self.config
        advantages, returns = generalized_advantages(
            token_rewards(rewards, mask), values, mask, gamma=config.gamma, lam=config.lam
        )
        seen, errors = returns[mask], (returns - values)[mask]
        spread, rounding = variance(seen), (ROUNDING * seen.abs().mean()).square()
        explained = 1 - variance(errors) / spread.masked_fill(spread <= rounding, torch.nan)
        metrics = {"value": values[mask].mean(), "explained_variance": explained}
        return whiten(advantages, mask) if config.whiten else advantages, returns, metrics

    def backward(self, part: Batch, states: list[Tensor], totals: Totals) -> None:
        """Add the gradient of the value loss on a micro-batch, divided by the response tokens of the minibatch."""
        assert part.values is not None and part.returns is not None
        self.model.train()
        loss = value_loss(
            self.values(part, states),
            part.values,
            part.returns,
            part.completion_mask,
            self.config.clip,
            total_tokens=totals.tokens,
        )
        self.ranks.backward(loss * self.ranks.size)  # backward averages over ranks; each has a share of a sum
        self._loss += float(loss.detach())

    def clip(self) -> Tensor:
        """Clip the gradient on the minibatch as the policy's; return its norm before that."""
        self._norm = self.ranks.clip_grad_norm_(self.model.parameters(), self.optim.max_grad_norm)
        return self._norm

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the value model's parameters, by name."""
        return self.model.named_parameters("value")

    def step(self, warmup: float, hold: bool = False) -> dict[str, Any]:
        """Make one optimizer step at `warmup` times the learning rate, with `hold` none, after `clip`; return loss and
        gradient norm of the minibatch."""
        for group in self.optimizer.param_groups:
            group["lr"] = warmup * self.config.learning_rate
        if not hold:
            self.optimizer.step()
        self.optimizer.zero_grad()
        loss, self._loss = self.ranks.sums(self._loss)[0], 0.0
        return {"value_loss": loss, "value_grad_norm": self._norm}
