"""Prompts -> responses with rewards. Each rank samples and verifies its share; then all ranks hold all responses."""

import json
import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rl.rollout import Rollout, score
from moe_rl.rollout.completions import unrouted_tokens
from moe_rl.rollout.continuing import converse
from moe_rl.rollout.engine import Engine
from moe_rl.rollout.task import user_code
from moe_rl.routing import RoutedExperts, RoutingError
from moe_rl.training.distributed import Ranks
from moe_rl.training.not_finite import NotFiniteError, prompt_of


def respond(
    engine: Engine,
    problems: list[Any],
    ranks: Ranks,
    generator: torch.Generator,
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    record_routes: bool = False,
    task: Any = None,
    tokenizer: Any = None,
    seconds: float | None = None,
) -> Rollout:
    """`group_size` responses of `engine` to each problem, without rewards; on every rank, padded as if by one process.

    Args:
        generator: one uniform number for each token of each response is drawn from it, in the order of rows (see
            `moe_rl.rollout.sample`), so that a response depends neither on the number of ranks nor on which samples it.
        record_routes: also the routes that the engine took.
        task, tokenizer, seconds: of a task with several turns (`reply`); `max_new_tokens` is then of all its turns.

    Raises:
        DistributedError: ranks whose problems differ.
        RoutingError: recorded routes with holes, see `check_routes`.
    """
    options: dict[str, Any] = {
        "group_size": group_size,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "generator": generator,
        "record_routes": record_routes,
    }
    if ranks.size == 1:
        rollout = engine.sample(problems, **options)
        if hasattr(task, "reply"):
            more = {"tokens": max_new_tokens, "longest": max_new_tokens, "temperature": temperature}
            go_on = partial(_turn, engine, {**more, "generator": generator, "record_routes": record_routes})
            rollout = converse(rollout, task, tokenizer, go_on, max_new_tokens, seconds)
    else:
        ranks.agree_on("the prompts", [(p.prompt, p.answer) for p in problems])
        mine = ranks.share(len(problems))
        torch.rand(mine.start * group_size * max_new_tokens, generator=generator, dtype=torch.float64)  # of lower ranks
        with ranks.lock_step(getattr(engine, "model", None)):
            own = engine.sample([problems[i] for i in mine], **options)
        rollout = _joined(ranks, own, problems)
    if record_routes:
        check_routes(rollout)
    return rollout


def _turn(engine: Any, options: dict[str, Any], rollout: Rollout, turn: int) -> Rollout:
    return engine.extend(rollout, **options)


def problems_of(task: Any, rng: random.Random, count: int, held_out: bool = False) -> list[Any]:
    """So many problems of the task. Raises TaskError for whatever its code raises."""
    with user_code(task, "problem"):
        return [task.problem(rng, held_out=held_out) for _ in range(count)]


def verify(task: Any, rollout: Rollout, ranks: Ranks, seconds: float | None = None) -> Rollout:
    """The rollout with its rewards, each rank verifying its share.

    Raises:
        TaskError: as `score`.
        NotFiniteError: a sampler that gave a token no probability, which is no sample of its distribution.
    """
    bad = ~torch.isfinite(rollout.logps).all(1)
    if bool(bad.any()):
        raise NotFiniteError(
            "sampling",
            f"logps of {int(bad.sum())} of {len(rollout)} responses are not finite, first of one to "
            f"{prompt_of(rollout, int(bad.int().argmax()))}. The weights of the model that sampled are of no more use",
            rollout,
            everywhere=True,
        )
    own = score(task, ranks.mine(rollout), seconds).rewards
    return replace(rollout, rewards=ranks.gather(own, len(rollout)))


def check_routes(rollout: Rollout) -> RoutedExperts:
    """The rollout's routes, after a check that exactly the tokens of `unrouted_tokens` lack them, at every site.

    Raises:
        RoutingError: no routes at all; holes where the engine must have routed; routes where nothing was routed.
    """
    routes = rollout.routes
    if routes is None:
        raise RoutingError("the rollout engine gave no routes, which replay R3 and the comparison of engines need")
    expected = unrouted_tokens(rollout.attention_mask.bool())[:, :, None].expand(routes.shape[:3]).to(routes.device)
    wrong = routes.live != expected
    if bool(wrong.any()):
        b, t, site = wrong.nonzero()[0].tolist()
        raise RoutingError(
            f"routes of the rollout engine: {int(wrong.sum())} of {wrong.numel()} (token, site) rows are not as they "
            f"should be; first: sequence {b}, token {t}, site {routes.sites[site]} "
            f"{'has no route' if bool(routes.live[b, t, site]) else 'has a route, and is padding or a last token'}. "
            "Prompt tokens need the routes of prefill (prefix caching may drop them), sampled ones those of decoding"
        )
    return routes


def _joined(ranks: Ranks, own: Rollout, problems: list[Any]) -> Rollout:
    """The rollouts of all ranks as one: prompts padded on the left and responses on the right to the longest."""
    first = int(own.completion_mask[0].int().argmax())
    widths = [first, own.input_ids.shape[1] - first, own.completions]
    everyone = [json.loads(text) for text in ranks.exchange(json.dumps(widths))]
    left, right = (max(of[i] for of in everyone) - widths[i] for i in (0, 1))
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
