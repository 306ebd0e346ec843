"""`moe-rl check-routes FILE --model MODEL`: are captured routes what the model says when it scores the same tokens?"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from moe_rl.drift.adapters import Source
from moe_rl.drift.capture_files import read_capture
from moe_rl.drift.captured import Captured, Finding, OwnRoutes
from moe_rl.drift.checkpoints import check_device, check_dtype, load
from moe_rl.drift.errors import DriftError
from moe_rl.drift.options import CheckOptions, check_least
from moe_rl.drift.prompts import Example, laid_out
from moe_rl.drift.route_check import RouteCheck, check_routes
from moe_rl.measure.noise_floor import first_line, rounded_copy
from moe_rl.measure.scoring import score_live
from moe_rl.policy.models import check_path, taken_for_hub_id, vocabulary_of
from moe_rl.policy.tiny import ModelError
from moe_rl.routing import RoutedExperts, UnsupportedModelError
from moe_rl.routing.skeleton import sites_of
from moe_rl.study.words import count

Say = Callable[[str], None]


def run_check(options: CheckOptions) -> int:
    """Print the verdict and the table; 0 if the routes are the model's, 1 if not. Raises DriftError."""
    result = checked(options, lambda line: print(line, file=sys.stderr))
    if options.json:
        fields = {**dataclasses.asdict(result), "verdict": result.verdict, "ok": not result.faults}
        print(json.dumps(fields, indent=1))
    else:
        print("\n".join(page(result)))
    return 1 if result.faults else 0


def checked(options: CheckOptions, say: Say = lambda line: None) -> RouteCheck:
    """The comparison of a file with a model. Raises DriftError: no such file or model, tokens that the model does not
    have, options out of range."""
    check_least(options, batch_size=1, max_sequences=1, max_tokens=1)
    device = check_device(options.device)
    model, K = _loaded(options, device)
    captured = _cut(read_capture(options.file, K, options.pad_token_id), options, say)
    vocabulary = vocabulary_of(model)
    for b, words in enumerate(captured.tokens):
        if int(words.max()) >= vocabulary:
            raise DriftError(
                f"{options.file}: sequence {b} has token {int(words.max())}, the model {vocabulary}: another model?"
            )
    own = own_routes(model, captured.tokens, options.batch_size, say)
    try:
        result = check_routes(captured, own)
    except ValueError as error:
        raise DriftError(f"{options.file}: {error}") from error
    padding = _padding(captured.tokens) if result.faults and options.pad_token_id is None else None
    if padding is None:
        return result
    text = (
        f"sequences begin or end with runs of token {padding}; if that is padding, its rows were compared, too, and "
        f"what is named above may be nothing else: check again with --pad-token-id {padding}"
    )
    return dataclasses.replace(result, findings=(*result.findings, Finding("padding?", text, False)))


def _padding(tokens: Sequence[np.ndarray]) -> int | None:
    """A token of which sequences begin or end with three."""
    ends = [end for words in tokens if len(words) > 3 for end in (words[:3], words[-3:])]
    return next((int(end[0]) for end in ends if (end == end[0]).all()), None)


def _loaded(options: CheckOptions, device: torch.device) -> tuple[Any, int]:
    check_dtype(options.dtype)
    try:
        sites_of(check_path(options.model))  # a dense model is refused before its weights are read
    except (ModelError, ValueError) as error:
        more = "" if isinstance(error, ModelError) else taken_for_hub_id(options.model)
        raise DriftError(f"--model: {str(error).removeprefix('model.path: ')}{more}") from error
    model: Any = load("--model", Source(options.model), options.dtype, device, options.trust_remote_code)
    config = model.config.get_text_config()
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
    return model, next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 1)


def _cut(captured: Captured, options: CheckOptions, say: Say) -> Captured:
    """The first sequences and tokens; whole sequences that are longer lose their rest, and routes with it."""
    tokens, ids = list(captured.tokens), list(captured.ids)
    if len(tokens) > options.max_sequences:
        say(f"the first {options.max_sequences} of {len(tokens)} sequences (--max-sequences)")
        tokens, ids = tokens[: options.max_sequences], ids[: options.max_sequences]
    most = options.max_tokens
    long = [b for b, words in enumerate(tokens) if len(words) > most]
    if long:
        say(f"{count(len(long), 'sequence')} cut to the first {most} tokens (--max-tokens)")
    for b in long:
        whole = len(ids[b]) in (len(tokens[b]), len(tokens[b]) - 1)
        tokens[b], ids[b] = tokens[b][:most], ids[b][:most] if whole else ids[b]
    return Captured(tokens, ids, captured.sites)


def own_routes(
    model: nn.Module, tokens: Sequence[np.ndarray], batch_size: int, say: Say = lambda line: None
) -> OwnRoutes:
    """What the model chooses for these tokens, and what a copy in other arithmetic does: bf16, or fp32 where the model
    is not in fp32. Raises DriftError where that copy cannot run: without it nothing says what arithmetic explains."""
    base, routes = _scored(model, tokens, batch_size)
    say(f"scored {len(tokens)} sequences; again in other arithmetic, for the floor")
    other = torch.bfloat16 if next(model.parameters()).dtype == torch.float32 else torch.float32
    try:
        copy, _ = _scored(rounded_copy(model, other), tokens, batch_size)
    except (RuntimeError, MemoryError, UnsupportedModelError) as error:
        raise DriftError(
            f"a copy of the model in {str(other).removeprefix('torch.')} cannot run here, and the limits come from it: "
            f"{first_line(error)}. Try another --device or --dtype"
        ) from error
    numbers = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", site) for site in routes.sites]
    layers = tuple(int(number[1]) if number else i for i, number in enumerate(numbers))
    experts = routes.num_experts
    config: Any = model.config
    return OwnRoutes(
        base,
        copy,
        routes.sites,
        (experts,) * len(layers) if isinstance(experts, int) else experts,
        layers,
        max(int(getattr(config.get_text_config(), "num_hidden_layers", 0)), max(layers) + 1),
    )


def _scored(model: nn.Module, tokens: Sequence[np.ndarray], batch_size: int) -> tuple[list[np.ndarray], RoutedExperts]:
    found: list[np.ndarray] = []
    for start in range(0, len(tokens), batch_size):
        held = [Example(0, one.tolist(), start=1) for one in tokens[start : start + batch_size]]
        text = laid_out(held, 0, [0] * len(held))
        routes = score_live(model, text).routes
        found += [ids[mask].to(torch.int32).numpy() for ids, mask in zip(routes.ids, text.attention_mask, strict=True)]
    return found, routes


def page(result: RouteCheck) -> list[str]:
    """Verdict, findings and a line per site, as text."""
    lines = [result.verdict, ""]
    lines += [f"  {'fault' if found.fault else 'note'}: {found.name}: {found.text}" for found in result.findings]
    if not result.rows:
        return lines
    width = max(len(row.site) for row in result.rows)
    lines += ["", f"  {'site':{width}}  layer  tokens   slots    sets   floor   limit"]
    for row in result.rows:
        cells = "".join(f"{100 * share:7.1f}%" for share in (row.slots, row.sets, row.floor_slots, row.limit))
        fits = "" if row.fits else "  <-"
        lines.append(f"  {row.site:{width}}  {row.layer if row.layer >= 0 else '-':>5}  {row.tokens:6}{cells}{fits}")
    lines += [
        "",
        "  slots: share of experts that both have; sets: of tokens whose K experts are the same; floor: slots that the",
        "  model and its copy in other arithmetic share; limit: what three times that floor and the sample allow.",
        f"  With the routes of other tokens {100 * result.chance:.1f} % of slots would agree.",
    ]
    return lines
