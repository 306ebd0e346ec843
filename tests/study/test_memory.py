"""What a run keeps besides its policy, by arithmetic."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_doctor import QWEN, needs, run
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from tiny_families import tiny_config

from moe_rl.policy.models import ModelConfig
from moe_rl.policy.tiny import ModelError
from moe_rl.study.doctor import left_in_cgroups
from moe_rl.study.memory import architecture, experts_of, meta_model, plan
from moe_rl.training import MethodConfig, ProbeConfig, RolloutConfig


def test_predictors_keep_what_the_routers_saw():
    pr2 = run(QWEN, method=MethodConfig(replay="PR2"))
    of = plan(pr2)
    found, tokens = needs(pr2), 256 * (of.prompt_tokens + of.new_tokens)
    assert found["router inputs and logits"] == tokens * 48 * (2048 + 2 * 128) * 4
    assert found["predictors"] == 16 * 48 * 2048 * 128
    assert not {"router inputs and logits", "predictors"} & set(needs(run(QWEN)))


def test_what_a_probe_and_pairs_keep_and_what_waits():
    """DPO has the policy of the beginning twice; a probe keeps other weights, and four gradients of each weight."""
    P, lag = 30_532_122_624, RolloutConfig(prompts=32, group_size=8, lag=2)
    probe = ProbeConfig(decompose_every=1, gradients=True)
    plain = needs(run(QWEN))
    found = needs(run(QWEN, method=MethodConfig(objective="dpo"), probe=probe, rollout=lag))
    assert (found["reference"], found["initial policy"]) == (2 * P, 2 * P)
    assert (found["weights of the decomposition"], found["gradients of the probe"]) == (2 * P, 8 * P)
    assert found["routes"] == 3 * plain["routes"] and found["KV cache"] == plain["KV cache"]
    assert not {"reference", "initial policy", "weights of the decomposition", "gradients of the probe"} & set(plain)
    assert plain["sampling logits"] == 256 * 151_936 * (2 + 16)


def test_a_probe_holds_what_the_routers_said_before_and_after_while_nothing_else_comes_and_goes():
    """In fp32, of the response tokens of the probed responses, beside what is always there."""
    few = RolloutConfig(prompts=2, group_size=8, max_new_tokens=1000)
    for sequences, probed in ((4, 4), (32, 16)):
        of = plan(run(QWEN, rollout=few, probe=ProbeConfig(sequences=sequences)))
        (need,) = (need for need in of.needs if need.name == "router logits of the probe")
        assert (need.bytes, need.when) == (2 * 4 * probed * 1000 * 48 * 128, "probing")
    assert "router logits of the probe" not in needs(run(QWEN, probe=ProbeConfig(every=0)))
    many = plan(run(QWEN, probe=ProbeConfig(sequences=256), rollout=RolloutConfig(max_new_tokens=10**6, max_batch=1)))
    always, probing = (sum(need.bytes for need in many.needs if need.when == when) for when in ("always", "probing"))
    assert many.peak >= always + probing > 10**12


@pytest.mark.parametrize("path", ["ibm-granite/granite-3.1-1b-a400m-base", "Qwen/Qwen3-30B-A3B"])
def test_gathered_layers_are_without_the_embeddings_which_may_be_one_matrix(path):
    config = ModelConfig(path=path, dtype="bfloat16")
    layer = sum(p.numel() for p in meta_model(architecture(config)).model.layers[0].parameters())
    assert needs(run(config), devices=8)["gathered layers"] == pytest.approx(2 * 2 * layer, rel=1e-4)


@pytest.mark.parametrize("family", ["aria_text", "dbrx", "gemma4_text", "hunyuan_v1_moe", "qwen3_5_moe"])
def test_sizes_by_other_names_of_each_layer_or_in_a_part_of_the_configuration(tmp_path, family):
    """Aria and DBRX have names of their own, Gemma 4 a head_dim of each layer, HunYuan lists, Qwen 3.5 reads images."""
    if family == "qwen3_5_moe":
        config = AutoConfig.for_model(family, text_config=tiny_config(f"{family}_text").to_dict())
    else:
        config = tiny_config(family)
    if family == "hunyuan_v1_moe":
        config.moe_topk = [2] * config.num_hidden_layers
    config.save_pretrained(tmp_path)
    found = plan(run(ModelConfig(path=str(tmp_path)))).architecture
    assert found.endswith(f" {config.get_text_config().num_hidden_layers} layers, 8 experts, 2 per token")


def test_a_configuration_that_no_model_can_be_built_of_or_that_names_no_experts(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": "eight"}')
    with pytest.raises(ModelError, match=f"the configuration of {tmp_path} cannot be used: .*'num_experts'"):
        architecture(ModelConfig(path=str(tmp_path)))
    config = tiny_config("lfm2_moe")
    config.layer_types = None
    with pytest.raises(ModelError, match="transformers cannot build a model of this configuration: 'NoneType'"):
        meta_model(config)
    for given, missing in (({}, "a layer has"), ({"num_experts": 8}, "a token is given to")):
        with pytest.raises(ModelError, match=f"does not say, .* how many experts {missing}$"):
            experts_of(SimpleNamespace(**given))
    seen = []
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_config", lambda *_, **given: seen.append(given["trust_remote_code"])
    )
    meta_model(config, trust_remote_code=True)
    assert seen == [True]  # else the model of a study that trusts its code would be refused


def test_memory_left_in_a_container_is_that_of_the_tightest_group_and_counts_the_page_cache(tmp_path):
    def limited(folder, limit, used, cache):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("max", limit), ("current", used), ("stat", f"anon 1\ninactive_file {cache}\nslab 2")):
            (folder / f"memory.{name}").write_text(f"{text}\n")

    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("4:memory:/elsewhere\n0::/job.slice/task\n")
    limited(root / "job.slice", 1000, 900, 300)
    limited(root / "job.slice" / "task", "max", 700, 0)
    assert left_in_cgroups(own, root) == [400]
    limited(root / "job.slice" / "task", 800, 700, 50)
    limited(root, 2000, 1500, 0)
    assert left_in_cgroups(own, root) == [150, 400, 500]
    own.write_text("0::/not/mounted/here\n")  # a container that sees its own group as the root
    assert left_in_cgroups(own, root) == left_in_cgroups(tmp_path / "none", root) == [500]


@pytest.mark.parametrize("controllers", ["memory", "cpuset,memory"])
def test_memory_left_in_a_container_of_the_first_cgroups(tmp_path, controllers):
    own, group = tmp_path / "self", tmp_path / "cgroup" / "memory" / "docker" / "one"
    own.write_text(f"5:cpu,cpuacct:/docker/other\n9:{controllers}:/docker/one\n1:name=systemd:/docker/one\n")
    group.mkdir(parents=True)
    stat = "inactive_file 7\ntotal_inactive_file 300\nhierarchical_memory_limit 1000"
    for name, text in (("limit_in_bytes", 1000), ("usage_in_bytes", 900), ("stat", stat)):
        (group / f"memory.{name}").write_text(f"{text}\n")
    assert left_in_cgroups(own, tmp_path / "cgroup") == [400]
