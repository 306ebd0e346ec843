"""Score one text with one model: its log-probabilities under live or forced routes, and the experts that it chose."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from moe_rl.measure.logprobs import causal_lm, evaluating, token_logps
from moe_rl.objectives.ratios import as_bool_mask
from moe_rl.routing import RoutedExperts, record_routes, replay_routes, site_change
from moe_rl.routing.calls import device_of


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tokens to score: any padding, `completion_mask` True on the tokens that are measured. Masks of 0 and 1, as
    tokenizers write them, become bool; other values are a ValueError."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Shaped[Tensor, "B T"]
    completion_mask: Shaped[Tensor, "B T"]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("attention_mask", "completion_mask"):
            object.__setattr__(self, name, as_bool_mask(getattr(self, name), name))

    def each(self, change: Callable[[Tensor], Tensor]) -> "TokenBatch":
        """The same change of its ids and masks."""
        masks = change(self.attention_mask), change(self.completion_mask)
        return TokenBatch(change(self.input_ids), *masks, self.temperature)

    def rows(self, start: int, stop: int) -> "TokenBatch":
        return self.each(lambda part: part[start:stop])


def check_measured(text: TokenBatch) -> None:
    """Raises ValueError where the first token of a sequence is to be measured."""
    first = text.attention_mask & (text.attention_mask.cumsum(1) == 1)
    if bool((first & text.completion_mask).any()):
        raise ValueError(
            "completion_mask: True on the first token of a sequence, which follows nothing and has no log-probability; "
            "leave it out"
        )


@dataclass(frozen=True, eq=False)
class Scored:
    """What one model says of a text when it routes for itself: `logps` in nats, and the routes. On the CPU."""

    logps: Float[Tensor, "B T"]
    routes: RoutedExperts


Score = Callable[[nn.Module, TokenBatch], Tensor]
"""Log-probabilities `[B,T]` of a text, in one forward or in several."""


def text_logps(model: nn.Module, text: TokenBatch) -> Float[Tensor, "B T"]:
    """`token_logps` of a text, on the CPU, float64."""
    device = device_of(causal_lm(model))
    masks = text.attention_mask.to(device), text.completion_mask.to(device)
    out = token_logps(model, text.input_ids.to(device), *masks, temperature=text.temperature)
    return out.logps.cpu().double()


@torch.no_grad()
def score_live(model: nn.Module, text: TokenBatch, score: Score = text_logps) -> Scored:
    """f(w, own routes), and the routes."""
    with evaluating(model), record_routes(model) as recording:
        logps = score(model, text)
    return Scored(logps, recording.routes.to("cpu"))


@torch.no_grad()
def score_replayed(
    model: nn.Module, text: TokenBatch, routes: RoutedExperts, own: RoutedExperts, score: Score = text_logps
) -> Float[Tensor, "B T"]:
    """f(w, other routes); `own` are those that the model takes by itself, for the order of unchanged slots."""
    with evaluating(model), replay_routes(model, in_order_of(own, routes)):
        return score(model, text)


def in_order_of(own: RoutedExperts, routes: RoutedExperts) -> RoutedExperts:
    """`routes`, with the slot order of `own` in every row whose set of experts is the same."""
    if set(routes.sites) != set(own.sites):
        return routes  # of another model: replay says what does not fit
    routes = routes.select(own.sites)
    if routes.shape != own.shape or routes.num_experts != own.num_experts:
        return routes
    changed = site_change(own, routes)
    ids = torch.where(changed[..., None], routes.ids, own.ids)
    return RoutedExperts(ids, routes.sites, routes.num_experts, tokens=routes.tokens, meta=routes.meta)
