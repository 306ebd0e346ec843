"""Randomness of a model in train mode, dropout and router jitter: find it and turn it off."""

from collections.abc import Iterator
from functools import partial

from torch import nn

SAMPLED = "router_jitter_noise"
"""Attribute of routers that sample their experts in train mode (Phi-MoE); eval mode uses it as a threshold."""
_JITTER = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps", SAMPLED)


def random_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, float]]:
    """Yield each dropout or jitter above 0 as (module's name, module, attribute, amount).

    A dropout is a dropout module of torch, or a number under a name such as `attention_dropout` or `resid_pdrop`. With
    one of these above 0, log-probabilities and routes differ between forwards of equal weights in train mode: the ratio
    of a policy to itself is not 1.
    """
    for name, module in model.named_modules():
        dropout = ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        dropout += [attribute for attribute in vars(module) if "drop" in attribute]
        for attribute in (*dropout, *_JITTER):
            amount = getattr(module, attribute, 0.0)
            held = attribute == SAMPLED and "train" in vars(module)
            if isinstance(amount, float) and amount > 0 and not held:
                yield name or type(module).__name__, module, attribute, amount


def turn_off_randomness(model: nn.Module) -> list[str]:
    """Turn off all randomness of train mode in place, so that train mode computes what eval mode does.

    Each of `random_parts` is set to 0; a router that samples (`SAMPLED`) stays in eval mode instead. Return what was
    turned off, as `module.attribute = amount`, with the former amounts."""
    found = list(random_parts(model))
    for _, module, attribute, _ in found:
        if attribute == SAMPLED:
            module.eval().train = partial(_stay, module)  # type: ignore[method-assign]  # called by model.train()
        else:
            setattr(module, attribute, 0.0)
    return [f"{name}.{attribute} = {amount:g}" for name, _, attribute, amount in found]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Return the module without changing its mode; takes the place of `module.train`."""
    return module
