"""Routing changes as rates with intervals, and as tables by routing site and by position in the measured text."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int, Shaped
from scipy.special import stdtrit
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moe_rl.measure.moments import Moments
from moe_rl.routing import ChangeCounts, RoutedExperts, flips_per_token, slot_change


def rates_of(counts: ChangeCounts) -> dict[str, dict[str, float]]:
    """Return slot, site and token change, each as `rate`, numerator `changed` and denominator `of`."""
    return {
        level: {"rate": changed / of if of else float("nan"), "changed": changed, "of": of}
        for level, (changed, of) in counts.levels().items()
    }


def intervals_of(counts: ChangeCounts, clusters: Moments) -> dict[str, dict[str, float]]:
    """Return `rates_of` with a 95 % interval, `low` to `high`, over clusters of tokens.

    The interval is that of a ratio estimator, with Student's t; NaN with one cluster. clusters: moments of the slots,
    sites and tokens changed and of the tokens in each cluster, columns as in `changed_in`."""
    n, covariance = clusters.count, clusters.covariance
    student = float(stdtrit(n - 1, 0.975)) if n > 1 else math.nan  # the factor is 12.7 for two clusters, 1.96 for many
    found = rates_of(counts)
    for i, (level, row) in enumerate(found.items()):
        per_token = row["of"] / counts.tokens_total
        slope = row["changed"] / counts.tokens_total
        spread = covariance[i, i] - 2 * slope * covariance[i, 3] + slope**2 * covariance[3, 3]
        half = student * float((spread / n).clamp(min=0).sqrt() / clusters.mean[3]) / per_token
        rate = row["rate"]
        low, high = (half, half) if math.isnan(half) else (max(0.0, rate - half), min(1.0, rate + half))
        found[level] = {"rate": rate, "low": low, "high": high, "changed": row["changed"], "of": row["of"]}
    return found


def changed_in(
    slots: Int[Tensor, "B T L"], flips: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B 4"]:
    """Return, for each sequence, the numbers of slots, sites and tokens changed and of tokens, within `mask`.

    slots: how many slots changed at each site. flips: how many sites of each token changed."""
    numerators = torch.stack([slots.sum(-1), flips, (flips > 0).int()], -1) * mask[..., None]
    return torch.cat([numerators.sum(1), mask.sum(1, keepdim=True)], 1).double()


def by_cluster(rows: Float[Tensor, "B 4"], clusters: Shaped[Tensor, " B"]) -> Moments:
    """Sum the sequences of each cluster, and return the moments of these sums over the clusters.

    rows: of each sequence, as in `changed_in`. clusters: of each sequence the number of its cluster."""
    _, place = clusters.unique(return_inverse=True)
    return Moments.of(rows.new_zeros(int(place.max()) + 1, rows.shape[1]).index_add_(0, place, rows))


SITE_COLUMNS = "site", "tokens", "tokens_changed", "slots", "slots_changed"
"""The columns of `site_table`."""


def site_table(counts: ChangeCounts, **labels: str) -> pd.DataFrame:
    """Return a table of one row per routing site, its changes and their denominators, behind the columns `labels`."""
    table = counts.to_frame()[list(SITE_COLUMNS)]
    return table.assign(**labels)[[*labels, *SITE_COLUMNS]]


@dataclass(frozen=True, eq=False)
class Positions:
    """Counts of tokens, slots changed, sites changed and tokens changed, by position in the measured text.

    Position 0 is the first measured token of its row. sums: a row per position, these four as columns."""

    sums: Int[Tensor, "P 4"]

    @staticmethod
    def of(old: RoutedExperts, new: RoutedExperts, mask: Bool[Tensor, "B T"]) -> "Positions":
        """Count the changes from `old` to `new` on the tokens of `mask`."""
        position = (mask.cumsum(1) - 1)[mask]
        slots = (slot_change(old, new)[mask] * old.shape[-1]).round().sum(-1)
        flips = flips_per_token(old, new)[mask]
        columns = (torch.ones_like(flips), slots, flips, flips > 0)
        return Positions(torch.stack([torch.bincount(position, column.double()).long() for column in columns], -1))

    def __add__(self, other: "Positions") -> "Positions":
        """Add the counts of two batches, position by position; the result is as long as the longer one."""
        return Positions(pad_sequence([self.sums, other.sums]).sum(1))

    def table(self, counts: ChangeCounts) -> pd.DataFrame:
        """Return a table of one row per position, each count with its denominator. counts: of the same tokens."""
        tokens, slots, flips, touched = self.sums.T.numpy()
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
