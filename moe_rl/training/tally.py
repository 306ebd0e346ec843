"""What one update is said to have done: its micro-batches, of all ranks, as one row of the metrics."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rl.objectives import LossOutput
from moe_rl.training.batch import Batch
from moe_rl.training.facts import ratio_facts
from moe_rl.training.logprobs import TokenLogps
from moe_rl.training.update_routing import RoutingCount

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer

COUNTS = ("replayed_rows", "routed_rows", "slots_changed", "slots")


class Tally:
    """Adds up the micro-batches of one minibatch; `row` reduces over ranks, so every rank has to ask for it."""

    def __init__(self, trainer: "Trainer", batch: Batch):
        self.trainer, self.batch = trainer, batch
        self.losses: list[LossOutput] = []
        self.entropies: list[Tensor] = []
        self.gammas: list[Tensor] = []
        self.loss = self.aux_loss = self.value_loss = 0.0
        self.counts = dict.fromkeys(COUNTS, 0)

    def add(self, loss: LossOutput, out: TokenLogps, gamma: Tensor | None, routing: RoutingCount, share: float) -> None:
        """share: of the minibatch's sequences, that this micro-batch has."""
        self.losses.append(loss)
        self.loss += float(loss.loss.detach())
        if out.aux_loss is not None:
            self.aux_loss += share * float(out.aux_loss.detach())
        if out.entropy is not None:
            self.entropies.append(out.entropy)
        if gamma is not None:
            self.gammas.append(gamma)
        for name in COUNTS:
            self.counts[name] += getattr(routing, name)

    def row(self) -> dict[str, Any]:
        """Loss, ratios, clipped tokens, entropy, routing of the whole minibatch; names as in the catalogue."""
        trainer, mask = self.trainer, self.batch.completion_mask
        sums = trainer.accelerator.sums(self.loss, self.aux_loss, self.value_loss, *self.counts.values())
        loss, aux_loss, value_loss, *counts = sums
        facts: dict[str, Any] = {
            "loss": loss,
            **ratio_facts(
                log_ratio=self._whole([x.log_ratio for x in self.losses]),
                sequence_log_ratio=self._whole([x.sequence_log_ratio for x in self.losses]),
                clipped=self._whole([x.clipped for x in self.losses]),
                mask=mask,
            ),
            "entropy": self._whole(self.entropies)[mask].mean(),
            "aux_loss": aux_loss if trainer.config.optim.aux_loss_coef else None,
            "aux_loss_coef": trainer.config.optim.aux_loss_coef,
            **dict(zip(COUNTS, map(int, counts), strict=True)),
        }
        if trainer.critic:
            facts["value_loss"] = value_loss
        if self.gammas:
            weights = self._whole(self.gammas)[mask]
            floored = weights < trainer.method.objective.route_floor
            facts |= {"route_weight": weights.mean(), "route_weight_floored": floored.float().mean()}
        return facts

    def _whole(self, parts: list[Tensor]) -> Tensor:
        return self.trainer.accelerator.gather(torch.cat(parts).detach(), len(self.batch))
