"""Every causal-LM MoE family of the installed transformers: exact recording, exact replay, live gradients."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_families import VOCABULARY, families, supported, tiny_model
from torch import Tensor, nn

from moe_rl.routing import Site, UnsupportedModelError, find_sites, record_routes, replay_routes

SUPPORTED = supported()


@contextmanager
def experts_reached(sites: list[Site]) -> Iterator[dict[str, Tensor]]:
    """`[N,K]` ids by site, read where experts are applied and without any of the package's hooks."""
    reached: dict[str, Tensor] = {}
    handles = []
    for site in sites:

        def beside(module: nn.Module, args: tuple, kwargs: dict, name: str = site.name) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim == 2:
                    reached[name] = value

        def returned(module: nn.Module, args: tuple, output: tuple, name: str = site.name) -> None:
            if type(module).__name__ == "Llama4Router":  # all experts run; those not chosen have score 0
                used = output[0] != 0
                reached[name] = used.nonzero()[:, 1].reshape(used.shape[0], -1)
            if type(module).__name__ == "JetMoeTopKGating":  # slots sorted by expert, and how many each expert has
                order, sizes = output[0], torch.tensor(output[3])
                ids = torch.empty_like(order)
                ids[order] = torch.arange(len(sizes)).repeat_interleave(sizes)
                reached[name] = ids.reshape(-1, module.top_k)

        handles.append(site.module.register_forward_hook(returned))
        for module in site.parents[0].children():
            if module is not site.module:
                handles.append(module.register_forward_pre_hook(beside, with_kwargs=True))
    try:
        yield reached
    finally:
        for handle in handles:
            handle.remove()


def loss_of(logits: Tensor) -> Tensor:
    return (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def disturb(model: nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std().nan_to_num(0) * torch.randn_like(parameter) + 1e-3)
        for site in find_sites(model):
            for parameter in site.module.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))


def test_nearly_all_families_are_found() -> None:
    assert len(SUPPORTED) >= 55, SUPPORTED


@pytest.mark.parametrize("family", SUPPORTED)
def test_family(family: str) -> None:
    model = tiny_model(family)
    inputs = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    sites = find_sites(model)
    free = [i for i, site in enumerate(sites) if not site.fixed]

    plain = model(input_ids=inputs).logits
    loss_of(plain).backward()
    plain_grads = gradients(model)

    with record_routes(model) as recording, experts_reached(sites) as reached:
        recorded = model(input_ids=inputs).logits
    routes = recording.routes
    assert torch.equal(recorded, plain)
    assert routes.sites == tuple(site.name for site in sites)
    assert set(dict(model.named_modules())) >= set(routes.sites)
    check_reached(routes.ids, reached, sites)

    with replay_routes(model, routes) as replay:
        replayed = model(input_ids=inputs).logits
        loss_of(replayed).backward()
    assert replay.replayed_fraction == 1
    assert replay.replayed_rows == inputs.numel() * len(free)
    assert torch.equal(replayed, plain)
    replayed_grads = gradients(model)
    assert plain_grads.keys() == replayed_grads.keys()
    for name, grad in plain_grads.items():
        assert torch.equal(grad, replayed_grads[name]), name

    disturb(model)
    with record_routes(model) as recording:
        model(input_ids=inputs)
    assert not torch.equal(recording.routes.ids[:, :, free].sort(-1)[0], routes.ids[:, :, free].sort(-1)[0])

    with replay_routes(model, routes), record_routes(model) as recording, experts_reached(sites) as reached:
        logits = model(input_ids=inputs).logits
        loss_of(logits).backward()
    assert recording.routes.equal(routes)
    check_reached(routes.ids, reached, sites)
    assert logits.isfinite().all()
    for i in free:
        grads = [p.grad for p in sites[i].module.parameters() if p.grad is not None]
        assert any(bool((g != 0).any()) for g in grads), f"{sites[i].name} has no gradient under replay"


def check_reached(ids: Tensor, reached: dict[str, Tensor], sites: list[Site]) -> None:
    for i, site in enumerate(sites):
        wanted, found = ids[:, :, i].flatten(0, 1), reached[site.name]
        if type(site.module).__name__ == "ZayaRouter":  # its skip expert reaches the experts as id 0 with weight 0
            wanted = wanted.masked_fill(wanted == site.module.num_router_classes - 1, 0)
        assert torch.equal(wanted.sort(-1).values, found.sort(-1).values), site.name


@pytest.mark.parametrize("family", sorted(set(families()) - set(SUPPORTED)))
def test_refused_family_is_named_with_its_reason(family: str) -> None:
    model = tiny_model(family)
    before = copy.deepcopy({n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in model.named_modules()})
    with (
        pytest.raises(UnsupportedModelError, match=r"DogeCDMoE.*not one top-k|ran 2 times in one forward"),
        record_routes(model),
    ):
        pass
    assert before == {n: len(m._forward_hooks) + len(m._forward_pre_hooks) for n, m in model.named_modules()}
