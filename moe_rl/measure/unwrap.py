"""The transformers model inside whatever wraps it (DistributedDataParallel, FSDP2, PEFT, accelerate, torch.compile)."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel


def hf_model(model: nn.Module) -> nn.Module:
    """The outermost transformers model, which alone says what it accepts; `model` itself where there is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The outermost transformers model that has an output head.

    Raises:
        TypeError: there is none.
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
    """`eval()` inside, so that no dropout or router jitter is drawn; afterwards every module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
