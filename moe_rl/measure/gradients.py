"""Comparison of a loss's gradients under replay and under live routing, at the same weights and tokens.

Under replay the experts are the old policy's, so that the gradient is that of another function of the weights. The
cosine with the natural gradient measures this bias: overall, by layer, and for the routers alone. The cosine between
the gradients of two halves of the responses shows the effect of sampling alone.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moe_rl.routing.counts import quotient
from moe_rl.routing.sites import canonical_site

OTHER = "other"
"""Name of the group of parameters outside all layers: embeddings, the last norm, the head."""
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def loss_gradient(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of `loss` by name, for all trainable parameters that it depends on; `.grad` is unchanged."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
    return {name: grad for (name, _), grad in zip(named, found, strict=True) if grad is not None}


def compare_gradients(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], group: Callable[[str], str] = lambda name: "all"
) -> dict[str, tuple[float, float]]:
    """Return, by group of parameters, the cosine of two gradients and the norm of `other` over the norm of `one`.

    A parameter that is missing in one of the gradients counts as zero there. A value is NaN if its divisor is zero.

    Args:
        group: maps a parameter's name to that of its group; groups keep the order of the names.
    """
    dots: dict[str, list[float]] = {}
    for name in dict.fromkeys((*one, *other)):
        a, b = (None if grad is None else grad.detach().double() for grad in (one.get(name), other.get(name)))
        sums = dots.setdefault(group(name), [0.0, 0.0, 0.0])
        for i, (left, right) in enumerate(((a, b), (a, a), (b, b))):
            sums[i] += 0.0 if left is None or right is None else float((left * right).sum())
    return {
        name: (quotient(ab, math.sqrt(aa) * math.sqrt(bb)), quotient(math.sqrt(bb), math.sqrt(aa)))
        for name, (ab, aa, bb) in dots.items()
    }


def layer_of(name: str) -> str:
    """Return the layer of a parameter: the first number in its name, or `OTHER` if there is none.

    >>> layer_of("model.layers.3.mlp.experts.down_proj"), layer_of("lm_head.weight")
    ('3', 'other')
    """
    found = _LAYER.search(name)
    return found[1] if found else OTHER


def gradient_metrics(
    natural: Mapping[str, Tensor],
    replayed: Mapping[str, Tensor],
    halves: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    sites: Sequence[str],
) -> dict[str, float | list[float] | list[str]]:
    """Return the gradient metrics that a probe writes, under the names of the catalogue.

    Args:
        natural, replayed: gradients of the same loss, under live and under replayed routing.
        halves: natural gradients of two halves of the responses.
        sites: names of the routing sites; a parameter below one of them is a router's.

    If no parameter has a gradient, cosine and ratio are NaN.
    """
    nothing = (math.nan, math.nan)
    routers = [name for name in natural if any(canonical_site(name).startswith(f"{site}.") for site in sites)]
    cosine, ratio = compare_gradients(natural, replayed).get("all", nothing)
    own, forced = ({name: g[name] for name in routers if name in g} for g in (natural, replayed))
    router_cosine, router_ratio = compare_gradients(own, forced).get("all", nothing)
    by_layer = compare_gradients(natural, replayed, layer_of)
    return {
        "gradient_cosine": cosine,
        "gradient_norm_ratio": ratio,
        "gradient_halves_cosine": compare_gradients(*halves).get("all", nothing)[0],
        "router_gradient_cosine": router_cosine,
        "router_gradient_norm_ratio": router_ratio,
        "layer_names": list(by_layer),
        "layer_gradient_cosine": [cosine for cosine, _ in by_layer.values()],
        "layer_gradient_norm_ratio": [ratio for _, ratio in by_layer.values()],
    }
