"""Score given tokens the way a sampler makes them: the prompt in one forward, then token by token with a KV cache."""

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl.measure.head import LogitMap, head_logps
from moe_rl.measure.logprobs import causal_lm, head_treatment
from moe_rl.measure.scoring import TokenBatch
from moe_rl.routing.calls import cache_left, cache_name, device_of


@torch.no_grad()
def decoded_logps(model: nn.Module, text: TokenBatch, prefill: int) -> Float[Tensor, "B T"]:
    """As `text_logps`, with the first `prefill` columns in one forward and every further column in one of its own.

    A token is scored by the call that was fed the column before it: the first one after the prompt by the prefill. The
    head computes as in `token_logps`, so that what differs from it is the cache and the shapes.
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
            if stop < width:
                said = states[-1][:, -1] if isinstance(treatment, LogitMap) else out.logits[:, -1]
                logps[:, stop] = _logps_of(said, ids[:, stop], head, treatment, text.temperature).cpu()
            states.clear()
    finally:
        hook.remove()
    return torch.where(text.completion_mask.cpu(), logps, 0.0)


def _logps_of(said: Tensor, targets: Tensor, head: Any, treatment: LogitMap | str, temperature: float) -> Tensor:
    """float64 log-probabilities of `targets` from the head's input or, where the head is special, from logits."""
    if isinstance(treatment, LogitMap):
        logps, _ = head_logps(said, head.weight, targets, bias=head.bias, logit_map=treatment, temperature=temperature)
        return logps.double()
    z = said.to(torch.promote_types(said.dtype, torch.float32)) / temperature
    return z.log_softmax(-1).gather(1, targets[:, None])[:, 0].double()
