"""The noise floor of a comparison: the old checkpoint against itself in the variants of `moe_rl.measure.noise_floor`.

The variants show which changes arithmetic alone makes, without a new checkpoint.
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
    """Routing changes, and gaps of log-probabilities in nats, that one variant of the arithmetic makes."""

    detail: str
    counts: ChangeCounts
    positions: Positions
    gap_sum: float
    gap_max: float

    @staticmethod
    def of(detail: str, old: Scored, new: Scored, mask: Tensor) -> "Variant":
        """Count what changed between two scorings of one batch, on the tokens of `mask`."""
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
    """The noise floor of the old checkpoint, measured on its first batches.

    Batches are measured until `sequences` sequences were seen; 0 measures nothing. Call `add` while the old model is in
    memory; then read `results`, `sites`, `positions` and `histograms`.
    """

    def __init__(self, sequences: int):
        self.sequences = sequences
        self.seen = 0
        self.variants: dict[str, Variant] = {}
        self._noise_floor = NoiseFloor()

    def add(self, model: nn.Module, text: TokenBatch, before: Scored) -> None:
        """Score a batch again in every variant, unless enough were seen. before: `score_live(model, text)`."""
        if self.seen >= self.sequences:
            return
        self.seen += len(text.input_ids)
        for name, detail, scored in self._noise_floor.variants(model, text):
            found = Variant.of(detail, before, scored, text.completion_mask.cpu())
            self.variants[name] = self.variants[name] + found if name in self.variants else found
        if self.seen >= self.sequences:
            self.close()

    def close(self) -> None:
        """Free the memory of the bf16 copy."""
        self._noise_floor.close()

    # -- results -----------------------------------------------------------------------------------------

    def results(self) -> dict[str, Any]:
        """Return the floor as one mapping, for JSON.

        `sequences`: how many were measured; `left_out`: variant -> why this model or machine cannot run it; `variants`:
        variant -> `detail`, `slot`, `site` and `token` (rate, changed, of), and `gap_mean`, `gap_max` of
        log-probabilities, nats."""
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
        """Return a table of one row per variant and routing site, with the columns of `site_table`."""
        parts = [site_table(variant.counts, variant=name) for name, variant in self._measured().items()]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["variant", *SITE_COLUMNS])

    def positions(self) -> pd.DataFrame:
        """Return a table of one row per variant and position in the measured text."""
        parts = [v.positions.table(v.counts).assign(variant=name) for name, v in self._measured().items()]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["variant", "position"])

    def histograms(self) -> dict[str, pd.DataFrame]:
        """Return the histograms `flips` and `deviation` at equal weights, one column per floor.

        `flips`: share of tokens by the number of sites changed; `deviation`: share of (token, site) pairs by the number
        of slots changed. Of a floor with several variants, the one that changes most is taken."""
        return {name: self._histogram(name) for name in ("flips", "deviation")}

    def _histogram(self, name: str) -> pd.DataFrame:
        """Return one of the tables of `histograms`."""
        found, measured = {}, self._measured()
        for floor, variants in FLOORS.items():
            counts = [getattr(measured[v].counts, name).numpy() for v in measured if v in variants]
            if counts:
                most = max(counts, key=lambda c: float(np.average(np.arange(len(c)), weights=c)))
                found[floor] = most / most.sum()
        return pd.DataFrame(found)

    def _measured(self) -> dict[str, Variant]:
        """Return the variants that were measured on all sequences, and on at least one token.

        One that failed on a later batch was measured on fewer sequences than the others."""
        left_out = self._noise_floor.left_out
        return {name: one for name, one in self.variants.items() if one.counts.tokens_total and name not in left_out}
