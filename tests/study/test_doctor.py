"""Memory from shapes: known counts, states by arithmetic, activations against what autograd keeps; the report."""

import json
import math
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from moe_rl.cli import main
from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig
from moe_rl.policy.tiny import ModelError, char_tokenizer
from moe_rl.rollout.engines import EngineConfig
from moe_rl.study.config import load_study, parse_study
from moe_rl.study.doctor import (
    Machine,
    Requirement,
    check_comparisons,
    examine,
    inspect_machine,
    installed,
    planned,
    report,
)
from moe_rl.study.memory import KNOWN, activation_bytes, architecture, meta_model, plan
from moe_rl.training import MethodConfig, OptimConfig, RewardConfig, RolloutConfig, RunConfig, ValueConfig
from moe_rl.training.config import DistributedConfig
from moe_rl.training.method import resolved_objective

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
QWEN = ModelConfig(path="Qwen/Qwen3-30B-A3B-Base", dtype="bfloat16")
H200 = Machine("cuda", ("H200",), int(141e9), int(1e12), int(1e13), True)


def run(model, **changes):
    return replace(RunConfig(model=model, rollout=RolloutConfig(prompts=32, group_size=8)), **changes)


def needs(*args, **options):
    return {need.name: need.bytes for need in plan(*args, **options).needs}


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        # 50,304 x 2048 twice; each of 16 layers: attention 4 x 2048^2 + 2 norms of 2048, router 64 x 2048,
        # experts 64 x 3 x 1024 x 2048, 2 norms of 2048; a last norm.
        ("allenai/OLMoE-1B-7B-0924", 6_919_161_856),
        # 49,155 x 1024 once (tied); each of 24 layers: attention 2 x 1024^2 + 2 x 512 x 1024, router 32 x 1024,
        # experts 32 x 3 x 512 x 1024, 2 norms of 1024; a last norm.
        (
            "ibm-granite/granite-3.1-1b-a400m-instruct",
            49_155 * 1024 + 24 * (3 * 1024**2 + 32 * 1024 + 32 * 3 * 512 * 1024 + 2 * 1024) + 1024,
        ),
    ],
)
def test_parameters_of_known_models_without_their_weights(path, parameters):
    model = meta_model(architecture(ModelConfig(path=path)))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_states_of_qwen3_30b():
    P = 30_532_122_624
    one = needs(run(QWEN))
    assert (one["policy weights"], one["gradients"], one["optimizer"]) == (2 * P, 2 * P, 12 * P)
    eight = needs(run(QWEN), devices=8)
    assert eight["policy weights"] + eight["gradients"] + eight["optimizer"] == 2 * P  # 16 bytes on 8 devices: 61.1 GB
    pure = needs(run(QWEN, optim=OptimConfig(master_weights=False)))
    assert pure["optimizer"] == 4 * P
    fp32 = needs(run(replace(QWEN, dtype="float32")))
    assert (fp32["policy weights"], fp32["gradients"], fp32["optimizer"]) == (4 * P, 4 * P, 8 * P)
    assert "reference" not in one
    assert needs(run(QWEN, method=MethodConfig(kl_coef=0.1)))["reference"] == 2 * P
    assert needs(run(QWEN, rollout=RolloutConfig(engine=EngineConfig("hf", "bfloat16"))))["rollout engine"] == 2 * P
    for url, there in ((None, True), ("http://gpu:8471", False)):  # another machine's memory is not this one's
        engine = EngineConfig("vllm", python=None if url else "python", url=url)
        assert ("rollout engine" in needs(run(QWEN, rollout=RolloutConfig(engine=engine)))) == there
    rspo = needs(run(QWEN, method=MethodConfig(objective="rspo"), optim=OptimConfig(micro_batch=2)))
    assert "router scores" not in one and rspo["router scores"] == 4 * one["routes"]  # fp32 beside a byte
    assert rspo["router logits"] == 2 * (4 + 16 + 25) * 48 * 128 * 2  # of a micro-batch, bf16
    needed = plan(run(QWEN))
    assert needed.routes_bytes_per_token == 48 * 8  # layers x experts of a token, a byte each
    assert needed.kv_bytes_per_token == 2 * 48 * 4 * 128 * 2  # keys and values, layers, heads, size of a head, bf16
    # mod_chain: 11 characters, at 3 a token and 16 more, and responses of 25 tokens; 256 at once
    assert one["KV cache"] == 256 * (4 + 16 + 25) * needed.kv_bytes_per_token
    assert needs(run(QWEN, rollout=RolloutConfig(max_batch=16)))["KV cache"] * 16 == one["KV cache"]
    assert needed.peak == sum(n.bytes for n in needed.needs if n.when == "always") + max(
        sum(n.bytes for n in needed.needs if n.when == when) for when in ("sampling", "update")
    )


def test_adapters_train_little_and_are_their_own_reference():
    model = replace(QWEN, lora=LoraConfig(rank=16))
    needed = plan(run(model, method=MethodConfig(kl_coef=0.1)))
    # q: 2048 -> 4096, k and v: 2048 -> 512, o: 4096 -> 2048; each 16 x (in + out)
    own = 48 * 16 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
    assert needed.trainable == own
    found = {need.name: need.bytes for need in needed.needs}
    # adapters are in fp32
    assert (found["reference"], found["gradients"], found["optimizer"]) == (0, 4 * own, 8 * own)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_activations_are_estimated_within_a_factor_of_two(family, checkpointed):
    from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer

    tiny = TinyConfig(family=family, hidden_size=64, num_layers=6, num_experts=8, moe_intermediate_size=48)
    model = build_tiny(tiny, char_tokenizer("ab")).train()
    if checkpointed:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    ids, kept = torch.ones(4, 64, dtype=torch.long), {}
    weights = {p.data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.model(ids, use_cache=False).last_hidden_state
    config = ModelConfig(gradient_checkpointing=checkpointed)
    estimate = activation_bytes(model.config, ids.numel(), 64, config)
    if checkpointed:  # what is computed again is not seen here: the layers' inputs alone
        estimate -= activation_bytes(model.config, ids.numel(), 64, ModelConfig()) // 6
    assert 0.5 < estimate / sum(kept.values()) < 2, (estimate, sum(kept.values()))
    assert out.requires_grad


def test_a_configuration_that_is_not_here_says_what_to_do(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError,
        match=r"configuration of nobody/nothing is not on this machine.*no folder .*nobody/nothing, so .*Put its",
    ):
        architecture(ModelConfig(path="nobody/nothing"))
    with pytest.raises(ModelError, match="there is no folder"):
        architecture(ModelConfig(path=str(tmp_path / "none")))
    architecture(ModelConfig(path="allenai/OLMoE-1B-7B-0924-SFT")).save_pretrained(tmp_path)
    assert architecture(ModelConfig(path=str(tmp_path))).num_experts == 64  # a config.json is enough


@pytest.mark.parametrize("name", ["olmoe_1b_7b", "granite_3_1b_a400m", "qwen3_30b_a3b"])
def test_ready_studies_have_the_papers_settings_and_are_known(name):
    study = load_study(EXPERIMENTS / f"{name}.yaml")
    assert study.base.model.path in KNOWN and list(study.arms) == ["grpo", "grpo_replay", "gspo"]
    for arm in study.arms:
        config = study.resolve(arm, 0)
        clip = (3e-4, 4e-4) if arm == "gspo" else (0.2, 0.27)
        objective = resolved_objective(config)
        assert (objective["clip_low"], objective["clip_high"]) == clip
        assert config.optim.num_minibatches == 4 and config.model.dtype == "bfloat16"
        assert config.method.replay == ("R2" if arm == "grpo_replay" else "none")
    # What the file says of the hardware holds.
    devices = 8 if "qwen" in name else 1
    peak = plan(study.resolve("grpo", 0), devices).peak
    said = {"olmoe_1b_7b": 119, "granite_3_1b_a400m": 35, "qwen3_30b_a3b": 114}[name]
    assert round(peak / 1e9) == said and f"{said} GB on" in (EXPERIMENTS / f"{name}.yaml").read_text()


STUDY = {
    "name": "mine",
    "question": "does it fit?",
    "seeds": [0, 1],
    "base": {"model": {"path": "Qwen/Qwen3-30B-A3B", "dtype": "bfloat16"}},
    "arms": {"plain": {}, "tied": {"method": {"kl_coef": 0.1}}},
}


def test_the_verdict_is_that_of_the_most_demanding_arm():
    found = examine(parse_study(STUDY), H200)
    assert found["study"]["arm"] == "tied" and not found["ok"]
    checks = {check["name"]: check for check in found["study"]["checks"]}
    memory = checks["device memory"]
    assert (
        memory["ok"] is False and "too little" in memory["remedy"] and "on one device, 141 GB there" in memory["found"]
    )
    eight = replace(H200, devices=("H200",) * 8, asked=True)
    checks = {check["name"]: check for check in examine(parse_study(STUDY), eight)["study"]["checks"]}
    assert checks["device memory"]["ok"] and "on each of 8, sharded" in checks["device memory"]["found"]
    # Two runs of each arm, and one more while a checkpoint is replaced: weights and Adam, and of one arm its reference
    P = 30_532_122_624
    assert f"needs {(2 * 14 + 3 * 16) * P / 1e9:.0f} GB for the checkpoints of 4 runs, " in checks["disk"]["found"]
    # The other has three runs, which keep the policies after 0, 10, 20 and 30 of 31 steps
    more = STUDY | {"arms": {**STUDY["arms"], "plain": {"keep_policy_every": 10, "seeds": [0, 1, 2]}}}
    checks = {check["name"]: check for check in examine(parse_study(more), eight)["study"]["checks"]}
    needed, kept = (3 * 14 + 3 * 16 + 3 * 4 * 2) * P, 3 * 4 * 2 * P
    said = (
        f"needs {needed / 1e9:.0f} GB for the checkpoints of 5 runs, {kept / 1e9:.0f} GB of it for policies that stay"
    )
    assert said in checks["disk"]["found"]


def checks_on(machine, **base):
    found = examine(parse_study(STUDY | {"base": {**STUDY["base"], **base}}), machine)["study"]["checks"]
    return {check["name"]: check for check in found}


def test_a_run_is_planned_over_the_processes_that_it_would_have():
    eight = replace(H200, devices=("H200",) * 8)
    alone = checks_on(eight)
    assert alone["device memory"]["ok"] is False and "on one device" in alone["device memory"]["found"]
    assert "processes" not in alone
    asked = checks_on(replace(eight, asked=True))
    (needed,) = re.findall(r"needs (\d+ GB) on one device", alone["device memory"]["found"])
    assert asked["device memory"]["ok"] and asked["processes"]["ok"] is None
    assert asked["processes"]["found"] == f"as the file stands one device holds {needed}"
    assert asked["processes"]["remedy"] == "needs --distributed.strategy fsdp2 --distributed.processes 8"
    for processes, n in ((None, 8), (4, 4)):
        said = checks_on(eight, distributed={"strategy": "fsdp2", "processes": processes})
        assert f"on each of {n}, sharded" in said["device memory"]["found"] and "processes" not in said
    said = checks_on(H200, distributed={"strategy": "fsdp2", "processes": 8})
    assert said["device memory"]["ok"] and said["processes"]["ok"] is False
    assert said["processes"]["found"] == "distributed.processes: 8, and devices here: 1"


def test_processes_that_share_the_hosts_memory_need_it_together():
    of_one = plan(parse_study(STUDY).resolve("tied", 0), 4).peak
    here = replace(H200, accelerator="cpu", device_bytes=4 * of_one - 1, host_bytes=10**12)
    for machine, base in (
        (replace(here, devices=("x",) * 4, asked=True), {}),
        (here, {"distributed": {"strategy": "fsdp2", "processes": 4}}),
    ):
        checks = checks_on(machine, **base)
        memory = checks["device memory"]
        assert machine.asked or "processes" not in checks, "as many as asked for, on the one device"
        assert f"needs {4 * of_one / 1e9:.0f} GB for 4 processes together, sharded" in memory["found"]
        assert (
            memory["ok"] is False
            and checks_on(replace(machine, device_bytes=4 * of_one), **base)["device memory"]["ok"]
        )


def test_every_arm_is_asked_for_its_task_and_dtype():
    arms = {"a": {"model": {"dtype": "float32"}}, "b": {}, "c": {"task": {"name": "jsonl", "options": {"path": "no"}}}}
    checks = examine(parse_study(STUDY | {"arms": arms}), replace(H200, bf16=False))["study"]["checks"]
    said = [(check["name"], check["ok"], check["found"]) for check in checks if check["name"] in ("task", "bf16")]
    assert said[:2] == [("task", True, "a, b: usable here"), ("bf16", False, "b, c: the device has no native bf16")]
    assert said[2][:2] == ("task", False) and said[2][2].startswith("c: ") and len(said) == 3


def test_what_is_wrong_with_a_study_is_said_in_words(monkeypatch):
    data = STUDY | {
        "base": {
            "model": {"experts_implementation": "megablocks"},
            "task": {"name": "jsonl", "options": {"path": "no.jsonl"}},
        }
    }
    found = examine(parse_study(data), inspect_machine())
    text = report(found)
    assert not found["ok"] and "!! task" in text and "there is no file" in text
    assert "!! model options" in text and "megablocks" in text


LACKING = """
from dataclasses import dataclass
from typing import ClassVar
from moe_rl.rollout import Problem, VerifiableTask

@dataclass(frozen=True)
class Sums(VerifiableTask):
    broken: bool = False
    name: ClassVar[str] = "sums"
    alphabet: ClassVar[str] = "0123456789^="
    max_new_tokens: ClassVar[int] = 3

    def draw(self, rng):
        n = rng.randrange(1, 50)
        return Problem(f"^{n}+{n // (not self.broken)}=", str(2 * n))

    def reward(self, problem, completion):
        return float(completion == problem.answer)
"""


def test_prompts_without_tokens_and_a_task_that_fails_are_found(tmp_path):
    (tmp_path / "lacking.py").write_text(LACKING)

    def checks(model, **options):
        task = {"name": f"{tmp_path}/lacking.py:Sums", "options": options}
        found = examine(parse_study(STUDY | {"base": {"model": model, "task": task}}), inspect_machine())
        return {check["name"]: check for check in found["study"]["checks"]}

    (tmp_path / "hub").mkdir()
    char_tokenizer("0123456789^=").save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    for model in ({"path": str(tmp_path / "hub")}, {}):
        said = checks(model)["prompts"]
        assert said["ok"] is False and "cannot encode '^" in said["found"] and "it lacks '+'" in said["found"]
    char_tokenizer("0123456789^=+").save_pretrained(tmp_path / "hub")
    assert checks({"path": str(tmp_path / "hub")})["prompts"]["ok"]
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "qwen3_moe", "max_position_embeddings": 6}')
    said = checks({"path": str(tmp_path / "hub")})["prompts"]
    assert said["ok"] is False and "are more than the 6 positions that the model has" in said["found"]
    endless = char_tokenizer("0123456789^=+")
    endless.eos_token = endless.pad_token = None
    endless.save_pretrained(tmp_path / "hub")
    said = checks({"path": str(tmp_path / "hub")})["prompts"]
    assert said["ok"] is False and "has neither a padding nor an end token" in said["found"]
    failed = checks({}, broken=True)
    assert failed["task"]["ok"] is False and "ZeroDivisionError" in failed["task"]["found"] and "prompts" not in failed
    assert "prompts" not in checks(STUDY["base"]["model"]), "the tokenizer of a hub id is not at hand"


def test_comparisons_of_too_few_seeds_are_said_before_they_are_run():
    gspo, gmpo, sapo = ({"method": {"objective": name}} for name in ("gspo", "gmpo", "sapo"))
    study = {"name": "s", "arms": {"grpo": {}, "gspo": gspo, "gmpo": gmpo, "sapo": sapo | {"seeds": [0]}}}

    def said(seeds, *pairs):
        return [check.found for check in check_comparisons(parse_study(study | {"seeds": seeds, "comparisons": pairs}))]

    few, enough = "2 declared, 1 to 4 pairs of seeds", "1 of 2 declared, 1 pair of seeds"
    assert said([0, 1, 2, 3], ["gspo", "grpo"], ["sapo", "grpo"]) == [f"{few}: a range and no verdict"]
    assert said([*range(6)], ["gspo", "grpo"], ["sapo", "grpo"]) == [f"{enough}: a range and no verdict"]
    assert said([*range(6)], ["gspo", "grpo"]) == said([0]) == []
    three = said([*range(6)], ["gspo", "grpo"], ["gmpo", "grpo"], ["gmpo", "gspo"])
    assert three == ["3 declared, 6 pairs of seeds: “no difference of interest” at most"]


def test_packages_are_held_against_their_bounds():
    assert installed(Requirement("torch>=2.9")) == (version("torch"), True)
    assert installed(Requirement("torch>=99"))[1] is False
    assert installed(Requirement("no-such-package")) == ("not installed", False)


def test_the_command(capsys, tmp_path, monkeypatch):
    def doctor(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["doctor", *arguments])
        return stop.value.code, capsys.readouterr()

    status, out = doctor()
    assert status == 0 and "Everything required is there." in out.out
    status, out = doctor(str(EXPERIMENTS / "quick.yaml"), "--json")
    found = json.loads(out.out)
    assert status == 0 and found["ok"] and found["study"]["plan"]["parameters"] == 336_912
    status, out = doctor(str(EXPERIMENTS / "quick.yaml"), "--memory", "0.001")
    assert status == 1 and "!! device memory" in out.out
    status, out = doctor("none.yaml")
    assert status == 1 and "no such study file" in out.err
    status, out = doctor("--devices", "0", "--memory", "0")
    assert status == 1 and "at least 1 device" in out.err


def test_host_memory_is_one_model_per_node_when_sharded_and_one_per_rank_under_ddp():
    P = 30_532_122_624
    assert plan(run(QWEN)).host_bytes == 12 * P  # the optimizer's file: fp32 master weights, m and v
    pure = OptimConfig(master_weights=False)
    kl = MethodConfig(kl_coef=0.1)
    for devices, strategy, ranks in ((1, "none", 1), (8, "none", 1), (8, "fsdp2", 1), (8, "ddp", 8)):
        said = plan(run(QWEN, optim=pure, method=kl, distributed=DistributedConfig(strategy)), devices)
        assert said.host_bytes == max(ranks * 2 * 2 * P, 4 * P), (devices, strategy)  # bf16 policy and reference
    engine = RolloutConfig(engine=EngineConfig("hf", "bfloat16"))
    assert plan(run(QWEN, optim=pure, rollout=engine), 8).host_bytes == 4 * P
    assert needs(run(QWEN, rollout=engine), devices=8)["rollout engine"] == 2 * P  # whole on every rank


def test_ddp_shards_nothing():
    ddp, sharded = (plan(run(QWEN, distributed=DistributedConfig(name)), 8) for name in ("ddp", "fsdp2"))
    states = ("policy weights", "optimizer", "gradients")
    sizes = [{need.name: need.bytes for need in needed.needs} for needed in (ddp, sharded)]
    assert all(sizes[0][name] == 8 * sizes[1][name] for name in states)
    assert sizes[0]["routes"] == sizes[1]["routes"] and "gathered layers" not in sizes[0]
    assert ddp.checkpoint_bytes == sharded.checkpoint_bytes


def test_models_that_are_trained_beside_the_policy_are_saved_with_it():
    """Each is a copy of the policy trained whole: weights, and states with fp32 master weights, under LoRA too."""
    P = 30_532_122_624
    ppo, learned = MethodConfig(objective="ppo"), RewardConfig(model="learned")
    assert plan(run(QWEN)).checkpoint_bytes == 14 * P
    for changes in ({"method": ppo}, {"reward": learned}):
        assert plan(run(QWEN, **changes)).checkpoint_bytes == 28 * P
        name = "value model" if "method" in changes else "reward model"
        assert needs(run(QWEN, **changes))[name] == 16 * P
    assert plan(run(QWEN, method=ppo, value=ValueConfig(model="head"))).checkpoint_bytes == 14 * P
    pure = OptimConfig(master_weights=False)
    assert plan(run(QWEN, method=ppo, reward=learned, optim=pure)).checkpoint_bytes == 3 * 6 * P
    adapters, beside = (plan(run(replace(QWEN, lora=LoraConfig()), **more)) for more in ({}, {"method": ppo}))
    assert beside.checkpoint_bytes - adapters.checkpoint_bytes >= 14 * P and beside.host_bytes >= 12 * P


def test_planning_for_another_machine():
    assert planned(None, None).devices == inspect_machine().devices
    there = planned(8, 141.0)
    assert len(there.devices) == 8 and there.device_bytes == 141 * 10**9 and there.accelerator == "planned"
    for devices, memory in ((0, None), (0, 80.0), (8, 0.0), (-1, None), (1, math.nan), (8, math.inf), (10**17, 80.0)):
        with pytest.raises(ValueError, match="at least 1 device with some memory"):
            planned(devices, memory)
