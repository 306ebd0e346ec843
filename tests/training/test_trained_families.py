"""Every family as a policy: loaded from hub format, sampled from, scored, updated under replay, probed."""

import json
import sys
import warnings
from pathlib import Path

import pytest

from moe_rl.policy import char_tokenizer
from moe_rl.policy.models import ModelConfig
from moe_rl.rollout import Problem, TaskConfig
from moe_rl.rollout.engine_config import EngineConfig
from moe_rl.training import (
    EvalConfig,
    MethodConfig,
    OptimConfig,
    ProbeConfig,
    RolloutConfig,
    RunConfig,
    train,
)

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe
from tiny_families import supported


class Digits:
    """A digit earns something wherever it stands, so that a policy with random weights has unequal rewards."""

    name, alphabet, max_new_tokens = "digits", "^$0123456789+=", 8

    def problem(self, rng, held_out=False):
        return Problem(f"^{rng.randint(10, 99)}=", "")

    def reward(self, problem, completion):
        return sum(c.isdigit() for c in completion) / 8


def rows_of(family, folder, engine=None, **method):
    """The rows of one step of two updates."""
    moe(family).save_pretrained(folder / "model")
    char_tokenizer(Digits.alphabet).save_pretrained(folder / "model")
    rollout = RolloutConfig(prompts=4, group_size=4, engine=engine or EngineConfig())
    config = RunConfig(
        model=ModelConfig(path=str(folder / "model")),
        task=TaskConfig(f"{__file__}:Digits"),
        method=MethodConfig(**method),
        rollout=rollout,
        optim=OptimConfig(steps=1, num_minibatches=2, warmup_updates=0),
        eval=EvalConfig(every=0, prompts=4),
        probe=ProbeConfig(sequences=8, decompose_every=1, tokens_every=1),
    )
    with warnings.catch_warnings(action="ignore"):
        train(config, folder / "run")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {kind: [row for row in rows if row["kind"] == kind] for kind in {row["kind"] for row in rows}}


@pytest.mark.parametrize("family", supported())
def test_a_family_trains_under_replay(family, tmp_path):
    rows = rows_of(family, tmp_path, replay="R2")
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


@pytest.mark.parametrize("family", ["GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "PhimoeForCausalLM"])
def test_tensors_of_little_effect_reach_an_engine_of_lower_precision(family, tmp_path):
    """A bf16 engine does not hear what an fp32 model does when such a tensor moves by its own size."""
    rows = rows_of(family, tmp_path, EngineConfig(kind="hf"), replay="R3")
    for update in rows["update"]:
        assert 0 < update["replayed_rows"] < update["routed_rows"]  # last tokens have no route


def test_a_value_model_is_a_copy_of_a_backbone_of_another_name(tmp_path):
    """Llama 4 names an attribute as its backbone that it does not have."""
    rows = rows_of("Llama4ForCausalLM", tmp_path, objective="ppo")
    assert all(update["grad_norm"] > 0 and update["value_loss"] >= 0 for update in rows["update"])
