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
    """names: of the checkpoints. load: the model of a number. cache: a folder for the routes and log-probabilities of
    two checkpoints."""

    names: Sequence[str]
    load: Callable[[int], nn.Module]
    text: Text
    cache: Path
    tick: Tick

    def first(self, floor: Floor) -> "Held":
        """Score the first checkpoint, measure its noise floor; its row is of zeros."""
        model = self.load(0)
        held = Held(self.names[0], gates_of(model))
        for number, batch in enumerate(self.text.batches()):
            before = scored("checkpoint 1", model, batch.text)
            floor.add(model, batch.text, before)
            for name in ("first", "last"):
                keep_scored(self.cache, f"{name}_{number}", before)
            held.add(batch, before, before, before, before.logps)
            self.tick()
        floor.close()
        return held

    def other(self, index: int, gates: Gates | None) -> "Held":
        """Score a further checkpoint, live and with the first one's routes and, given `gates`, with its routers."""
        model = self.load(index)
        held = Held(self.names[index], gates_of(model))
        for number, batch in enumerate(self.text.batches()):
            (before, _), (last, _) = (kept_scored(self.cache, f"{name}_{number}") for name in ("first", "last"))
            after = scored(f"checkpoint {index + 1}", model, batch.text)
            held.add(batch, before, last, after, score_replayed(model, batch.text, before.routes, after.routes))
            if gates is not None:
                with with_gates(model, gates):
                    held.swap("body", batch, before, score_live(model, batch.text))
            keep_scored(self.cache, f"last_{number}", after)
            self.tick()
        return held

    def swapped(self, helds: Sequence["Held"]) -> None:
        """The first checkpoint again, with the routers of every other, into their rows."""
        model = self.load(0)
        for number, batch in enumerate(self.text.batches()):
            before, _ = kept_scored(self.cache, f"first_{number}")
            for held in helds:
                with with_gates(model, held.gates):
                    held.swap("routers", batch, before, score_live(model, batch.text))
            self.tick()


class Held:
    """What one checkpoint changed: against the first, against the one before, and with swapped routers. `gates`: its
    own routers."""

    def __init__(self, name: str, gates: Gates) -> None:
        self.name, self.gates = name, gates
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

    def row(self) -> dict[str, Any]:
        """`change` and `step`: slot, site and token change against the first and against the one before; `gap`: the
        log-ratio against the first, natural and replayed (`gap_split`); `gate_swap`."""
        assert self.gap.counts is not None and self.step is not None
        swaps = {key: rates_of(self.swaps[key]) for key in ("routers", "body") if key in self.swaps}
        return {
            "name": self.name,
            "tokens": self.tokens,
            "change": rates_of(self.gap.counts),
            "step": rates_of(self.step),
            "gap": self.gap.metrics(),
            "gate_swap": swaps if len(swaps) == 2 else None,
        }

    def sites(self) -> pd.DataFrame:
        """One row per routing site, against the first checkpoint."""
        counts = self.gap.counts
        assert counts is not None
        return site_table(counts, checkpoint=self.name)
