"""Policy updates: forward, backward and optimizer step on one minibatch under the arm's routing, and their metrics."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from moe_rl.measure.logprobs import TokenLogps, token_logps
from moe_rl.measure.metrics import load_violation, masked_mismatch_metrics, ratio_range_metrics, update_ratio_metrics
from moe_rl.measure.router_shift import chosen_scores, shift_weight
from moe_rl.measure.shared_prompts import SharedPrompts, share_prompts
from moe_rl.objectives import LossOutput, TokenValues, loss_metrics, policy_loss
from moe_rl.routing import RoutedExperts, change_counts, expert_load, noisy_routes, record_routes, replay_routes
from moe_rl.training.batch import Batch, Place, Totals, joined, micro_batches, totals_of
from moe_rl.training.config import MethodConfig, OptimConfig
from moe_rl.training.dpo import pair_loss
from moe_rl.training.levers import ExpertBias, only_rows
from moe_rl.training.method import Method
from moe_rl.training.ranks import Ranks
from moe_rl.training.scorers import Learner

COUNTS = ("replayed_rows", "routed_rows", "slots_changed", "slots")


def update_policy(
    batch: Batch,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    method: Method,
    arm: MethodConfig,
    optim: OptimConfig,
    *,
    temperature: float,
    warmup: float,
    noise: torch.Generator,
    learners: Sequence[Learner] = (),
    bias: ExpertBias | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Make one optimizer step on the minibatch `batch`, and return its metrics.

    Returns the row of kind "update", and the names of the parameters whose gradients were not finite. With such a
    gradient, of the policy or of a learner, none of them moves, and the row has `skipped`. Each rank takes its share of
    the rows, in micro-batches of `optim.micro_batch`.

    Args:
        warmup: factor on the learning rate.
        noise: random generator of the selection noise, if the arm has any.
        learners: models that are trained in the same step.
        bias: the expert bias, which is moved by the loads of this minibatch.
    """
    for group in optimizer.param_groups:
        group["lr"] = optim.learning_rate * warmup * group["multiplier"]
    policy.train()
    mine = ranks.mine(batch)
    totals, found = totals_of(batch), []
    together, live = 2 if method.pairs else 1, bool(bias and bias.live)
    for place in micro_batches(mine.attention_mask, optim.micro_batch, together, in_order=optim.share_prompts):
        micro = mine.rows(place[0]).columns(place[1])
        share = len(micro) / len(batch)
        with update_routing(policy, arm, micro, noise, live, optim.share_prompts) as routing, ExitStack() as stack:
            watched = [stack.enter_context(learner.watch(policy)) for learner in learners]
            out = token_logps(
                policy,
                *micro.tokens,
                temperature=temperature,
                entropy=True,
                aux_loss=bool(optim.aux_loss_coef),
                router_logits=method.weighs_routes,
                shared=routing.shared,
            )
            loss = arm_loss(out, micro, method, arm, totals)
            total = loss.loss
            if out.aux_loss is not None:
                total = total + optim.aux_loss_coef * share * out.aux_loss
            ranks.backward(total * ranks.size)  # backward averages over ranks; each has a share of a sum
        for learner, seen in zip(learners, watched, strict=True):
            learner.backward(micro, seen, totals)
        found.append(MicroBatch(place, loss, replace(out, router_logits=None), routing, share))
    grad_norm = ranks.clip_grad_norm_(policy.parameters(), optim.max_grad_norm)
    load = ranks.gather(torch.stack([part.routing.loads for part in found]).sum(0)[None], ranks.size).sum(0)
    norms = [grad_norm, *(learner.clip() for learner in learners)]
    finite = all(bool(torch.isfinite(norm)) for norm in norms)  # if not, no weights are changed
    if finite:
        optimizer.step()
        if bias:
            bias.update(load[-1])
    trained = chain(policy.named_parameters(), *(learner.parameters() for learner in learners))
    wrong = [] if finite else _not_finite(trained)
    optimizer.zero_grad()
    row = update_metrics(found, batch, ranks, method, optim) | {"max_vio": load_violation(load[0])["max_vio"].nanmean()}
    for learner in learners:
        row |= learner.step(warmup, hold=not finite)
    row |= {} if finite else {"skipped": True}
    return {"lr": optim.learning_rate * warmup, "grad_norm": grad_norm, **row}, wrong


def _not_finite(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the names of the parameters whose gradient (this rank's shard of it) is not finite."""
    named = ((name, getattr(p.grad, "_local_tensor", p.grad)) for name, p in parameters)
    return [name for name, grad in named if grad is not None and not bool(grad.isfinite().all())]


def arm_loss(out: TokenLogps, batch: Batch, method: Method, arm: MethodConfig, totals: Totals) -> LossOutput:
    """Return the method's loss on the rows `batch`, a part of a minibatch with these totals."""
    if method.pairs:
        return pair_loss(arm.beta, out.logps, batch, totals.pairs)
    return policy_loss(
        method.objective,
        out.logps,
        batch.old_logps,
        batch.advantages,
        batch.completion_mask,
        ref_logps=batch.ref_logps,
        rollout_logps=batch.rollout_logps if method.needs_rollout_logps else None,
        route_weight=route_weight(out, batch) if method.weighs_routes else None,
        total_tokens=totals.tokens,
        total_sequences=totals.sequences,
    )


def route_weight(out: TokenLogps, micro: Batch) -> Tensor:
    """Return RSPO's router-shift weight of each token, before its floor is applied."""
    assert out.router_logits is not None and micro.route_scores is not None
    return shift_weight(chosen_scores(out.router_logits, micro.routes), micro.route_scores)


# -- routing of an update ----------------------------------------------------------------------------------------------


class RoutingCount:
    """Counts of the routing in one update forward, which are complete after `update_routing`.

    Attributes:
        shared: the rows with which the model must be called, if responses share prompts; known from the beginning.
        replayed_rows: number of replayed (token, site) rows (under R3 all but padding and last tokens, which no engine
            routed).
        routed_rows: number of all (token, site) rows, without sites that look up experts by token id.
        slots_changed: number of response slots that differ from those of the old policy (0 under R2 of all routes;
            under R3 the difference between engines; under selection noise, the dose).
        slots: number of response slots.
        loads: number of tokens of each expert, prompts included: those routed to the expert and, if the live choice is
            asked for under replay, those that would have been.
    """

    shared: SharedPrompts | None = None
    replayed_rows = 0
    routed_rows = 0
    slots_changed = 0
    slots = 0
    loads: Int[Tensor, "N L E"]


def forced_routes(method: MethodConfig, batch: Batch) -> RoutedExperts | None:
    """Return the routes that an update forces: those of the old policy (R2) or of the sampler (R3, PR2).

    If `batch.kept` is given, only these rows are forced. Returns None without replay."""
    routes = {"none": None, "R2": batch.routes}.get(method.replay, batch.rollout_routes)
    if routes is None and method.replay != "none":
        raise RuntimeError(f"replay {method.replay}: this batch has no such routes")
    return routes if routes is None or batch.kept is None else only_rows(routes, batch.kept)


@contextmanager
def update_routing(
    model: nn.Module,
    method: MethodConfig,
    batch: Batch,
    noise: torch.Generator,
    live: bool = False,
    share: bool = False,
) -> Iterator[RoutingCount]:
    """Context manager: give the model the arm's routing (live, noisy or forced) for forward and backward, and count it.

    live: under replay, also count the loads of the experts that the routers would have chosen.
    share: responses share prompts.
    """
    count, routes = RoutingCount(), forced_routes(method, batch)
    if share:
        count.shared = share_prompts(*batch.tokens, routes=routes)
        routes = None if routes is None else count.shared.pack(routes)
    with ExitStack() as stack:
        if method.noise:
            stack.enter_context(noisy_routes(model, method.noise, generator=noise))
        replay = None if routes is None else stack.enter_context(replay_routes(model, routes, shadow=live, once=True))
        recording = stack.enter_context(record_routes(model))
        yield count
    choices = [recording.routes, *([replay.shadow] if live and replay else [])]
    fixed = choices[0].meta.get("hash_routed", ())  # these sites look up experts by token id: nothing to replay
    shared = count.shared
    routed = batch.input_ids.numel() if shared is None else shared.tokens
    count.routed_rows = routed * (len(choices[0].sites) - len(fixed))
    if shared:
        choices = [shared.unpack(chosen) for chosen in choices]
    changed = change_counts(batch.routes, choices[0], batch.completion_mask)
    count.slots_changed, count.slots = changed.slots_changed, changed.slots_total
    count.loads = torch.stack([expert_load(chosen, batch.attention_mask.bool()) for chosen in choices])
    if replay is not None:
        count.replayed_rows = replay.replayed_rows


# -- metrics of an update ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """The results of the forward and backward of one micro-batch.

    place: rows and columns in the rank's part of the minibatch.
    share: share of the minibatch's sequences.
    """

    place: Place
    loss: LossOutput
    out: TokenLogps
    routing: RoutingCount
    share: float


def update_metrics(
    parts: list[MicroBatch], batch: Batch, ranks: Ranks, method: Method, optim: OptimConfig
) -> dict[str, Any]:
    """Return metrics of the whole minibatch over all ranks: loss, ratios, clipped tokens, entropy, routing.

    Names are as in the catalogue."""
    places = [part.place for part in parts]
    shape = sum(len(rows) for rows, _ in places), batch.input_ids.shape[1]

    def whole(of: Callable[[MicroBatch], Tensor]) -> Tensor:
        return ranks.gather(joined([of(part) for part in parts], places, shape), len(batch))

    loss, aux_loss, *counts = ranks.sums(
        sum(float(part.loss.loss.detach()) for part in parts),
        sum(part.share * float(part.out.aux_loss.detach()) for part in parts if part.out.aux_loss is not None),
        *(sum(getattr(part.routing, name) for part in parts) for name in COUNTS),
    )
    mask = batch.completion_mask
    values = TokenValues(**{n: whole(attrgetter(f"loss.tokens.{n}")) for n, _ in parts[0].loss.tokens.items()})
    row: dict[str, Any] = {
        "loss": loss,
        **loss_metrics(values),
        **update_ratio_metrics(
            log_ratio=values.log_ratio,
            sequence_log_ratio=whole(lambda part: part.loss.sequence_log_ratio),
            mask=mask,
        ),
        **ratio_range_metrics(values.log_ratio, mask),
        "entropy": whole(lambda part: cast(Tensor, part.out.entropy))[mask].mean(),
        "aux_loss": aux_loss if optim.aux_loss_coef else None,
        "aux_loss_coef": optim.aux_loss_coef,
        **dict(zip(COUNTS, map(int, counts), strict=True)),
    }
    if method.source == "policy":
        from_rollout, above = whole(lambda part: part.out.logps) - batch.rollout_logps, values.gate_log_ratio > 0
        row |= masked_mismatch_metrics(from_rollout, values.clipped & ~above, values.clipped & above, mask)
    return row
