"""A rollout in shares: each rank samples and verifies its prompts, then all ranks hold all responses."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rl.rollout import Rollout, score
from moe_rl.routing import RoutedExperts
from moe_rl.training.distributed import Ranks, digest

Sampler = Callable[[list[Any], torch.Generator], Rollout]
"""(problems, generator) -> their responses, groups contiguous."""


def spread_sampling(
    ranks: Ranks,
    sampler: Sampler,
    model: nn.Module,
    problems: list[Any],
    responses: int,
    budget: int,
    generator: torch.Generator,
) -> Rollout:
    """What `sampler(problems, generator)` gives, sampled in shares; on every rank, padded as if by one process.

    Args:
        model: that samples; ranks stay in step where it is sharded.
        responses, budget: per problem, and tokens per response. One uniform number for each token of each response is
            drawn from `generator`, in the order of rows, as `moe_rl.rollout.sample` says: so that a response depends
            neither on the number of ranks nor on which of them samples it.

    Raises:
        DistributedError: ranks whose problems differ.
    """
    if ranks.size == 1:
        return sampler(problems, generator)
    ranks.agree("the prompts", digest([(p.prompt, p.answer) for p in problems]))
    mine = ranks.share(len(problems))
    torch.rand(mine.start * responses * budget, generator=generator, dtype=torch.float64)  # what lower ranks draw
    with ranks.lock_step(model):
        own = sampler([problems[i] for i in mine], generator)
    return _joined(ranks, own, problems)


def spread_scores(ranks: Ranks, task: Any, rollout: Rollout) -> Rollout:
    """`score(task, rollout)`, each rank verifying its share."""
    own = score(task, ranks.mine(rollout)).rewards
    return replace(rollout, rewards=ranks.gather(own, len(rollout)))


def _joined(ranks: Ranks, own: Rollout, problems: list[Any]) -> Rollout:
    """The rollouts of all ranks as one: prompts padded on the left and responses on the right to the longest."""
    first = int(own.completion_mask[0].int().argmax())
    facts = [first, own.input_ids.shape[1] - first, own.completions]
    everyone = [json.loads(text) for text in ranks.exchange(json.dumps(facts))]
    left, right = (max(fact[i] for fact in everyone) - facts[i] for i in (0, 1))
    G, count = own.group_size, len(problems) * own.group_size

    def pad(x: Tensor, value: float = 0) -> Tensor:
        return F.pad(x, (*[0] * (2 * (x.ndim - 2)), left, right), value=value)

    def joined(x: Tensor) -> Tensor:
        # Ranks have shares of problems; shares of rows are the same only if they divide evenly.
        per_problem = x.reshape(-1, G, *x.shape[1:])
        return ranks.gather(per_problem, len(problems)).reshape(count, *x.shape[1:])

    # Padding holds what the sampler itself pads with: column 0 of a shorter prompt, or any other token, is never read.
    input_ids = joined(pad(own.input_ids))
    routes = None
    if own.routes is not None:
        ids = joined(pad(own.routes.ids.to(torch.int16), -1))
        routes = RoutedExperts(ids, own.routes.sites, own.routes.num_experts, tokens=input_ids, meta=own.routes.meta)
    return Rollout(
        input_ids=input_ids,
        attention_mask=joined(pad(own.attention_mask)),
        completion_mask=joined(pad(own.completion_mask)),
        logps=joined(pad(own.logps)),
        rewards=joined(own.rewards),
        finished=joined(own.finished),
        group_size=G,
        problems=[problem for problem in problems for _ in range(G)],
        completions=[text for _, _, texts in everyone for text in texts],
        routes=routes,
    )
