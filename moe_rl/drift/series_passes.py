"""The forwards of a series, one model in memory at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor, nn

from moe_rl.drift.change_tables import rates_of, site_table
from moe_rl.drift.floor import Floor
from moe_rl.drift.gates import gates_of, with_gates
from moe_rl.drift.output import Tick
from moe_rl.drift.passes import keep_scored, kept_scored, scored
from moe_rl.drift.prompts import Text, TextBatch
from moe_rl.measure.arithmetic import GapSums
from moe_rl.measure.scoring import Scored, score_live, score_replayed
from moe_rl.routing import ChangeCounts, change_counts

Gates = Mapping[str, Tensor]


@dataclass(frozen=True)
class Passes:
    """load: the model of a number; cache: a folder for the routes and log-probabilities of two checkpoints."""

    load: Callable[[int], nn.Module]
    text: Text
    cache: Path
    tick: Tick

    def first(self, floor: Floor) -> tuple["Held", Gates]:
        """Score the first checkpoint, measure its noise floor; its row of zeros, and its routers."""
        model, held = self.load(0), Held()
        for number, batch in enumerate(self.text.batches()):
            before = scored("checkpoint 1", model, batch.text)
            floor.add(model, batch.text, before)
            for name in ("first", "last"):
                keep_scored(self.cache, f"{name}_{number}", before)
            held.add(batch, before, before, before, before.logps)
            self.tick()
        floor.close()
        return held, gates_of(model)

    def other(self, index: int, gates: Gates | None) -> tuple["Held", Gates]:
        """Score a further checkpoint, live and with the first one's routes and, given `gates`, with its routers; what
        it changed, and its own routers."""
        model, held = self.load(index), Held()
        for number, batch in enumerate(self.text.batches()):
            (before, _), (last, _) = (kept_scored(self.cache, f"{name}_{number}") for name in ("first", "last"))
            after = scored(f"checkpoint {index + 1}", model, batch.text)
            held.add(batch, before, last, after, score_replayed(model, batch.text, before.routes, after.routes))
            if gates is not None:
                with with_gates(model, gates):
                    held.swap("body", batch, before, score_live(model, batch.text))
            keep_scored(self.cache, f"last_{number}", after)
            self.tick()
        return held, gates_of(model)

    def swapped(self, gates: Sequence[Gates], helds: Sequence["Held"]) -> None:
        """The first checkpoint again, with the routers of every other, into their rows."""
        model = self.load(0)
        for number, batch in enumerate(self.text.batches()):
            before, _ = kept_scored(self.cache, f"first_{number}")
            for own, held in zip(gates, helds, strict=True):
                with with_gates(model, own):
                    held.swap("routers", batch, before, score_live(model, batch.text))
            self.tick()


class Held:
    """What one checkpoint changed: against the first, against the one before, and with swapped routers."""

    def __init__(self) -> None:
        self.gap = GapSums(pair="policies")
        self.step: ChangeCounts | None = None
        self.swaps: dict[str, ChangeCounts] = {}

    def add(self, batch: TextBatch, first: Scored, last: Scored, own: Scored, replayed: Tensor) -> None:
        mask = batch.text.completion_mask.cpu()
        self.gap.add(first, own, replayed, mask)
        counts = change_counts(last.routes, own.routes, mask)
        self.step = counts if self.step is None else self.step + counts

    def swap(self, name: str, batch: TextBatch, first: Scored, own: Scored) -> None:
        counts = change_counts(first.routes, own.routes, batch.text.completion_mask.cpu())
        self.swaps[name] = self.swaps[name] + counts if name in self.swaps else counts

    @property
    def tokens(self) -> int:
        return self.gap.counts.tokens_total if self.gap.counts is not None else 0

    def row(self, name: str) -> dict[str, Any]:
        """`change` and `step`: slot, site and token change against the first and against the one before; `gap`: the
        log-ratio against the first, natural and replayed (`gap_split`); `gate_swap`."""
        assert self.gap.counts is not None and self.step is not None
        swaps = {key: rates_of(self.swaps[key]) for key in ("routers", "body") if key in self.swaps}
        return {
            "name": name,
            "tokens": self.tokens,
            "change": rates_of(self.gap.counts),
            "step": rates_of(self.step),
            "gap": self.gap.metrics(),
            "gate_swap": swaps if len(swaps) == 2 else None,
        }

    def sites(self, name: str) -> pd.DataFrame:
        """One row per routing site, against the first checkpoint."""
        counts = self.gap.counts
        assert counts is not None
        return site_table(counts, checkpoint=name)
