"""Sums over the batches of a comparison: of fixed size for any length of the text, and five numbers per sequence."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moe_rl.drift.change_tables import Positions, by_cluster, changed_in, intervals_of, rates_of, site_table
from moe_rl.drift.passes import Measured
from moe_rl.measure.moments import Moments, Shares, SiteShares
from moe_rl.routing import ChangeCounts, change_counts, flips_per_token, site_change, slot_change
from moe_rl.routing.router_stats import expert_load, load_cv, load_entropy

KINDS = ("natural", "replayed", "routing")
"""Log-ratios whose distribution is kept: f(new,new), f(new,old) and f(old,new), each minus f(old,old), where f(w,e) is
the log-probability of a token under weights w and routes e."""
SIZES = torch.logspace(-7, 2, 91, dtype=torch.float64)
"""Edges of the bins of |log r|, nats, ten to a decade."""
MARGINS = torch.logspace(-7, 2, 91, dtype=torch.float64)
"""Edges of the bins of margins, in the units of the router's scores, ten to a decade."""


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums of a comparison, all but the per-token table; those of batches (`count`) add up with `+`.

    counts: routing changes from old to new. shares: moments of the log-ratio's parts. load: `[2, L, E]`, tokens given
    to each expert by the old and the new router, negative for an expert that a site lacks. sizes: histogram of |log r|
    for each of KINDS. divergence: sums of -log r and of r - 1 - log r for each of KINDS. by_flips: see `_by_flips`.
    positions: changes by position. margins: see `_by_margin`. site_shares: of each site's routes, None if not measured.
    routers, body: changes with new routers on the old body, and with old routers on the new body, or None.
    """

    counts: ChangeCounts
    shares: Shares
    sequences: list[Tensor]
    """`[B, 5]` of every batch: slots, sites and tokens changed, tokens, and the prompt's number (`Example.prompt`)."""
    load: Tensor
    sizes: Tensor
    divergence: Tensor
    by_flips: Tensor
    positions: Positions
    margins: Tensor
    site_shares: SiteShares | None
    routers: ChangeCounts | None
    body: ChangeCounts | None

    def __add__(self, other: "Sums") -> "Sums":
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        added: Any = (None if a is None else a + b for a, b in pairs)
        return Sums(*added)

    # -- results -----------------------------------------------------------------------------------------

    def rates(self) -> dict[str, dict[str, float]]:
        """Return slot, site and token change, each with rate, 95 % interval over prompts, numerator and denominator."""
        return intervals_of(self.counts, self.prompts)

    @property
    def prompts(self) -> Moments:
        """The moments, over prompts, of slots, sites and tokens changed and of tokens."""
        rows = torch.cat(self.sequences)
        return by_cluster(rows[:, :4], rows[:, 4])

    def swaps(self) -> dict[str, dict[str, dict[str, float]]] | None:
        """Return the changes with swapped routers, against the old routes; None if not measured.

        Slot, site and token change by new routers on the old body (`routers`) and by old routers on the new body
        (`body`), each as rate, numerator and denominator."""
        if self.routers is None or self.body is None:
            return None
        return {"routers": rates_of(self.routers), "body": rates_of(self.body)}

    def sites(self) -> pd.DataFrame:
        """Return a table of one row per routing site: changes, load, margins, and its effect on the log-ratio."""
        counts = self.counts
        load = self.load.clamp(min=0)  # negative marks experts that a site does not have
        share = load.double() / load.sum(-1, keepdim=True)
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
        """Return a table of one row per (site, expert): tokens given to it by the old and by the new router."""
        old, new = self.load.numpy()
        sites, experts = old.shape
        table = {"site": np.repeat(list(self.counts.sites), experts), "expert": np.tile(np.arange(experts), sites)}
        every = pd.DataFrame({**table, "old": old.ravel(), "new": new.ravel()})
        return every[every["old"] >= 0].reset_index(drop=True)  # negative marks experts that a site does not have

    def by_position(self) -> pd.DataFrame:
        """Return a table of changes with one row per position in the measured text (0: its first token)."""
        return self.positions.table(self.counts)

    def by_margin(self) -> pd.DataFrame:
        """Return a table of choices and changes of all sites, in bins `low`..`high` of the margin of the old choice."""
        kept, changed = self.margins.sum(0).numpy()
        edges = np.concatenate([[0.0], MARGINS.numpy(), [np.inf]])
        table = pd.DataFrame({"low": edges[:-1], "high": edges[1:], "choices": kept + changed, "changed": changed})
        return table[table["choices"] > 0].reset_index(drop=True)

    def tails(self) -> pd.DataFrame:
        """Return a table of the share of tokens whose |log r| is at least a size, for each kind of log-ratio."""
        parts = []
        for kind, counts in zip(KINDS, self.sizes, strict=True):
            above = counts.flip(0).cumsum(0).flip(0)[1:]  # bin i + 1 begins at edge i
            columns = {"size": SIZES.numpy(), "tokens": above.numpy(), "share": (above / counts.sum()).numpy()}
            parts.append(pd.DataFrame({"log_ratio": kind, **columns}))
        return pd.concat(parts, ignore_index=True)

    def variance_by_flips(self) -> pd.DataFrame:
        """Return a table of the variance of log r, natural and replayed, by the number of sites changed.

        The sites are those of the position before the token, which predicts it; earlier positions act only through
        attention."""
        tokens = self.by_flips[0]
        table: dict[str, Any] = {"flips": np.arange(len(tokens)), "tokens": tokens.long().numpy()}
        for i, kind in enumerate(KINDS[:2]):
            total, squares = self.by_flips[1 + 2 * i], self.by_flips[2 + 2 * i]
            table[kind] = ((squares - total**2 / tokens) / (tokens - 1)).clamp(min=0).numpy()
        found = pd.DataFrame(table)
        return found[found["tokens"] > 1].reset_index(drop=True)

    def kl(self) -> dict[str, float]:
        """Return k1 = mean(-log r) and k3 = mean(r - 1 - log r), nats per token, natural and replayed.

        Both estimate KL(old || new) if the text was sampled from OLD, and are averages over the text otherwise."""
        k1, k3 = (self.divergence / self.counts.tokens_total).tolist()
        return {f"{name}_{kind}": row[i] for name, row in (("k1", k1), ("k3", k3)) for i, kind in enumerate(KINDS[:2])}


def count(measured: Measured) -> tuple[Sums, dict[str, np.ndarray]]:
    """Return the sums of a batch, and its rows of the per-token table, one per measured token."""
    parts, mask = measured.parts, measured.parts.mask
    old, new = parts.old_routes, parts.new_routes_taken
    slots = (slot_change(old, new) * old.shape[-1]).round().long()
    flips = flips_per_token(old, new)
    log_ratios = torch.stack([parts.log_ratio, parts.weight, parts.routing])[:, mask]
    before = flips.roll(1, 1)  # token t is predicted at t - 1; the first token of a sequence is never measured
    routers, body = (change_counts(old, own, mask) for own in measured.swapped) if measured.swapped else (None, None)
    prompts = torch.tensor(measured.batch.prompts)
    sums = Sums(
        counts=change_counts(old, new, mask),
        shares=parts.shares(),
        sequences=[torch.cat([changed_in(slots, flips, mask), prompts[:, None]], 1)],
        load=torch.stack([expert_load(old, mask), expert_load(new, mask)]),
        sizes=torch.stack([_bins(row.abs(), SIZES) for row in log_ratios]),
        divergence=torch.stack([-log_ratios, log_ratios.expm1() - log_ratios]).sum(-1),
        by_flips=_by_flips(before[mask], log_ratios[:2], old.shape[2]),
        positions=Positions.of(old, new, mask),
        margins=_by_margin(measured.margins[mask], site_change(old, new)[mask]),
        site_shares=parts.site_shares(),
        routers=routers,
        body=body,
    )
    return sums, _token_rows(measured, slots.sum(-1), flips, before)


def _bins(values: Tensor, edges: Tensor) -> Tensor:
    """Return a histogram: counts below the first edge, between edges, and from the last edge on."""
    return torch.bincount(torch.bucketize(values.double(), edges, right=True), minlength=len(edges) + 1)


def _by_flips(flips: Tensor, log_ratios: Tensor, sites: int) -> Tensor:
    """Return `[5, L+1]`, by the number of sites changed: tokens, then sum and sum of squares of both log-ratios."""
    rows = [torch.bincount(flips, minlength=sites + 1).double()]
    for values in log_ratios:
        rows += [torch.bincount(flips, values**power, minlength=sites + 1) for power in (1, 2)]
    return torch.stack(rows)


def _by_margin(margins: Tensor, changed: Tensor) -> Tensor:
    """Return `[L, 2, bins]`: how many choices stayed and changed, by the old margin; 0 for sites without a choice."""
    rows = []
    for margin, flipped in zip(margins.T, changed.T, strict=True):
        known = margin.isfinite()  # infinite where all experts are chosen: no choice
        rows.append(torch.stack([_bins(margin[known & (flipped == kind)], MARGINS) for kind in (False, True)]))
    return torch.stack(rows)


def _median(counts: Tensor, edges: Tensor) -> float:
    """Return the median of binned values, interpolated log-linearly in its bin; NaN without counts."""
    if not counts.sum():
        return float("nan")
    total = counts.cumsum(0)
    place = int((total * 2 >= counts.sum()).int().argmax())
    if not 0 < place < len(edges):
        return float(edges[min(place, len(edges) - 1)])
    inside = (counts.sum() / 2 - total[place - 1]) / counts[place]
    return float(edges[place - 1] * (edges[place] / edges[place - 1]) ** inside)


def _token_rows(measured: Measured, slots: Tensor, flips: Tensor, before: Tensor) -> dict[str, np.ndarray]:
    """Return the columns of the per-token table, one row per measured token."""
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
        "smallest_margin": measured.margins.nan_to_num(float("inf"), posinf=float("inf")).amin(-1),
    }
    integers = {"line": lines[mask], "position": position, "token": batch.text.input_ids[mask]}
    integers |= {"flips": flips[mask], "flips_before": before[mask], "slots_changed": slots[mask]}
    table = {name: column.int().numpy() for name, column in integers.items()}
    return table | {name: column[mask].float().numpy() for name, column in floats.items()}
