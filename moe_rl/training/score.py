"""Scoring: turns responses into a batch, with rewards and the old policy's log-probabilities and routes.

The log-probabilities and routes come from one pass without gradient.
Three policies are distinguished: mu, the engine that sampled; pi_old, the training engine's old policy; pi, the current
one.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from moe_rl.measure.logprobs import TokenLogps, token_logps
from moe_rl.measure.shared_prompts import share_prompts
from moe_rl.rollout import Rollout, score
from moe_rl.routing import RoutedExperts, record_routes
from moe_rl.training.batch import Batch, joined, micro_batches
from moe_rl.training.config import OF_SAMPLER
from moe_rl.training.incidents import NotFiniteError
from moe_rl.training.ranks import Ranks
from moe_rl.training.scorers import Scorer, Seen

SCORING_BATCH = 256
"""Responses per pass, unless `optim.micro_batch` sets their number."""


@dataclass(frozen=True)
class Scores:
    """The outputs of a run's models for a rollout, on every rank; log-probabilities in nats, 0 outside the response.

    Attributes:
        logps: log-probabilities of the old policy under live routing.
        replayed_logps: those of the old policy under the rollout engine's routes; None unless these were recorded.
        learned_rewards: rewards from the reward model; None without one.
        margins: margins by which the old policy's routers chose, in the unit of the scores that they rank; None unless
            asked for.
        all others: see `Batch`.
    """

    logps: Float[Tensor, "B T"]
    routes: RoutedExperts
    replayed_logps: Float[Tensor, "B T"] | None = None
    route_scores: Float[Tensor, "B T L K"] | None = None
    ref_logps: Float[Tensor, "B T"] | None = None
    values: Float[Tensor, "B T"] | None = None
    learned_rewards: Float[Tensor, " B"] | None = None
    margins: Float[Tensor, "B T L"] | None = None
    router_inputs: Float[Tensor, "B T L H"] | None = None
    router_logits: Float[Tensor, "B T L E"] | None = None
    router_predicted: Float[Tensor, "B T L E"] | None = None


@torch.no_grad()
def score_rollout(
    rollout: Rollout | Batch,
    policy: nn.Module,
    ranks: Ranks,
    *,
    temperature: float,
    batch_size: int | None = None,
    scorers: Sequence[Scorer] = (),
    decoded: bool = False,
    shared: bool = False,
) -> Scores:
    """Return old log-probabilities and routes, from one pass of the current policy, and the outputs of the scorers.

    Args:
        batch_size: responses per pass; those of like length are together, without the padding that they share (whose
            routes are then -1). None: all responses, or 256 if there are more.
        scorers: what else is computed, and by which models.
        decoded: make no pass; take log-probabilities and routes that were recorded in decoding.
        shared: responses share prompts in this pass, and in those of a reference (`optim.share_prompts`). With
            `decoded` or `shared` a row's last token has no route (-1).
    """
    policy.eval()
    mine = ranks.mine(rollout)
    size = SCORING_BATCH if batch_size is None and len(mine) > SCORING_BATCH else batch_size
    places = list(micro_batches(mine.attention_mask, size, in_order=shared))
    router_logits = any(scorer.router_logits for scorer in scorers)
    routes, found = [], []
    for rows, columns in places:
        part = mine.rows(rows).columns(columns)
        with ExitStack() as stack:
            watched = [stack.enter_context(scorer.watch(policy)) for scorer in scorers]
            seen = one_pass(policy, part, temperature, router_logits, decoded, shared)
        said = {"logps": seen.out.logps}
        for scorer, own in zip(scorers, watched, strict=True):
            said |= scorer.say(part, seen, own)
        routes.append(seen.routes)
        found.append(said)
    own = {name: joined([said[name] for said in found], places, mine.input_ids.shape) for name in found[0]}
    for name, values in own.items():
        if name not in ("margins", "route_scores", "router_inputs", "router_logits", "router_predicted"):
            why = "that model are no longer usable, or a response has a token that it gives no probability"
            _refuse_not_finite("scoring", name, values, mine, why)
    tensors = {name: ranks.gather(values, len(rollout)) for name, values in own.items()}
    whole = routes[0]
    if size is not None:  # join those of micro-batches; -1 in the columns that were left out
        ids = joined([(part.ids + 1).to(torch.int16) for part in routes], places, mine.input_ids.shape) - 1
        whole = whole.with_ids(ids, mine.input_ids)
    return Scores(routes=ranks.gather_routes(whole, len(rollout)), **tensors)


def one_pass(
    policy: nn.Module, part: Rollout | Batch, temperature: float, router_logits: bool, decoded: bool, shared: bool
) -> Seen:
    """Return the policy's log-probabilities of a part of a rollout, and the experts chosen in the same pass."""
    layout = share_prompts(*part.tokens) if shared else None
    if decoded:
        assert isinstance(part, Rollout) and part.routes is not None
        return Seen(TokenLogps(part.logps), part.routes, layout)
    with record_routes(policy) as recording:
        out = token_logps(policy, *part.tokens, temperature=temperature, router_logits=router_logits, shared=layout)
    return Seen(out, layout.unpack(recording.routes) if layout else recording.routes, layout)


def verify(task: Any, rollout: Rollout, ranks: Ranks, seconds: float | None = None) -> Rollout:
    """Return the rollout with its rewards; each rank verifies its share.

    Raises:
        TaskError: as `score`.
        NotFiniteError: a log-probability of the sampler is not finite, so that the token is no sample of its
            distribution.
    """
    why = "the model that sampled are of no more use"
    _refuse_not_finite("sampling", "logps", rollout.logps, rollout, why, everywhere=True)
    own = score(task, ranks.mine(rollout), seconds).rewards
    return replace(rollout, rewards=ranks.gather(own, len(rollout)))


def _refuse_not_finite(
    where: str, name: str, values: Shaped[Tensor, "B ..."], rollout: Rollout | Batch, why: str, everywhere: bool = False
) -> None:
    """Raise NotFiniteError if a response has values that are not finite."""
    bad = ~torch.isfinite(values.reshape(len(values), -1)).all(1)
    if bool(bad.any()):
        raise NotFiniteError(
            where,
            f"{name} of {int(bad.sum())} of {len(rollout)} responses are not finite, first of "
            f"{rollout.called(int(bad.int().argmax()))}. The weights of {why}",
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
    """Return the batch of a scored rollout.

    Under R3 and PR2 the old log-probabilities are those under the rollout's routes (arXiv 2510.11370), otherwise those
    under live routing."""
    old_logps = scores.replayed_logps if replay in OF_SAMPLER else scores.logps
    assert old_logps is not None
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
        natural_logps=scores.logps if replay in OF_SAMPLER else None,
        rollout_routes=rollout.routes,
        versions=rollout.versions,
        router_inputs=scores.router_inputs,
        router_logits=scores.router_logits,
        router_predicted=scores.router_predicted,
    )
