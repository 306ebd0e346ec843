"""Change counts as rates, and as tables by routing site and by position in the measured text."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moe_rl.measure.metrics import changed_of
from moe_rl.routing import ChangeCounts, RoutedExperts, flips_per_token, slot_change


def rates_of(counts: ChangeCounts) -> dict[str, dict[str, float]]:
    """Slot, site and token change: rate, numerator, denominator."""
    return {
        level: {"rate": changed / of if of else float("nan"), "changed": changed, "of": of}
        for level, (changed, of) in changed_of(counts).items()
    }


def site_table(counts: ChangeCounts, **labels: str) -> pd.DataFrame:
    """One row per routing site, after `labels`: changes with their denominators."""
    return pd.DataFrame(
        {
            **labels,
            "site": counts.sites,
            "tokens": counts.per_site_total.numpy(),
            "tokens_changed": counts.per_site_changed.numpy(),
            "slots": counts.per_site_slots_total.numpy(),
            "slots_changed": counts.per_site_slots_changed.numpy(),
        }
    )


def count_positions(old: RoutedExperts, new: RoutedExperts, mask: Bool[Tensor, "B T"]) -> Int[Tensor, "P 4"]:
    """Tokens, slots changed, sites changed and tokens changed, by position (0: the first measured token of its row)."""
    position = (mask.cumsum(1) - 1)[mask]
    slots = (slot_change(old, new)[mask] * old.shape[-1]).round().sum(-1)
    flips = flips_per_token(old, new)[mask]
    columns = (torch.ones_like(flips), slots, flips, flips > 0)
    return torch.stack([torch.bincount(position, column.double()).long() for column in columns], -1)


def add_positions(a: Int[Tensor, "P 4"] | None, b: Int[Tensor, "Q 4"]) -> Int[Tensor, "R 4"]:
    """Their sum, as long as the longer."""
    if a is None:
        return b
    size = max(len(a), len(b))
    padded = [torch.cat([x, x.new_zeros(size - len(x), 4)]) for x in (a, b)]
    return padded[0] + padded[1]


def position_table(positions: Int[Tensor, "P 4"], counts: ChangeCounts) -> pd.DataFrame:
    """One row per position, each changed count with its denominator; `counts` of the same tokens."""
    tokens, slots, flips, touched = positions.T.numpy()
    sites, k = len(counts.sites), counts.site_deviation.shape[1] - 1
    return pd.DataFrame(
        {
            "position": np.arange(len(tokens)),
            "tokens": tokens,
            "slots_changed": slots,
            "slots": tokens * sites * k,
            "sites_changed": flips,
            "sites": tokens * sites,
            "tokens_changed": touched,
        }
    )
