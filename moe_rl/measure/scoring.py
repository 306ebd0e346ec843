"""Scoring of one text with one model: log-probabilities under live or forced routes, and the chosen experts.

A text is scored in one forward or token by token with a KV cache."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from moe_rl.measure.head import LogitMap, head_logps
from moe_rl.measure.logprobs import causal_lm, evaluating, head_treatment, token_logps
from moe_rl.objectives.ratios import as_bool_mask, check_shapes
from moe_rl.routing import RoutedExperts, record_routes, replay_routes, site_change
from moe_rl.routing.calls import cache_left, cache_name, device_of
from moe_rl.routing.packing import words


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tokens to score, padded on any side, with `completion_mask` True on the tokens that are measured.

    Masks of 0 and 1, as tokenizers write them, become bool; other values and other shapes raise ValueError."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Shaped[Tensor, "B T"]
    completion_mask: Shaped[Tensor, "B T"]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        masks = {"attention_mask": self.attention_mask, "completion_mask": self.completion_mask}
        check_shapes(self.input_ids, masks, "input_ids")
        for name, mask in masks.items():
            object.__setattr__(self, name, as_bool_mask(mask, name))

    def each(self, change: Callable[[Tensor], Tensor]) -> "TokenBatch":
        """Return the batch with `change` applied to its ids and to both masks."""
        masks = change(self.attention_mask), change(self.completion_mask)
        return TokenBatch(change(self.input_ids), *masks, self.temperature)

    def rows(self, start: int, stop: int) -> "TokenBatch":
        """Return the sequences `start` to `stop` - 1."""
        return self.each(lambda part: part[start:stop])

    def pieces(self, size: int) -> list["TokenBatch"]:
        """Return the batch in parts of `size` sequences; the last part may have fewer."""
        return [self.rows(start, start + size) for start in range(0, len(self.input_ids), size)]


def check_measured(text: TokenBatch) -> None:
    """Raise ValueError if the first token of a sequence is to be measured."""
    first = text.attention_mask & (text.attention_mask.cumsum(1) == 1)
    if bool((first & text.completion_mask).any()):
        raise ValueError(
            "completion_mask: True on the first token of a sequence, which follows nothing and has no log-probability; "
            "leave it out"
        )


@dataclass(frozen=True, eq=False)
class Scored:
    """Log-probabilities (`logps`, nats) and routes of a text under one model's live routing; on the CPU."""

    logps: Float[Tensor, "B T"]
    routes: RoutedExperts


Score = Callable[[nn.Module, TokenBatch], Tensor]
"""Type of functions that return a text's log-probabilities `[B,T]`, from one forward or several."""


def text_logps(model: nn.Module, text: TokenBatch) -> Float[Tensor, "B T"]:
    """Return `token_logps` of a text, on the CPU, float64."""
    device = device_of(causal_lm(model))
    masks = text.attention_mask.to(device), text.completion_mask.to(device)
    out = token_logps(model, text.input_ids.to(device), *masks, temperature=text.temperature)
    return out.logps.cpu().double()


@torch.no_grad()
def score_live(model: nn.Module, text: TokenBatch, score: Score = text_logps) -> Scored:
    """Score a text under the model's live routing; return its log-probabilities and routes."""
    with evaluating(model), record_routes(model) as recording:
        logps = score(model, text)
    return Scored(logps, recording.routes.to("cpu"))


@torch.no_grad()
def score_replayed(
    model: nn.Module, text: TokenBatch, routes: RoutedExperts, own: RoutedExperts, score: Score = text_logps
) -> Float[Tensor, "B T"]:
    """Return a text's log-probabilities with `routes` forced on the model.

    `own`: the model's live routes, which give the slot order of rows whose set of experts is the same."""
    with evaluating(model), replay_routes(model, in_order_of(own, routes)):
        return score(model, text)


def in_order_of(own: RoutedExperts, routes: RoutedExperts) -> RoutedExperts:
    """Return `routes`, with the slot order of `own` in every row whose set of experts is the same."""
    if set(routes.sites) != set(own.sites):
        return routes  # of another model: replay then raises an error that says what does not fit
    routes = routes.select(own.sites)
    if routes.shape != own.shape or routes.num_experts != own.num_experts:
        return routes
    changed = site_change(own, routes) | routes.live | own.live  # a row without a route has no set
    packed = torch.where(changed[..., None], words(routes.packed), words(own.packed))
    return routes._with(packed.view(routes.packed.dtype), routes._tokens)  # the tokens with what their mask hid


# -- scoring as a sampler computes: the prompt in one forward, then token by token with a KV cache ---------------------


@torch.no_grad()
def decoded_logps(model: nn.Module, text: TokenBatch, prefill: int) -> Float[Tensor, "B T"]:
    """Return log-probabilities as `text_logps`, with a KV cache: `prefill` columns first, then one column a forward.

    A token is scored by the call on the column before it; the first token after the prompt by the prefill. The head
    computes as in `token_logps`, so that only the cache and the shapes differ.

    Raises:
        ValueError: `prefill` is no number of columns, or a token within it is measured.
        RuntimeError: the model keeps no cache; or it keeps a state (linear attention, convolution, state space) and a
            sequence begins so far behind the prefill that its padding would change the state.
    """
    if not 1 <= prefill <= text.input_ids.shape[1]:
        raise ValueError(f"prefill counts columns, between 1 and {text.input_ids.shape[1]}, got {prefill}")
    if bool(text.completion_mask[:, :prefill].any()):
        raise ValueError(f"completion_mask is True within the {prefill} columns of the prefill, which are not decoded")
    lm = causal_lm(model)
    accepts = set(inspect.signature(type(lm).forward).parameters)
    device = device_of(lm)
    ids, mask = text.input_ids.to(device), text.attention_mask.to(device).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    late = text.completion_mask.any(1) & ~text.attention_mask[:, : prefill + 1].any(1)
    treatment = head_treatment(model, lm)
    states: list[Tensor] = []
    head = lm.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    logps = torch.zeros(ids.shape, dtype=torch.float64, device="cpu")
    cache, start, width = None, 0, ids.shape[1]
    try:
        for stop in range(prefill, width + 1):
            inputs: dict[str, Any] = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
            inputs |= {"use_cache": True, "return_dict": True}
            inputs |= {} if cache is None else {cache_name(accepts): cache}
            inputs |= {"position_ids": positions[:, start:stop]} if "position_ids" in accepts else {}
            inputs |= {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}
            out = model(**inputs)
            cache, start = cache_left(out), stop
            if cache is None:
                raise RuntimeError(f"{type(lm).__name__} returned no KV cache: it cannot decode token by token")
            if stop == prefill and bool(late.any()) and _keeps_state(cache):
                raise RuntimeError(
                    f"{type(lm).__name__} carries a state along a row: sequence {int(late.int().argmax())} begins "
                    f"behind the {prefill} columns of the prefill, and its padding there would change it. Pad on the "
                    "right"
                )
            if stop < width:
                said = states[-1][:, -1] if isinstance(treatment, LogitMap) else out.logits[:, -1]
                logps[:, stop] = _logps_of(said, ids[:, stop], head, treatment, text.temperature)
            states.clear()
    finally:
        hook.remove()
    return torch.where(text.completion_mask.cpu(), logps, 0.0)


def _keeps_state(cache: Any) -> bool:
    """Return whether a cache holds a recurrent state: more than keys and values of tokens, which a mask can hide."""
    kinds = [base.__name__ for layer in getattr(cache, "layers", ()) for base in type(layer).__mro__]
    return hasattr(cache, "linear_cache") or any("LinearAttention" in kind for kind in kinds)  # linear_cache: MiniMax


def _logps_of(said: Tensor, targets: Tensor, head: Any, treatment: LogitMap | str, temperature: float) -> Tensor:
    """Return the log-probabilities of `targets` from the head's input or, for a special head, from logits.

    The result is float64 on the CPU, as Apple's GPU has no float64."""
    if isinstance(treatment, LogitMap):
        logps, _ = head_logps(said, head.weight, targets, bias=head.bias, logit_map=treatment, temperature=temperature)
        return logps.cpu().double()
    z = said.to(torch.promote_types(said.dtype, torch.float32)) / temperature
    return z.log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu().double()
