"""What the TRL integration measures: its probe, the rows of its run folder, interrupted and continued runs."""

import sys
from pathlib import Path

import pytest
import torch

from moe_rl.routing import RoutingError, change_counts, expert_load, record_routes

pytest.importorskip("trl", reason="needs `pip install '.[trl]'`")

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import disturbed, moe
from tiny_trl import CHANGES, MEASURED, TINY, TOKENIZER, logged, make, replayed_all, spying, trained, weights
from transformers import TrainerCallback
from trl import GRPOTrainer

from moe_rl.integrations.hf_trainer import load_converted
from moe_rl.integrations.trl import routing_replay
from moe_rl.policy import build_tiny


def test_probe_is_what_one_measures_by_hand(tmp_path):
    options = {"replay": "R2", "probe_sequences": 100}
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options=options, max_steps=1, learning_rate=0.1)
    old = build_tiny(TINY, TOKENIZER)
    kept = {}
    inner = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: kept.setdefault("batch", inner(inputs))
    trainer.train()
    batch = kept["batch"]
    ids, real = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    routes, logps = [], []
    for model in (old, trainer.model):
        with torch.no_grad(), record_routes(model) as recording:
            log_probabilities = model(input_ids=ids, attention_mask=real).logits.log_softmax(-1)
        routes.append(recording.routes)
        logps.append(log_probabilities[:, :-1].gather(-1, ids[:, 1:, None])[..., 0])
    answers = torch.cat([torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], dim=1).bool()
    expected = change_counts(*routes, answers).rates()
    assert 0 < expected["slot_change"] < 1
    for name in CHANGES:
        assert logged(trainer, name)[1] == pytest.approx(expected[name.removeprefix("routing/")], abs=1e-12)
    load = expert_load(routes[1], answers)
    most = load.amax(1) / load.double().mean(1) - 1
    assert logged(trainer, "routing/max_vio")[1] == pytest.approx(float(most.mean()), rel=1e-9)
    shares = load.double() / load.sum(1, keepdim=True)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum(1)
    assert logged(trainer, "routing/load_entropy_min")[1] == pytest.approx(float(entropy.min()), rel=1e-9)
    gap = (logps[1] - logps[0]).double()
    assert logged(trainer, "routing/var_token_natural")[1] == pytest.approx(float(gap[answers[:, 1:]].var()), rel=1e-4)
    far = (gap[answers[:, 1:]].exp() > 2) | (gap[answers[:, 1:]].exp() < 1 / 2)
    assert 0 < int(far.sum()) / far.numel() == logged(trainer, "routing/f2_natural")[1]
    means = torch.stack([row[mask].mean() for row, mask in zip(gap, answers[:, 1:], strict=True)])
    assert logged(trainer, "routing/var_sequence_natural")[1] == pytest.approx(float(means.var()), rel=1e-4)


@pytest.mark.parametrize("replay", ["none", "R2"])
def test_run_folder_is_read_by_the_laboratory(replay, tmp_path):
    from moe_rl import study
    from moe_rl.integrations.hf_trainer import run_writer
    from moe_rl.study.comparing import pairs_to_compare
    from moe_rl.study.live_rows import new_rows

    options = {"replay": replay, "run_folder": tmp_path / "runs"}
    trainer = trained(routing_replay(GRPOTrainer), tmp_path / "trl", options=options)
    data = study.load(tmp_path / "runs")
    (run,) = data.runs
    assert (run.arm, run.seed, run.replay, run.finished) == ("dapo" if replay == "none" else "dapo_r2", 1, replay, True)
    assert data.rollouts.step.tolist() == [0, 1]
    assert data.rollouts.reward.tolist() == list(logged(trainer, "reward").values())
    keys = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2)]
    for table in (data.updates, data.probes):
        assert list(zip(table.step, table["update"], strict=True)) == keys
    assert (data.updates.replayed_rows / data.updates.routed_rows).tolist() == [float(replay == "R2")] * 6
    f2 = (data.probes.extreme_2_natural / data.probes.tokens).tolist()
    assert f2 == list(logged(trainer, "routing/f2_natural").values())
    slots = (data.probes.slots_changed / data.probes.slots).tolist()
    assert slots == list(logged(trainer, "routing/slot_change").values())
    assert data.updates.loss.tolist() == pytest.approx(list(logged(trainer, "loss").values()), abs=1e-4)
    clipped = (data.updates.clipped_tokens / data.updates.tokens).tolist()
    assert clipped == pytest.approx(list(logged(trainer, "clip_ratio/region_mean").values()))
    assert data.updates.lr.tolist() == pytest.approx(list(logged(trainer, "learning_rate").values()))
    assert data.updates.grad_norm.tolist() == pytest.approx(list(logged(trainer, "grad_norm").values()), rel=1e-3)
    rounding = 1e-12 if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else 0  # plain kernels, by addresses
    assert data.updates.k3[0] <= rounding < data.updates.k3[1]  # the ratio is 1 until a weight moves
    assert len(new_rows(run.folder / "metrics.jsonl")["rows"]["probe"]) == 6
    if replay == "R2":
        assert study.figures.FIGURES["expert_change"](data).figure.axes
        gspo = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "loss_type": "grpo"}
        for objective, settings in (("gspo", gspo), ("slow", {"learning_rate": 1e-3, **gspo})):
            other = make(routing_replay(GRPOTrainer), tmp_path / objective, seed=2, options=MEASURED, **settings)
            run_writer(other, tmp_path / "runs", objective).finish()
        arms = pairs_to_compare(study.load(tmp_path / "runs"))
        assert arms == [("gspo", "dapo_r2")], "the same but for the method; the third has another learning rate, too"


@pytest.mark.parametrize("delta", [None, 1.0])
def test_clipped_tokens_of_a_sequence_ratio_are_those_of_the_clipped_sequences(delta, tmp_path):
    from moe_rl import study

    options = {**MEASURED, "run_folder": tmp_path / "runs", "probe_sequences": 0}
    gspo = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "loss_type": "grpo", "delta": delta}
    length = {"max_completion_length": 6, "generation_kwargs": {"min_new_tokens": 6}}
    trained(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **gspo, **length)
    updates = study.load(tmp_path / "runs").updates
    assert updates.clipped_sequences.max() > 0
    assert (updates.clipped_tokens == 6 * updates.clipped_sequences).all()


def test_a_sequence_is_clipped_if_one_of_its_tokens_is(tmp_path):
    """Where tokens have advantages of their own, as a trainer of one's own may give them; beside it the tokens above
    the ceiling of dual clip."""
    from moe_rl import study

    by_hand = []

    class TokenAdvantages(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            signs = torch.arange(output["completion_ids"].numel()) % 3 - 1.0
            return {**output, "advantages": signs.view(output["completion_ids"].shape)}

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.found

        def _compute_loss(self, model, inputs):
            loss, mask = super()._compute_loss(model, inputs), inputs["completion_mask"]
            gap = (self.found[0] - inputs["old_per_token_logps"]).detach()
            ratio = ((gap * mask).sum(1) / mask.sum(1)).exp()[:, None]
            low, high = (ratio < 1 - 3e-4) & (inputs["advantages"] < 0), (ratio > 1 + 3e-4) & (inputs["advantages"] > 0)
            clipped = (low | high) & mask.bool()
            above = (gap.exp() > 3) & (inputs["advantages"] < 0) & mask.bool()
            by_hand.append((int(clipped.sum()), int(clipped.any(1).sum()), int(above.sum())))
            return loss

    options = {**MEASURED, "run_folder": tmp_path / "runs", "probe_sequences": 0}
    gspo = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "loss_type": "grpo"}
    trainer = trained(routing_replay(TokenAdvantages), tmp_path / "trl", options=options, learning_rate=1.0, **gspo)
    updates = study.load(tmp_path / "runs").updates
    columns = updates.clipped_tokens, updates.clipped_sequences, updates.ceiling_tokens
    assert list(zip(*columns, strict=True)) == by_hand
    assert min(max(counts) for counts in zip(*by_hand, strict=True)) > 0
    shares = (updates.ceiling_tokens / updates.tokens).tolist()
    assert shares == pytest.approx(list(logged(trainer, "routing/ceiling_fraction").values()))


def test_loss_of_a_row_is_without_the_load_balancing_loss(tmp_path):
    from moe_rl import study

    for coef in (0.0, 1.0):
        options = {**MEASURED, "run_folder": tmp_path / f"runs{coef:.0f}", "probe_sequences": 0}
        settings = {"gradient_accumulation_steps": 2, "max_steps": 2, "router_aux_loss_coef": coef}
        trainer = trained(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **settings)
    without, added = (study.load(tmp_path / f"runs{n}").updates for n in (0, 1))
    assert added.loss[0] == pytest.approx(without.loss[0], abs=1e-6), "the same policy on the same batch"
    assert "aux_loss" not in without and (added.aux_loss_coef == 1).all() and (added.aux_loss > 1).all()
    assert added.aux_loss.tolist() == pytest.approx(list(logged(trainer, "aux_loss").values()))
    assert (added.loss + added.aux_loss).tolist() == pytest.approx(list(logged(trainer, "loss").values()), abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "by_group"),
    [
        ({}, True),
        ({"scale_rewards": "none"}, True),
        ({"scale_rewards": "batch"}, False),
        ({"multi_objective_aggregation": "normalize_then_sum"}, False),
    ],
)
def test_groups_of_equal_rewards_are_counted_where_trl_counts_groups(settings, by_group, tmp_path):
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options=MEASURED, **settings)
    trainer._metrics["train"].update(reward=[0.5], reward_std=[0.1], frac_reward_zero_std=[0.25])
    trainer._has_reward = torch.ones(16, dtype=torch.bool)
    wanted = {"reward": 0.5, "reward_std": 0.1, "reward_n": 16} | ({"groups_equal": 0.25} if by_group else {})
    assert trainer._rewards() == wanted


def test_sequences_of_a_row_have_a_token_that_counts(tmp_path):
    from moe_rl import study

    with_tokens = []

    class Seen(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            with_tokens.append(int(inputs["completion_mask"].any(1).sum()))
            return super()._compute_loss(model, inputs)

    options = {**MEASURED, "run_folder": tmp_path / "runs", "probe_sequences": 0}
    gspo = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "loss_type": "grpo"}
    settings = {**gspo, "mask_truncated_completions": True}
    trainer = trained(routing_replay(Seen), tmp_path / "trl", options=options, **settings)
    updates = study.load(tmp_path / "runs").updates
    assert updates.sequences.tolist() == with_tokens and 0 < min(with_tokens) < 4
    clipped = [
        4 * share for share in logged(trainer, "clip_ratio/region_mean").values()
    ]  # TRL's means are over all rows
    assert updates.clipped_sequences.tolist() == pytest.approx(clipped) and max(clipped) > 0


def test_rows_of_a_table_over_token_ids_are_in_no_arms_count(tmp_path):
    from moe_rl import study

    for replay in ("none", "R2"):
        options = {"replay": replay, "run_folder": tmp_path / "runs", "probe_sequences": 0}
        model = moe("DeepseekV4ForCausalLM")  # one of its layers
        trainer = trained(routing_replay(GRPOTrainer), tmp_path, model=model, options=options, max_steps=1)
        assert len(trainer._old.routes.meta["hash_routed"]) == 1
    rows = study.load(tmp_path / "runs").updates.routed_rows
    assert rows.tolist() == [rows[0]] * 2


def test_a_folder_of_another_seed_is_told(tmp_path, caplog):
    from moe_rl.integrations.hf_trainer import run_writer

    trainer = make(routing_replay(GRPOTrainer), tmp_path / "trl", options=MEASURED, seed=3)
    for seed in (2, 3):
        run_writer(trainer, tmp_path / "mine" / f"seed{seed}", "dapo").close()
    (told,) = [record.getMessage() for record in caplog.records if "folders alone" in record.getMessage()]
    assert "seed2 says seed 2, the trainer's arguments say seed=3" in told


def interrupted(trainer, at):
    """Train, and stop as by Ctrl-C after so many updates."""
    from transformers import TrainerCallback

    class Interrupted(TrainerCallback):
        def on_step_end(self, args, state, *_, **__):
            if state.global_step == at:
                raise KeyboardInterrupt

    trainer.add_callback(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)


def test_arms_of_other_models_or_rewards_are_not_compared_as_methods(tmp_path):
    import yaml
    from peft import LoraConfig

    from moe_rl import study
    from moe_rl.integrations.hf_trainer import run_writer
    from moe_rl.run_folder import RunFolderError
    from moe_rl.study.comparing import pairs_to_compare

    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    lora = {"options": {"peft_config": adapter}}
    arms = {"first": {}, "weights": {"reward_weights": [2.0]}, "lora": lora, "same": {}}
    for name, settings in arms.items():
        options = {"replay": "none" if name == "first" else "R2", **settings.pop("options", {})}
        trainer = make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **settings)
        run_writer(trainer, tmp_path / "runs" / name / "seed1", "dapo").finish()
    assert pairs_to_compare(study.load(tmp_path / "runs")) == [("same", "first")]
    folder = tmp_path / "more" / "a" / "seed1"
    run_writer(trainer, folder, "dapo").close()
    other = make(routing_replay(GRPOTrainer), tmp_path / "trl", options={"replay": "R2"}, reward_weights=[2.0])
    with pytest.raises(RunFolderError, match=r"reward_weights: None there, \[2.0\] now"):
        run_writer(other, folder, "dapo")
    config = folder / "config.yaml"  # of a version that kept neither models nor lists, and servers among arguments
    there = yaml.safe_load(config.read_text())
    for name in ("model", "rewards"):
        del there[name]
    there["arguments"] = {name: one for name, one in there["arguments"].items() if not isinstance(one, dict | list)}
    there["arguments"]["vllm_server_host"] = there["run"].pop("vllm_server_host")
    config.write_text(yaml.safe_dump(there))
    run_writer(trainer, folder, "dapo").close()
    assert "trained" in config.read_text()


def test_resumed_training_begins_with_the_checkpoints_experts(tmp_path):
    """transformers saves experts one by one, and its Trainer does not find them again."""

    class Seen(routing_replay(GRPOTrainer)):
        def _load_from_checkpoint(self, *args, **kwargs):
            super()._load_from_checkpoint(*args, **kwargs)
            self.begun = weights(self)

    settings = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    options = {**MEASURED, "probe_sequences": 0}
    before = weights(trained(routing_replay(GRPOTrainer), tmp_path, options=options, max_steps=2, **settings))
    resumed = make(Seen, tmp_path, options=options, max_steps=3, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(resumed.begun[name], value) for name, value in before.items())
    resumed.state.best_model_checkpoint, resumed.state.best_metric = str(tmp_path / "checkpoint-2"), 1.0
    resumed._load_best_model()  # as load_best_model_at_end does
    assert all(torch.equal(value, before[name]) for name, value in weights(resumed).items())


@pytest.mark.parametrize("family", ["OlmoeForCausalLM", "DeepseekV4ForCausalLM"])  # the latter saves a table of ids
def test_weights_are_loaded_that_a_checkpoint_has_under_other_names(family, tmp_path):
    from safetensors.torch import load_file

    saved, model = disturbed(moe(family)), moe(family)
    saved.save_pretrained(tmp_path)
    found = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    load_converted(model, found.missing_keys, str(tmp_path))
    wanted = saved.state_dict()
    assert found.missing_keys and all(torch.equal(x, wanted[name]) for name, x in model.state_dict().items())


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer = trained(routing_replay(GRPOTrainer), tmp_path, options={**MEASURED, "probe_sequences": 0}, **settings)
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "layers.1.mlp.experts" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(RoutingError, match=r"checkpoint-2 does not fit the model: \d+ of its weights are not there"):
        trainer.train(resume_from_checkpoint=True)


def test_a_folder_that_was_first_named_at_a_resume_keeps_no_lost_rows(tmp_path):
    from moe_rl import study

    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}
    options = {**MEASURED, "probe_sequences": 0}
    interrupted(make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **settings), at=4)
    options["run_folder"], settings["resume_from_checkpoint"] = tmp_path / "runs" / "a" / "seed1", True
    interrupted(make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **settings), at=5)
    resumed = make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **settings)
    resumed.train(resume_from_checkpoint=True)
    updates = study.load(tmp_path / "runs").updates
    assert updates["trainer/global_step"].tolist() == [3, 4, 5, 6, 7, 8], "the fifth was made twice, and counts once"


def test_interrupted_run_goes_on_in_its_folder(tmp_path):
    from moe_rl import study
    from moe_rl.run_folder import RunFolderError

    folder = tmp_path / "runs" / "mine" / "seed3"
    options = {**MEASURED, "run_folder": folder, "probe_sequences": 0}
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}  # a checkpoint inside a batch
    trainer = make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **settings)
    interrupted(trainer, at=5)
    data = study.load(folder)
    assert (data.runs[0].arm, data.runs[0].seed, data.runs[0].finished) == ("mine", 3, False)
    assert list(zip(data.updates.step, data.updates["update"], strict=True))[3:] == [(0, 4), (1, 1)]
    again = make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **settings)
    settings |= {"max_steps": 9, "resume_from_checkpoint": str(tmp_path / "trl" / "checkpoint-3"), "run_name": "again"}
    resumed = make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, **settings)  # a cell that ran twice
    with pytest.raises(RoutingError, match="has rows of 2 batches, and training begins anew"):
        again.train()
    resumed.train(resume_from_checkpoint=True)
    data = study.load(folder)
    assert data.runs[0].finished and not data.notes
    assert list(zip(data.updates.step, data.updates["update"], strict=True)) == [
        *((0, u) for u in (1, 2, 3)),  # the fourth was lost with the weights that it made
        *((1, u) for u in (1, 2, 3, 4)),
        (2, 1),
        (2, 2),
    ]
    with pytest.raises(RunFolderError, match="holds a finished run"):
        resumed.train()


@pytest.mark.parametrize("interrupted_at", [3, 4, 5])
def test_a_trainer_that_was_interrupted_does_not_rewrite_its_folder(interrupted_at, tmp_path):
    """As a cell that is stopped and run again does: TRL's buffer goes on, its count of steps begins at 0."""
    options = {**MEASURED, "run_folder": tmp_path / "runs" / "mine" / "seed1", "probe_sequences": 0}
    trainer = make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options)
    interrupted(trainer, interrupted_at)
    rows = (options["run_folder"] / "metrics.jsonl").read_bytes()
    with pytest.raises(RoutingError, match="make the trainer again and pass resume_from_checkpoint"):
        trainer.train()
    assert (options["run_folder"] / "metrics.jsonl").read_bytes() == rows
    assert not (options["run_folder"] / "DONE").exists()


def test_a_run_that_a_callback_stops_early_is_not_finished(tmp_path):
    options = {**MEASURED, "run_folder": tmp_path / "mine" / "seed1", "probe_sequences": 0}

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    trainer = make(routing_replay(GRPOTrainer), tmp_path / "trl", options=options, max_steps=8)
    trainer.add_callback(Stop())
    trainer.train()
    assert trainer.state.global_step == 3 and not (options["run_folder"] / "DONE").exists()


def test_train_may_be_called_again(tmp_path):
    trainer = make(routing_replay(spying(GRPOTrainer)), tmp_path, options={"replay": "R2"}, max_steps=2)
    trainer.train()
    trainer.train()  # goes on with the second half of TRL's batch, and counts its steps from 0 again
    assert replayed_all(trainer)
    assert logged(trainer, "routing/replayed_fraction") == {1: 1.0, 2: 1.0}
    assert not logged(trainer, "routing/first_change")  # no batch was scored
