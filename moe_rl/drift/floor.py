"""The noise floor of a comparison: the old checkpoint against itself in the variants of `moe_rl.measure.noise_floor`.

What they change is no work of the new checkpoint.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from moe_rl.drift.change_tables import SITE_COLUMNS, Positions, rates_of, site_table
from moe_rl.measure.noise_floor import NoiseFloor
from moe_rl.measure.scoring import Scored, TokenBatch
from moe_rl.routing import ChangeCounts, change_counts
from moe_rl.study.floors import FLOORS


@dataclass(frozen=True, eq=False)
class Variant:
    """What one kind of arithmetic changed."""

    detail: str
    counts: ChangeCounts
    positions: Positions
    gap_sum: float
    gap_max: float

    @staticmethod
    def of(detail: str, old: Scored, new: Scored, mask: Tensor) -> "Variant":
        gap = (new.logps - old.logps).abs()[mask]
        return Variant(
            detail,
            change_counts(old.routes, new.routes, mask, pair="engines"),
            Positions.of(old.routes, new.routes, mask),
            float(gap.sum()),
            float(gap.max()) if len(gap) else 0.0,
        )

    def __add__(self, other: "Variant") -> "Variant":
        gap_sum, gap_max = self.gap_sum + other.gap_sum, max(self.gap_max, other.gap_max)
        return Variant(self.detail, self.counts + other.counts, self.positions + other.positions, gap_sum, gap_max)


class Floor:
    """Measured on the first batches, until `sequences` of them were seen; 0 measures nothing.

    `add` while the old model is at hand; then read `results`, `sites`, `positions` and `histograms`.
    """

    def __init__(self, sequences: int):
        self.sequences = sequences
        self.seen = 0
        self.variants: dict[str, Variant] = {}
        self._noise_floor = NoiseFloor()

    def add(self, model: nn.Module, text: TokenBatch, before: Scored) -> None:
        """Score a batch again in every variant; `before` is `score_live(model, text)`."""
        if self.seen >= self.sequences:
            return
        self.seen += len(text.input_ids)
        for name, detail, scored in self._noise_floor.variants(model, text):
            found = Variant.of(detail, before, scored, text.completion_mask.cpu())
            self.variants[name] = self.variants[name] + found if name in self.variants else found
        if self.seen >= self.sequences:
            self.close()

    def close(self) -> None:
        """Let go of the bf16 copy: its memory is wanted elsewhere."""
        self._noise_floor.close()

    # -- what it comes to -----------------------------------------------------------------------------------------

    def results(self) -> dict[str, Any]:
        """`sequences` measured; `left_out`: variant -> why this model or machine cannot run it; `variants`: `slot`,
        `site`, `token` (rate, changed, of) of each, and `gap_mean`, `gap_max` of log-probabilities, nats."""
        variants = {
            name: {
                "detail": variant.detail,
                **rates_of(variant.counts),
                "gap_mean": variant.gap_sum / variant.counts.tokens_total,
                "gap_max": variant.gap_max,
            }
            for name, variant in self._measured().items()
        }
        return {"sequences": self.seen, "left_out": self._noise_floor.left_out, "variants": variants}

    def sites(self) -> pd.DataFrame:
        """One row per variant and routing site, as the comparison's own table."""
        parts = [site_table(variant.counts, variant=name) for name, variant in self._measured().items()]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["variant", *SITE_COLUMNS])

    def positions(self) -> pd.DataFrame:
        """One row per variant and position in the measured text."""
        parts = [v.positions.table(v.counts).assign(variant=name) for name, v in self._measured().items()]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["variant", "position"])

    def histograms(self) -> dict[str, pd.DataFrame]:
        """`flips` (share of tokens by sites changed) and `deviation` (share of sites by slots changed): one column per
        floor; of the own variants, the one that changes most."""
        return {name: self._histogram(name) for name in ("flips", "deviation")}

    def _histogram(self, name: str) -> pd.DataFrame:
        found, measured = {}, self._measured()
        for floor, variants in FLOORS.items():
            counts = [getattr(measured[v].counts, name).numpy() for v in measured if v in variants]
            if counts:
                most = max(counts, key=lambda c: float(np.average(np.arange(len(c)), weights=c)))
                found[floor] = most / most.sum()
        return pd.DataFrame(found)

    def _measured(self) -> dict[str, Variant]:
        return {name: variant for name, variant in self.variants.items() if variant.counts.tokens_total}
