"""Tests of how a model maps its head's output to logits, and log-probabilities from whole logits.

The tests find the map by running the model's own code on known numbers, and look for wrappers and hooks that change the
logits further. Whole logits serve the models in which no stand-in is possible for the head."""

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, MoeModelOutputWithPast

from moe_rl.measure.head import LogitMap

logger = logging.getLogger(__name__)
PASSING_ON = ("torch.", "deepspeed.")
"""Packages of wrappers (DDP, FSDP, engines) that return the wrapped model's output unchanged."""
ROUTING_HOOKS = "moe_rl.routing.hooks"
_KNOWN_HOOKS = (ROUTING_HOOKS, "torch.distributed.", "torch.nn.parallel.", "deepspeed.", "transformers.")


def whole_logits_logps(
    model: nn.Module,
    lm: PreTrainedModel,
    inputs: dict[str, Any],
    predicting: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
) -> tuple[Any, Tensor, Tensor | None]:
    """Return outputs, log-probabilities and entropies, computed from the model's logits of all predicting columns.

    `predicting`: flat positions in `[B*T]` of the hidden states that predict `targets`."""
    T = inputs["input_ids"].shape[1]
    row, column = predicting // T, predicting % T
    columns = torch.arange(T, device=predicting.device)
    if "logits_to_keep" in inspect.signature(type(lm).forward).parameters and len(predicting):
        columns = column.unique()
        inputs = {**inputs, "logits_to_keep": columns}
    outputs = model(**inputs)
    z = outputs.logits[row, torch.searchsorted(columns, column)]
    log_p = (z.to(torch.promote_types(z.dtype, torch.float32)) / temperature).log_softmax(-1)
    logps = log_p.gather(1, targets[:, None]).squeeze(1)
    if not entropy:
        return outputs, logps, None
    p = log_p.exp()  # where it is 0, p log p has no slope that is a number
    return outputs, logps, -(p * log_p.masked_fill(p == 0, 0.0)).sum(1)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, but each message only once in a process."""
    logger.warning(message)


def backbone_of(lm: PreTrainedModel) -> nn.Module:
    """Return the part of a causal LM that computes the hidden states; `lm` itself if no such part is found."""
    inner: nn.Module = lm.base_model
    if inner is lm:  # the attribute that Llama4ForCausalLM names does not exist
        inner = next((module for module in lm._modules.values() if isinstance(module, PreTrainedModel)), lm)
    return inner


def hindrance(model: nn.Module, lm: PreTrainedModel) -> str | None:
    """Return why no stand-in is possible for the head of a causal LM, apart from what its own class does; else None.

    The reason is something else that may change the logits on their way to the caller. Forward pre-hooks are no
    hindrance: they run as in any call.
    """
    head = lm.get_output_embeddings()
    if getattr(type(head), "forward", None) is not nn.Linear.forward or "forward" in vars(head):
        return f"its output head ({type(head).__module__}.{type(head).__name__}) has a forward of its own"
    if getattr(lm, "tp_size", None):
        return "its output head is split (tensor parallelism)"
    around = [module for module in model.modules() if any(part is lm for part in module.modules())]
    for module in around:  # the wrappers, then the model: a compiled one would not see the stand-in
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            return "it was compiled as a whole"
    for module in (*around, head):
        name = "output head" if module is head else type(module).__name__
        for hook in module._forward_hooks.values():
            if not str(_function(hook).__module__).startswith(_KNOWN_HOOKS):
                return f"a forward hook of its {name} may change the logits"
        if not _forward_is_known(module):
            return f"the forward of its {name} was replaced, and may change the logits"
    wrapper = next((module for module in around if not type(module).__module__.startswith(PASSING_ON)), lm)
    if wrapper is not lm and not _passes_on(wrapper, lm):
        return f"{type(wrapper).__name__} around it does not hand out its logits as they are"
    return None


def _function(of: Any) -> Any:
    """Return the function inside partial objects and bound methods."""
    while isinstance(of, functools.partial):
        of = of.func
    return getattr(of, "__func__", of)


def _forward_is_known(module: nn.Module) -> bool:
    """Return whether a module's `forward` is that of its class, or accelerate's wrapper around that one.

    accelerate wraps it to move tensors between devices or to return fp32."""
    hook = vars(module).get("_hf_hook")
    kinds = [type(each).__module__ for each in (hook, *getattr(hook, "hooks", ())) if each is not None]
    functions = [_function(vars(module).get(name)) for name in ("forward", "_original_forward", "_old_forward")]
    kinds += [str(each.__module__) for each in functions if each is not None and each is not type(module).forward]
    return all(kind.startswith("accelerate.") for kind in kinds)


def _passes_on(wrapper: nn.Module, lm: PreTrainedModel) -> bool:
    """Return whether a wrapper around a causal LM returns the LM's logits unchanged.

    The wrapper is called once while the LM returns known numbers. No layer and no hook of the LM runs, so that no
    recording is disturbed."""
    V = lm.get_output_embeddings().weight.shape[0]
    known = torch.linspace(-50, 50, 2 * V, device="cpu").view(1, 2, V)
    ids = torch.zeros(1, 2, dtype=torch.long, device="cpu")
    inputs = {"input_ids": ids, "attention_mask": ids + 1, "use_cache": False, "return_dict": True}
    try:
        with torch.no_grad(), _answering(lm, CausalLMOutput(logits=known.clone())):
            logits = wrapper(**inputs).logits
        return bool(torch.equal(logits.to(known), known))
    except Exception as error:  # an unusual forward is no error: the caller uses whole logits
        logger.debug("%s: whether it passes logits on could not be tried out: %r", type(wrapper).__name__, error)
        return False


@contextmanager
def _answering(lm: PreTrainedModel, output: CausalLMOutput) -> Iterator[None]:
    """Context manager: called by this thread, as a module or by its `forward`, the model only returns `output`."""
    caller, own = threading.get_ident(), dict(vars(lm))
    real: dict[str, Callable[..., Any]] = {
        "_call_impl": functools.partial(nn.Module._call_impl, lm),
        "forward": lm.forward,
    }

    def answer(name: str, *args: Any, **kwargs: Any) -> Any:
        return output if threading.get_ident() == caller else real[name](*args, **kwargs)

    vars(lm).update({name: functools.partial(answer, name) for name in real})
    try:
        yield
    finally:
        for name in real:
            if name in own:
                vars(lm)[name] = own[name]
            else:
                del vars(lm)[name]


def logit_map_of(lm: PreTrainedModel) -> LogitMap | None:
    """Return a model's map from head output to logits, found by a test; None if it is more than a scale and a soft cap.

    Runs the model's own `forward` on a copy of its outermost object, in which the backbone returns zeros and
    the head returns known numbers. No weight, layer or hook takes part: no recording is disturbed, sharded
    and quantised models need nothing special, and the cost is a few operations on two rows of logits.
    """
    head, backbone = lm.get_output_embeddings(), backbone_of(lm)
    if not any(module is backbone for module in lm._modules.values()):
        logger.debug("%s: its backbone was not found, so that nothing can stand in for it", type(lm).__name__)
        return None
    V, H = head.weight.shape
    # In float64: small numbers show the scale, large ones the cap, and a grid proves that nothing else is done.
    grid = torch.linspace(-50, 50, 2 * V, dtype=torch.float64, device="cpu").view(1, 2, V)
    probes = [torch.full_like(grid, 2.0**-30), torch.full_like(grid, 2.0**60), grid]
    answers = iter(probes)
    shapes: list[tuple[int, ...]] = []

    def known_logits(hidden: Tensor) -> Tensor:
        shapes.append(tuple(hidden.shape))
        return next(answers).clone()

    copy: Any = object.__new__(type(lm))
    copy.__dict__.update(lm.__dict__)
    copy.__dict__["_modules"] = {
        name: known_logits if module is head else _Backbone(module, H) if module is backbone else module
        for name, module in lm._modules.items()
    }
    ids = torch.zeros(1, 2, dtype=torch.long, device="cpu")
    inputs = {"input_ids": ids, "attention_mask": ids + 1, "use_cache": False, "return_dict": True}
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            small, large, values = (type(lm).forward(copy, **inputs).logits.double() for _ in probes)
    except Exception as error:  # an unusual forward is no error: the caller uses whole logits
        logger.debug("%s: the treatment of logits could not be tried out: %r", type(lm).__name__, error)
        return None
    if shapes != [(1, 2, H)] * len(probes) or values.shape != grid.shape:
        return None
    scale, largest = float(small[0, 0, 0]) * 2.0**30, float(large[0, 0, 0])
    found = LogitMap(scale, largest if largest < 2.0**50 * scale else None)
    # Some families cap in fp32, hence 1e-6.
    return found if torch.allclose(found(grid), values, rtol=1e-6, atol=1e-6) else None


class _Output(MoeModelOutputWithPast):
    """A backbone output with only hidden states; any other attribute, such as an image's features, is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Backbone:
    """A stand-in for the backbone of a causal LM: returns zeros as hidden states, has the real one's attributes."""

    def __init__(self, real: nn.Module, hidden_size: int):
        self.real, self.hidden_size = real, hidden_size

    def __call__(self, *args: Any, **kwargs: Any) -> "_Output":
        return _Output(last_hidden_state=torch.zeros(1, 2, self.hidden_size, device="cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
