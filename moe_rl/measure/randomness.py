"""What a model draws at random in train mode: dropout and the jitter of routers."""

from collections.abc import Iterator
from functools import partial

from torch import nn

SAMPLED = "router_jitter_noise"
"""Of routers that sample their experts in train mode (Phi-MoE); eval mode reads it, too, as a threshold."""
_JITTER = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps", SAMPLED)


def random_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, float]]:
    """Each dropout or jitter above 0: name of the module, the module, its attribute, the amount. A dropout is a module
    of torch's, or a number under a name such as `attention_dropout` or `resid_pdrop`.

    With equal weights such a model gives other log-probabilities, and other routes, at every forward in train mode: the
    ratio of a policy to itself is not 1.
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
    """Train mode draws nothing any more, and computes what eval mode does: each of `random_parts` becomes 0, in place,
    but a router that samples (`SAMPLED`) stays in eval mode. What was done, as `module.attribute = amount`."""
    found = list(random_parts(model))
    for _, module, attribute, _ in found:
        if attribute == SAMPLED:
            module.eval().train = partial(_stay, module)  # type: ignore[method-assign]  # model.train() calls it
        else:
            setattr(module, attribute, 0.0)
    return [f"{name}.{attribute} = {amount:g}" for name, _, attribute, amount in found]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """`module.train` of a module whose mode does not change."""
    return module
