"""Which experts an update uses: the live choice, a noisy one, or the old policy's; and what came of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from moe_rl.routing import change_counts, noisy_routes, record_routes, replay_routes
from moe_rl.training.batch import Batch
from moe_rl.training.config import MethodConfig


class RoutingCount:
    """(token, site) rows of one update forward, how many of them by replay; response slots that were routed
    otherwise than by the old policy (0 under replay; under selection noise, the dose)."""

    replayed_rows = 0
    routed_rows = 0
    slots_changed = 0
    slots = 0


@contextmanager
def update_routing(
    model: torch.nn.Module, method: MethodConfig, batch: Batch, noise: torch.Generator
) -> Iterator[RoutingCount]:
    """The arm's routing for forward and backward: live, noisy, or the old policy's."""
    count = RoutingCount()
    with ExitStack() as stack:
        if method.noise:
            stack.enter_context(noisy_routes(model, method.noise, generator=noise))
        replay = stack.enter_context(replay_routes(model, batch.routes)) if method.replay == "R2" else None
        recording = stack.enter_context(record_routes(model))
        yield count
    changed = change_counts(batch.routes, recording.routes, batch.completion_mask)
    count.slots_changed, count.slots = changed.slots_changed, changed.slots_total
    B, T, L, _ = batch.routes.shape
    count.routed_rows = B * T * L
    if replay is not None:
        count.replayed_rows = replay.replayed_rows
        if count.replayed_rows != count.routed_rows:
            raise RuntimeError(
                f"replay forced {count.replayed_rows} of {count.routed_rows} (token, site) rows: the update forward "
                "did not run wholly under replay"
            )
