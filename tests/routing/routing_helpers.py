"""Small models, batches, routes and comparisons for the routing tests."""

import copy
from typing import Any

import torch
from tiny_families import VOCABULARY, tiny_model
from torch import Tensor, nn

from moe_rl.routing import RoutedExperts, record_routes


def tokens(batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def moe(family: str = "Qwen3MoeForCausalLM", seed: int = 0) -> Any:
    model = tiny_model(family, seed)
    model.generation_config.eos_token_id = None  # generate to the full length
    return model


def disturbed(model: nn.Module, scale: float = 0.05) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return other


def routes_of(model: nn.Module, inputs: Tensor, **kwargs: Any) -> RoutedExperts:
    with torch.no_grad(), record_routes(model) as recording:
        model(input_ids=inputs, **kwargs)
    return recording.routes


SITES = ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]


def random_ids(b: int, t: int, sites: int, k: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(b, t, sites, experts, generator=torch.Generator().manual_seed(seed)).topk(k).indices


def example(tokens: bool = True) -> RoutedExperts:
    ids = random_ids(3, 4, 2, 2, 8)
    ids[2, 3] = -1
    return RoutedExperts(ids, SITES, 8, tokens=torch.arange(12).view(3, 4) if tokens else None, meta={"model": "tiny"})


def hooked(model: nn.Module) -> list[str]:
    """Modules that carry a hook or a wrapped checkpoint function of ours."""
    return [
        name
        for name, m in model.named_modules()
        if any("moe_rl" in type(h).__module__ for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
        or "moe_rl" in type(vars(m).get("_gradient_checkpointing_func")).__module__
    ]


def grads(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], exact: bool = True) -> None:
    assert left.keys() == right.keys() and left
    for name, value in left.items():
        if exact:
            assert torch.equal(value, right[name]), name
        else:
            torch.testing.assert_close(value, right[name])


def sets(ids: Tensor) -> Tensor:
    return ids.sort(-1).values
