"""A learned reward model, retrained as the policy moves: iterative GRPO (arXiv:2402.03300, algorithm 1).

The model learns from the verifier's verdicts on pairs of responses to one prompt, and replaces the verifier in the
computation of advantages; the logged `reward` stays the verifier's, so that a policy which fools the model can be seen.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.objectives import historical_sample, reward_model_loss
from moe_rl.rollout import Rollout
from moe_rl.training.config import OptimConfig, RewardConfig
from moe_rl.training.critic import ScalarModel, optimizer_of
from moe_rl.training.ranks import Ranks
from moe_rl.training.scorers import Scorer, Seen


@dataclass(frozen=True)
class Comparisons:
    """Pairs of responses to one prompt, the better one first: tokens and their mask."""

    input_ids: Int[Tensor, "N 2 T"]
    attention_mask: Bool[Tensor, "N 2 T"]

    def rows(self, index: Int[Tensor, " M"]) -> "Comparisons":
        """Return the pairs `index`, in that order."""
        return Comparisons(self.input_ids[index], self.attention_mask[index])

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def __add__(self, other: "Comparisons") -> "Comparisons":
        """Return the pairs of both, the shorter ones padded on the right."""
        width = max(self.input_ids.shape[2], other.input_ids.shape[2])

        def joined(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([F.pad(x, (0, width - x.shape[2])) for x in (a, b)])

        return Comparisons(joined(self.input_ids, other.input_ids), joined(self.attention_mask, other.attention_mask))

    @staticmethod
    def none() -> "Comparisons":
        """Return comparisons without any pair."""
        empty = torch.zeros(0, 2, 1)
        return Comparisons(empty.long(), empty.bool())


def ranked_pairs(rewards: Float[Tensor, " B"], group_size: int) -> Int[Tensor, "N 2"]:
    """Return pairs of rows (better, worse) of each group: best and worst, second best and second worst, ...

    Only pairs whose rewards differ are returned; at most half of `group_size` pairs from a group.

    >>> ranked_pairs(torch.tensor([0.0, 1.0, 1.0, 0.5, 2.0, 2.0, 2.0, 2.0]), group_size=4).tolist()
    [[1, 0], [2, 3]]
    """
    groups = rewards.view(-1, group_size)
    order = groups.sort(dim=1, descending=True, stable=True).indices
    half = group_size // 2
    better, worse = order[:, :half], order.flip(1)[:, :half]
    differ = groups.gather(1, better) > groups.gather(1, worse)
    start = torch.arange(len(groups), device=rewards.device)[:, None] * group_size
    return torch.stack([better + start, worse + start], -1)[differ]


class RewardModel(Scorer):
    """A model of one scalar at a response's last token, with its optimizer, fresh comparisons and older ones."""

    def __init__(self, policy: nn.Module, config: RewardConfig, optim: OptimConfig, ranks: Ranks):
        self.config, self.optim, self.ranks = config, optim, ranks
        module = ScalarModel(policy)
        self.model, self.optimizer = ranks.prepare(module, optimizer_of(module, config.learning_rate, optim))
        self.fresh, self.history = Comparisons.none(), Comparisons.none()

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        """Return the learned rewards (`learned_rewards`) of a part of the rollout."""
        return {"learned_rewards": self.scores(part.input_ids, part.attention_mask)}

    def scores(self, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
        """Return one number per response, whose scale is arbitrary: only differences mean something. With gradient."""
        last = attention_mask.shape[1] - 1 - attention_mask.flip(1).int().argmax(1)
        return self.model(input_ids, attention_mask).gather(1, last[:, None]).squeeze(1)

    def observe(self, rollout: Rollout) -> None:
        """Add pairs of the responses, ranked by the verifier's rewards, to the fresh comparisons."""
        pairs = ranked_pairs(rollout.rewards, rollout.group_size)
        self.fresh += Comparisons(rollout.input_ids[pairs].cpu(), rollout.attention_mask[pairs].cpu())

    def agreement(self, rewards: Float[Tensor, " B"], scores: Float[Tensor, " B"], group_size: int) -> float | None:
        """Return the share of the verifier's pairs that the model puts in the same order; None without pairs."""
        pairs = ranked_pairs(rewards, group_size)
        return float((scores[pairs[:, 0]] > scores[pairs[:, 1]]).float().mean()) if len(pairs) else None

    def retrain(self, generator: torch.Generator) -> dict[str, float | int | None]:
        """Train on the fresh comparisons and some of the history, which the fresh ones then join.

        The share of old comparisons in the mix is `reward.history_fraction`, or less if the history is too short.

        Returns:
            `loss`: the mean over the pairs of the last epoch, nats; `new`, `old`: numbers of comparisons; `skipped`:
            number of minibatches whose gradient was not finite, on which the model was not trained.
        """
        old = self.history.rows(
            historical_sample(len(self.fresh), len(self.history), self.config.history_fraction, generator=generator)
        )
        mixed, losses, self._skipped = self.fresh + old, [], 0
        new = len(self.fresh)
        self.history = self.history + self.fresh
        if len(self.history) > self.config.history_size:
            kept = torch.randperm(len(self.history), generator=generator)[: self.config.history_size].sort().values
            self.history = self.history.rows(kept)
        self.fresh = Comparisons.none()
        self.model.train()
        for _ in range(self.config.epochs if len(mixed) else 0):
            losses = [
                self._update(mixed.rows(rows)) * len(rows)
                for rows in torch.randperm(len(mixed), generator=generator).split(self.config.batch_size)
            ]
        self.model.eval()
        loss = sum(losses) / len(mixed) if losses else None
        return {"loss": loss, "new": new, "old": len(old), "skipped": self._skipped}

    def _update(self, pairs: Comparisons) -> float:
        """Make one optimizer step on these pairs, unless the gradient is not finite; return the loss."""
        ids, mask = (x.flatten(0, 1).to(self.ranks.device) for x in (pairs.input_ids, pairs.attention_mask))
        scores = self.scores(ids, mask)
        loss = reward_model_loss(scores[0::2], scores[1::2])
        self.ranks.backward(loss)
        norm = self.ranks.clip_grad_norm_(self.model.parameters(), self.optim.max_grad_norm)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        else:
            self._skipped += 1
        self.optimizer.zero_grad()
        return float(loss.detach())

    def tensors(self) -> dict[str, Tensor]:
        """Return the comparisons, for a checkpoint."""
        parts = {"fresh": self.fresh, "history": self.history}
        return {f"{name}/{field}": tensor for name, part in parts.items() for field, tensor in vars(part).items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the comparisons from what `tensors` returned."""
        self.fresh, self.history = (
            Comparisons(tensors[f"{name}/input_ids"], tensors[f"{name}/attention_mask"])
            for name in ("fresh", "history")
        )
