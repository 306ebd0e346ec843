"""Whether a model gives responses that share a prompt what it gives them in rows of their own."""

import inspect
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.measure.logprobs import causal_lm, evaluating, token_logps
from moe_rl.measure.shared_prompts import SharedPrompts, share_prompts
from moe_rl.routing import RoutedExperts, record_routes, replay_routes

PROMPTS, RESPONSES = (4, 4, 3, 3), (3, 5, 4, 2)
"""Tokens of the texts that a model is tried out with: two prompts of two responses each."""
ATTENTION = ("sdpa", "eager")
_PASSED: "weakref.WeakKeyDictionary[PreTrainedModel, str]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def check_shared_prompts(model: nn.Module, longest: int = 0) -> None:
    """Try a model out on a few tokens, once, before rows of several responses are used (`share_prompts`).

    Under the same routes it must give the log-probabilities of rows of their own, up to rounding (ten times what padding
    changes, and 1e-5 nats, or 4 epsilon of a dtype of 16 bits), and those of a response must not depend on another one.
    Not inside a context that records or replays.

    Args:
        longest: tokens of the longest sequence. A window of attention must not be shorter: the rows' mask has none.

    Raises:
        ValueError: it does not, with what was found and what to do.
    """
    lm = causal_lm(model)
    config = lm.config.get_text_config()
    own, attention = type(lm).__name__, str(getattr(config, "_attn_implementation", None))

    def refuse(why: str) -> None:
        raise ValueError(f"{own} cannot share prompts between responses: {why}. Train it without share_prompts")

    if attention not in ATTENTION:
        refuse(f"its attention is {attention}; model.set_attn_implementation('sdpa') takes such a mask")
    if "position_ids" not in inspect.signature(type(lm).forward).parameters:
        refuse("it takes no position_ids")
    if any(name.startswith("index_topk") and value for name, value in vars(config).items()):
        refuse("its attention is sparse, and chooses among all tokens of a row")
    window = _window(config)
    if window is not None and window < longest:
        refuse(f"attention has a window of {window} tokens, and a sequence has {longest}")
    if _PASSED.get(lm) == attention:
        return
    tokens = _texts(lm)
    with evaluating(model):
        try:
            apart, seen, again, disturbed = _tried(model, tokens)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            refuse(f"it does not run with such rows ({error})")
    shapes = float((apart[0] - apart[1]).abs().max())
    far, repeats = float((apart[0] - seen).abs().max()), float((seen - again).abs().max())
    if not far <= 10 * shapes + max(1e-5, 4 * torch.finfo(lm.dtype).eps):
        refuse(f"log-probabilities differ by {far:.2g} nats, where doing without padding changes {shapes:.2g}")
    moved = float((seen - disturbed)[[0, 2, 3]].abs().max())
    if not moved <= 10 * repeats:
        refuse(f"a token of one response moved the log-probabilities of others by {moved:.2g} nats")
    _PASSED[lm] = attention


def _window(config: Any) -> int | None:
    """Tokens that some layer attends to, where that is fewer than all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((window for window in windows if window), default=None)


def _texts(lm: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, attention and completion mask of the texts: prompts left-padded, the same in a text and the next one."""
    P, R, V = max(PROMPTS), max(RESPONSES), lm.config.get_text_config().vocab_size
    ids = torch.randint(V, (len(PROMPTS), P + R), generator=torch.Generator().manual_seed(0))
    ids[1::2, :P] = ids[::2, :P]
    column, first, last = torch.arange(P + R), P - torch.tensor(PROMPTS), P + torch.tensor(RESPONSES)
    attended = (column >= first[:, None]) & (column < last[:, None])
    device = cast(Tensor, lm.get_input_embeddings().weight).device
    return ids.to(device), attended.to(device), (attended & (column >= P)).to(device)


def _tried(
    model: nn.Module, tokens: tuple[Tensor, Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """Log-probabilities under the same routes: of the texts together, and each by itself without padding; of the rows
    that share, twice; and of these with another token in the second text."""
    ids, attended, completion = tokens
    with record_routes(model) as recording:
        token_logps(model, *tokens)
    flat = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    flat[1::2, : max(PROMPTS)] = flat[::2, : max(PROMPTS)]
    routes = recording.routes.take(flat)  # one prompt, one route, whatever rounding says

    def under(routes: RoutedExperts, tokens: tuple[Tensor, ...], shared: SharedPrompts | None = None) -> Tensor:
        with replay_routes(model, routes if shared is None else shared.pack(routes), check_tokens=False):
            return token_logps(model, *tokens, shared=shared).logps

    alone = torch.zeros(ids.shape, device=ids.device)
    for row in range(len(ids)):
        used = attended[row].nonzero()
        columns = slice(int(used[0]), int(used[-1]) + 1)  # no padding, so that attention may need no mask
        part = tuple(some[row : row + 1, columns] for some in tokens)
        alone[row, columns] = under(routes.rows([row]).columns(columns), part)[0].to(alone)
    other = ids.clone()
    other[1, max(PROMPTS)] = (ids[1, max(PROMPTS)] + 1) % int(ids.max() + 1)
    shared, disturbed = (share_prompts(some, attended, completion, longest=ids.numel()) for some in (ids, other))
    return (
        (under(routes, tokens), alone),
        under(routes, tokens, shared),
        under(routes, tokens, shared),
        under(routes, (other, attended, completion), disturbed),
    )
