"""Decomposition of a token's log-ratio into a weight, a routing and an interaction part.

The same tokens are scored under {old, new weights} x {old, new routes}. With f(w, e) the log-probability of a token
under weights w and routes e,

    log r       = f(new, new) - f(old, old)         the log-ratio of importance sampling
    weight      = f(new, old) - f(old, old)         new weights, old routes: the log-ratio under Routing Replay
    routing     = f(old, new) - f(old, old)         old weights, new routes
    interaction = log r - weight - routing          the part that neither change causes alone

This is the 2x2 factorial contrast with the old policy as its origin: both effects are measured from one point, and
neither change goes first. In an *ordering* one goes first, and the two orderings disagree by exactly the interaction:

    weights first:  log r = weight + (routing + interaction),  the last term f(new, new) - f(new, old) being what
                            replay removes under the new weights (`Decomposition.replay_effect`)
    routes first:   log r = routing + (weight + interaction)

Their mean, the Shapley value, gives half of the interaction to each: `routing + interaction / 2` and
`weight + interaction / 2`.

No publication on RL has this decomposition; R2 and R3 (arXiv 2507.18071 section 5.3, arXiv 2510.11370) remove the
routing part without measuring it.

Exactness. A row of routes whose *set* of experts did not change keeps the slot order of the model that is run. A token
without a changed route in its context therefore gets no routing part and no interaction from another summation order.
The remaining error is rounding of the experts' products, which may depend on how many rows an expert has: none was seen
with AVX512 kernels, 1e-6 nats with AVX2. Equal weights give exactly 0 in every part.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_rl.measure.logprobs import evaluating
from moe_rl.measure.moments import Shares, SiteShares
from moe_rl.measure.scoring import (
    Scored,
    TokenBatch,
    check_measured,
    in_order_of,
    score_live,
    score_replayed,
    text_logps,
)
from moe_rl.measure.weights import temporary_weights
from moe_rl.routing import RoutedExperts, replay_routes, site_change


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The four log-probabilities of every token, and the parts of its log-ratio. float64, CPU, detached.

    Attributes:
        old: f(old weights, old routes), nats; like all log-probabilities here, 0 outside `mask`.
        new_weights: f(new weights, old routes).
        new_routes: f(old weights, new routes).
        new: f(new weights, new routes).
        mask: True on the tokens that are measured.
        old_routes, new_routes_taken: the routes that each model chose live, for all tokens.
        site_alone: per routing site l, f(new weights; new routes at l, old routes elsewhere) - f(new, old): what is
            left of the replay effect when all sites but l are replayed. None without `per_site`.
        site_last: per routing site l, f(new, new) - f(new weights; old routes at l, new routes elsewhere): what
            replaying site l alone removes. All other sites are held at their recorded routes, so that only site l
            differs. With two sites, `site_alone[0] + site_last[1]` is the whole effect; in general neither sums to it.
    """

    old: Float[Tensor, "B T"]
    new_weights: Float[Tensor, "B T"]
    new_routes: Float[Tensor, "B T"]
    new: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    old_routes: RoutedExperts
    new_routes_taken: RoutedExperts
    site_alone: Float[Tensor, "L B T"] | None = None
    site_last: Float[Tensor, "L B T"] | None = None

    @property
    def log_ratio(self) -> Float[Tensor, "B T"]:
        """f(new, new) - f(old, old), nats: the logarithm of GRPO's token ratio."""
        return self.new - self.old

    @property
    def weight(self) -> Float[Tensor, "B T"]:
        """f(new weights, old routes) - f(old, old), nats: the log-ratio under Routing Replay."""
        return self.new_weights - self.old

    @property
    def routing(self) -> Float[Tensor, "B T"]:
        """f(old weights, new routes) - f(old, old), nats: the effect of the new routes alone."""
        return self.new_routes - self.old

    @property
    def interaction(self) -> Float[Tensor, "B T"]:
        """The rest of the log-ratio, f(new, new) - f(new, old) - f(old, new) + f(old, old), nats."""
        return (self.new - self.new_weights) - (self.new_routes - self.old)

    @property
    def replay_effect(self) -> Float[Tensor, "B T"]:
        """f(new, new) - f(new, old) = routing + interaction, nats: what replay removes under the new weights."""
        return self.new - self.new_weights

    def sequence(self, part: Float[Tensor, "*parts B T"]) -> Float[Tensor, "*parts B"]:
        """Return the mean of a part over each sequence's measured tokens, as in GSPO's ratio (arXiv 2507.18071, eq. 7);
        0 for a sequence without measured tokens."""
        return (part * self.mask).sum(-1) / self.mask.sum(-1).clamp(min=1)

    def shares(self) -> Shares:
        """Return variances and covariances of the three parts, over tokens and over sequences; batches add with `+`."""
        return Shares.of(torch.stack([self.weight, self.routing, self.interaction], -1), self.mask)

    def site_shares(self) -> SiteShares | None:
        """Return the variances of the sites' effects and their shares of the replay effect; None without `per_site`."""
        if self.site_alone is None or self.site_last is None:
            return None
        return SiteShares.of(self.old_routes.sites, self.site_alone, self.site_last, self.replay_effect, self.mask)


def decompose(
    old_model: nn.Module,
    new_model: nn.Module,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    *,
    temperature: float = 1.0,
    per_site: bool = False,
    batch_size: int | None = None,
) -> Decomposition:
    """Split the log-ratio of two checkpoints of one architecture on any text; the module's docstring defines the parts.

    Takes four forwards, and with `per_site` up to two more for every routing site at which a route changed. Both models
    are in eval mode meanwhile; no gradient is computed. They may be on different devices.

    Args:
        attention_mask: true on tokens, false on padding, on either side.
        completion_mask: true on the tokens to measure, never on the first token of a sequence.
        temperature: of the distribution that is scored.
        per_site: also replay all sites but one, and one site alone (`site_alone`, `site_last`).
        batch_size: sequences per forward; None takes all at once. All forwards use the same size, so that a model
            whose numbers depend on the batch's shape is compared under one shape.

    Raises:
        RoutingError: routing sites, expert counts or experts per token differ.
        UnsupportedModelError: not a Mixture-of-Experts whose routing can be recorded.
        ValueError: as `token_logps`; the first token of a sequence is to be measured; there is no token at all.
    """
    text = TokenBatch(input_ids, attention_mask, completion_mask, temperature)
    if not input_ids.numel():
        raise ValueError(f"input_ids: no tokens to score, got shape {tuple(input_ids.shape)}")
    check_measured(text)
    parts = []
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size counts sequences and must be at least 1, got {batch_size}")
    for piece in text.pieces(batch_size or max(len(text.input_ids), 1)):
        old, new = score_live(old_model, piece), score_live(new_model, piece)
        parts.append(decompose_scored(old_model, new_model, piece, old, new, per_site=per_site))
    return _join(parts)


def decompose_scored(
    old_model: nn.Module, new_model: nn.Module, text: TokenBatch, old: Scored, new: Scored, *, per_site: bool = False
) -> Decomposition:
    """Do `decompose` for a text that `score_live` has already scored with both models (`old`, `new`)."""
    new_weights = score_replayed(new_model, text, old.routes, new.routes)
    new_routes = score_replayed(old_model, text, new.routes, old.routes)
    sites = score_sites(new_model, text, old.routes, new, new_weights) if per_site else None
    return combine(text, old, new, new_weights, new_routes, sites)


def decompose_update(
    model: nn.Module, old_weights: dict[str, Tensor], text: TokenBatch, old: Scored, *, per_site: bool = False
) -> Decomposition:
    """Do `decompose` with one model that holds the new weights, and a copy of the old weights.

    Args:
        model: holds the new weights, before the call and after it.
        old_weights: from `copy_weights(model)`, taken before the update.
        old: `score_live` of the old weights on the same text, computed once for all updates.
    """
    new = score_live(model, text)
    new_weights = score_replayed(model, text, old.routes, new.routes)
    sites = score_sites(model, text, old.routes, new, new_weights) if per_site else None
    with temporary_weights(model, old_weights):
        new_routes = score_replayed(model, text, new.routes, old.routes)
    return combine(text, old, new, new_weights, new_routes, sites)


# -- single passes, for callers that hold one model at a time; also `score_live`, `score_replayed` ---------------------


@torch.no_grad()
def score_sites(
    model: nn.Module, text: TokenBatch, old_routes: RoutedExperts, new: Scored, replayed: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "L B T"], Float[Tensor, "L B T"]]:
    """Return f(new; new routes at site l, old elsewhere) and f(new; old routes at l, new elsewhere), for every site l.

    `replayed` is f(new; old routes). A site at which no token changed needs no forward.
    """
    kept = in_order_of(new.routes, old_routes)
    changed = site_change(kept, new.routes).flatten(0, 1).any(0).tolist()
    alone: list[Tensor] = []
    others: list[Tensor] = []
    with evaluating(model):
        for site, differs in enumerate(changed):
            for outer, inner, found, without in (
                (kept, new.routes, alone, replayed),
                (new.routes, kept, others, new.logps),
            ):
                if not differs:
                    found.append(without)
                    continue
                with replay_routes(model, outer), replay_routes(model, inner, sites=site):
                    found.append(text_logps(model, text))
    return torch.stack(alone), torch.stack(others)


def combine(
    text: TokenBatch,
    old: Scored,
    new: Scored,
    new_weights: Float[Tensor, "B T"],
    new_routes: Float[Tensor, "B T"],
    sites: tuple[Float[Tensor, "L B T"], Float[Tensor, "L B T"]] | None = None,
) -> Decomposition:
    """Return the results of the passes as one Decomposition."""
    alone, others = (None, None) if sites is None else sites
    return Decomposition(
        old=old.logps,
        new_weights=new_weights,
        new_routes=new_routes,
        new=new.logps,
        mask=text.completion_mask.cpu(),
        old_routes=old.routes,
        new_routes_taken=new.routes,
        site_alone=None if alone is None else alone - new_weights,
        site_last=None if others is None else new.logps - others,
    )


def _join(parts: list[Decomposition]) -> Decomposition:
    def cat(values: list[Any]) -> Any:
        if values[0] is None:
            return None
        return RoutedExperts.cat(values) if isinstance(values[0], RoutedExperts) else torch.cat(values, -2)

    return Decomposition(**{name: cat([vars(part)[name] for part in parts]) for name in vars(parts[0])})
