"""Every family as a policy: loaded from hub format, sampled from, scored, updated under replay, probed."""

import pytest
from sweep import rows_of
from sweeps import mostly_swept, sweep
from tiny_families import supported

from moe_rl.policy.tiny import ModelError

FEW = (  # a recorder, a replay, an engine and a probe meet here; what a router is like is seen in tests/routing
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Llama4ForCausalLM",
    "LongcatFlashForCausalLM",
    "NemotronHForCausalLM",
    "PhimoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "ZayaForCausalLM",
)


@pytest.mark.parametrize("family", mostly_swept(supported(), FEW))
def test_a_family_trains_under_replay(family, tmp_path):
    rows = rows_of(family, tmp_path)
    first, second = rows["update"]
    assert first["k3"] < 1e-12 and first["clipped_tokens"] == 0  # of the policy to itself
    assert first["grad_norm"] > 0 and second["k3"] > 0
    for update in rows["update"]:
        assert update["replayed_rows"] == update["routed_rows"] > 0 and update["slots_changed"] == 0
    assert rows["rollout"][0]["rollout_logp_gap"] < 1e-5  # decoding with a cache and one forward agree
    after, change = rows["probe"][-1], rows["decomposition"][-1]
    assert after["slots_changed"] > 0
    parts = [change[name] for name in ("token_var_weight", "token_var_routing", "token_var_interaction")]
    covariances = [value for name, value in change.items() if name.startswith("token_cov_")]
    assert sum(parts) + 2 * sum(covariances) == pytest.approx(change["token_variance"], rel=1e-6)
    assert change["token_variance"] == pytest.approx(after["var_token_natural"], rel=1e-3)


@pytest.mark.parametrize("family", [sweep("GraniteMoeHybridForCausalLM"), "NemotronHForCausalLM", "PhimoeForCausalLM"])
def test_tensors_of_little_effect_reach_an_engine_of_lower_precision(family, tmp_path):
    """A bf16 engine does not hear what an fp32 model does when such a tensor moves by its own size."""
    rows = rows_of(family, tmp_path, rollout__engine__kind="hf", method__replay="R3")
    for update in rows["update"]:
        assert 0 < update["replayed_rows"] < update["routed_rows"]  # last tokens have no route


def test_a_value_model_is_a_copy_of_a_backbone_of_another_name(tmp_path):
    """Llama 4 names an attribute as its backbone that it does not have."""
    rows = rows_of("Llama4ForCausalLM", tmp_path, method__objective="ppo")
    assert all(update["grad_norm"] > 0 and update["value_loss"] >= 0 for update in rows["update"])


def test_a_family_without_gradient_checkpointing_says_so(tmp_path):
    with pytest.raises(ModelError, match=r"model.gradient_checkpointing: JetMoeForCausalLM does not support"):
        rows_of("JetMoeForCausalLM", tmp_path, model__gradient_checkpointing=True)
