"""Names of the routing sites and numbers of experts of a model that was not loaded: from its configuration alone."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from moe_rl.routing.errors import RoutingError, UnsupportedModelError
from moe_rl.routing.sites import canonical_site, find_sites

_WIDTHS = ("num_router_classes", "n_routed_experts", "num_experts")
"""What routers call the width of what they rank, the widest first: some count skip or zero experts too."""

Described = PreTrainedConfig | nn.Module | str | os.PathLike[str] | Sequence[str]
"""A model's configuration, the model, a folder or hub id that has the configuration, or the names of its sites."""


def sites_of(model: Described) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """L qualified names of the routing sites, and their numbers of experts; of names alone, None for these.

    A configuration becomes a model on torch's meta device, where tensors have no memory: nothing is loaded.

    Raises UnsupportedModelError for a model without routers; RoutingError for a configuration that cannot be read.

    >>> from transformers import Qwen3MoeConfig
    >>> sites_of(Qwen3MoeConfig(num_hidden_layers=2, num_experts=16, mlp_only_layers=[0]))
    (('model.layers.1.mlp.gate',), (16,))
    """
    described: Any = model
    if isinstance(model, str | os.PathLike):
        try:
            described = AutoConfig.from_pretrained(model)
        except Exception as error:  # hub and configuration errors share no base class
            raise RoutingError(
                f"{model}: no configuration of a model there ({error}); expected a folder in hub format, a hub id, or "
                "a list of site names"
            ) from error
    if isinstance(described, PreTrainedConfig):
        with torch.device("meta"):
            described = AutoModelForCausalLM.from_config(described)
    if isinstance(described, nn.Module):
        found = find_sites(described)
        return tuple(site.name for site in found), tuple(_experts(site.module, site.name) for site in found)
    names = tuple(canonical_site(name) for name in described)
    if not names:
        raise RoutingError("no sites were named: routes need at least one")
    return names, None


def _experts(router: nn.Module, name: str) -> int:
    for attribute in _WIDTHS:
        value = getattr(router, attribute, None)
        if isinstance(value, int):
            return value
    tables = [p for p in router.parameters() if p.ndim == 2]
    if len(tables) == 1:
        return int(tables[0].shape[0])
    raise UnsupportedModelError(f"site {name} ({type(router).__name__}) does not say how many experts it ranks")
