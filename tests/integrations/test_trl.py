"""Routing Replay in the installed TRL: exact, carried through its shuffle, or an error."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_rl.measure.randomness import turn_off_randomness
from moe_rl.routing import RoutedExperts, RoutingError, change_counts, record_routes

pytest.importorskip("trl", reason="needs `pip install '.[trl]'`")

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from datasets import Dataset
from routing_helpers import moe
from tiny_trl import CHANGES, MEASURED, TINY, TOKENIZER, equal, logged, make, replayed_all, spying, trained
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from moe_rl.integrations.hf_trainer import ReplayTrainer
from moe_rl.integrations.old_policy import refuse_model, same_policy
from moe_rl.integrations.trl import routing_replay
from moe_rl.policy import build_tiny


def test_measuring_changes_no_bit_of_the_training(tmp_path):
    plain, ours = trained(GRPOTrainer, tmp_path), trained(routing_replay(GRPOTrainer), tmp_path, options=MEASURED)
    assert equal(plain, ours)
    assert logged(plain, "loss") == logged(ours, "loss")
    assert set(logged(ours, "routing/replayed_fraction").values()) == {0.0}
    assert logged(ours, "routing/first_change") == {1: 0.0, 5: 0.0}  # a batch is scored before updates 1 and 5


def test_first_update_is_trls_to_the_bit_and_later_ones_are_replayed(tmp_path):
    plain = trained(GRPOTrainer, tmp_path, max_steps=1)
    replayed = trained(routing_replay(GRPOTrainer), tmp_path, options={"replay": "R2"}, max_steps=1)
    assert equal(plain, replayed)
    assert logged(replayed, "loss") == logged(plain, "loss")
    spy = trained(routing_replay(spying(GRPOTrainer)), tmp_path, options={"replay": "R2"})
    natural = trained(routing_replay(spying(GRPOTrainer)), tmp_path, options=MEASURED)
    assert replayed_all(spy) and not replayed_all(natural)  # the weights move far enough to choose others
    assert set(logged(spy, "routing/replayed_fraction").values()) == {1.0}
    assert not equal(spy, natural)


SETTINGS = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 4},
    "num_iterations": {"num_iterations": 3, "steps_per_generation": 2},
    "batch and update do not end together": {"gradient_accumulation_steps": 3, "steps_per_generation": 4},
    "padding to a multiple": {"pad_to_multiple_of": 8},
    "truncated masked": {"mask_truncated_completions": True},
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "fp32 head": {"cast_lm_head_to_fp32": True},
    "auxiliary loss": {"router_aux_loss_coef": 0.01},
    "evaluation between updates": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
} | {loss: {"loss_type": loss, "max_steps": 3} for loss in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo")}
SETTINGS["luspo"] = {"loss_type": "luspo", "importance_sampling_level": "sequence", "max_steps": 3}


@pytest.mark.parametrize("name", SETTINGS)
def test_replay_is_exact_under(name, tmp_path):
    options = {"replay": "R2", "probe_sequences": 0}
    if "evaluation" in name:
        options["eval_dataset"] = Dataset.from_dict({"prompt": ["^1+2=", "^34+5="]})
    trainer = trained(routing_replay(spying(GRPOTrainer)), tmp_path, options=options, **SETTINGS[name])
    assert replayed_all(trainer)
    assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}
    assert set(logged(trainer, "routing/first_change").values()) == {0.0}
    assert not logged(trainer, CHANGES[0])  # no probe was asked for
    if "evaluation" in name:
        assert logged(trainer, "eval_loss").keys() == set(range(1, 7))


@pytest.mark.parametrize(
    "family",
    ["PhimoeForCausalLM", "DeepseekV4ForCausalLM", "NemotronHForCausalLM", "JetMoeForCausalLM", "GptOssForCausalLM"],
)
def test_other_kinds_of_routers_are_replayed(family, tmp_path):
    model = moe(family)
    if family == "PhimoeForCausalLM":
        with pytest.raises(RoutingError, match="router_jitter_noise"):
            make(routing_replay(GRPOTrainer), tmp_path, model=model, options=MEASURED).train()
        turn_off_randomness(model)
    trainer = trained(routing_replay(spying(GRPOTrainer)), tmp_path, model=model, options={"replay": "R2"}, max_steps=3)
    assert replayed_all(trainer)
    assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}
    assert set(logged(trainer, "routing/first_change").values()) == {0.0}
    assert max(logged(trainer, CHANGES[0]).values()) > 0


def test_gmpo_is_replayed(tmp_path):
    settings = {"config_class": GMPOConfig, "importance_sampling_level": "sequence", "max_steps": 3}
    trainer = trained(routing_replay(spying(GMPOTrainer)), tmp_path, options={"replay": "R2"}, **settings)
    assert replayed_all(trainer)
    assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}
    assert not trainer._measures.sequence_clip, "GMPO does not read the level: its clip fractions are of tokens"


def test_compiled_model_carries_its_hooks(tmp_path):
    # torch.compile cannot trace the shape checks of the tests in our own experts implementation
    model = build_tiny(TINY, TOKENIZER, experts_implementation="grouped_mm")
    settings = {"model": model, "torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    with pytest.raises(RoutingError, match="the ratio is 1 by construction"):
        make(routing_replay(GRPOTrainer), tmp_path, options={"replay": "R2"}, **settings, steps_per_generation=1)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()), "it was refused"
    trainer = trained(routing_replay(GRPOTrainer), tmp_path, options={"replay": "R2"}, **settings)
    assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}
    assert max(logged(trainer, CHANGES[0]).values()) > 0


def lora(base, folder, **options):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=16, task_type="CAUSAL_LM")
    options = {"replay": "R2", "peft_config": adapter, **options}
    return make(routing_replay(base), folder, options=options, beta=0.05, learning_rate=0.1, max_steps=6)


def test_routes_of_the_lora_reference_are_never_replayed(tmp_path):
    # With an adapter TRL scores the reference through the same module, right after the policy.
    trainer = lora(spying(GRPOTrainer), tmp_path)
    trainer.train()
    assert replayed_all(trainer)
    assert logged(trainer, "routing/first_change") == {1: 0.0, 5: 0.0}
    assert any(value > 0 for value in logged(trainer, "kl").values())


def test_a_model_by_its_path_with_a_reference_of_its_own(tmp_path):
    build_tiny(TINY, TOKENIZER).save_pretrained(tmp_path / "model")
    options = {"replay": "R2", "probe_sequences": 0}
    settings = {"model": str(tmp_path / "model"), "options": options, "beta": 0.05, "max_steps": 3}
    trainer = trained(routing_replay(spying(GRPOTrainer)), tmp_path, **settings)
    assert trainer.ref_model is not None
    assert replayed_all(trainer)
    assert set(logged(trainer, "routing/replayed_fraction").values()) == {1.0}


def test_routes_of_another_policy_are_an_error(tmp_path):
    class Mistaken(GRPOTrainer):
        """Takes the reference's log-probabilities for the old policy's."""

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["old_per_token_logps"] = output["ref_per_token_logps"]
            return output

    trainer = lora(Mistaken, tmp_path)
    with pytest.raises(RoutingError, match=r"before any weight moved.*another policy"):
        trainer.train()
    assert trainer.state.global_step == 4  # at first the adapter changes nothing: reference and policy are one


def test_routes_beside_other_tokens_are_an_error(tmp_path):
    class Mixed(GRPOTrainer):
        def _prepare_inputs(self, batch):
            inputs = super()._prepare_inputs(batch)
            return {**inputs, "routing_rows": inputs["routing_rows"].flip(0)} if self.model.training else inputs

    with pytest.raises(RoutingError, match="recorded for other tokens"):
        make(routing_replay(Mixed), tmp_path, options={"replay": "R2"}).train()


def test_a_pass_that_is_not_the_old_policys_is_an_error(tmp_path):
    class Copied(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {**output, "old_per_token_logps": output["old_per_token_logps"].clone()}

    with pytest.raises(RoutingError, match="not those of a pass of the policy"):
        make(routing_replay(Copied), tmp_path, options={"replay": "R2"}).train()


def test_a_loss_that_calls_the_model_twice_is_an_error(tmp_path):
    class Twice(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            model(inputs["prompt_ids"])
            return super()._compute_loss(model, inputs)

    for replay, said in (("none", "its loss called the model 2 times"), ("R2", "do not fit this call")):
        trainer = make(routing_replay(Twice), tmp_path / replay, options={"replay": replay})
        with pytest.raises(RoutingError, match=said):
            trainer.train()


def test_a_loss_of_its_own_is_an_error(tmp_path):
    class Own(GRPOTrainer):
        def compute_loss(self, model, inputs, **_):
            return model(input_ids=inputs["prompt_ids"]).logits.sum()

    with pytest.raises(
        RoutingError, match=r"a training step without the loss .* \(does it have a compute_loss of its own"
    ):
        make(routing_replay(Own), tmp_path, options={"replay": "R2"}).train()


@pytest.mark.parametrize("replay", ["none", "R2"])
def test_a_reward_function_that_leaves_the_model_in_eval_mode_is_an_error(replay, tmp_path):
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options={"replay": replay})
    trainer.reward_funcs = [lambda completions, **_: [float(trainer.model.eval().training) for _ in completions]]
    with pytest.raises(RoutingError, match=r"in eval mode \(did a reward function call model.eval\(\)\?\)"):
        trainer.train()


@pytest.mark.parametrize("replay", ["none", "R2"])
@pytest.mark.parametrize(
    "settings", [{"steps_per_generation": 2, "gradient_accumulation_steps": 2}, {"steps_per_generation": 1}]
)
def test_a_ratio_that_is_one_by_construction_is_refused(settings, replay, tmp_path):
    with pytest.raises(RoutingError, match="the ratio is 1 by construction"):
        make(routing_replay(GRPOTrainer), tmp_path, options={"replay": replay}, **settings)


def test_a_run_folder_is_refused_where_an_update_takes_micro_batches_of_two_batches(tmp_path):
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 3}
    with pytest.raises(RoutingError, match=r"4 x 1\) is no multiple of gradient_accumulation_steps \(3\)"):
        make(routing_replay(GRPOTrainer), tmp_path, options={**MEASURED, "run_folder": tmp_path / "runs"}, **settings)
    assert not (tmp_path / "runs").exists()


def test_other_trainers_are_refused():
    from trl import SFTTrainer

    with pytest.raises(TypeError, match=r"GRPOTrainer.*got SFTTrainer$"):
        routing_replay(SFTTrainer)
    with pytest.raises(TypeError, match="AsyncGRPOTrainer: it has a loss"):
        routing_replay(type("AsyncGRPOTrainer", (), {}))
    assert routing_replay(GRPOTrainer) is routing_replay(GRPOTrainer)
    assert issubclass(routing_replay(GMPOTrainer), GMPOTrainer)
    own = type("Own", (routing_replay(GRPOTrainer),), {})
    for twice in (routing_replay(GRPOTrainer), own):
        with pytest.raises(TypeError, match=f"{twice.__name__} is made by routing_replay already"):
            routing_replay(twice)


def test_an_older_trl_is_refused(monkeypatch):
    monkeypatch.setattr("trl.__version__", "0.29.1")  # that ms-swift pins
    with pytest.raises(RoutingError, match=r"TRL 0.29.1 .* pip install 'trl>=1.16'"):
        routing_replay(type("Own", (GRPOTrainer,), {}))


def test_a_dense_model_is_refused_before_anything_is_sampled(tmp_path):
    config = Qwen3Config(
        vocab_size=len(TOKENIZER), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    with pytest.raises(RoutingError, match=r"Qwen3ForCausalLM registers no router.*a dense model"):
        make(routing_replay(GRPOTrainer), tmp_path, model=Qwen3ForCausalLM(config), options=MEASURED)


def test_a_model_with_images_is_refused(tmp_path):
    class Images(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._is_vlm = True

    with pytest.raises(RoutingError, match="models with images are not supported"):
        make(routing_replay(Images), tmp_path, options=MEASURED)


def test_evaluation_with_continuous_batching_is_refused_before_training(tmp_path):
    """Its generation leaves the model in train mode: TRL then evaluates on the training's buffer."""
    settings = {"use_transformers_continuous_batching": True, "eval_strategy": "steps", "eval_steps": 1}
    options = {**MEASURED, "eval_dataset": Dataset.from_dict({"prompt": ["^1+2=", "^34+5="]})}
    with pytest.raises(RoutingError, match="TRL takes an evaluation for training"):
        make(routing_replay(GRPOTrainer), tmp_path, options=options, **settings)


def test_unknown_replay_is_refused(tmp_path):
    with pytest.raises(RoutingError, match="none, R2, R3, got 'r2'"):
        make(routing_replay(GRPOTrainer), tmp_path, options={"replay": "r2"})


def test_replay_that_is_not_named_is_none_and_is_said(tmp_path, caplog):
    """Somebody who came for replay and forgot to name it must not train without it and without a word."""
    assert make(routing_replay(GRPOTrainer), tmp_path).replay == "none"
    assert "nothing is replayed" in caplog.text and '"R2"' in caplog.text
    caplog.clear()
    make(routing_replay(GRPOTrainer), tmp_path, options=MEASURED)
    assert "nothing is replayed" not in caplog.text


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("first_change_tolerance", 5.0, "a share of the expert slots: .* at least 0 and of at most 1, got 5.0"),
        ("first_change_tolerance", -0.1, "of at least 0 and of at most 1, got -0.1"),
        ("first_change_tolerance", float("nan"), "a finite number"),
        ("probe_sequences", -1, "a whole number of at least 0, got -1"),
    ],
)
def test_options_out_of_their_ranges_are_refused(option, value, said, tmp_path):
    with pytest.raises(RoutingError, match=f"{option}.*{said}"):
        make(routing_replay(GRPOTrainer), tmp_path, options={**MEASURED, option: value})


def test_dropout_is_refused(tmp_path):
    model = build_tiny(TINY, TOKENIZER)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(RoutingError, match=r"layers.1.self_attn has attention_dropout = 0.1"):
        make(routing_replay(GRPOTrainer), tmp_path, model=model, options=MEASURED)
    refuse_model(torch.nn.Sequential(torch.nn.Dropout(0.0)))
    with pytest.raises(RoutingError, match=r"0 has dropout = 0.5"):
        refuse_model(torch.nn.Sequential(torch.nn.Dropout(0.5)))


def test_an_accelerator_without_float64_is_refused_by_its_name():
    trainer = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("mps")))
    with pytest.raises(RoutingError, match=r"mps has no float64.*use_cpu=True"):
        ReplayTrainer._begin(trainer, None, "grpo", None, one_update=True)


def test_noise_on_the_embeddings_is_refused_by_its_name(tmp_path):
    with pytest.raises(RoutingError, match=r"neftune_noise_alpha=5 adds noise to the embeddings"):
        make(routing_replay(GRPOTrainer), tmp_path, neftune_noise_alpha=5.0, options=MEASURED)


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_adapters_that_add_tokens_are_refused_before_anything_is_sampled(tmp_path, kind):
    import peft

    adapter = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(RoutingError, match=r"PEFT's P\w+_TUNING adds virtual tokens that are not in the batch"):
        make(routing_replay(GRPOTrainer), tmp_path, options={**MEASURED, "peft_config": adapter})


def test_the_auxiliary_loss_that_trl_adds_is_named(tmp_path, caplog):
    make(routing_replay(GRPOTrainer), tmp_path, router_aux_loss_coef=None, options=MEASURED)
    assert "router_aux_loss_coef=0.0" in caplog.text
    caplog.clear()
    make(routing_replay(GRPOTrainer), tmp_path, options=MEASURED)
    gmpo = {"config_class": GMPOConfig, "router_aux_loss_coef": None}  # whose loss leaves it out
    make(routing_replay(GMPOTrainer), tmp_path, options=MEASURED, **gmpo)
    assert "router_aux_loss_coef" not in caplog.text


def test_same_policy_counts_real_tokens_only():
    model = build_tiny(TINY, TOKENIZER)
    ids = torch.randint(1, 10, (2, 5))
    with torch.no_grad(), record_routes(model) as one:
        model(ids)
    other = one.routes.ids.clone()
    other[0, 0] = (other[0, 0] + 1) % 6  # one token, both sites, every slot
    changed = RoutedExperts(other, one.routes.sites, 6)
    real = torch.ones(2, 5, dtype=torch.bool)
    share = change_counts(one.routes, changed, real).rates()["slot_change"]
    with pytest.raises(RoutingError, match=f"{100 * share:.3g} % of the expert slots"):
        same_policy(one.routes, changed, real)
    assert same_policy(one.routes, changed, real, tolerance=share) == share
    real[0, 0] = False
    assert same_policy(one.routes, changed, real) == 0
