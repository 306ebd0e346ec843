"""Test of whether a model scores responses that share a prompt as it does in rows of their own."""

import inspect
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.measure.logprobs import causal_lm, evaluating, token_logps
from moe_rl.measure.packed_rows import ATTENDING, drawn, nudged
from moe_rl.measure.shared_prompts import SharedPrompts, share_prompts
from moe_rl.routing import RoutedExperts, record_routes, replay_routes
from moe_rl.routing.calls import device_of

PROMPTS, RESPONSES = (4, 4, 3, 3), (3, 5, 4, 2)
"""Numbers of tokens of the four texts in the test: two prompts with two responses each."""
_PASSED: "weakref.WeakKeyDictionary[PreTrainedModel, str]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def check_shared_prompts(model: nn.Module) -> None:
    """Raise ValueError unless a model scores rows of several responses (`share_prompts`) rightly, as a test shows.

    The test takes a few tokens, once per model and attention. Do not call it inside a context that records or replays.

    Under the same routes the log-probabilities must be those of rows of their own, up to ten times the effect of one
    rounding of the embeddings plus 1e-5 nats, and those of a response must not depend on another response. Some models
    are refused by their configuration, as a few tokens would not show the error: attention other than "sdpa" or
    "eager", layers other than attention (`layer_types`), and sparse attention that chooses among all tokens of a row
    (`index_topk`). Limits on the length are checked in every batch (`too_long`).

    Raises:
        ValueError: the model cannot share prompts; the message says what was found and what to do.
    """
    lm = causal_lm(model)
    config = lm.config.get_text_config()
    attention = str(getattr(config, "_attn_implementation", None))

    def require(ok: bool, why: str) -> None:
        if not ok:
            raise ValueError(f"{type(lm).__name__} cannot share prompts: {why}. Train it without sharing")

    if _PASSED.get(lm) == attention:
        return
    require(
        attention in ("sdpa", "eager"), f"its attention is {attention}; set_attn_implementation('sdpa') takes a mask"
    )
    require("position_ids" in inspect.signature(type(lm).forward).parameters, "it takes no position_ids")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENDING))
    require(not others, f"layers of type {', '.join(others)} carry more than attention along a row")
    sparse = any(name.startswith("index_topk") and value for name, value in vars(config).items())
    require(not sparse, "its attention is sparse, and chooses among all tokens of a row")
    tokens = _texts(lm)
    with evaluating(model):
        routes, alone, nudged = _alone(model, lm, tokens)
        try:
            seen, again, disturbed = _shared(model, tokens, routes)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ValueError(f"{type(lm).__name__} cannot share prompts: {error}. Train it without sharing") from error
    rounding, far = float((alone - nudged).abs().max()), float((alone - seen).abs().max())
    moved, repeats = float((seen - disturbed)[[0, 2, 3]].abs().max()), float((seen - again).abs().max())
    require(
        far <= 10 * rounding + 1e-5,
        f"log-probabilities differ by {far:.2g} nats, of which rounding explains {rounding:.2g}",
    )
    require(moved <= 10 * repeats, f"a token of one response moved the log-probabilities of others by {moved:.2g} nats")
    _PASSED[lm] = attention


def _texts(lm: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, attention mask and completion mask of the four texts, padded on the right.

    Texts 0 and 1 have the same prompt, and texts 2 and 3."""
    V, longest = lm.config.get_text_config().vocab_size, max(map(sum, zip(PROMPTS, RESPONSES, strict=True)))
    ids, column = drawn(V, (len(PROMPTS), longest)), torch.arange(longest, device="cpu")
    prompts, responses = torch.tensor((PROMPTS, RESPONSES), device="cpu")[..., None]
    attended, prompt = column < prompts + responses, column < prompts
    ids[1::2][prompt[1::2]] = ids[::2][prompt[::2]]
    device = device_of(lm)
    return ids.to(device), attended.to(device), (attended & ~prompt).to(device)


def _logps_under(
    model: nn.Module, routes: RoutedExperts, tokens: Sequence[Tensor], shared: SharedPrompts | None = None
) -> Tensor:
    """Return the log-probabilities of the texts under `routes`, in rows of their own or as `shared`."""
    with replay_routes(model, routes if shared is None else shared.pack(routes), check_tokens=False):
        return token_logps(model, *tokens, shared=shared).logps


def _alone(
    model: nn.Module, lm: PreTrainedModel, tokens: tuple[Tensor, Tensor, Tensor]
) -> tuple[RoutedExperts, Tensor, Tensor]:
    """Score the texts in rows of their own: return routes, log-probabilities, and those `nudged`."""
    ids, attended, completion = tokens
    with record_routes(model) as recording:
        token_logps(model, *tokens)
    flat, prompt = torch.arange(ids.numel(), device=ids.device).view(ids.shape), attended & ~completion
    flat[1::2][prompt[1::2]] = flat[::2][prompt[::2]]
    routes = recording.routes.take(flat)  # the same routes for both copies of a prompt, whatever the rounding
    plain = _logps_under(model, routes, tokens)
    with nudged(lm):
        return routes, plain, _logps_under(model, routes, tokens)


def _shared(model: nn.Module, tokens: tuple[Tensor, Tensor, Tensor], routes: RoutedExperts) -> list[Tensor]:
    """Return the log-probabilities in one shared row: twice, and with another token in the second text's response."""
    ids, *masks = tokens
    other = ids.clone()
    other[1, PROMPTS[1]] = (ids[1, PROMPTS[1]] + 1) % int(ids.max() + 1)
    return [
        _logps_under(model, routes, (some, *masks), share_prompts(some, *masks, longest=ids.numel()))
        for some in (ids, ids, other)
    ]
