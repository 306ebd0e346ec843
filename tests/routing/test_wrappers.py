"""Precisions, experts implementations and adapters."""

import pytest
import torch
from routing_helpers import disturbed, hooked, moe, routes_of, tokens
from torch.nn.utils.parametrize import register_parametrization

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    UnsupportedModelError,
    find_sites,
    noisy_routes,
    record_router_logits,
    record_routes,
    replay_routes,
    router_parameters,
)


def test_bfloat16_and_autocast() -> None:
    inputs = tokens()
    for model in (moe().bfloat16(), moe("DeepseekV3ForCausalLM").bfloat16()):
        with record_routes(model) as recording:
            plain = model(inputs).logits
        with replay_routes(model, recording.routes):
            assert torch.equal(model(inputs).logits, plain)
    model = moe()
    with torch.autocast("cpu", torch.bfloat16):
        with record_routes(model) as recording:
            plain = model(inputs).logits
        with replay_routes(model, recording.routes):
            assert torch.equal(model(inputs).logits, plain)
    other = disturbed(model)
    with replay_routes(other, recording.routes), torch.autocast("cpu", torch.bfloat16):
        other(inputs).logits.float().square().mean().backward()
    assert all(bool((site.module.weight.grad != 0).any()) for site in find_sites(other))


def test_routes_pass_between_experts_implementations() -> None:
    model, inputs = moe(), tokens()
    logits = {}
    model.set_experts_implementation("eager")
    routes = routes_of(model, inputs)
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        with replay_routes(model, routes), record_routes(model) as recording:
            logits[name] = model(inputs).logits
        assert recording.routes.equal(routes)
    torch.testing.assert_close(logits["eager"], logits["grouped_mm"])
    torch.testing.assert_close(logits["eager"], logits["batched_mm"])


def test_an_adapter_on_a_linear_map_in_the_router_leaves_no_logits() -> None:
    """Its output is added to the logits: noise on one of the two would be scaled, or be none."""
    peft = pytest.importorskip("peft")
    inputs, model = tokens(), moe("JetMoeForCausalLM")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["layer"]))
    with replay_routes(wrapped, routes_of(wrapped, inputs)):
        wrapped(input_ids=inputs)
    for context in (noisy_routes(wrapped, 0.1), record_router_logits(wrapped)):
        with pytest.raises(UnsupportedModelError, match="no one linear map has its logits"), context:
            pass


def test_noise_acts_alike_with_adapters_in_the_router_on_and_off() -> None:
    peft = pytest.importorskip("peft")
    inputs, model = tokens(), moe()

    def noisy(part: torch.nn.Module) -> RoutedExperts:
        with noisy_routes(part, 1.0, torch.Generator().manual_seed(0)), record_routes(part) as recording:
            part(input_ids=inputs)
        return recording.routes

    expected = noisy(model)
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])  # begins as the identity
    wrapped = peft.get_peft_model(model, config)
    assert not expected.equal(routes_of(wrapped, inputs))
    assert noisy(wrapped).equal(expected)
    with wrapped.disable_adapter():
        assert noisy(wrapped).equal(expected), "checked anew"
    assert noisy(wrapped).equal(expected)


def test_noise_is_refused_where_the_router_computes_otherwise_than_when_it_was_checked() -> None:
    class Product(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight @ torch.eye(weight.shape[1])

    model, inputs = moe(), tokens()
    router = find_sites(model)[0].module
    with noisy_routes(model, 1.0):
        model(inputs)
        register_parametrization(router, "weight", Product())
        with pytest.raises(RoutingError, match="other linear maps than when it was checked"):
            model(inputs)


@pytest.mark.parametrize("adapted", ["attention", "router parameter", "router copy"])
def test_peft_models_share_site_names_with_the_bare_model(adapted: str) -> None:
    peft = pytest.importorskip("peft")
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    config = {
        "attention": peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        "router parameter": peft.LoraConfig(
            target_modules=["q_proj"], target_parameters=["mlp.gate.weight"], init_lora_weights=False
        ),
        "router copy": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"], init_lora_weights=False),
    }[adapted]
    wrapped = peft.get_peft_model(model, config)
    assert [site.name for site in find_sites(wrapped)] == list(routes.sites)
    with record_routes(wrapped) as recording:
        plain = wrapped(input_ids=inputs).logits
    assert recording.routes.sites == routes.sites
    with replay_routes(wrapped, recording.routes):
        assert torch.equal(wrapped(input_ids=inputs).logits, plain)
    with replay_routes(wrapped, routes), record_routes(wrapped) as recording:
        wrapped(input_ids=inputs).logits.square().mean().backward()
    assert recording.routes.equal(routes)
    trained = {n for n, p in wrapped.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
    assert (adapted == "attention") != any(".mlp.gate." in name for name in trained)
    of_routers = set(router_parameters(wrapped))
    assert {n for n, p in wrapped.named_parameters() if p in of_routers} == {
        n for n, _ in wrapped.named_parameters() if ".mlp.gate." in n
    }
    with wrapped.disable_adapter():
        assert routes_of(wrapped, inputs).equal(routes)
    assert not hooked(wrapped)


def test_prompt_tuning_is_refused_by_its_name() -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(moe(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModelError, match="as prompt tuning does, are not supported"):
        routes_of(wrapped, tokens())
    assert not hooked(wrapped)
