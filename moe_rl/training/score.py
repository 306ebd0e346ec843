"""Responses -> a batch: their rewards, and what the old policy says of them in one pass without gradient.

Three policies meet here: mu, the engine that sampled; pi_old, the training engine's old policy; pi, the current one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from moe_rl.measure.logprobs import token_logps
from moe_rl.measure.router_shift import chosen_scores
from moe_rl.measure.shared_prompts import share_prompts
from moe_rl.rollout import Rollout, score
from moe_rl.rollout.task import shortened
from moe_rl.routing import RoutedExperts, record_margins, record_routes, replay_routes
from moe_rl.training.batch import Batch, Place, joined, micro_batches
from moe_rl.training.critic import Critic
from moe_rl.training.incidents import NotFiniteError
from moe_rl.training.ranks import Ranks
from moe_rl.training.reward_model import RewardModel

SCORING_BATCH = 256
"""Responses per pass, unless `optim.micro_batch` says what fits."""


@dataclass(frozen=True)
class Scores:
    """What the models of a run say of a rollout, on every rank; log-probabilities in nats, 0 outside the response.

    Attributes:
        logps: the old policy's, natural routing.
        routes: the experts that it chose for every token, prompt included.
        replayed_logps: the old policy's under the rollout engine's routes; None unless those were recorded.
        route_scores: log router probability of the experts in `routes`; None unless asked for.
        ref_logps: the reference policy's, natural routing; None without one.
        values: of the value model, units of reward; None without one.
        learned_rewards: of the reward model; None without one.
        margins: by which the old policy's routers decided, in units of what they rank; None unless asked for.
    """

    logps: Float[Tensor, "B T"]
    routes: RoutedExperts
    replayed_logps: Float[Tensor, "B T"] | None = None
    route_scores: Float[Tensor, "B T L K"] | None = None
    ref_logps: Float[Tensor, "B T"] | None = None
    values: Float[Tensor, "B T"] | None = None
    learned_rewards: Float[Tensor, " B"] | None = None
    margins: Float[Tensor, "B T L"] | None = None


@torch.no_grad()
def score_rollout(
    rollout: Rollout,
    policy: nn.Module,
    ranks: Ranks,
    *,
    temperature: float,
    batch_size: int | None = None,
    decoded: bool = False,
    shared: bool = False,
    router_scores: bool = False,
    margins: bool = False,
    reference: nn.Module | None = None,
    critic: Critic | None = None,
    reward_model: RewardModel | None = None,
) -> Scores:
    """One pass of the current policy gives old log-probabilities and routes; the run's other models speak beside it.

    Args:
        batch_size: responses per pass, those of like length together, without the padding that they share (routes of
            which are -1 then); None: all, or 256 if there are more.
        decoded: take the policy's part from the decoding that wrote the responses, whose routes the rollout then has,
            instead of a pass. A row's last token has no route then (-1).
        shared: responses share prompts in the passes of the policy and the reference (`optim.share_prompts`). A row's
            last token has no route then, either.
        router_scores: keep the router's scores of the chosen experts (RSPO).
        margins: keep the margins of their choices (replay of a part of the routes).
    """
    policy.eval()
    mine = ranks.mine(rollout)
    size = SCORING_BATCH if batch_size is None and len(mine) > SCORING_BATCH else batch_size
    places = list(micro_batches(mine.attention_mask, size, in_order=shared))
    routes, found = [], []
    for rows, columns in places:
        part = mine.rows(rows).columns(columns)
        seen: dict[str, Tensor] = {}
        layout = share_prompts(*part.tokens) if shared else None
        if decoded:
            assert part.routes is not None
            routes.append(part.routes)
            seen["logps"] = part.logps
        else:
            watched: AbstractContextManager[list[Tensor]] = critic.watch(policy) if critic else nullcontext([])
            near: AbstractContextManager[Any] = record_margins(policy) if margins else nullcontext()
            with record_routes(policy) as recording, near as choices, watched as states:
                old = token_logps(
                    policy, *part.tokens, temperature=temperature, router_logits=router_scores, shared=layout
                )
            routes.append(layout.unpack(recording.routes) if layout else recording.routes)
            seen["logps"] = old.logps
            if margins:
                seen["margins"] = choices.values.to(old.logps.device)
            if part.routes is not None:  # of the rollout engine
                other = share_prompts(*part.tokens, routes=part.routes) if shared else None
                with replay_routes(policy, other.pack(part.routes) if other else part.routes, once=True):
                    under = token_logps(policy, *part.tokens, temperature=temperature, shared=other)
                seen["replayed_logps"] = under.logps
            if old.router_logits is not None:
                seen["route_scores"] = chosen_scores(old.router_logits, recording.routes)
        if reference is not None:
            seen["ref_logps"] = token_logps(reference, *part.tokens, temperature=temperature, shared=layout).logps
        if critic:
            seen["values"] = critic.values(part, states)
        if reward_model:
            seen["learned_rewards"] = reward_model.scores(part.input_ids, part.attention_mask)
        found.append(seen)
    shape = mine.input_ids.shape
    own = {name: joined([seen[name] for seen in found], places, shape) for name in found[0]}
    for name, values in own.items():
        if name not in ("margins", "route_scores"):
            why = "that model are no longer usable, or a response has a token that it gives no probability"
            _refuse_not_finite("scoring", name, values, mine, why)
    tensors = {name: ranks.gather(values, len(rollout)) for name, values in own.items()}
    whole = routes[0] if size is None else _joined_routes(routes, places, mine.input_ids)
    return Scores(routes=ranks.gather_routes(whole, len(rollout)), **tensors)


def _joined_routes(
    parts: Sequence[RoutedExperts], places: Sequence[Place], input_ids: Int[Tensor, "B T"]
) -> RoutedExperts:
    """The routes of micro-batches as those of the batch; -1 where they had no column."""
    first = parts[0]
    ids = joined([(part.ids + 1).to(torch.int16) for part in parts], places, input_ids.shape) - 1
    return RoutedExperts(ids, first.sites, first.num_experts, tokens=input_ids, meta=first.meta)


def verify(task: Any, rollout: Rollout, ranks: Ranks, seconds: float | None = None) -> Rollout:
    """The rollout with its rewards, each rank verifying its share.

    Raises:
        TaskError: as `score`.
        NotFiniteError: a sampler that gave a token no probability, which is no sample of its distribution.
    """
    why = "the model that sampled are of no more use"
    _refuse_not_finite("sampling", "logps", rollout.logps, rollout, why, everywhere=True)
    own = score(task, ranks.mine(rollout), seconds).rewards
    return replace(rollout, rewards=ranks.gather(own, len(rollout)))


def _refuse_not_finite(
    where: str, name: str, values: Shaped[Tensor, "B ..."], rollout: Rollout, why: str, everywhere: bool = False
) -> None:
    bad = ~torch.isfinite(values.reshape(len(values), -1)).all(1)
    if bool(bad.any()):
        raise NotFiniteError(
            where,
            f"{name} of {int(bad.sum())} of {len(rollout)} responses are not finite, first of one to "
            f"{shortened(rollout.problems[int(bad.int().argmax())].prompt)}. The weights of {why}",
            rollout,
            everywhere=everywhere,
        )


def make_batch(
    rollout: Rollout,
    scores: Scores,
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    *,
    replay: str,
    step: int,
    returns: Float[Tensor, "B T"] | None = None,
) -> Batch:
    """What one RL step trains on. Under R3 the old log-probabilities are those under the rollout engine's routes
    (arXiv 2510.11370), otherwise those of natural routing."""
    old_logps, natural = scores.logps, None
    if replay == "R3":
        assert scores.replayed_logps is not None
        old_logps, natural = scores.replayed_logps, scores.logps
    return Batch(
        *rollout.tokens,
        rewards=rollout.rewards,
        advantages=advantages,
        old_logps=old_logps,
        routes=scores.routes,
        rollout_logps=rollout.logps,
        ref_logps=scores.ref_logps,
        step=step,
        values=scores.values,
        returns=returns,
        route_scores=scores.route_scores,
        natural_logps=natural,
        rollout_routes=rollout.routes,
        versions=rollout.versions,
    )
