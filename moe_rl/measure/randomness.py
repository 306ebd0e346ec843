"""What a model draws at random in train mode: dropout and the jitter of routers."""

from collections.abc import Iterator

from torch import nn

_ATTRIBUTES = ("attention_dropout", "jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def random_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, float]]:
    """Each dropout or jitter above 0: name of the module, the module, its attribute, the amount.

    With equal weights such a model gives other log-probabilities, and other routes, at every forward in train mode: the
    ratio of a policy to itself is not 1.
    """
    for name, module in model.named_modules():
        dropout = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ()
        for attribute in (*dropout, *_ATTRIBUTES):
            amount = getattr(module, attribute, 0.0)
            if isinstance(amount, float) and amount > 0:
                yield name or type(module).__name__, module, attribute, amount


def turn_off_randomness(model: nn.Module) -> list[str]:
    """Set each of `random_parts` to 0, in place; what was set, as `module.attribute = amount`."""
    found = list(random_parts(model))
    for _, module, attribute, _ in found:
        setattr(module, attribute, 0.0)
    return [f"{name}.{attribute} = {amount:g}" for name, _, attribute, amount in found]
