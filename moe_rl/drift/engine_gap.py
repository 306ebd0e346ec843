"""The gap between a model's log-probabilities and those of an engine for the same tokens, and routing's share of it.

The model is scored live, and with the engine's routes replayed. The same is done with the model's copy in other
arithmetic in place of the engine."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from moe_rl.drift.captured import Captured
from moe_rl.drift.route_check import EngineGap, Gaps, RouteCheck
from moe_rl.drift.words import number, percent
from moe_rl.measure.arithmetic import check_finite, gap_split, joined
from moe_rl.measure.scoring import Scored, TokenBatch, score_replayed
from moe_rl.rollout.engine_config import ARITHMETIC
from moe_rl.routing import RoutedExperts
from moe_rl.routing.arrays import pad_left_aligned
from moe_rl.study.words import count

MOST = ARITHMETIC[torch.bfloat16].most
"""The largest mean gap, nats, that arithmetic can explain; the limit of a bf16 rollout engine of a run."""
FAULTY = "the captured routes are not the model's as they stand, and must be right first."
FAR = (
    f"a mean gap above {MOST:g} nats is more than arithmetic explains. Another temperature (--temperature), processed "
    "instead of raw log-probabilities or the other way round, top-p or top-k, other weights, values of other tokens?"
)


def engine_gap(
    model: nn.Module,
    captured: Captured,
    texts: Sequence[TokenBatch],
    live: Sequence[Scored],
    copies: Sequence[Scored],
    result: RouteCheck,
) -> EngineGap | None:
    """Return the gap to the engine's log-probabilities, or None if no token has a finite one of the engine.

    texts: the captured sequences in batches, without padding on the left; their completion mask is True on the tokens
    with a finite log-probability of the engine. live, copies: scores of the model and of its copy in other arithmetic,
    for each text. result: of the check of the routes, which are replayed only if it has no fault.

    Raises CannotRun: log-probabilities of the model are not finite; RoutingError: routes that cannot be forced.
    """
    given = [] if captured.logps is None else [torch.from_numpy(logps) for logps in captured.logps]
    measured = [int(logps.isfinite().sum()) for logps in given]
    if not sum(measured):
        return None
    check_finite([*live, *copies])
    engines, start = [], 0
    for text, own in zip(texts, live, strict=True):
        rows = slice(start, start + len(text.input_ids))
        routes = own.routes if result.faults else _routes(captured, rows, own.routes, result)
        engines.append(Scored(pad_left_aligned(given[rows], 0), routes))
        start = rows.stop
    engine = _gaps(texts, live, engines)
    why = FAULTY if result.faults else FAR if (engine["gap_mean"] or 0) > MOST else _missing(captured, result)
    return EngineGap(
        tokens=sum(measured),
        sequences=sum(tokens > 0 for tokens in measured),
        impossible=sum(int(logps.isneginf().sum()) for logps in given),
        temperature=texts[0].temperature,
        engine=engine if why else _gaps(texts, live, engines, model),
        copy=_gaps(texts, live, copies, model),
        copy_dtype=str(other_arithmetic(model)).removeprefix("torch."),
        not_replayed=why,
    )


def _missing(captured: Captured, result: RouteCheck) -> str:
    """Return in words how many tokens lack a route at a site, empty if none does.

    If a token lacks a route, nothing is replayed: the tokens behind would depend on what the model chooses there.
    """
    layers = [row.layer for row in result.rows]  # dense layers may hold -1 everywhere
    pairs = zip(captured.tokens, captured.ids, strict=True)
    holes = sum(int((ids[: len(tokens) - 1, layers] < 0).any((1, 2)).sum()) for tokens, ids in pairs)
    return f"{count(holes, 'token')} without all of {'its' if holes == 1 else 'their'} routes." if holes else ""


def other_arithmetic(model: nn.Module) -> torch.dtype:
    """Return the dtype of the copy that shows what arithmetic alone does: bf16 for a model in fp32, else fp32."""
    return torch.bfloat16 if next(model.parameters()).dtype == torch.float32 else torch.float32


def _gaps(
    texts: Sequence[TokenBatch], live: Sequence[Scored], others: Sequence[Scored], model: nn.Module | None = None
) -> Gaps:
    """Return `gap_split` of the model's scores `live` against the scores `others`, None for what is not finite.

    model: is scored again with the routes of `others`; None leaves out all entries that need this replay."""
    natural, replayed = [], []
    for text, own, other in zip(texts, live, others, strict=True):
        logps = own.logps if model is None else score_replayed(model, text, other.routes, own.routes)
        check_finite([Scored(logps, own.routes)])
        natural.append(own.logps - other.logps)
        replayed.append(logps - other.logps)
    found = gap_split(*(joined(part) for part in (natural, replayed, [text.completion_mask for text in texts])))
    if model is None:
        found = {k: v for k, v in found.items() if not k.endswith("_replayed") and not k.startswith("routing_share_")}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _routes(captured: Captured, rows: slice, own: RoutedExperts, result: RouteCheck) -> RoutedExperts:
    """Return the captured routes of some sequences in the layout of `own`.

    The last token of a sequence is left to live routing: it predicts no token, and may have no captured route.
    """
    ids = np.full(own.shape, -1)
    layers = [row.layer for row in result.rows]
    for place, tokens, held in zip(ids, captured.tokens[rows], captured.ids[rows], strict=True):
        place[: len(tokens) - 1] = held[: len(tokens) - 1, layers]
    return own.with_ids(ids)


COLUMNS = ("gap_mean", "gap_p99", "gap_max", "k3", "outside_fraction")


def gap_lines(gap: EngineGap) -> list[str]:
    """Return the lines to print: a sentence on the share of routing, a table, and what the numbers mean."""
    engine, copy = gap.engine, gap.copy
    said = f"The model is {number(engine['gap_mean'])} nats from the engine's log-probabilities in the mean"
    if gap.not_replayed:
        said += f". How much of that is routing is not said: {gap.not_replayed}"
    else:
        said += (
            f", {number(engine['gap_mean_replayed'])} with the engine's routes replayed: routing makes "
            f"{percent(engine['routing_share_gap_mean'])}. Of what its own {gap.copy_dtype} copy differs by "
            f"({number(copy['gap_mean'])}) it makes {percent(copy['routing_share_gap_mean'])}."
        )
    table: list[tuple[str, ...]] = [("", "mean |d|", "p99", "largest", "k3", "outside")]
    for name, gaps in (("engine", engine), (f"{gap.copy_dtype} copy", copy)):
        for suffix, words in (("", ""), ("_replayed", ", routes replayed")):
            if f"gap_mean{suffix}" in gaps:
                cells = [gaps[f"{column}{suffix}"] for column in COLUMNS]
                table.append((name + words, *map(number, cells[:-1]), percent(cells[-1])))
        if "routing_share_gap_mean" in gaps:
            shares = [gaps.get(f"routing_share_{'outside' if c == 'outside_fraction' else c}") for c in COLUMNS]
            table.append(("  of it routing", *map(percent, shares)))
    lines = [said, ""]
    lines += ["  " + f"{row[0]:30}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in table]
    lines += [
        "",
        f"  {count(gap.tokens, 'sampled token')} of {count(gap.sequences, 'sequence')} at temperature "
        f"{gap.temperature:g}, which must be that of the engine's log-probabilities;",
        "  d: the model's less the engine's, or less those of the model's own copy, nats; outside: tokens with e^d",
        "  outside [0.9, 1.1]. What decoding, batch shape and kernels do at equal weights: moe-rl floor.",
    ]
    if gap.impossible:
        lines.append(f"  {count(gap.impossible, 'token')} to which the engine gave no probability (-inf) left out.")
    return lines
