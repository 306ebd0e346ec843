"""What a model does to the output of its head, found by trying it out, and whether anything around it does more; and
log-probabilities the plain way, from whole logits, for models whose head cannot be stood in for."""

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
"""Where wrappers come from (DDP, FSDP, engines) that hand out what the model in them gives."""
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
    """From the model's logits, of those columns that predict something; `predicting`: flat positions in `[B*T]`."""
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
    return outputs, logps, torch.special.entr(log_p.exp()).sum(1) if entropy else None


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


def backbone_of(lm: PreTrainedModel) -> nn.Module:
    """The part of a causal LM that makes the hidden states; `lm` itself where none is found."""
    inner: nn.Module = lm.base_model
    if inner is lm:  # Llama4ForCausalLM names another attribute than it has
        inner = next((module for module in lm._modules.values() if isinstance(module, PreTrainedModel)), lm)
    return inner


def hindrance(model: nn.Module, lm: PreTrainedModel) -> str | None:
    """Why nothing can stand in for the head of a causal LM, whatever its own class does: something else may change the
    logits on their way to the caller. None where nothing does.

    Hooks that are put before a module are no hindrance: they run as ever.
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
    """The function in partial objects and bound methods."""
    while isinstance(of, functools.partial):
        of = of.func
    return getattr(of, "__func__", of)


def _forward_is_known(module: nn.Module) -> bool:
    """Whether a module's `forward` is its class's, or what accelerate puts around that to move tensors between devices
    or to return fp32."""
    hook = vars(module).get("_hf_hook")
    kinds = [type(each).__module__ for each in (hook, *getattr(hook, "hooks", ())) if each is not None]
    functions = [_function(vars(module).get(name)) for name in ("forward", "_original_forward", "_old_forward")]
    kinds += [str(each.__module__) for each in functions if each is not None and each is not type(module).forward]
    return all(kind.startswith("accelerate.") for kind in kinds)


def _passes_on(wrapper: nn.Module, lm: PreTrainedModel) -> bool:
    """Whether a module around a causal LM hands out its logits as they are: it is called once while the LM answers
    known numbers. No layer and no hook of the LM runs, so that no recording is disturbed."""
    V = lm.get_output_embeddings().weight.shape[0]
    known = torch.linspace(-50, 50, 2 * V, device="cpu").view(1, 2, V)
    ids = torch.zeros(1, 2, dtype=torch.long, device="cpu")
    inputs = {"input_ids": ids, "attention_mask": ids + 1, "use_cache": False, "return_dict": True}
    try:
        with torch.no_grad(), _answering(lm, CausalLMOutput(logits=known.clone())):
            logits = wrapper(**inputs).logits
        return bool(torch.equal(logits.to(known), known))
    except Exception as error:  # a forward of another build: not an error, the caller takes the plain way
        logger.debug("%s: whether it passes logits on could not be tried out: %r", type(wrapper).__name__, error)
        return False


@contextmanager
def _answering(lm: PreTrainedModel, output: CausalLMOutput) -> Iterator[None]:
    """Called by this thread, as a module or by its `forward`, the model gives this output and does nothing else."""
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
    """Find what a model does to its head's output by trying it out; None if not a scale nor a soft cap.

    Runs the model's own `forward` on a copy of its outermost object, in which the backbone answers zeros and
    the head answers known numbers. No weight, layer or hook takes part: no recording is disturbed, sharded
    and quantised models are no different, and it costs a few operations on two rows of logits.
    """
    head, backbone = lm.get_output_embeddings(), backbone_of(lm)
    if not any(module is backbone for module in lm._modules.values()):
        logger.debug("%s: its backbone was not found, so that nothing can stand in for it", type(lm).__name__)
        return None
    V, H = head.weight.shape
    # In float64, small numbers show the scale, large ones the cap, and a grid proves that there is no more to
    # it.
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
    except Exception as error:  # a forward of another build: not an error, the caller takes the plain way
        logger.debug("%s: the treatment of logits could not be tried out: %r", type(lm).__name__, error)
        return None
    if shapes != [(1, 2, H)] * len(probes) or values.shape != grid.shape:
        return None
    scale, largest = float(small[0, 0, 0]) * 2.0**30, float(large[0, 0, 0])
    found = LogitMap(scale, largest if largest < 2.0**50 * scale else None)
    # Some families cap in fp32, hence 1e-6.
    return found if torch.allclose(found(grid), values, rtol=1e-6, atol=1e-6) else None


class _Output(MoeModelOutputWithPast):
    """Whatever else a model takes from its backbone's output, such as an image's features, is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Backbone:
    """Answers a causal LM's call of its backbone with zeros; has the attributes of the real one."""

    def __init__(self, real: nn.Module, hidden_size: int):
        self.real, self.hidden_size = real, hidden_size

    def __call__(self, *args: Any, **kwargs: Any) -> "_Output":
        return _Output(last_hidden_state=torch.zeros(1, 2, self.hidden_size, device="cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
