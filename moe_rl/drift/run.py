"""The comparison of two checkpoints from beginning to end: check, measure, write.

The output folder appears whole or not at all."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from moe_rl.drift import checkpoints as pair
from moe_rl.drift.adapters import sources
from moe_rl.drift.errors import DriftError
from moe_rl.drift.floor import Floor
from moe_rl.drift.options import DriftOptions, check_least
from moe_rl.drift.output import finite, output_folder, progress, record_of, short_names, unfinished
from moe_rl.drift.page import draw, render, summary
from moe_rl.drift.passes import Measured, one_at_a_time, with_both
from moe_rl.drift.prompts import Text, longest
from moe_rl.drift.samples import FILE, Load, check_sampling, to_measure
from moe_rl.drift.sums import Sums, count
from moe_rl.drift.words import pair_verdict
from moe_rl.files import atomic_file, naming, write_atomic, write_json

MAX_TOKENS = 2048
TABLES = "sites", "experts", "positions", "floor_sites", "floor_positions"
WRITTEN = (
    "drift.json", "report.html", "figures", FILE, "tokens.parquet", *(f"{name}.parquet" for name in TABLES)
)  # fmt: skip


def run_drift(options: DriftOptions) -> Path:
    """Compare two checkpoints, write tables, figures and `report.html`, and return the folder.

    Everything is checked before a model is loaded. Raises DriftError; RoutingError where routes cannot be recorded.
    """
    console, names = Console(stderr=True), short_names(options.checkpoints)
    output, given, device, (load_old, load_new) = checked(options, ("OLD", "NEW"), "_vs_".join(names), WRITTEN)
    alone = options.one_at_a_time or not pair.fits_twice(given.known.parameters, options.dtype, device)
    if alone and not options.one_at_a_time:
        console.print("Two models do not fit into memory: one at a time.", style="dim")
    floor = Floor(options.floor_sequences)
    with unfinished(output) as folder:
        text, load_first = to_measure(options, given, load_old, folder, output)
        wanted = options.per_site, options.gate_swap
        with progress(console, (3 if alone else 1) * text.most_batches) as tick:
            if alone:
                measured = one_at_a_time(load_first, load_new, text, *wanted, folder / "cache", floor, tick)
            else:
                measured = with_both(load_first(), load_new(), text, *wanted, floor, tick)
            sums = _counted(measured, folder / "tokens.parquet")
        if sums is None:
            raise text.nothing_left()
        results = _results(options, names, text, sums, floor, device, alone)
        made = sums.sites(), sums.experts(), sums.by_position(), floor.sites(), floor.positions()
        tables = dict(zip(TABLES, made, strict=True))
        write_json(folder / "drift.json", results)  # from here on `unfinished` keeps what was measured
        for name, table in tables.items():
            with atomic_file(folder / f"{name}.parquet") as file:
                table.to_parquet(file, index=False)
        figures = draw(sums, tables, floor.histograms(), results, folder / "figures")
        write_atomic(folder / "report.html", render(results, tables["sites"], figures))
    return output


def checked(
    options: DriftOptions, labels: Sequence[str], default: str, written: Sequence[str]
) -> tuple[Path, Text, torch.device, list[Load]]:
    """Check everything that can be wrong before a model is loaded. Raises DriftError.

    Returns the folder to write, the text, the device, and a function that loads each checkpoint. labels: the names of
    the checkpoints in messages. default: the name of the folder if none is given. written: the names of what will be
    written there, the one that marks a result first."""
    device = pair.check_device(options.device)
    dtype = pair.check_dtype(options.dtype)
    check_least(options, batch_size=1, max_tokens=2, floor_sequences=0)
    if not options.prompts.is_file():
        raise DriftError(f"--prompts: there is no file {options.prompts}")
    output = output_folder(options.output, Path("runs") / "drift" / default, written, options.prompts)
    of = sources(dict(zip(labels, options.checkpoints, strict=True)), options.base)
    known = pair.check(of, options.tokenizer, options.trust_remote_code)
    text = Text(options.prompts, known, longest(options.max_tokens, MAX_TOKENS, known.max_length), options.batch_size)
    check_sampling(options, text, output)
    how = dtype, device, options.trust_remote_code
    return output, text, device, [partial(pair.load, which, source, *how) for which, source in of.items()]


def say(folder: Path) -> None:
    """Print the summary of a finished comparison."""
    results = json.loads((folder / "drift.json").read_text())
    print(pair_verdict(results))
    for topic, text in summary(results):
        print(f"{topic}{'' if topic.endswith('?') else ':'} {text}")
    print(f"report: {folder / 'report.html'}")


def _counted(measured: Iterator[Measured], path: Path) -> Sums | None:
    """Write the per-token table, a row group for each batch, and return the sums of all batches, None without any."""
    total: Sums | None = None
    writer: pq.ParquetWriter | None = None
    try:
        for one in measured:
            sums, rows = count(one)
            total = sums if total is None else total + sums
            table = pa.table(rows)
            with naming(path):
                writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd", compression_level=1)
                writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    return total


def _results(
    options: DriftOptions, names: list[str], text: Text, sums: Sums, floor: Floor, device: torch.device, alone: bool
) -> dict[str, Any]:
    """Return all that drift.json holds and the page says, with None for a number that does not exist."""
    counts, shares = sums.counts, sums.shares
    old, new = options.checkpoints
    results = {
        "old_name": names[0],
        "new_name": names[1],
        "other_settings": text.known.other_settings,
        "adapters": text.known.adapters,
        "experts_per_token": counts.site_deviation.shape[1] - 1,
        "measured_sequences": shares.sequences.count,
        "measured_prompts": sums.prompts.count,
        "measured_tokens": shares.tokens.count,
        "change": sums.rates(),
        "floor": floor.results(),
        "gate_swap": sums.swaps(),
        "flips_per_token": counts.sites_changed / counts.tokens_total,
        "overdispersion": counts.overdispersion,
        "kl": sums.kl(),
        "decomposition": shares.rows(),
        "replay_effect_var": None if sums.site_shares is None else sums.site_shares.whole,
        **record_of(text, replace(options, one_at_a_time=alone), device, "checkpoints", old=old, new=new),
    }
    return finite(results)
