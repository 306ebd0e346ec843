"""The noise floor of a comparison: the old checkpoint against itself in the variants of `moe_rl.measure.noise_floor`.

What they change is no work of the new checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from moe_rl.drift.change_tables import add_positions, count_positions, position_table, rates_of, site_table
from moe_rl.measure.noise_floor import NoiseFloor
from moe_rl.measure.scoring import Scored, TokenBatch
from moe_rl.routing import ChangeCounts, change_counts
from moe_rl.study.floors import FLOORS


@dataclass
class Variant:
    """What one kind of arithmetic changed so far."""

    detail: str
    counts: ChangeCounts | None = None
    positions: Tensor | None = None
    gap_sum: float = 0.0
    gap_max: float = 0.0

    def add(self, mask: Tensor, old: Scored, new: Scored) -> None:
        counts = change_counts(old.routes, new.routes, mask, pair="engines")
        self.counts = counts if self.counts is None else self.counts + counts
        self.positions = add_positions(self.positions, count_positions(old.routes, new.routes, mask))
        gap = (new.logps - old.logps).abs()[mask]
        self.gap_sum += float(gap.sum())
        self.gap_max = max(self.gap_max, float(gap.max()) if len(gap) else 0.0)


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
            self.variants.setdefault(name, Variant(detail)).add(text.completion_mask.cpu(), before, scored)
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
                **rates_of(counts),
                "gap_mean": variant.gap_sum / counts.tokens_total,
                "gap_max": variant.gap_max,
            }
            for name, variant, counts in self._measured()
        }
        return {"sequences": self.seen, "left_out": self._noise_floor.left_out, "variants": variants}

    def sites(self) -> pd.DataFrame:
        """One row per variant and routing site, as the comparison's own table."""
        parts = [site_table(counts, variant=name) for name, _, counts in self._measured()]
        columns = ["variant", "site", "tokens", "tokens_changed", "slots", "slots_changed"]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)

    def positions(self) -> pd.DataFrame:
        """One row per variant and position in the measured text."""
        parts = []
        for name, variant, counts in self._measured():
            assert variant.positions is not None
            parts.append(position_table(variant.positions, counts).assign(variant=name))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["variant", "position"])

    def histograms(self) -> dict[str, pd.DataFrame]:
        """`flips` (share of tokens by sites changed) and `deviation` (share of sites by slots changed): one column per
        floor; of the own variants, the one that changes most."""
        return {name: self._histogram(name) for name in ("flips", "deviation")}

    def _histogram(self, name: str) -> pd.DataFrame:
        found = {}
        for floor, variants in FLOORS.items():
            counts = [getattr(c, name).numpy() for v, _, c in self._measured() if v in variants]
            if counts:
                most = max(counts, key=lambda c: float(np.average(np.arange(len(c)), weights=c)))
                found[floor] = most / most.sum()
        return pd.DataFrame(found)

    def _measured(self) -> Iterator[tuple[str, Variant, ChangeCounts]]:
        for name, variant in self.variants.items():
            if variant.counts is not None and variant.counts.tokens_total:
                yield name, variant, variant.counts
