"""What is counted while the text streams by: sums of fixed size, whatever the length of the text."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit
from torch import Tensor

from moe_rl.drift.change_tables import add_positions, count_positions, position_table, rates_of, site_table
from moe_rl.drift.passes import Measured
from moe_rl.measure.moments import Moments, Shares, SiteShares
from moe_rl.routing import ChangeCounts, change_counts, flips_per_token, site_change, slot_change
from moe_rl.routing.router_stats import expert_load, load_cv, load_entropy

KINDS = ("natural", "replayed", "routing")
"""Log-ratios whose distribution is kept: f(new,new), f(new,old) and f(old,new), each minus f(old,old)."""
SIZES = torch.logspace(-7, 2, 91, dtype=torch.float64)
"""Edges of |log r|, nats, ten to a decade."""
MARGINS = torch.logspace(-7, 2, 91, dtype=torch.float64)
"""Edges of margins, in the units of the router's scores, ten to a decade."""


@dataclass
class Sums:
    """Everything of a comparison but its per-token table; `add` batches, then read `rates`, `sites`, ..."""

    counts: ChangeCounts | None = None
    shares: Shares | None = None
    site_shares: SiteShares | None = None
    clusters: Moments | None = None
    load: Tensor | None = None
    sizes: Tensor | None = None
    divergence: Tensor | None = None
    by_flips: Tensor | None = None
    positions: Tensor | None = None
    margins: Tensor | None = None
    swapped: dict[str, ChangeCounts] | None = None

    def add(self, measured: Measured) -> dict[str, np.ndarray]:
        """Count a batch; returns its rows of the per-token table, one per measured token."""
        parts, mask = measured.parts, measured.parts.mask
        old, new = parts.old_routes, parts.new_routes_taken
        self.counts = _plus(self.counts, change_counts(old, new, mask))
        self.shares = _plus(self.shares, parts.shares())
        own = parts.site_shares()
        self.site_shares = _plus(self.site_shares, own) if own is not None else None
        k = old.shape[-1]
        slots = (slot_change(old, new) * k).round().long()
        flips = flips_per_token(old, new)
        numerators = torch.stack([slots.sum(-1), flips, (flips > 0).int()], -1) * mask[..., None]
        self.clusters = _plus(
            self.clusters, Moments.of(torch.cat([numerators.sum(1), mask.sum(1, keepdim=True)], 1).double())
        )
        self.load = _plus(self.load, torch.stack([expert_load(old, mask), expert_load(new, mask)]))
        log_ratios = torch.stack([parts.log_ratio, parts.weight, parts.routing])[:, mask]
        self.sizes = _plus(self.sizes, torch.stack([_bins(row.abs(), SIZES) for row in log_ratios]))
        self.divergence = _plus(self.divergence, torch.stack([-log_ratios, log_ratios.expm1() - log_ratios]).sum(-1))
        before = flips.roll(1, 1)  # token t is predicted at t - 1; the first of a row follows nothing and is 0
        self.by_flips = _plus(self.by_flips, _by_flips(before[mask], log_ratios[:2], old.shape[2]))
        self.positions = add_positions(self.positions, count_positions(old, new, mask))
        if measured.swapped is not None:
            known, swapped = self.swapped or {}, zip(("routers", "body"), measured.swapped, strict=True)
            self.swapped = {name: _plus(known.get(name), change_counts(old, own, mask)) for name, own in swapped}
        changed = site_change(old, new)[mask]
        self.margins = _plus(self.margins, _by_margin(measured.margins[mask], changed))
        return _token_rows(measured, slots.sum(-1), flips, before)

    # -- what it comes to -----------------------------------------------------------------------------------------

    def rates(self) -> dict[str, dict[str, float]]:
        """Slot, site and token change: rate, numerator, denominator, and a 95 % interval over sequences (a ratio
        estimator's, Student's with sequences as clusters; NaN with one sequence)."""
        counts, clusters = self._counts, self.clusters
        assert clusters is not None
        n, covariance = clusters.count, clusters.covariance
        student = float(stdtrit(n - 1, 0.975)) if n > 1 else math.nan  # of two sequences 12.7, of many 1.96
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

    def swaps(self) -> dict[str, dict[str, dict[str, float]]] | None:
        """Slot, site and token change by new routers on the old body (`routers`) and by old routers on the new body
        (`body`), against the old routes: rate, numerator, denominator. None where it was not measured."""
        if self.swapped is None:
            return None
        return {name: rates_of(counts) for name, counts in self.swapped.items()}

    def sites(self) -> pd.DataFrame:
        """One row per routing site: change, load, margins, and what it does to the log-ratio."""
        counts = self._counts
        assert self.load is not None and self.margins is not None
        share = self.load.double() / self.load.sum(-1, keepdim=True)
        table: dict[str, Any] = {
            "site_change": counts.per_site_changed / counts.per_site_total,
            "slot_change": counts.per_site_slots_changed / counts.per_site_slots_total,
            "load_cv_old": load_cv(self.load[0]),
            "load_cv_new": load_cv(self.load[1]),
            "load_entropy_old": load_entropy(self.load[0]),
            "load_entropy_new": load_entropy(self.load[1]),
            "load_moved": (share[1] - share[0]).abs().sum(-1) / 2,
            "margin_median": [_median(row.sum(0), MARGINS) for row in self.margins],
        }
        if self.site_shares is not None:
            table |= self.site_shares.rows()
        return site_table(counts).assign(**{name: np.asarray(column) for name, column in table.items()})

    def experts(self) -> pd.DataFrame:
        """One row per (site, expert): tokens given to it by the old and by the new router."""
        assert self.load is not None
        old, new = self.load.numpy()
        sites, experts = old.shape
        table = {"site": np.repeat(list(self._counts.sites), experts), "expert": np.tile(np.arange(experts), sites)}
        return pd.DataFrame({**table, "old": old.ravel(), "new": new.ravel()})

    def by_position(self) -> pd.DataFrame:
        """One row per position in the measured text (0: its first token)."""
        assert self.positions is not None
        return position_table(self.positions, self._counts)

    def by_margin(self) -> pd.DataFrame:
        """Choices and changes by the margin of the old choice, all sites together; `low` to `high` bounds a bin."""
        assert self.margins is not None
        kept, changed = self.margins.sum(0).numpy()
        edges = np.concatenate([[0.0], MARGINS.numpy(), [np.inf]])
        table = pd.DataFrame({"low": edges[:-1], "high": edges[1:], "choices": kept + changed, "changed": changed})
        return table[table["choices"] > 0].reset_index(drop=True)

    def tails(self) -> pd.DataFrame:
        """Share of tokens whose |log r| exceeds a size, for each kind of log-ratio."""
        assert self.sizes is not None
        parts = []
        for kind, counts in zip(KINDS, self.sizes, strict=True):
            above = counts.flip(0).cumsum(0).flip(0)[1:]  # bin i + 1 begins at edge i
            columns = {"size": SIZES.numpy(), "tokens": above.numpy(), "share": (above / counts.sum()).numpy()}
            parts.append(pd.DataFrame({"log_ratio": kind, **columns}))
        return pd.concat(parts, ignore_index=True)

    def variance_by_flips(self) -> pd.DataFrame:
        """Token variance of the natural and the replayed log-ratio by the sites that changed where the token was
        predicted, one position before it. Earlier positions act through attention only."""
        assert self.by_flips is not None
        tokens = self.by_flips[0]
        table: dict[str, Any] = {"flips": np.arange(len(tokens)), "tokens": tokens.long().numpy()}
        for i, kind in enumerate(KINDS[:2]):
            total, squares = self.by_flips[1 + 2 * i], self.by_flips[2 + 2 * i]
            table[kind] = ((squares - total**2 / tokens) / (tokens - 1)).clamp(min=0).numpy()
        found = pd.DataFrame(table)
        return found[found["tokens"] > 1].reset_index(drop=True)

    def kl(self) -> dict[str, float]:
        """k1 = mean(-log r) and k3 = mean(r - 1 - log r), nats per token, natural and replayed. They estimate
        KL(old || new) if the text was sampled from OLD, and are plain averages over the text otherwise."""
        assert self.divergence is not None
        k1, k3 = (self.divergence / self._counts.tokens_total).tolist()
        return {f"{name}_{kind}": row[i] for name, row in (("k1", k1), ("k3", k3)) for i, kind in enumerate(KINDS[:2])}

    @property
    def _counts(self) -> ChangeCounts:
        assert self.counts is not None
        return self.counts


def _plus(a: Any, b: Any) -> Any:
    return b if a is None else a + b


def _bins(values: Tensor, edges: Tensor) -> Tensor:
    """Counts below the first edge, between edges, above the last."""
    return torch.bincount(torch.bucketize(values.double(), edges, right=True), minlength=len(edges) + 1)


def _by_flips(flips: Tensor, log_ratios: Tensor, sites: int) -> Tensor:
    """[5, L+1]: tokens, then sum and sum of squares of each log-ratio."""
    rows = [torch.bincount(flips, minlength=sites + 1).double()]
    for values in log_ratios:
        rows += [torch.bincount(flips, values**power, minlength=sites + 1) for power in (1, 2)]
    return torch.stack(rows)


def _by_margin(margins: Tensor, changed: Tensor) -> Tensor:
    """[L, 2, bins]: choices that stayed and that changed, by the old margin; sites without a choice stay empty."""
    rows = []
    for margin, flipped in zip(margins.T, changed.T, strict=True):
        known = margin.isfinite()  # infinite where all experts are chosen: no choice
        rows.append(torch.stack([_bins(margin[known & (flipped == kind)], MARGINS) for kind in (False, True)]))
    return torch.stack(rows)


def _median(counts: Tensor, edges: Tensor) -> float:
    """The median of binned values, log-linear within its bin; NaN without counts."""
    if not counts.sum():
        return float("nan")
    total = counts.cumsum(0)
    place = int((total * 2 >= counts.sum()).int().argmax())
    if not 0 < place < len(edges):
        return float(edges[min(place, len(edges) - 1)])
    inside = (counts.sum() / 2 - total[place - 1]) / counts[place]
    return float(edges[place - 1] * (edges[place] / edges[place - 1]) ** inside)


def _token_rows(measured: Measured, slots: Tensor, flips: Tensor, before: Tensor) -> dict[str, np.ndarray]:
    parts, mask, batch = measured.parts, measured.parts.mask, measured.batch
    position = (mask.cumsum(1) - 1)[mask]
    lines = torch.tensor(batch.lines)[:, None].expand_as(mask)
    floats = {
        "old_logp": parts.old,
        "new_logp": parts.new,
        "new_logp_replayed": parts.new_weights,
        "old_logp_rerouted": parts.new_routes,
        "log_ratio": parts.log_ratio,
        "weight": parts.weight,
        "routing": parts.routing,
        "interaction": parts.interaction,
        "smallest_margin": measured.margins.nan_to_num(float("inf")).amin(-1),
    }
    integers = {"line": lines[mask], "position": position, "token": batch.text.input_ids[mask]}
    integers |= {"flips": flips[mask], "flips_before": before[mask], "slots_changed": slots[mask]}
    table = {name: column.int().numpy() for name, column in integers.items()}
    return table | {name: column[mask].float().numpy() for name, column in floats.items()}
