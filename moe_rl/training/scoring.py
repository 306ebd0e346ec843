"""From responses to a batch: what the old policy says of them in one no-grad pass, and the advantages that follow."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rl.rollout import Rollout
from moe_rl.routing import record_routes
from moe_rl.training.advantages import make_advantages
from moe_rl.training.batch import Batch
from moe_rl.training.engine_gap import log_engines
from moe_rl.training.preference import best_and_worst, preferences
from moe_rl.training.router_shift import chosen_scores
from moe_rl.training.update_routing import forced_routes

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer

SCORING_BATCH = 256  # responses per no-grad pass, unless optim.micro_batch says what fits


@torch.no_grad()
def score_rollout(trainer: "Trainer", rollout: Rollout) -> tuple[Batch, dict[str, Any]]:
    """The batch of a rollout that has its rewards, and what is to be logged of how its advantages came about.

    Old log-probabilities and routes come from one pass of the current policy; the method's other models (reference,
    value, reward) speak in the same pass. Where the rollout engine's routes were recorded, a second pass forces them:
    under R3 these are the old log-probabilities (arXiv:2510.11370), else they are measured only. A method that learns
    from pairs gets those rows only.
    """
    method, rewards = trainer.method, rollout.rewards
    trainer.model.eval()
    routes, found = [], []
    ranks = trainer.accelerator
    for rows in torch.tensor(ranks.share(len(rollout))).split(trainer.config.optim.micro_batch or SCORING_BATCH):
        part = rollout.rows(rows)
        with record_routes(trainer.model) as recording, trainer.watching() as states:
            old = trainer.logps(trainer.model, part, router_logits=trainer.shifts)
        routes.append(recording.routes)
        seen: dict[str, Tensor] = {"old_logps": old.logps}
        if part.routes is not None:  # of the rollout engine
            with forced_routes(trainer.model, part.routes):
                seen["replayed_logps"] = trainer.logps(trainer.model, part).logps
        if old.router_logits is not None:
            seen["route_scores"] = chosen_scores(old.router_logits, recording.routes)
        if trainer.reference is not None:
            seen["ref_logps"] = trainer.logps(trainer.reference, part).logps
        if trainer.critic:
            seen["values"] = trainer.critic.values(part, states)
        if trainer.reward_model:
            seen["worth"] = trainer.reward_model.scores(part.input_ids, part.attention_mask)
        found.append(seen)
    tensors = {name: ranks.gather(torch.cat([seen[name] for seen in found]), len(rollout)) for name in found[0]}
    worth = tensors.pop("worth", rewards)  # what the method takes for the reward
    replayed, natural = tensors.pop("replayed_logps", None), None
    if trainer.config.method.replay == "R3":
        assert replayed is not None
        tensors["old_logps"], natural = replayed, tensors["old_logps"]

    facts: dict[str, Any] = {}
    if trainer.reward_model:
        agreement = trainer.reward_model.agreement(rewards, worth, rollout.group_size)
        facts = {"learned_reward": worth.mean(), "learned_reward_agreement": agreement}
        trainer.reward_model.observe(rollout)
    if trainer.critic:
        advantages, tensors["returns"], more = trainer.critic.advantages(
            worth, tensors["values"], rollout.completion_mask
        )
    elif method.pairs:
        advantages, more = torch.zeros_like(worth), {}
    else:
        scale = method.objective.advantage_scale
        advantages, more = make_advantages(method.advantage, scale, worth, rollout, trainer.task, trainer.tokenizer)
    batch = Batch(
        input_ids=rollout.input_ids,
        attention_mask=rollout.attention_mask,
        completion_mask=rollout.completion_mask,
        rewards=rewards,
        advantages=advantages,
        old_logps=tensors["old_logps"],
        routes=ranks.gather_routes(type(routes[0]).cat(routes), len(rollout)),
        rollout_logps=rollout.logps,
        ref_logps=tensors.get("ref_logps"),
        step=trainer.step,
        values=tensors.get("values"),
        returns=tensors.get("returns"),
        route_scores=tensors.get("route_scores"),
        natural_logps=natural,
        rollout_routes=rollout.routes,
    )
    log_engines(trainer, batch, replayed)
    if method.pairs:
        pairs = best_and_worst(worth, rollout.group_size)
        batch = replace(batch.rows(pairs), advantages=preferences(worth[pairs]))
        more = {"pairs": (batch.advantages > 0).sum()}
    return batch, {**facts, **more}
