"""Check that each route of a sampling engine is stored at its own token and not shifted by one."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.routing import RoutedExperts, RoutingError, slot_change

SHIFTS = (0, -1, 1)
FEWEST_TOKENS = 8


def refuse_shifted(
    engine: RoutedExperts,
    own: RoutedExperts,
    tokens: Bool[Tensor, "B T"],
    sums: Callable[[Tensor], Tensor] = lambda found: found,
) -> None:
    """Raise RoutingError if a sampling engine's routes are shifted by one token against the policy's at equal weights.

    Routes shifted by one token have the right shape and replay without an error, at a replayed fraction of 1. Only the
    first site is compared: its router's choices do not depend on other routes.

    Args:
        engine, own: routes `[B,T,L,K]` of the same tokens; rows of -1 are not counted.
        tokens: true on real tokens.
        sums: adds a tensor over all processes, so that all of them refuse or none.

    Raises:
        RoutingError: after a shift by one token, the share of slots that differ is less than half of that without it,
            over at least `FEWEST_TOKENS` rows.
    """
    found = [_changed(engine.site_ids(0), own.site_ids(0), tokens, shift) for shift in SHIFTS]
    changed, rows = sums(torch.stack(found).double().cpu()).unbind(1)
    beside, *shifted = (changed / rows).tolist()
    if float(rows.min()) < FEWEST_TOKENS or 2 * min(shifted) >= beside:
        return
    shift = SHIFTS[1 + shifted.index(min(shifted))]
    raise RoutingError(
        f"the routes of the engine that samples are shifted by one token: row t holds those of token t{shift:+d}. "
        f"Beside its own token {100 * beside:.3g} % of the slots of the first router are not the policy's, beside that "
        f"one {100 * min(shifted):.3g} %. Row t must be what the routers chose for token t of prompt and response"
    )


def _changed(engine: Tensor, own: Tensor, tokens: Bool[Tensor, "B T"], shift: int) -> Float[Tensor, "2"]:
    """Return the sum of slot changes of the engine's rows t against the policy's rows t + shift, and the row count."""
    width = tokens.shape[1]
    here, there = slice(max(0, -shift), width - max(0, shift)), slice(max(0, shift), width - max(0, -shift))
    a, b, real = engine[:, here], own[:, there], tokens[:, here] & tokens[:, there]
    rows = real.to(a.device) & (a[..., 0] >= 0) & (b[..., 0] >= 0)
    changed = slot_change(a[rows][:, None], b[rows][:, None])
    return torch.stack([changed.double().sum(), rows.sum().double()])
