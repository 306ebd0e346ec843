"""Token log-probabilities and entropies of any transformers causal LM, computed without holding all of its logits.

The logits are the memory peak of training: 8k tokens x 151,936 entries are 5 GB in fp32, and as much again
for their gradient. Here the model runs its own forward, wrappers and hooks included, but a stand-in replaces the
`forward` of the output head meanwhile: it takes the hidden states that predict completion tokens, reduces them
to one number per token chunk by chunk (`moe_rl.measure.head`), and returns empty logits to the model.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl.measure.head import LogitMap, threaded_head_logps
from moe_rl.measure.other_heads import PASSING_ON, ROUTING_HOOKS, hindrance, logit_map_of, warn_once, whole_logits_logps
from moe_rl.measure.packed_rows import refuse_leak
from moe_rl.measure.shared_prompts import SharedPrompts, packed
from moe_rl.objectives.ratios import as_bool_mask, check_shapes
from moe_rl.routing import UnsupportedModelError, find_sites


@dataclass(frozen=True)
class TokenLogps:
    """A model's results for the completion tokens; entry t is about token t given the tokens before it.

    Attributes:
        logps: nats, 0 outside the completion; fp32, or float64 for a float64 model. Differentiable.
        entropy: nats, of the distribution that token t is drawn from; 0 outside the completion.
            Differentiable, so that an entropy bonus works. None without `entropy=True`.
        aux_loss: the model's own load-balancing loss over all tokens that are not padding, without its
            coefficient. Differentiable. None without `aux_loss=True`.
        router_logits: one tensor per routing site, as the model returned them, in the order of `find_sites`; None
            without `router_logits=True` or `aux_loss=True`.
    """

    logps: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"] | None = None
    aux_loss: Float[Tensor, ""] | None = None
    router_logits: tuple[Tensor, ...] | None = None


def token_logps(
    model: nn.Module,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    aux_loss: bool = False,
    router_logits: bool = False,
    chunk_size: int | None = None,
    position_ids: Int[Tensor, "B T"] | None = None,
    shared: SharedPrompts | None = None,
) -> TokenLogps:
    """Return the log-probability of every completion token, `log softmax(logits[t-1] / temperature)[token t]`.

    `model` is called once, as the caller holds it (bare, or in DistributedDataParallel, FSDP2, PEFT,
    accelerate), so gradient synchronisation, sharding and routing hooks work as in any other call. For some models
    `model(...).logits` is used instead: the same numbers at full memory, with one warning. These are models with a head
    that is not a plain `nn.Linear`, models that change its output by more than a scale and a soft cap (also in a
    forward hook, a replaced `forward` or a wrapper: `other_heads.hindrance`), and models compiled as a whole. (To save
    memory in a compiled model, compile its backbone or its layers.) A scale and a soft cap are applied in fp32; in 16
    bits the model's own logits are rounded once more.

    Args:
        attention_mask: true on tokens, false on padding, on either side.
        completion_mask: true on the tokens to score. No token precedes a row's first one, so that its entry is 0.
        temperature: of the distribution that is scored, as in sampling.
        entropy: also return the entropy of each completion token's distribution.
        aux_loss: also return the model's load-balancing loss. It counts the experts that the router logits favour,
            even if a replay made the model use others.
        router_logits: also return the router logits, of all tokens.
        chunk_size: completion tokens whose logits are held at once; default as in `head_logps`.
        position_ids: default: the number of tokens before, padding not counted. A row may hold several sequences (see
            `packed`); the first such call tests whether the model keeps them apart.
        shared: this batch as rows that share prompts (`share_prompts`), with which the model is then called. Call
            `check_shared_prompts` first: it tests whether the model computes such rows rightly.

    Raises:
        ValueError: `input_ids` is not [B,T] or is empty; a mask of another shape, or of other values than 0 and 1; a
            completion token lies on padding, or right behind padding within its sequence; several sequences in a row,
            in a model that does not keep them apart; temperature or chunk size is not positive; the model has no
            load-balancing loss; `shared` is of another batch, is combined with `aux_loss`, `router_logits` or
            `position_ids`, or has sequences or rows too long for the model to attend as its mask says.
        TypeError: `model` holds no transformers model with an output head.
        RuntimeError: another thread is in `token_logps` of this model; the model does not call its output head exactly
            once in a forward, or calls it with other states than one per token (prompt tuning).

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=7))
    >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # every token equally likely
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> out = token_logps(model, ids, torch.ones_like(ids), torch.tensor([[0, 0, 1]]))
    >>> out.logps.detach()  # -log 7
    tensor([[ 0.0000,  0.0000, -1.9459]])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}: greedy choice has no log-probability")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size counts tokens and must be at least 1, got {chunk_size}")
    lm = causal_lm(model)
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids: expected tokens [B,T], got shape {tuple(input_ids.shape)}")
    B, T = input_ids.shape
    check_shapes(input_ids, {"attention_mask": attention_mask, "completion_mask": completion_mask}, "input_ids")
    attended = as_bool_mask(attention_mask, "attention_mask")
    completion = as_bool_mask(completion_mask, "completion_mask")
    gap = F.pad(~attended[:, :-1] & (attended.cumsum(1)[:, :-1] > 0), (1, 0))  # right behind inner padding
    if (wrong := completion & (~attended | gap)).any():
        row, column = wrong.nonzero()[0].tolist()
        if attended[row, column]:
            raise ValueError(
                f"completion_mask is true right behind padding within a sequence (first at row {row}, position "
                f"{column}); padding must stand at the ends of a row. Prompts that are padded on the right, with "
                "responses behind? Pad them on the left"
            )
        raise ValueError(
            f"completion_mask is true on padding (first at row {row}, position {column}); it must lie within "
            "attention_mask. Was one of them built for the other padding side?"
        )
    first = None if position_ids is None else packed(position_ids, attended)
    if first is not None:
        refuse_leak(model, lm, evaluating(model), single=B == 1)
    follows = attended[:, :-1] if first is None else ~first[:, 1:]
    # Flat positions in [B * T] of the tokens that are predicted; the hidden state one position earlier predicts each.
    token = F.pad(completion[:, 1:] & follows, (1, 0)).flatten().nonzero().squeeze(1)
    targets, predicting = input_ids.flatten()[token], token - 1
    if shared is not None:
        if aux_loss or router_logits or position_ids is not None:
            raise ValueError("rows that share prompts have no aux_loss, router_logits or position_ids of their own")
        inputs: dict[str, Any] = shared.inputs(lm)
        predicting = shared.places(input_ids, attended, predicting)
    else:
        inputs = {"input_ids": input_ids, "attention_mask": attended.long() if first is None else None}
        if position_ids is None and "position_ids" in inspect.signature(type(lm).forward).parameters:
            position_ids = (attended.long().cumsum(1) - 1).clamp(min=0)
        inputs |= {} if position_ids is None else {"position_ids": position_ids}
    inputs |= {"output_router_logits": True} if aux_loss or router_logits else {}
    inputs |= {"use_cache": False, "return_dict": True}

    treatment = head_treatment(model, lm)
    watched = partial(_order_of_routers, lm) if aux_loss | router_logits and lm not in _ROUTER_ORDER else nullcontext
    if isinstance(treatment, LogitMap):

        def reduce(states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
            return threaded_head_logps(states, weight, targets, bias, treatment, temperature, entropy, chunk_size)

        with watched():
            outputs, logps, entropies = _through_head(model, lm.get_output_embeddings(), inputs, predicting, reduce)
    else:
        warn_once(f"{type(lm).__name__}: {treatment}; its log-probabilities are taken from whole logits")
        with watched():
            outputs, logps, entropies = whole_logits_logps(model, lm, inputs, predicting, targets, temperature, entropy)

    if aux_loss and not isinstance(outputs.get("aux_loss"), Tensor):
        raise ValueError(f"{type(lm).__name__} returned no aux_loss: this family has no load-balancing loss")

    def aligned(values: Tensor) -> Tensor:
        return values.new_zeros(B * T).scatter(0, token, values).view(B, T)

    found = outputs.router_logits if aux_loss or router_logits else None
    order = _ROUTER_ORDER.get(lm, [])
    if found is not None and len(order) == len(found):
        found = tuple(logits for _, logits in sorted(zip(order, found, strict=True), key=lambda pair: pair[0]))
    return TokenLogps(
        logps=aligned(logps),
        entropy=None if entropies is None else aligned(entropies),
        aux_loss=outputs.aux_loss if aux_loss else None,
        router_logits=found,
    )


_ROUTER_ORDER: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
"""Model -> its routing sites in the order of running, which is that of the router logits that it returns. It is not
always that of the sites: JetMoE holds its MLP before the attention that runs first."""


@contextmanager
def _order_of_routers(lm: PreTrainedModel) -> Iterator[None]:
    """Context manager: keep in `_ROUTER_ORDER` the order in which the routing sites run in one forward."""
    ran: list[int] = []
    with ExitStack() as stack:
        with suppress(UnsupportedModelError):  # a model whose routers are unknown keeps its own order
            for index, site in enumerate(find_sites(lm)):
                for module in site.modules:
                    handle = module.register_forward_hook(lambda *_, index=index: ran.append(index))
                    stack.callback(handle.remove)
        yield
    _ROUTER_ORDER[lm] = ran


def _through_head(
    model: nn.Module,
    head: nn.Linear,
    inputs: dict[str, Any],
    predicting: Tensor,
    reduce: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor]],
) -> tuple[Any, Tensor, Tensor | None]:
    """Call the model with a stand-in for its head, which reduces the hidden states at `predicting`.

    Return the model's outputs, the log-probabilities and the entropies. The stand-in reads the weight within the head's
    call, where FSDP2 has just gathered it whole."""
    B, T = inputs["input_ids"].shape
    results: list[tuple[Tensor, Tensor | None]] = []
    caller = threading.get_ident()

    def reduced(hidden: Tensor) -> Tensor:
        if threading.get_ident() != caller:  # another forward of this model
            return F.linear(hidden, head.weight, head.bias)
        if hidden.shape[:2] != (B, T):
            raise RuntimeError(
                f"the output head received states of shape {tuple(hidden.shape)} for {B} x {T} tokens; "
                "expected one state per token (prompt tuning adds virtual ones, which is not supported)"
            )
        states = hidden.flatten(0, 1).index_select(0, predicting)
        logps, entropies, thread = reduce(states, head.weight, head.bias)
        results.append((logps, entropies))
        return thread.view(B, 0, len(head.weight)).clone()  # FSDP2 warns of outputs that are views

    stand_in = _StandIn(reduced)
    if vars(head).setdefault("forward", stand_in) is not stand_in:  # atomic, in case of other threads
        raise RuntimeError(_BUSY)
    try:  # the hooks of the head run as in any call
        outputs = model(**inputs)
    finally:
        del head.forward
    if len(results) != 1:
        raise RuntimeError(
            f"{type(model).__name__} called its output head {len(results)} times in one forward, not once"
        )
    logps, entropies = results[0]
    # The empty logits left the model as its output, through every wrapper. Adding their sum, 0, makes the
    # results depend on that output: a wrapper's work when backward reaches the output (FSDP2 gathers the head
    # again) is then done before the head's own backward.
    zero = outputs.logits.sum()
    return outputs, logps + zero, None if entropies is None else entropies + zero


class _StandIn(partial[Tensor]):
    """The function that temporarily replaces a head's `forward`; a type of its own, to be recognised."""


_BUSY = (
    "token_logps of this model is under way already, in another thread or around this call, and stands in for its "
    "output head: call it once at a time, or give each thread a copy of the model"
)


def head_treatment(model: nn.Module, lm: PreTrainedModel) -> LogitMap | str:
    """Return how the model maps its head's output to logits or, if no stand-in is possible for the head, why not."""
    head = lm.get_output_embeddings()
    if isinstance(vars(head).get("forward"), _StandIn):
        raise RuntimeError(_BUSY)
    around = (*takewhile(lambda module: module is not lm, model.modules()), lm, head)
    # The answer is kept for each model, and found again if anything has changed that it may depend on.
    seen = [head.weight.shape, *map(_settings, (lm.config, lm.config.get_text_config())), *map(_overrides, around)]
    tried = _TRIED.get(model)
    if tried is None or tried[0] != seen:
        found = (
            hindrance(model, lm)
            or logit_map_of(lm)
            or "it treats its head's output to more than a scale and a soft cap"
        )
        tried = _TRIED[model] = (seen, found)
    return tried[1]


_TRIED: "weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], LogitMap | str]]" = weakref.WeakKeyDictionary()


def _overrides(module: nn.Module) -> list[Any]:
    """Return everything about a module that may change its output, to see later whether any of it was replaced.

    Functions are held by weak references, as they may hold the module."""
    values = [vars(module).get("forward"), *module._forward_hooks.values()]
    held = [weakref.ref(value) for value in values if value is not None and value.__module__ != ROUTING_HOOKS]
    numbers = None if type(module).__module__.startswith(PASSING_ON) else _settings(module)
    return [type(module).forward, module._compiled_call_impl is None, held, numbers]


def _settings(of: Any) -> dict[str, Any]:
    return {n: value for n, value in vars(of).items() if isinstance(value, int | float | str) and n != "training"}


# -- the transformers model inside whatever wraps it (DDP, FSDP2, PEFT, accelerate, torch.compile) ---------------------


def hf_model(model: nn.Module) -> nn.Module:
    """Return the outermost transformers model in `model`, or `model` itself if there is none.

    A wrapper's signature does not tell which arguments are accepted; that model's does."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """Return the outermost transformers model in `model` that has an output head.

    Raises:
        TypeError: no module has one.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
            return module
    raise TypeError(
        f"{type(model).__name__} holds no transformers model with an output head (get_output_embeddings() is "
        "None everywhere). Load it with AutoModelForCausalLM."
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: the model is in eval mode, so that no dropout or router jitter is drawn.

    Afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
