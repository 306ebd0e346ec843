"""Checkpoints of one training on one text: each against the first, and against the one before it.

One model is in memory at a time. The first is loaded twice: to begin with, and at the end to carry the routers of every
other. What is measured is on disk after every checkpoint, in OUTPUT.partial, which becomes OUTPUT at the end.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from torch import nn

from moe_rl.drift import checkpoints
from moe_rl.drift.adapters import sources
from moe_rl.drift.errors import DriftError
from moe_rl.drift.floor import Floor
from moe_rl.drift.options import DriftOptions
from moe_rl.drift.output import finite, output_folder, place_of, progress, record_of, short_names, unfinished
from moe_rl.drift.run import check_options, text_of
from moe_rl.drift.samples import FILE, recognising, to_measure
from moe_rl.drift.series_page import draw, render, series_table
from moe_rl.drift.series_passes import Held, Passes
from moe_rl.drift.words import adapters_sentence, series_verdict, settings_sentence, swap_sentence, text_sentence
from moe_rl.files import write_atomic, write_json

WRITTEN = "series.json", "series.csv", "sites.csv", "report.html", "figures", FILE


def run_series(options: DriftOptions) -> Path:
    """Compare, and write series.json, series.csv, sites.csv, figures and report.html; returns the folder.

    Everything is checked before a model is loaded. Raises DriftError; RoutingError where routes cannot be recorded.
    """
    dtype, device = check_options(options)
    paths = checkpoints.chosen(options.checkpoints)
    places = [place_of(path) for path in paths]
    if len(set(places)) < len(places):
        raise DriftError(f"the series names {next(p for p in places if places.count(p) > 1)} twice")
    names = short_names(paths)
    default = Path("runs") / "drift" / f"{names[0]}_to_{names[-1]}"
    output = output_folder(options.output, default, WRITTEN, options.prompts)
    labels = [f"checkpoint {i} ({name})" for i, name in enumerate(names, start=1)]
    of = sources(dict(zip(labels, paths, strict=True)), options.base)
    known = checkpoints.check(of, options.tokenizer, options.trust_remote_code)
    given, floor = text_of(options, known, output), Floor(options.floor_sequences)
    helds: list[Held] = []

    def load(index: int) -> nn.Module:
        return checkpoints.load(labels[index], of[labels[index]], dtype, device, options.trust_remote_code)

    def results_now() -> dict[str, Any]:
        return {
            "checkpoints": paths,
            "steps": checkpoints.steps_of(names),
            "other_settings": known.other_settings,
            "adapters": known.adapters,
            "floor": floor.results(),
            "rows": [held.row() for held in helds],
            **record_of(text, options, device, "per_site", "one_at_a_time"),  # these are of pairs alone
        }

    with unfinished(output) as folder:
        text = to_measure(options, given, lambda: load(0), folder, output)
        total = (len(paths) + (1 if options.gate_swap else 0)) * text.most_batches
        with progress(Console(stderr=True), total) as tick:
            first_of = recognising(text, lambda: load(0))
            passes = Passes(names, lambda i: load(i) if i else first_of(), text, folder / "cache", tick)
            first = passes.first(floor)
            if not first.tokens:
                raise text.nothing_left()
            helds.append(first)
            for index in range(1, len(paths)):
                helds.append(passes.other(index, first.gates if options.gate_swap else None))
                _write(folder, results_now(), helds, complete=False)
            if options.gate_swap:
                passes.swapped(helds[1:])
        shutil.rmtree(folder / "cache", ignore_errors=True)
        results = _write(folder, results_now(), helds, complete=True)
        figures = draw(results, _sites(helds), folder / "figures")
        write_atomic(folder / "report.html", render(results, figures))
    return output


def say_series(folder: Path) -> None:
    """Print what a finished series says."""
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


def _write(folder: Path, results: dict[str, Any], helds: Sequence[Held], complete: bool) -> dict[str, Any]:
    """The numbers so far, of two checkpoints at least."""
    swap = swap_sentence(results["rows"][-1]["gate_swap"])
    whole: dict[str, Any] = finite({"verdict": series_verdict(results), "swap": swap, "complete": complete, **results})
    write_json(folder / "series.json", whole)
    write_atomic(folder / "series.csv", series_table(results["rows"]).to_csv(index=False))
    write_atomic(folder / "sites.csv", _sites(helds).to_csv(index=False))
    return whole


def _sites(helds: Sequence[Held]) -> pd.DataFrame:
    """One row per checkpoint and routing site."""
    return pd.concat([held.sites() for held in helds])
