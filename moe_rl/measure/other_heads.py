"""What a model does to the output of its head, found by trying it out; and log-probabilities the plain way, from whole
logits, for models whose head cannot be stood in for."""

import functools
import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from moe_rl.measure.head import LogitMap

logger = logging.getLogger(__name__)


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
