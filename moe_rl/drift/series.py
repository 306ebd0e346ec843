"""The comparison of a series of checkpoints on one text: each with the first, and with the one before it.

One model is in memory at a time. The first is loaded twice: at the beginning, and at the end, with the routers of every
other checkpoint. Results are on disk from the second checkpoint on, in OUTPUT.partial, which becomes OUTPUT at the end.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from torch import Tensor

from moe_rl.drift import checkpoints
from moe_rl.drift.change_tables import rates_of, site_table
from moe_rl.drift.errors import DriftError
from moe_rl.drift.floor import Floor
from moe_rl.drift.gates import gates_of, with_gates
from moe_rl.drift.options import DriftOptions
from moe_rl.drift.output import Tick, finite, place_of, progress, record_of, short_names, unfinished
from moe_rl.drift.passes import check_finite, keep_scored, kept_scored, scored
from moe_rl.drift.prompts import Text, TextBatch
from moe_rl.drift.run import checked
from moe_rl.drift.samples import FILE, Load, to_measure
from moe_rl.drift.series_page import draw, render, series_table
from moe_rl.drift.words import adapters_sentence, series_verdict, settings_sentence, swap_sentence, text_sentence
from moe_rl.files import write_atomic, write_json
from moe_rl.measure.arithmetic import GapSums
from moe_rl.measure.scoring import Scored, score_live, score_replayed
from moe_rl.routing import ChangeCounts, change_counts

WRITTEN = "series.json", "series.csv", "sites.csv", "report.html", "figures", FILE


Gates = Mapping[str, Tensor]


class CheckpointChange:
    """Sums of one checkpoint's routing changes and log-ratios, batch by batch.

    gates: the checkpoint's own routers. gap: changes and log-ratios against the first checkpoint. counts: changes
    against the checkpoint before ("step"), and against the first one with swapped routers ("routers", "body")."""

    def __init__(self, name: str, gates: Gates) -> None:
        self.name, self.gates = name, gates
        self.gap = GapSums(pair="policies")
        self.counts: dict[str, ChangeCounts] = {}

    def add(self, batch: TextBatch, first: Scored, last: Scored, own: Scored, replayed: Tensor) -> None:
        """Add a batch, as scored by the first, the previous and this checkpoint; replayed: under the first's routes."""
        self.gap.add(first, own, replayed, batch.text.completion_mask.cpu())
        self.change("step", batch, last, own)

    def change(self, name: str, batch: TextBatch, old: Scored, new: Scored) -> None:
        """Add the routing changes of a batch under a name of `counts`."""
        counts = change_counts(old.routes, new.routes, batch.text.completion_mask.cpu())
        self.counts[name] = self.counts[name] + counts if name in self.counts else counts

    @property
    def tokens(self) -> int:
        """How many tokens were compared with the first checkpoint."""
        return self.gap.counts.tokens_total if self.gap.counts is not None else 0

    def row(self) -> dict[str, Any]:
        """Return the checkpoint's entry of `rows` in series.json.

        `change` and `step`: slot, site and token change against the first checkpoint and against the one before; `gap`:
        the log-ratio against the first, natural and replayed (`gap_split`); `gate_swap`: changes with swapped routers,
        None if not measured."""
        assert self.gap.counts is not None
        step, *swaps = (rates_of(self.counts[name]) for name in ("step", "routers", "body") if name in self.counts)
        return {
            "name": self.name,
            "tokens": self.tokens,
            "change": rates_of(self.gap.counts),
            "step": step,
            "gap": self.gap.metrics(),
            "gate_swap": dict(zip(("routers", "body"), swaps, strict=True)) if len(swaps) == 2 else None,
        }


@dataclass(frozen=True)
class Passes:
    """The passes over the text: one with each checkpoint and, for swapped routers, a second one with the first.

    loads: a function for each checkpoint that loads its model. cache: a folder for the routes and log-probabilities of
    two checkpoints. tick: is called after every batch."""

    names: Sequence[str]
    loads: Sequence[Load]
    text: Text
    cache: Path
    tick: Tick

    def first(self, floor: Floor) -> CheckpointChange:
        """Score the first checkpoint, and measure its noise floor; its own changes are all 0."""
        model = self.loads[0]()
        held = CheckpointChange(self.names[0], gates_of(model))
        for number, batch in enumerate(self.text.batches()):
            before = scored("checkpoint 1", model, batch.text)
            floor.add(model, batch.text, before)
            for name in ("first", "last"):
                keep_scored(self.cache, f"{name}_{number}", before)
            held.add(batch, before, before, before, before.logps)
            self.tick()
        floor.close()
        return held

    def other(self, index: int, gates: Gates | None) -> CheckpointChange:
        """Score a further checkpoint, live and with the first one's routes.

        gates: the first one's routers, with which it is scored, too; None leaves that out.
        """
        model = self.loads[index]()
        held = CheckpointChange(self.names[index], gates_of(model))
        for number, batch in enumerate(self.text.batches()):
            (before, _), (last, _) = (kept_scored(self.cache, f"{name}_{number}") for name in ("first", "last"))
            after = scored(f"checkpoint {index + 1}", model, batch.text)
            replayed = score_replayed(model, batch.text, before.routes, after.routes)
            check_finite(f"checkpoint {index + 1} with the routes of checkpoint 1", replayed)
            held.add(batch, before, last, after, replayed)
            if gates is not None:
                with with_gates(model, gates):
                    held.change("body", batch, before, score_live(model, batch.text))
            keep_scored(self.cache, f"last_{number}", after)
            self.tick()
        return held

    def swapped(self, changes: Sequence[CheckpointChange]) -> None:
        """Score the first checkpoint again with the routers of every other one, and add the changes to theirs."""
        model = self.loads[0]()
        for number, batch in enumerate(self.text.batches()):
            before, _ = kept_scored(self.cache, f"first_{number}")
            for held in changes:
                with with_gates(model, held.gates):
                    held.change("routers", batch, before, score_live(model, batch.text))
            self.tick()


def run_series(options: DriftOptions) -> Path:
    """Compare a series, write series.json, series.csv, sites.csv, figures and report.html, and return the folder.

    Everything is checked before a model is loaded. Raises DriftError; RoutingError where routes cannot be recorded.
    """
    paths = options.checkpoints
    places = [place_of(path) for path in paths]
    if len(set(places)) < len(places):
        raise DriftError(f"the series names {next(p for p in places if places.count(p) > 1)} twice")
    names = short_names(paths)
    labels = [f"checkpoint {i} ({name})" for i, name in enumerate(names, start=1)]
    output, given, device, loads = checked(options, labels, f"{names[0]}_to_{names[-1]}", WRITTEN)
    floor = Floor(options.floor_sequences)
    changes: list[CheckpointChange] = []

    def results_now() -> dict[str, Any]:
        """Return what is measured so far, as series.json holds it."""
        return {
            "checkpoints": paths,
            "steps": checkpoints.steps_of(names),
            "other_settings": text.known.other_settings,
            "adapters": text.known.adapters,
            "floor": floor.results(),
            "rows": [held.row() for held in changes],
            **record_of(text, options, device, "per_site", "one_at_a_time"),  # these options do nothing in a series
        }

    with unfinished(output) as folder:
        text, loads[0] = to_measure(options, given, loads[0], folder, output)
        total = (len(paths) + (1 if options.gate_swap else 0)) * text.most_batches
        with progress(Console(stderr=True), total) as tick:
            passes = Passes(names, loads, text, folder / "cache", tick)
            first = passes.first(floor)
            if not first.tokens:
                raise text.nothing_left()
            changes.append(first)
            for index in range(1, len(paths)):
                changes.append(passes.other(index, first.gates if options.gate_swap else None))
                _write(folder, results_now(), changes, complete=False)
            if options.gate_swap:
                passes.swapped(changes[1:])
        results = _write(folder, results_now(), changes, complete=True)
        figures = draw(results, _sites(changes), folder / "figures")
        write_atomic(folder / "report.html", render(results, figures))
    return output


def say_series(folder: Path) -> None:
    """Print the results of a finished series."""
    results = json.loads((folder / "series.json").read_text())
    print(results["verdict"])
    print(f"Text: {text_sentence(results['text'], results['rows'][0]['name'])}.")
    if results["swap"]:
        print(results["swap"])
    if results["other_settings"]:
        print(f"Other settings: {settings_sentence(results['other_settings'])}")
    if results["adapters"]:
        print(f"Adapters: {adapters_sentence(results)}")
    shown = series_table(results["rows"])[["name", "slot_change", "token_change", "step_slot_change", "gap_mean"]]
    print(shown.to_string(index=False, float_format="%.3g"))
    print(f"report: {folder / 'report.html'}")


def _write(
    folder: Path, results: dict[str, Any], changes: Sequence[CheckpointChange], complete: bool
) -> dict[str, Any]:
    """Write series.json, series.csv and sites.csv of two or more checkpoints; return what series.json holds."""
    swap = swap_sentence(results["rows"][-1]["gate_swap"])
    whole: dict[str, Any] = finite({"verdict": series_verdict(results), "swap": swap, "complete": complete, **results})
    write_json(folder / "series.json", whole)
    write_atomic(folder / "series.csv", series_table(results["rows"]).to_csv(index=False))
    write_atomic(folder / "sites.csv", _sites(changes).to_csv(index=False))
    return whole


def _sites(changes: Sequence[CheckpointChange]) -> pd.DataFrame:
    """Return a table of one row per checkpoint and routing site: changes against the first checkpoint."""
    return pd.concat([site_table(held.gap.counts, checkpoint=held.name) for held in changes if held.gap.counts])
