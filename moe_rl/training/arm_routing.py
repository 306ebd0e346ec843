"""Which experts a forward uses: the live choice, a noisy one, or forced routes; and what came of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Int
from torch import Tensor

from moe_rl.routing import RoutedExperts, change_counts, expert_load, noisy_routes, record_routes, replay_routes
from moe_rl.routing.replay import Replay
from moe_rl.training.batch import Batch
from moe_rl.training.config import MethodConfig
from moe_rl.training.levers import only


class RoutingCount:
    """(token, site) rows of one update forward, how many of them by replay (under R3 all but padding and last tokens,
    which no engine routed); response slots that were routed otherwise than by the old policy (0 under a whole R2; under
    R3 what the engines differ by; under selection noise, the dose); tokens of each expert, prompts included."""

    replayed_rows = 0
    routed_rows = 0
    slots_changed = 0
    slots = 0
    load: Int[Tensor, "L E"]


@contextmanager
def update_routing(
    model: torch.nn.Module, method: MethodConfig, batch: Batch, noise: torch.Generator
) -> Iterator[RoutingCount]:
    """The arm's routing for forward and backward: live, noisy, the old policy's (R2) or the rollout engine's (R3)."""
    count = RoutingCount()
    routes = {"none": None, "R2": batch.routes, "R3": batch.rollout_routes}[method.replay]
    if routes is None and method.replay != "none":
        raise RuntimeError(f"replay {method.replay}: this batch has no such routes")
    if routes is not None and batch.kept is not None:
        routes = only(routes, batch.kept)
    with ExitStack() as stack:
        if method.noise:
            stack.enter_context(noisy_routes(model, method.noise, generator=noise))
        replay = None if routes is None else stack.enter_context(forced_routes(model, routes))
        recording = stack.enter_context(record_routes(model))
        yield count
    changed = change_counts(batch.routes, recording.routes, batch.completion_mask)
    count.slots_changed, count.slots = changed.slots_changed, changed.slots_total
    count.load = expert_load(recording.routes, batch.attention_mask.bool())
    B, T, L, _ = batch.routes.shape
    count.routed_rows = B * T * L
    if replay is not None:
        count.replayed_rows = replay.replayed_rows


@contextmanager
def forced_routes(model: torch.nn.Module, routes: RoutedExperts) -> Iterator[Replay]:
    """`replay_routes` for one forward of the whole batch, proven: every row that has a route was forced, all others
    were left to the router, and nothing more ran.

    Raises:
        RuntimeError: after the block, where that is not so.
    """
    with replay_routes(model, routes) as replay:
        yield replay
    live = int(routes.live.sum()) if routes.has_live else 0
    expected = routes.live.numel() - live
    if (replay.replayed_rows, replay.live_rows) != (expected, live):
        raise RuntimeError(
            f"replay forced {replay.replayed_rows} (token, site) rows and left {replay.live_rows} live, but the routes "
            f"hold {expected} and lack {live}: the forward did not run wholly, or not once, under replay"
        )
