"""`moe-rl check-routes FILE --model MODEL`: the check that captured routes are those of a model on the same tokens."""

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
from moe_rl.drift.capture_files import likely_padding, read_capture
from moe_rl.drift.captured import Captured, Finding, OwnRoutes
from moe_rl.drift.checkpoints import check_device, check_dtype, experts_per_token, load
from moe_rl.drift.engine_gap import engine_gap, gap_lines, other_arithmetic
from moe_rl.drift.errors import DriftError
from moe_rl.drift.options import CheckOptions, check_least
from moe_rl.drift.prompts import Example, laid_out
from moe_rl.drift.route_check import RouteCheck, check_routes
from moe_rl.measure.arithmetic import CannotRun
from moe_rl.measure.noise_floor import first_line, rounded_copy
from moe_rl.measure.scoring import Scored, TokenBatch, score_live
from moe_rl.policy.models import found_path, taken_for_hub_id, vocabulary_of
from moe_rl.policy.tiny import ModelError
from moe_rl.rollout.engine_config import COLDEST
from moe_rl.routing import UnsupportedModelError, routing_sites
from moe_rl.routing.arrays import pad_left_aligned
from moe_rl.routing.others import sites_of
from moe_rl.study.words import count

Say = Callable[[str], None]


def run_check(options: CheckOptions) -> int:
    """Print the verdict and the table; return 0 if the routes are the model's, 1 if not. Raises DriftError."""
    result = checked(options, lambda line: print(line, file=sys.stderr))
    if options.json:
        fields = {**dataclasses.asdict(result), "verdict": result.verdict, "ok": not result.faults}
        print(json.dumps(fields, indent=1))
    else:
        print("\n".join(page(result)))
    return 1 if result.faults else 0


def checked(options: CheckOptions, say: Say = lambda line: None) -> RouteCheck:
    """Compare the routes of a file with a model's, and return the result. say: is given messages on the progress.

    Raises DriftError: no such file or model, tokens that the model does not have, options out of range."""
    check_least(options, batch_size=1, max_sequences=1, max_tokens=1, pad_token_id=0)
    if not COLDEST <= options.temperature < float("inf"):
        raise DriftError(f"--temperature: a number of at least {COLDEST}, got {options.temperature:g}")
    device = check_device(options.device)
    model, K = _loaded(options, device)
    likely = {len(routing_sites(model)), int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))}
    captured = _cut(read_capture(options.file, K, options.pad_token_id, likely), options, say)
    vocabulary = vocabulary_of(model)
    for b, words in enumerate(captured.tokens):
        if int(words.max()) >= vocabulary:
            raise DriftError(
                f"{options.file}: sequence {b} has token {int(words.max())}, the model {vocabulary}: another model?"
            )
    texts = _batches(captured, options)
    own, live, copies = own_routes(model, texts, say)
    try:
        result = check_routes(captured, own)
        result = dataclasses.replace(result, logprobs=engine_gap(model, captured, texts, live, copies, result))
    except ValueError as error:
        raise DriftError(f"{options.file}: {error}") from error
    except CannotRun as error:
        raise DriftError(f"--model: {error}") from error
    if captured.logps is not None and result.logprobs is None:
        say("no token here has a log-probability of the engine (masked, -inf, or cut off)")
    notes = [Finding("as read", note, False) for note in captured.notes]
    after = []
    if result.faults and options.pad_token_id is None and (padding := likely_padding(captured)):
        token, _, remedy = padding
        text = f"sequences begin or end with runs of token {token}; if that is padding, its rows were compared, too, "
        after = [Finding("padding?", f"{text}and what is named above may be nothing else: {remedy}", False)]
    return dataclasses.replace(result, findings=(*notes, *result.findings, *after))


def _loaded(options: CheckOptions, device: torch.device) -> tuple[Any, int]:
    """Load the model, and return it with its number of experts per token. Raises DriftError."""
    check_dtype(options.dtype)
    try:
        sites_of(found_path(options.model))  # a dense model is refused before its weights are read
    except (ModelError, ValueError) as error:
        more = "" if isinstance(error, ModelError) else taken_for_hub_id(options.model)
        raise DriftError(f"--model: {str(error).removeprefix('model.path: ')}{more}") from error
    model: Any = load("--model", Source(options.model), options.dtype, device, options.trust_remote_code)
    return model, experts_per_token(model.config.get_text_config())


def _cut(captured: Captured, options: CheckOptions, say: Say) -> Captured:
    """Keep the first `max_sequences` sequences, and the first `max_tokens` tokens of each with their routes.

    Raises DriftError: a sequence to be cut has too few rows, so that it is not known which of them belong to the tokens
    that are kept."""
    if len(captured.tokens) > options.max_sequences:
        say(f"the first {options.max_sequences} of {len(captured.tokens)} sequences (--max-sequences)")
    tokens, ids = (list(part[: options.max_sequences]) for part in (captured.tokens, captured.ids))
    most = options.max_tokens
    logps = captured.logps and [row[:most] for row in captured.logps[: options.max_sequences]]
    long = [b for b, words in enumerate(tokens) if len(words) > most]
    if long:
        say(f"{count(len(long), 'sequence')} cut to the first {most} tokens (--max-tokens)")
    for b in long:
        more = len(ids[b]) - len(tokens[b])
        if more < -1:
            raise DriftError(
                f"{options.file}: sequence {b} has {len(ids[b])} rows for {len(tokens[b])} tokens, and nothing says "
                f"which of them are of the first {most}: --max-tokens {len(tokens[b])}"
            )
        tokens[b], ids[b] = tokens[b][:most], ids[b][: most + max(0, more)]
    return dataclasses.replace(captured, tokens=tokens, ids=ids, logps=logps)


def _batches(captured: Captured, options: CheckOptions) -> list[TokenBatch]:
    """Return the sequences in batches padded on the right.

    The completion mask is True on the tokens with a finite log-probability of the engine or, if the file has none, on
    all tokens but the first."""
    texts = []
    for start in range(0, len(captured.tokens), options.batch_size):
        rows = slice(start, start + options.batch_size)
        held = [Example(0, one.tolist(), start=1) for one in captured.tokens[rows]]
        text = laid_out(held, 0, [0] * len(held))
        if captured.logps is not None:
            given = pad_left_aligned([torch.from_numpy(one).isfinite() for one in captured.logps[rows]], False)
            text = TokenBatch(text.input_ids, text.attention_mask, given, options.temperature)
        texts.append(text)
    return texts


def own_routes(
    model: nn.Module, texts: Sequence[TokenBatch], say: Say = lambda line: None
) -> tuple[OwnRoutes, list[Scored], list[Scored]]:
    """Score the texts with the model and with its copy in other arithmetic.

    The copy is in bf16, or in fp32 if the model is not. Returns the routes of both, then all scores of the model and
    all scores of the copy. Raises DriftError: the copy cannot run, so that nothing says what arithmetic explains."""
    live = [score_live(model, text) for text in texts]
    say(f"scored {sum(len(text.input_ids) for text in texts)} sequences; again in other arithmetic, for the floor")
    other = other_arithmetic(model)
    try:
        rounded = rounded_copy(model, other)
        copies = [score_live(rounded, text) for text in texts]
    except (RuntimeError, MemoryError, UnsupportedModelError) as error:
        raise DriftError(
            f"a copy of the model in {str(other).removeprefix('torch.')} cannot run here, and the limits come from it: "
            f"{first_line(error)}. Try another --device or --dtype"
        ) from error
    routes = live[0].routes
    numbers = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", site) for site in routes.sites]
    layers = tuple(int(number[1]) if number else i for i, number in enumerate(numbers))
    experts = routes.num_experts
    config: Any = model.config
    found = OwnRoutes(
        _ids_of(live, texts),
        _ids_of(copies, texts),
        routes.sites,
        (experts,) * len(layers) if isinstance(experts, int) else experts,
        layers,
        max(int(getattr(config.get_text_config(), "num_hidden_layers", 0)), max(layers) + 1),
    )
    return found, live, copies


def _ids_of(scored: Sequence[Scored], texts: Sequence[TokenBatch]) -> np.ndarray:
    """Return the expert ids `[B,T,L,K]` of all batches, each sequence from column 0 on, -1 behind its end."""
    ids = [
        some[mask].to(torch.int32)
        for one, text in zip(scored, texts, strict=True)
        for some, mask in zip(one.routes.ids, text.attention_mask, strict=True)
    ]
    return pad_left_aligned(ids, -1).numpy()


def page(result: RouteCheck) -> list[str]:
    """Return the lines to print: verdict, findings, a line per site, and the gaps of log-probabilities."""
    lines = [result.verdict, ""]
    lines += [f"  {'fault' if found.fault else 'note'}: {found.name}: {found.text}" for found in result.findings]
    more = ["", *gap_lines(result.logprobs)] if result.logprobs else []
    if not result.rows:
        return lines + more
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
    return lines + more
