"""Effect of arithmetic alone: the same weights and tokens scored in another way, and the share that is due to routing.

A *variant* is a second scoring of a text with equal weights: one of `LAYOUTS`, or

- "decode"        the prompt in one forward, then token by token with a KV cache
- "experts_NAME"  another experts implementation of transformers
- "same"          the same forward of the same policy in another form: another dtype, merged adapters

If a variant changes a route, the text is scored once more with the reference's routes forced. With d the change of a
token's log-probability, natural d = arithmetic + routing: the replayed d is the arithmetic that remains when every
expert is the reference's, and the rest is routing. This is the decomposition of `moe_rl.measure.decompose` with kernels
in place of weights.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_rl.measure.metrics import ratio_metrics, ratio_range_metrics
from moe_rl.measure.noise_floor import experts_computed_by, experts_implementation, first_line
from moe_rl.measure.scoring import (
    Score,
    Scored,
    TokenBatch,
    check_measured,
    decoded_logps,
    score_live,
    score_replayed,
    text_logps,
)
from moe_rl.routing import ChangeCounts, RoutedExperts, RoutingError, change_counts, site_change

LAYOUTS = {
    "repeat": "the same forward once more",
    "batch_1": "each sequence by itself, at the same width",
    "batch_1_unpadded": "each sequence by itself, without padding",
    "padding_left": "all padding on the left",
    "padding_right": "all padding on the right",
}
"""Variants that are one forward over the text, with a description of each."""
DECODE = "prefill, then token by token with a KV cache"
EXPERTS = ("eager", "grouped_mm")
"""Experts implementations that are tried by default. `batched_mm` copies an expert's weights for every token, so it is
not for large models."""
SPLIT = ("gap_mean", "m2", "k3", "outside")
"""Statistics with a reported routing share."""


class CannotRun(RuntimeError):
    """Error for a variant that this model, machine or text cannot run; the message gives the reason."""


@dataclass
class GapSums:
    """The gaps of one variant, collected batch by batch: changes of routes, and natural and replayed d, nats.

    `pair` is that of `ChangeCounts`."""

    pair: str = "engines"
    counts: ChangeCounts | None = None
    natural: list[Float[Tensor, "B T"]] = field(default_factory=list)
    replayed: list[Float[Tensor, "B T"]] = field(default_factory=list)
    masks: list[Bool[Tensor, "B T"]] = field(default_factory=list)

    def add(self, reference: Scored, other: Scored, replayed: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> None:
        """Add one batch; all tensors are in the reference's layout."""
        counts = change_counts(reference.routes, other.routes, mask, pair=self.pair)
        self.counts = counts if self.counts is None else self.counts + counts
        self.natural.append(other.logps - reference.logps)
        self.replayed.append(replayed - reference.logps)
        self.masks.append(mask)

    def metrics(self) -> dict[str, float | int]:
        """Return slot, site and token change with numerators and denominators, and the metrics of `gap_split`.

        Raises CannotRun if no token was added.
        """
        counts = self.counts
        if counts is None or not counts.tokens_total:
            raise CannotRun("no token to measure")
        found: dict[str, float | int] = {}
        for level, (changed, of) in counts.levels().items():
            found |= {f"{level}_change": changed / of, f"{level}s_changed": changed, f"{level}s": of}
        return found | gap_split(*(joined(part) for part in (self.natural, self.replayed, self.masks)))


def gap_split(
    natural: Float[Tensor, "B T"], replayed: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> dict[str, float | int]:
    """Return how far a second scoring of equal weights is from the first, and which share is routing; float64.

    Args:
        natural: d = log p(second scoring, its own routes) - log p(first), nats.
        replayed: the same difference with the first scoring's routes forced on the second.
        mask: the tokens that are measured.

    Returns the metrics of `natural`, and those of `replayed` under `NAME_replayed`:
        `outside`: tokens with a ratio e^d outside [0.9, 1.1], over `measured` (verl issue 6280 gives the share as
        `outside_fraction`);
        `extreme_2`: tokens with max(r, 1/r) > 2, R3's F(2) over `measured`;
        `gap_mean`, `gap_p99`, `gap_max` of |d|, nats; `m2` = mean d², nats²; `k3`, nats per token; `chi2_token`,
        `ess_token` and their counterparts over sequences: see `ratio_metrics`.
        `routing_share_NAME` for gap_mean, m2, k3 and outside: 1 - NAME_replayed / NAME, the share that forcing the
        first scoring's routes removes; NaN if NAME is 0; negative if the forced routes increase NAME.

    >>> natural, replayed = torch.tensor([[0.2, -0.4]]), torch.tensor([[0.05, -0.1]])
    >>> metrics = gap_split(natural, replayed, torch.ones(1, 2, dtype=torch.bool))
    >>> [round(metrics[name], 4) for name in ("gap_mean", "gap_mean_replayed", "routing_share_gap_mean", "outside")]
    [0.3, 0.075, 0.75, 2]
    """
    names = ("gap_mean", "gap_p99", "gap_max", "m2", "k3", "chi2_token", "chi2_sequence", "ess_token", "ess_sequence")
    measured = int(mask.sum())
    found: dict[str, float | int] = {"measured": measured}
    for suffix, d in (("", natural), ("_replayed", replayed)):
        ratios, outside = ratio_metrics(d, mask), float(ratio_range_metrics(d, mask)["outside_fraction"])
        found |= {f"outside{suffix}": round(outside * measured) if measured else 0}
        found |= {f"outside_fraction{suffix}": outside, f"extreme_2{suffix}": int(ratios["extreme_2"])}
        found |= {f"{name}{suffix}": float(ratios[name]) for name in names}
    for name in SPLIT:
        whole, left = found[name], found[f"{name}_replayed"]
        found[f"routing_share_{name}"] = 1 - left / whole if whole else float("nan")
    return found


def compare(
    model: nn.Module,
    texts: Sequence[TokenBatch],
    reference: Sequence[Scored],
    variant: str,
    *,
    decode_tokens: int = 64,
    tick: Callable[[], None] = lambda: None,
) -> GapSums:
    """Score `texts` in a variant, live and with the reference's routes, and return the gaps to `reference`.

    Args:
        reference: `score_live` of each text with the same weights, in the reference's arithmetic.
        decode_tokens: number of columns, from the first measured one, that the variant "decode" decodes and measures.
        tick: called after every batch.

    Raises:
        CannotRun: no token is measured; there is no padding to move, or each batch is one sequence ("batch_1...");
            log-probabilities are not finite; or kernels or memory do not allow it.
        ValueError: the first token of a sequence is to be measured.
    """
    for text in texts:
        check_measured(text)
    sums = GapSums()
    name = variant.removeprefix("experts_")
    try:
        with nullcontext() if name == variant else experts_computed_by(model, name):
            for text, before in zip(texts, reference, strict=True):
                pieces = _pieces(variant, text) if text.completion_mask.any() else []
                if pieces and variant == "decode":
                    own, replayed, mask = _decoded(model, text, before, decode_tokens)
                elif pieces:
                    own, replayed = _rescored(model, text, before, pieces)
                    mask = text.completion_mask.cpu()
                else:
                    tick()
                    continue
                check_finite([own, Scored(replayed, own.routes)])
                sums.add(before, own, replayed, mask)
                tick()
    except (RuntimeError, MemoryError, RoutingError) as error:
        raise CannotRun(first_line(error)) from error
    if not any(text.completion_mask.any() for text in texts):
        raise CannotRun("no token to measure")
    if sums.counts is None:
        why = "every batch is one sequence" if variant.startswith("batch") else "no padding would move"
        raise CannotRun(f"nothing to compare: {why}")
    return sums


def check_finite(scored: Iterable[Scored]) -> None:
    """Raise CannotRun if a log-probability is not finite, as counts would take its token for unchanged."""
    if not all(bool(torch.isfinite(one.logps).all()) for one in scored):
        raise CannotRun("log-probabilities are not all finite: an overflow in this dtype?")


def arithmetic_floor(
    model: nn.Module,
    texts: Sequence[TokenBatch],
    *,
    experts: Iterable[str] = EXPERTS,
    decode_tokens: int = 64,
) -> tuple[dict[str, dict[str, float | int]], dict[str, str]]:
    """Measure a model in all variants; return metrics (`GapSums.metrics`) by variant, and why others could not be run.

    Raises CannotRun if the log-probabilities of the reference scoring are not finite.

    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    >>> config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8)
    >>> real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    >>> text = TokenBatch(torch.arange(8).view(2, 4), real, real & (torch.arange(4) > 0))
    >>> found, left_out = arithmetic_floor(Qwen3MoeForCausalLM(config), [text])
    >>> found["repeat"]["gap_max"], found["decode"]["slots_changed"], "padding_left" in found
    (0.0, 0, True)
    """
    reference = [score_live(model, text) for text in texts]
    check_finite(reference)
    found, left_out = {}, {}
    for name in (*LAYOUTS, "decode", *experts_variants(model, experts)):
        try:
            found[name] = compare(model, texts, reference, name, decode_tokens=decode_tokens).metrics()
        except CannotRun as error:
            left_out[name] = str(error)
    return found, left_out


def experts_variants(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the variant names for all experts implementations of `names` but the model's own."""
    return [f"experts_{name}" for name in names if name != experts_implementation(model)]


def repadded(text: TokenBatch, side: str) -> TokenBatch:
    """Return the text with all padding on the `left` or the `right`; the width stays the same.

    >>> real = torch.tensor([[False, True, True]])
    >>> repadded(TokenBatch(torch.tensor([[0, 5, 6]]), real, real), "right").input_ids
    tensor([[5, 6, 0]])
    """
    real = text.attention_mask
    order = real.int().argsort(dim=1, stable=True, descending=side == "right")
    return text.each(lambda part: part.gather(1, order))


# -- one batch -----------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Rows start..stop of a text, laid out for one forward."""

    start: int
    stop: int
    text: TokenBatch


def _pieces(variant: str, text: TokenBatch) -> list[_Piece]:
    """Return the forwards of a variant; none if no padding moves ("padding_..."), or for one row ("batch_1...")."""
    size = len(text.input_ids)
    if variant.startswith("padding_"):
        moved = repadded(text, variant.removeprefix("padding_"))
        return [] if torch.equal(moved.attention_mask, text.attention_mask) else [_Piece(0, size, moved)]
    if variant.startswith("batch_1"):
        rows = text.pieces(1) if size > 1 else []
        if variant == "batch_1_unpadded":
            rows = [_without_padding(row) for row in rows]
        return [_Piece(i, i + 1, row) for i, row in enumerate(rows)]
    return [_Piece(0, size, text)]


def _without_padding(row: TokenBatch) -> TokenBatch:
    real = row.attention_mask[0]
    return row.each(lambda part: part[:, real]) if real.any() else row  # a row of padding alone stays as it is


def _rescored(
    model: nn.Module, text: TokenBatch, reference: Scored, pieces: Sequence[_Piece]
) -> tuple[Scored, Float[Tensor, "B T"]]:
    """Score the pieces live and under the reference's routes; return both in the layout of `text`."""
    logps, routes, forced = [], [], []
    for start, stop, piece in pieces:
        rows, before = text.rows(start, stop), reference.routes.rows(slice(start, stop))
        there, here = piece.attention_mask.cpu(), rows.attention_mask.cpu()
        moves = not torch.equal(there, here)  # if not, padding is replayed, too, and experts' row counts stay
        own, replayed = _live_and_replayed(model, piece, before.realign(here, there) if moves else before)
        logps.append(_moved(own.logps, piece, rows))
        forced.append(_moved(replayed, piece, rows))
        routes.append(own.routes.realign(there, here) if moves else own.routes)
    return Scored(torch.cat(logps), RoutedExperts.cat(routes)), torch.cat(forced)


def _live_and_replayed(
    model: nn.Module, text: TokenBatch, routes: RoutedExperts, score: Score = text_logps
) -> tuple[Scored, Float[Tensor, "B T"]]:
    """Score a text under live routing, and return its log-probabilities with `routes` forced, too.

    Replaying a model's own routes is bit-exact: if no route changed, the second forward is left out."""
    own = score_live(model, text, score)
    changed = bool(site_change(routes, own.routes)[text.attention_mask.cpu()].any())
    return own, score_replayed(model, text, routes, own.routes, score) if changed else own.logps


def _moved(logps: Float[Tensor, "b t"], piece: TokenBatch, rows: TokenBatch) -> Float[Tensor, "b T"]:
    """Move log-probabilities from a piece's layout to that of the text; measured tokens keep their order in a row."""
    found = logps.new_zeros(rows.input_ids.shape)
    found[rows.completion_mask.cpu()] = logps[piece.completion_mask.cpu()]
    return found


def _decoded(
    model: nn.Module, text: TokenBatch, reference: Scored, decode_tokens: int
) -> tuple[Scored, Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Do `_rescored` by decoding, and return the mask of the measured tokens as well.

    Decoded are the `decode_tokens` columns from the first one with a measured token on."""
    width = text.input_ids.shape[1]
    first = int(text.completion_mask.any(0).int().argmax())
    stop = min(width, first + decode_tokens)
    short = text.each(lambda part: part[:, :stop])
    before, score = reference.routes.columns(slice(stop)), partial(decoded_logps, prefill=first)
    own, replayed = _live_and_replayed(model, short, before, score)
    beyond = (0, width - stop)
    logps, replayed, mask = (F.pad(x, beyond) for x in (own.logps, replayed, short.completion_mask.cpu()))
    place = torch.arange(short.input_ids.numel(), device="cpu").view(short.input_ids.shape)
    return Scored(logps, own.routes.take(F.pad(place, beyond, value=-1))), replayed, mask


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate batches of different widths, padded on the right with 0 or False."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])
