"""Changes by position in the measured text, added up over batches of any length."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from moe_rl.routing import RoutedExperts, flips_per_token, slot_change


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


def position_table(counts: Int[Tensor, "P 4"], sites: int, k: int) -> pd.DataFrame:
    """One row per position, each changed count with its denominator."""
    tokens, slots, flips, touched = counts.T.numpy()
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
