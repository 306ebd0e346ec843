"""Updates too small for bf16 add up in fp32 master weights, and in fp32 nothing differs from torch's AdamW."""

import copy
import math
import typing
from dataclasses import replace

import pytest
import torch
from micro import MICRO, rows

from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.tiny import build_tiny, char_tokenizer
from moe_rl.rollout.engine_config import WEIGHT_FORMATS, EngineConfig
from moe_rl.rollout.engines import round_layers
from moe_rl.training import MethodConfig, OptimConfig, ProbeConfig, run, validate
from moe_rl.training.config import DistributedConfig
from moe_rl.training.optimizer import MasterAdamW, make_optimizer, policy_optimizer


def steps(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_master_weights_follow_torchs_adamw_in_fp32(weight_decay):
    torch.manual_seed(0)
    start = torch.randn(5, 3).bfloat16()
    gradients = [torch.randn(5, 3).bfloat16().float() for _ in range(6)]
    low, high = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    ours = MasterAdamW([low], lr=1e-3, weight_decay=weight_decay)
    theirs = torch.optim.AdamW([high], lr=1e-3, weight_decay=weight_decay)
    steps(ours, low, gradients)
    steps(theirs, high, gradients)
    assert torch.allclose(ours.state[low]["master"], high, rtol=0, atol=1e-7)
    assert torch.equal(low, ours.state[low]["master"].bfloat16())


def test_bf16_alone_learns_nothing_at_a_small_learning_rate():
    # AdamW's first steps under a constant gradient move a weight by lr each. Around 0.02 neighbours in bf16 are
    # 2^-13 = 1.2e-4 apart, so a move of 1e-6 is rounded away; 200 of them make 2e-4, more than one neighbour.
    start = torch.full((4,), 0.02).bfloat16()
    moved = {}
    for wanted in (True, False):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = make_optimizer([{"params": [parameter], "lr": 1e-6}], (0.9, 0.999), 0.0, wanted)
        steps(optimizer, parameter, [torch.ones(4)] * 200)
        moved[wanted] = float((parameter.detach() - start).abs().max())
    assert moved[False] == 0 and moved[True] >= 2**-13


def test_fp32_takes_torchs_own_optimizer_and_a_frozen_weight_none():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(make_optimizer([{"params": [parameter], "lr": 1.0}], (0.9, 0.999), 0.0)) is torch.optim.AdamW
    low = torch.nn.Parameter(torch.ones(2).bfloat16())
    optimizer = make_optimizer([{"params": [parameter, low], "lr": 1.0}], (0.9, 0.999), 0.0)
    assert isinstance(optimizer, MasterAdamW)
    steps(optimizer, parameter, [torch.ones(2)])
    assert low not in optimizer.state and torch.equal(low, torch.ones(2).bfloat16())  # no gradient, no update
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)


def test_float16_without_master_weights_is_refused():
    model, optim = replace(MICRO.model, dtype="float16"), replace(MICRO.optim, master_weights=False)
    with pytest.raises(ValueError, match="false does not go with model"):
        validate(replace(MICRO, model=model, optim=optim))
    validate(replace(MICRO, model=model))
    validate(replace(MICRO, model=replace(MICRO.model, dtype="bfloat16"), optim=optim))


ON_ROUTERS = [
    LoraConfig(rank=2, train_router=True),
    LoraConfig(rank=2, target_parameters=("mlp.gate.weight",)),
]


def of_lora(lora, **optim):
    return replace(
        MICRO,
        model=replace(MICRO.model, lora=lora),
        method=MethodConfig(kl_coef=0.1),
        optim=OptimConfig(steps=1, num_minibatches=2, **optim),
        probe=ProbeConfig(every=1, sequences=4, floor=False, gradients=True),
    )


def routers_of(state):
    found = {name: p for name, p in state.policy.named_parameters() if ".gate." in name}
    assert found
    return found


@pytest.mark.parametrize("lora", [lora for lora in ON_ROUTERS if not lora.train_router])  # which is refused
def test_a_frozen_router_has_no_adapter_that_is_trained(lora, state_of, tmp_path):
    state = state_of(of_lora(lora, freeze_router=True), tmp_path)
    assert not any(p.requires_grad for p in routers_of(state).values())


@pytest.mark.parametrize("lora", ON_ROUTERS)
def test_adapters_on_routers_have_the_routers_learning_rate_and_gradient(lora, state_of, tmp_path):
    state = state_of(of_lora(lora, router_lr_multiplier=0.1), tmp_path)
    trained = {id(p) for p in routers_of(state).values() if p.requires_grad}
    slow = {id(p) for group in state.optimizer.param_groups if group["multiplier"] == 0.1 for p in group["params"]}
    assert slow == trained and trained
    run(state)
    assert rows(tmp_path, "probe")[-1]["router_gradient_cosine"] is not None


def test_a_rate_of_routers_that_are_not_trained_is_refused(state_of, tmp_path):
    with pytest.raises(ValueError, match=r"optim.router_lr_multiplier: 0.1 .* model.lora trains no router"):
        state_of(of_lora(LoraConfig(rank=2), router_lr_multiplier=0.1), tmp_path)


def test_a_reference_that_shares_the_policys_weights_weighs_nothing(state_of, tmp_path):
    run(state_of(of_lora(LoraConfig(rank=2)), tmp_path))
    (step,) = rows(tmp_path, "step", timed=True)
    assert step["model_bytes"] > 0 and step["reference_bytes"] == step["reference_parameters"] == 0


# -- training through rounded weights ----------------------------------------------------------------------------------


def rounded_run(weight_format="int4", **changes):
    return replace(MICRO, optim=replace(MICRO.optim, weight_format=weight_format), **changes)


def test_the_gradient_at_rounded_weights_moves_masters_which_are_rounded_anew():
    """By hand: a model of master weights with torch's own AdamW, whose rounded copy makes every gradient."""
    torch.manual_seed(0)
    policy = build_tiny(MICRO.model.tiny, char_tokenizer("0123456789"))
    masters, by_hand = copy.deepcopy(policy), copy.deepcopy(policy)
    optimizer = policy_optimizer(policy, OptimConfig(weight_format="int4", learning_rate=0.01))
    theirs = torch.optim.AdamW(masters.parameters(), lr=0.01, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for step in range(3):
        by_hand.load_state_dict(masters.state_dict())
        round_layers(by_hand, "int4")
        assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), by_hand.parameters(), strict=True))
        ids = torch.randint(0, policy.config.vocab_size, (3, 7), generator=torch.Generator().manual_seed(step))
        for model in (policy, by_hand):
            model(ids).logits.log_softmax(-1)[..., 0].sum().backward()
        for own, copied in zip(masters.parameters(), by_hand.parameters(), strict=True):
            own.grad = copied.grad
        optimizer.step()
        theirs.step()
        for model in (policy, by_hand, masters):
            model.zero_grad()
    for own, parameter in zip(masters.parameters(), policy.parameters(), strict=True):
        assert torch.allclose(optimizer.state[parameter]["master"], own, rtol=0, atol=1e-6)
    rows = policy.model.layers[0].mlp.experts.down_proj
    assert all(len(row.unique()) <= 15 for row in rows.flatten(0, -2)), "the last step's weights are rounded, too"
    assert not torch.equal(optimizer.state[rows]["master"], rows)


def test_a_policy_is_trained_in_every_format_that_an_engine_has():
    known = typing.get_args(typing.get_type_hints(OptimConfig)["weight_format"])
    assert {name for part in known for name in typing.get_args(part)} == set(WEIGHT_FORMATS)


def test_a_weight_without_a_gradient_is_rounded_from_its_master_again():
    policy = build_tiny(MICRO.model.tiny, char_tokenizer("0123456789"))
    optimizer = policy_optimizer(policy, OptimConfig(weight_format="fp8"))
    before = [parameter.clone() for parameter in policy.parameters()]
    for _ in range(3):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_what_samples_in_the_same_format_is_the_policy_itself_and_a_run_resumes_to_the_same_numbers(state_of, tmp_path):
    engine = EngineConfig(kind="hf", dtype="float32", weight_format="int4")
    config = rounded_run(rollout=replace(MICRO.rollout, engine=engine))
    run(whole := state_of(config, tmp_path / "whole"))
    whole.engine.sync(whole.policy.state_dict(), 9)
    for own, copied in zip(whole.policy.parameters(), whole.engine.model.parameters(), strict=True):
        assert torch.allclose(own, copied, rtol=1e-5, atol=0)  # rounded twice: the scale may differ in its last digit
    run(state_of(replace(config, optim=replace(config.optim, steps=1)), tmp_path / "broken"))
    run(resumed := state_of(config, tmp_path / "broken"))
    assert all(torch.equal(a, b) for a, b in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True))
    assert rows(tmp_path / "whole", "update") == rows(tmp_path / "broken", "update")
    assert rows(tmp_path / "whole", "rollout")[-1]["rollout_logp_gap"] < 1e-4
    plain = replace(config, optim=replace(config.optim, weight_format=None))
    run(state_of(plain, tmp_path / "plain"))
    assert rows(tmp_path / "plain", "rollout")[-1]["rollout_logp_gap"] > 1e-3


def test_masters_of_weights_of_16_bits_stay_in_fp32(state_of, tmp_path):
    run(state := state_of(rounded_run(model=replace(MICRO.model, dtype="bfloat16")), tmp_path))
    states = [state.optimizer.state[parameter] for parameter in state.policy.parameters()]
    assert {own[name].dtype for own in states for name in own} == {torch.float32}
    assert any(not torch.equal(own["master"], own["master"].bfloat16().float()) for own in states)
    own = [torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(2)]
    first, second = (MasterAdamW([parameter], lr=1e-3) for parameter in own)
    steps(first, own[0], torch.ones(2, 1))
    second.load_state_dict(first.state_dict())
    steps(second, own[1], torch.ones(2, 1))
    assert own[1].item() == 0.99609375, "as four steps of one optimizer"


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_the_rounded_policy_begins_as_its_own_reference(lora, state_of, tmp_path):
    config = rounded_run(model=replace(MICRO.model, lora=lora), method=MethodConfig(objective="dpo", source="policy"))
    run(state_of(config, tmp_path))
    assert rows(tmp_path, "update")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_adapters_are_trained_over_rounded_weights(state_of, tmp_path):
    plain = state_of(of_lora(LoraConfig(rank=2)), tmp_path / "plain")
    state = state_of(of_lora(LoraConfig(rank=2), weight_format="mxfp4"), tmp_path / "rounded")
    start = {name: weight.clone() for name, weight in state.policy.named_parameters()}
    for name, weight in plain.policy.named_parameters():
        rounds = "lora_" not in name and any(part in name for part in ("_proj",))
        assert torch.equal(weight, start[name]) != rounds, name
    run(state)
    moved = {name for name, weight in state.policy.named_parameters() if not torch.equal(weight, start[name])}
    assert moved and all("lora_" in name for name in moved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"distributed": DistributedConfig(strategy="fsdp2")},
            "optim.weight_format: int4 rounds rows that one process",
        ),
        (
            {"optim": replace(MICRO.optim, weight_format="int4", master_weights=False)},
            "which rounds the master weights",
        ),
    ],
)
def test_rounding_what_cannot_be_rounded_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(replace(rounded_run(), **changes))
