"""`moe-rl floor MODEL --prompts FILE` from beginning to end: check, measure variant by variant, write.

Results are on disk after every variant, in OUTPUT.partial, which becomes OUTPUT at the end.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import nn

from moe_rl.drift import checkpoints
from moe_rl.drift.adapters import Source, adapters_of, resolve
from moe_rl.drift.change_tables import site_table
from moe_rl.drift.errors import DriftError
from moe_rl.drift.floor_page import draw, render, say, verdict
from moe_rl.drift.options import FloorOptions, check_least
from moe_rl.drift.output import Screen, Tick, finite, output_folder, progress, record_of, short_names, unfinished
from moe_rl.drift.prompts import Text, aligned, in_batches, longest
from moe_rl.files import write_atomic, write_json
from moe_rl.measure.arithmetic import DECODE, LAYOUTS, CannotRun, check_finite, compare, experts_variants
from moe_rl.measure.noise_floor import experts_implementation, first_line
from moe_rl.measure.scoring import Scored, TokenBatch, score_live
from moe_rl.policy.lora import refuse_tied
from moe_rl.policy.models import ModelConfig, check_machine
from moe_rl.policy.tiny import ModelError
from moe_rl.routing import RoutingError
from moe_rl.routing.errors import UnsupportedExpertsError
from moe_rl.routing.experts import check_experts_name

MAX_TOKENS = 1024
WRITTEN = "floor.json", "floor.csv", "sites.csv", "report.html", "figures"


@dataclass
class Found:
    """The results of `moe-rl floor` so far, written to `folder` after every variant.

    about: entries of floor.json that are known before anything is measured. texts: the batches to measure. tick: is
    called after every batch. rows: the numbers of each dtype and variant. sites: their tables by routing site.
    left_out: variants that were not measured, with the reason."""

    folder: Path
    about: dict[str, Any]
    texts: list[TokenBatch]
    decode_tokens: int
    tick: Tick
    rows: list[dict[str, Any]] = field(default_factory=list)
    sites: list[pd.DataFrame] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def measure(self, model: nn.Module, reference: list[Scored], dtype: str, variant: str, detail: str) -> None:
        """Measure one variant of the model in its dtype, or note why it cannot be run; then write all results."""
        kind = "same" if variant in ("dtype", "merged") else variant
        try:
            sums = compare(model, self.texts, reference, kind, decode_tokens=self.decode_tokens, tick=self.tick)
            self.rows.append({"dtype": dtype, "variant": variant, "detail": detail, **sums.metrics()})
        except CannotRun as error:
            self.skip(dtype, variant, str(error))
            return
        assert sums.counts is not None
        self.sites.append(site_table(sums.counts, dtype=dtype, variant=variant))
        self.keep()

    def skip(self, dtype: str, variant: str, reason: str) -> None:
        """Note that a variant was not measured, and why; then write all results."""
        self.left_out.append({"dtype": dtype, "variant": variant, "reason": reason})
        self.keep()

    def keep(self, complete: bool = False) -> dict[str, Any]:
        """Write floor.json, floor.csv and sites.csv, and return what floor.json holds."""
        results = {"verdict": verdict(self.rows), "complete": complete, **self.about}
        results = finite({**results, "rows": self.rows, "left_out": self.left_out})
        write_json(self.folder / "floor.json", results)
        if self.rows:
            write_atomic(self.folder / "floor.csv", pd.DataFrame(self.rows).to_csv(index=False))
            write_atomic(self.folder / "sites.csv", pd.concat(self.sites).to_csv(index=False))
        return results


def run_floor(options: FloorOptions) -> Path:
    """Measure, write floor.json, floor.csv, sites.csv, a figure and report.html, and return the folder.

    Everything is checked before a model is loaded. Raises DriftError; KeyboardInterrupt leaves OUTPUT.partial.
    """
    device = _check(options)
    given = options.adapter
    source = resolve("MODEL", options.model) if given is None else adapters_of("--adapter", given, options.model)
    with checkpoints.named("MODEL"):
        check_machine(ModelConfig(path=source.base, experts_implementation=options.experts_implementation))
    (name,) = short_names([options.model])
    output = output_folder(options.output, Path("runs") / "floor" / name, WRITTEN)
    known = checkpoints.check({"MODEL": source}, options.tokenizer, options.trust_remote_code)
    text = Text(options.prompts, known, longest(options.max_tokens, MAX_TOKENS, known.max_length), options.batch_size)
    used = list(islice(text.examples(), options.sequences))
    if not used:
        raise text.nothing_left()
    text.holds = replace(text.holds, kinds=dict(Counter(example.kind for example in used)))
    texts = [text.laid_out(held, aligned) for held in in_batches(iter(used), options.batch_size)]
    about = {
        "model": name,
        "adapter": None if source.adapter is None else str(source.adapter),
        "sequences": len(used),
        "measured_tokens": int(sum(batch.completion_mask.sum() for batch in texts)),
        **record_of(text, options, device),
    }
    variants = len(LAYOUTS) + len(options.experts) + 4  # four: the reference, decode, dtype, merged
    total = len(options.dtypes) * variants * len(texts)
    with unfinished(output) as folder:
        with progress(Console(stderr=True), total) as tick:
            found = Found(folder, about, texts, options.decode_tokens, tick)
            _measure(options, source, device, found)
        if not found.rows:
            reasons = sorted({row["reason"] for row in found.left_out})
            raise DriftError("nothing could be measured: " + "; ".join(reasons))
        results = found.keep(complete=True)
        figure = draw(found.rows, results, folder / "figures")
        write_atomic(folder / "report.html", render(results, figure))
    return output


def report(folder: Path, as_json: bool = False) -> None:
    """Print a finished measurement: the verdict and a table, or JSON."""
    text = (folder / "floor.json").read_text()
    if as_json:
        print(text, end="")
        return
    console = Screen()
    say(json.loads(text), console if console.is_terminal else Screen(width=160))
    print(f"report: {folder / 'report.html'}")


def _measure(options: FloorOptions, source: Source, device: torch.device, found: Found) -> None:
    """Measure all variants in every dtype, with one model in memory at a time."""
    first: tuple[str, list[Scored]] | None = None
    for dtype in options.dtypes:
        experts, trusted = options.experts_implementation, options.trust_remote_code
        model: Any = checkpoints.load("MODEL", source, dtype, device, trusted, experts, merge=False)
        reference = []
        try:
            for text in found.texts:
                reference.append(score_live(model, text))
                found.tick()
            check_finite(reference)
        except (RuntimeError, MemoryError, RoutingError) as error:
            kernels = options.experts_implementation is None and not isinstance(error, CannotRun)
            remedy = " (--experts-implementation eager may do)" if kernels else ""
            found.skip(dtype, "all", f"{first_line(error)}{remedy}")
            del model, reference  # before the next model is loaded
            continue
        if first is not None:
            found.measure(model, first[1], dtype, "dtype", f"{first[0]} and {dtype}")
        for variant, detail in _variants(model, options):
            found.measure(model, reference, dtype, variant, detail)
        if source.adapter is not None:  # last, because in 16 bits merging rounds the weights for good
            try:
                refuse_tied(model)
                model.merge_adapter()
                found.measure(model, reference, dtype, "merged", "adapters beside and in the weights")
            except (ModelError, RuntimeError, ValueError, NotImplementedError) as error:  # PEFT raises many kinds
                found.skip(dtype, "merged", first_line(error))
        first = first or (dtype, reference)
        del model


def _variants(model: nn.Module, options: FloorOptions) -> Iterator[tuple[str, str]]:
    """Yield the variants to measure in each dtype, by name and in words."""
    yield from LAYOUTS.items()
    if options.decode_tokens:
        yield "decode", f"{DECODE}, the first {options.decode_tokens} measured tokens"
    for variant in experts_variants(model, options.experts):
        yield variant, f"experts by {experts_implementation(model)} and by {variant.removeprefix('experts_')}"


def _check(options: FloorOptions) -> torch.device:
    """Return the device. Raises DriftError: an option is wrong, or the file of prompts is not there."""
    if not options.dtypes:
        raise DriftError("--dtypes: at least one, e.g. --dtypes bfloat16 float16")
    for dtype in options.dtypes:
        checkpoints.check_dtype(dtype, "--dtypes")
    for option, named in (("--dtypes", options.dtypes), ("--experts", options.experts)):
        if len(set(named)) < len(named):
            raise DriftError(f"{option}: one of {' '.join(named)} is named twice")
    given = [("--experts", experts) for experts in options.experts]
    for option, experts in (*given, ("--experts-implementation", options.experts_implementation)):
        try:
            check_experts_name(experts)
        except UnsupportedExpertsError as error:
            raise DriftError(f"{option}: {str(error).removeprefix('experts_implementation: ')}") from error
    check_least(options, batch_size=1, sequences=1, decode_tokens=0, max_tokens=2)
    if not options.prompts.is_file():
        raise DriftError(f"--prompts: there is no file {options.prompts}")
    return checkpoints.check_device(options.device)
