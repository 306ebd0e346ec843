"""`moe-rl floor MODEL --prompts FILE` from beginning to end: check, measure variant by variant, write.

What is measured is on disk after every variant, in OUTPUT.partial, which becomes OUTPUT at the end.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from torch import nn

from moe_rl.drift import checkpoints
from moe_rl.drift.errors import DriftError
from moe_rl.drift.floor import site_table
from moe_rl.drift.floor_model import Source, check_experts, load, resolve
from moe_rl.drift.floor_page import draw, render, say, verdict
from moe_rl.drift.options import FloorOptions
from moe_rl.drift.output import (
    Tick,
    environment,
    finite,
    kept_when_stopped,
    output_folder,
    progress,
    settings_of,
    short_names,
)
from moe_rl.drift.prompts import Example, Skipped, aligned, check_file, examples
from moe_rl.files import write_atomic, write_json
from moe_rl.measure.arithmetic import (
    DECODE,
    LAYOUTS,
    CannotRun,
    GapSums,
    check_finite,
    compare,
    experts_variants,
)
from moe_rl.measure.noise_floor import experts_implementation, first_line
from moe_rl.measure.scoring import Scored, TokenBatch, score_live
from moe_rl.routing import RoutingError

MAX_TOKENS = 1024


@dataclass
class Found:
    """What was measured so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    sites: list[pd.DataFrame] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    def add(self, dtype: str, variant: str, detail: str, sums: GapSums) -> None:
        counts = sums.counts
        assert counts is not None
        self.rows.append({"dtype": dtype, "variant": variant, "detail": detail, **sums.metrics()})
        self.sites.append(site_table(counts, dtype=dtype, variant=variant))

    def skip(self, dtype: str, variant: str, reason: Exception | str) -> None:
        self.left_out.append({"dtype": dtype, "variant": variant, "reason": str(reason)})


def run_floor(options: FloorOptions) -> Path:
    """Measure and write floor.json, floor.csv, sites.csv, a figure and report.html; returns the folder.

    Everything is checked before a model is loaded. Raises DriftError; KeyboardInterrupt leaves OUTPUT.partial.
    """
    device = _check(options)
    source = resolve(options.model, options.adapter)
    check_experts(source, options.experts_implementation)
    (name,) = short_names([options.model])
    output = output_folder(options.output, Path("runs") / "floor" / name, "floor.json")
    known = checkpoints.check({"MODEL": source.base}, options.tokenizer, options.trust_remote_code)
    number = check_file(options.prompts, known.tokenizer)
    max_tokens = _longest(options, known.max_length)
    skipped = Skipped()
    texts = _texts(options, known.tokenizer, max_tokens, skipped)
    if not texts:
        raise DriftError(
            f"{options.prompts}: no token to measure: {skipped.empty} examples are empty, a single token, or have a "
            f"prompt that fills the {max_tokens} tokens that count (--max-tokens; the model has "
            f"{known.max_length or 'no fixed number of'} positions)"
        )
    about = {
        "model": name,
        "adapter": None if source.adapter is None else str(source.adapter),
        "architecture": known.model_type,
        "parameters": known.parameters,
        "routing_sites": len(known.sites),
        "examples": number,
        "sequences": sum(len(text.input_ids) for text in texts),
        "measured_tokens": int(sum(text.completion_mask.sum() for text in texts)),
        "truncated": skipped.truncated,
        "empty": skipped.empty,
        "settings": {**settings_of(options), "max_tokens": max_tokens, "device": str(device)},
        "environment": environment(device),
    }
    found = Found()
    variants = len(LAYOUTS) + len(options.experts) + 4  # the reference, decode, dtype, merged
    total = len(options.dtypes) * variants * len(texts)
    with kept_when_stopped(output) as folder:

        def keep(complete: bool = False) -> dict[str, Any]:
            results = {"verdict": verdict(found.rows), "complete": complete, **about}
            results = finite({**results, "rows": found.rows, "left_out": found.left_out})
            write_json(folder / "floor.json", results)
            if found.rows:
                write_atomic(folder / "floor.csv", pd.DataFrame(found.rows).to_csv(index=False))
                write_atomic(folder / "sites.csv", pd.concat(found.sites).to_csv(index=False))
            return results

        with progress(Console(stderr=True), total) as tick:
            _measure(options, source, texts, device, found, keep, tick)
        if not found.rows:
            reasons = sorted({row["reason"] for row in found.left_out})
            raise DriftError("nothing could be measured: " + "; ".join(reasons))
        results = keep(complete=True)
        figure = draw(found.rows, results, folder / "figures")
        write_atomic(folder / "report.html", render(results, figure))
    return output


def report(folder: Path, as_json: bool = False) -> None:
    """Print what a finished measurement says: the verdict and a table, or JSON."""
    text = (folder / "floor.json").read_text()
    if as_json:
        print(text, end="")
        return
    console = Console()
    say(json.loads(text), console if console.is_terminal else Console(width=160))
    print(f"report: {folder / 'report.html'}")


def _measure(
    options: FloorOptions,
    source: Source,
    texts: list[TokenBatch],
    device: torch.device,
    found: Found,
    keep: Callable[[], Any],
    tick: Tick,
) -> None:
    """Every dtype's variants; one model in memory at a time."""
    first: tuple[str, list[Scored]] | None = None
    for dtype in options.dtypes:
        model = load(source, dtype, options.experts_implementation, device, options.trust_remote_code)
        try:
            reference = [_ticked(score_live(model, text), tick) for text in texts]
            check_finite(reference)
        except (RuntimeError, MemoryError, RoutingError) as error:
            kernels = options.experts_implementation is None and not isinstance(error, CannotRun)
            remedy = " (--experts-implementation eager may do)" if kernels else ""
            found.skip(dtype, "all", f"{first_line(error)}{remedy}")
            keep()
            continue
        if first is not None:
            _one(model, texts, first[1], dtype, "dtype", f"{first[0]} and {dtype}", found, tick)
            keep()
        for variant, detail in _variants(model, options):
            _one(model, texts, reference, dtype, variant, detail, found, tick, options.decode_tokens)
            keep()
        if source.adapter is not None:  # last: in 16 bits merging rounds the weights for good
            try:
                model.merge_adapter()
                _one(model, texts, reference, dtype, "merged", "adapters beside and in the weights", found, tick)
            except (RuntimeError, ValueError, NotImplementedError) as error:  # PEFT's, of kinds that do not merge
                found.skip(dtype, "merged", first_line(error))
            keep()
        first = first or (dtype, reference)
        del model


def _one(
    model: nn.Module,
    texts: list[TokenBatch],
    reference: list[Scored],
    dtype: str,
    variant: str,
    detail: str,
    found: Found,
    tick: Tick,
    decode_tokens: int = 0,
) -> None:
    kind = "same" if variant in ("dtype", "merged") else variant
    try:
        sums = compare(model, texts, reference, kind, decode_tokens=decode_tokens, tick=tick)
        found.add(dtype, variant, detail, sums)
    except CannotRun as error:
        found.skip(dtype, variant, error)


def _variants(model: nn.Module, options: FloorOptions) -> Iterator[tuple[str, str]]:
    yield from LAYOUTS.items()
    if options.decode_tokens:
        yield "decode", f"{DECODE}, the first {options.decode_tokens} measured tokens"
    for variant in experts_variants(model, options.experts):
        yield variant, f"experts by {experts_implementation(model)} and by {variant.removeprefix('experts_')}"


def _texts(options: FloorOptions, tokenizer: Any, max_tokens: int, skipped: Skipped) -> list[TokenBatch]:
    held: list[Example] = []
    for example in examples(options.prompts, tokenizer, max_tokens, skipped):
        held.append(example)
        if len(held) == options.sequences:
            break
    size, pad = options.batch_size, tokenizer.pad_token_id
    return [aligned(held[i : i + size], pad) for i in range(0, len(held), size)]


def _check(options: FloorOptions) -> torch.device:
    if not options.dtypes:
        raise DriftError("--dtypes: at least one, e.g. --dtypes bfloat16 float16")
    for dtype in options.dtypes:
        checkpoints.check_dtype(dtype, "--dtypes")
    if len(set(options.dtypes)) < len(options.dtypes):
        raise DriftError(f"--dtypes: one of {' '.join(options.dtypes)} is named twice")
    least = {"batch_size": 1, "sequences": 1, "decode_tokens": 0, "max_tokens": 2}
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise DriftError(f"--{name.replace('_', '-')}: at least {low}, got {value}")
    if not options.prompts.is_file():
        raise DriftError(f"--prompts: there is no file {options.prompts}")
    return checkpoints.check_device(options.device)


def _longest(options: FloorOptions, positions: int | None) -> int:
    if options.max_tokens is not None and positions is not None and options.max_tokens > positions:
        raise DriftError(f"--max-tokens: {options.max_tokens} are more than the model's {positions} positions")
    return min(options.max_tokens or MAX_TOKENS, positions or MAX_TOKENS)


def _ticked(scored: Scored, tick: Tick) -> Scored:
    tick()
    return scored
