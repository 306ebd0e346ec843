"""ms-swift's GRPO trainer: the real one where it is installed, a stand-in with its signatures elsewhere."""

import inspect
import json
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from moe_rl.integrations import swift as integration
from moe_rl.policy import TinyConfig, build_tiny, char_tokenizer
from moe_rl.routing import RoutingError, record_routes

TINY = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
MICRO_BATCHES = 4
REWARDS = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])  # by group


class GRPOTrainer:
    """What ms-swift 4.6.0 does around its forwards, with its signatures: micro-batches, each scored by itself."""

    def __init__(self, model, *_args, **kwargs):
        self.model, self.args, self.num_iterations, self.beta = model.train(), kwargs["args"], 1, 0.0
        self.accelerator, self.state = Accelerator(cpu=True), SimpleNamespace(global_step=0)
        self.template = SimpleNamespace(padding_free=False, sequence_parallel_size=1)
        self.overlong_filter, self.kl_in_reward, self.scale_rewards = False, False, "group"
        self.is_multimodal, self.importance_sampling_level, self.loss_type = False, "token", "grpo"
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.optimizer, self.callbacks = torch.optim.SGD(model.parameters(), lr=0.5), []

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def _prepare_batch_inputs(self, samples):
        found = []
        for ids, mask in samples:
            inputs, completion = {"input_ids": ids, "attention_mask": mask}, mask[:, 2:].bool()
            cut = mask.all(1)
            batch = SimpleNamespace(completion_mask=completion, truncated_mask=cut, old_per_token_logps=None)
            batch.advantages = torch.tensor([[1.0], [-1.0], [0.0]]).expand_as(completion)  # [B,T], as ms-swift has them
            with torch.no_grad():
                batch.old_per_token_logps = self._get_per_token_logps_and_entropies(self.model, inputs, batch)[0]
                if self.beta:  # the reference, by the same module with other weights
                    self._get_per_token_logps_and_entropies(self.model, inputs, batch)
            found.append({"model_inputs": inputs, "grpo_batch": batch})
        return found

    def _generate_and_score_completions(self, inputs):
        batches = self._prepare_batch_inputs(inputs)
        log, rewards = self._metrics["train"], REWARDS
        if self.kl_in_reward and self.beta:  # compute_advantages
            kl = torch.arange(12.0).view(4, 3)
            rewards = rewards - self.beta * kl
            log["kl"].append(kl.mean().item())
        log["reward"].append(rewards.mean().item())  # and compute_reward_metrics
        std = rewards.std() if self.scale_rewards == "batch" else rewards.std(-1).mean()
        log["reward_std"].append(std.item())
        log["frac_reward_zero_std"].append(torch.isclose(rewards.std(1), torch.zeros(4)).float().mean().item())
        return batches

    def _get_per_token_logps_and_entropies(
        self, model, model_inputs, grpo_batch, compute_entropy=False, origin_data=None
    ):
        logits = model(**model_inputs).logits[:, 1:-1].log_softmax(-1)
        return logits.gather(-1, model_inputs["input_ids"][:, 2:, None])[..., 0], None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch = inputs["grpo_batch"]
        logps, _ = self._get_per_token_logps_and_entropies(model, inputs["model_inputs"], batch)
        return -((logps - batch.old_per_token_logps).exp() * batch.completion_mask).mean()

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()

    def train(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            samples = []
            for _ in range(MICRO_BATCHES):
                length = torch.tensor([[6], [8], [5]])
                ids = torch.randint(1, 12, (3, 8), generator=generator)
                samples.append((ids, (torch.arange(8) < length).long()))
            self._buffered_inputs = self._generate_and_score_completions(samples)
            for inputs in self._buffered_inputs:
                self.training_step(self.model, inputs)
                self.optimizer.step()
                for callback in self.callbacks:
                    callback.on_optimizer_step(self.args, self.state, None)
                self.optimizer.zero_grad()
                self.state.global_step += 1


def make(replay=None, base=GRPOTrainer, **options):
    model = build_tiny(TINY, char_tokenizer("0123456789+=^$"))
    args = SimpleNamespace(steps_per_generation=MICRO_BATCHES, gradient_accumulation_steps=1)
    return (integration.routing_replay(base, replay, **options) if replay else base)(model, args=args)


def trained(*args, **options):
    trainer = make(*args, **options)
    trainer.train()
    return trainer


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_measuring_changes_no_bit():
    plain, ours = trained(), trained("none")
    assert equal(plain, ours)
    log = ours._metrics["train"]
    assert log["routing/first_change"] == [0, 0] and log["routing/replayed_fraction"] == [0.0] * 8
    assert log["routing/slot_change"][3] > 0
    assert len(log["routing/f2_natural"]) == 8 and all(0 <= share <= 1 for share in log["routing/f2_natural"])
    assert len(log["routing/max_vio"]) == 8 and min(log["routing/max_vio"]) > 0


def test_replay_takes_the_experts_of_the_scoring():
    passes = defaultdict(list)

    class Spy(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, model_inputs, *args, **kwargs):
            with record_routes(model) as recording:
                found = super()._get_per_token_logps_and_entropies(model, model_inputs, *args, **kwargs)
            if not kwargs:  # of the probe
                passes[id(model_inputs["input_ids"])].append(recording.routes.ids)
            return found

    replayed = trained("R2", Spy)
    assert len(passes) == 8 and all(torch.equal(scored, used) for scored, used in passes.values())
    assert replayed._metrics["train"]["routing/replayed_fraction"] == [1.0] * 8
    assert replayed._metrics["train"]["routing/first_change"] == [0, 0]
    assert not equal(replayed, trained())


def test_another_pass_than_the_old_policys_is_an_error():
    class Copied(GRPOTrainer):
        def _prepare_batch_inputs(self, samples):
            found = super()._prepare_batch_inputs(samples)
            found[1]["grpo_batch"].old_per_token_logps = found[1]["grpo_batch"].old_per_token_logps.clone()
            return found

    with pytest.raises(RoutingError, match="not those of a pass of the policy"):
        trained("R2", Copied)


@pytest.mark.parametrize(
    ("place", "name", "value", "said"),
    [
        ("template", "padding_free", True, "padding_free"),
        ("template", "sequence_parallel_size", 2, "sequence parallelism"),
        ("args", "gradient_accumulation_steps", MICRO_BATCHES, "the ratio is 1 by construction"),
        (None, "use_liger_loss", True, "use_liger_kernel with GRPO"),
        (None, "dynamic_num_samples", True, "a dynamic number of samples"),
        (None, "is_multimodal", True, "a model with images"),
        (None, "chord_sft_iterator", iter(()), "CHORD's loss calls the model on texts of its own"),
    ],
)
def test_refused(place, name, value, said):
    class Set(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            setattr(getattr(self, place) if place else self, name, value)

    with pytest.raises(RoutingError, match=said):
        make("R2", Set)


def test_a_dynamic_number_of_samples_is_refused_when_it_is_known():
    class Split(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.dynamic_num_samples = True  # of what the scheduler returned
            return super()._generate_and_score_completions(inputs)

    trainer = make("R2", Split)
    with pytest.raises(RoutingError, match="a dynamic number of samples"):
        trainer.train()


@pytest.mark.parametrize(
    ("level", "objective"), [("token", "grpo"), ("sequence", "gspo"), ("sequence_token", "gspo_token")]
)
def test_clip_fractions_are_of_tokens_at_every_level_of_the_ratio(level, objective):
    class Set(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.importance_sampling_level = level

    trainer = make("none", Set)
    assert trainer._objective == objective and trainer._measures.sequence_clip is False


def test_clip_fractions_are_not_taken_over_where_a_mask_takes_out_sequences():
    class Set(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.args.off_policy_sequence_mask_delta = 0.1

    assert make("none", Set)._measures.sequence_clip is None


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"groups_equal": 0.5}),
        ({"scale_rewards": "batch"}, {"groups_equal": 0.5, "reward_std": float(REWARDS.std())}),
        ({"kl_in_reward": True, "scale_rewards": "batch"}, {"groups_equal": 0.5, "reward_std": float(REWARDS.std())}),
        ({"kl_in_reward": True, "scale_rewards": "batch", "beta": 0.1}, {}),
        ({"beta": 0.1}, {"groups_equal": 0.5}),
    ],
)
def test_rows_have_the_verifiers_rewards_without_the_kl_that_is_taken_off(settings, wanted):
    class Set(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            vars(self).update(settings)

    assert trained("none", Set)._rewards() == pytest.approx({"reward": 0.5, **wanted})


def test_what_the_overlong_filter_leaves_out_of_the_loss_is_not_counted():
    class Set(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.overlong_filter = True

    trainer = trained("none", Set)
    batch = trainer._buffered_inputs[0]["grpo_batch"]
    assert batch.truncated_mask.tolist() == [False, True, False]
    assert trainer._counted(batch).sum(1).tolist() == [4, 0, 3]
    assert make("none")._counted(batch).sum(1).tolist() == [4, 6, 3]


def test_unknown_names_and_versions_are_refused(monkeypatch):
    with pytest.raises(TypeError, match="unexpected keyword argument 'probes'"):
        make("R2", probes=3)
    with pytest.raises(RoutingError, match="none, R2, got 'R3'"):
        make("R3")
    with pytest.raises(RoutingError, match=r"first_change_tolerance, a share .* at most 1, got 5.0"):
        make("R2", first_change_tolerance=5.0)
    for name in ("swift", "swift.trainers", "swift.trainers.trainer_factory"):
        module = ModuleType(name)
        module.__version__, module.TrainerFactory = "3.12.6", None
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RoutingError, match=r"ms-swift 3.12.6 is not known here \(4.6.0"):
        integration.install()


def test_a_trainer_is_wrapped_once():
    with pytest.raises(TypeError, match="RoutingReplayGRPOTrainer is made by routing_replay already"):
        integration.routing_replay(integration.routing_replay(GRPOTrainer))


def test_the_real_trainer(tmp_path, monkeypatch):
    """`swift rlhf` as a user starts it: measuring changes nothing, replay is exact, LoRA's reference is left alone."""
    swift = pytest.importorskip("swift", reason="ms-swift is not installed")
    import string

    from swift.rewards import ORM, orms
    from swift.rlhf_trainers import GRPOTrainer as Real
    from swift.trainers.trainer_factory import TrainerFactory

    names = ("_prepare_batch_inputs", "_get_per_token_logps_and_entropies", "compute_loss")
    for name in names:  # the stand-in above is called as the real one
        theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (Real, GRPOTrainer))
        assert list(theirs) == list(ours)

    made = []

    class Spy(Real):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.passes = defaultdict(list)
            made.append(self)

        def _get_per_token_logps_and_entropies(self, model, model_inputs, grpo_batch, *args, **kwargs):
            with record_routes(model) as recording:
                found = super()._get_per_token_logps_and_entropies(model, model_inputs, grpo_batch, *args, **kwargs)
            if not kwargs.get("compute_entropy") or torch.is_grad_enabled():
                self.passes[id(grpo_batch)].append((grpo_batch, torch.is_grad_enabled(), recording.routes.ids))
            return found

    class Tiny(ORM):
        def __call__(self, completions, **_):
            return [float(sum(map(ord, text)) % 3) for text in completions]

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(orms, "tiny", Tiny)
    monkeypatch.setattr(sys.modules[__name__], "Spy", Spy, raising=False)
    tokenizer = char_tokenizer(string.printable)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    build_tiny(TINY, tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    questions = [{"messages": [{"role": "user", "content": f"^{a}+{b}="}]} for a in (1, 23, 456) for b in (7, 89)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, questions)))
    settings = {
        "rlhf_type": "grpo", "model": tmp_path / "model", "model_type": "qwen3_moe", "template": "dummy",
        "dataset": tmp_path / "data.jsonl", "reward_funcs": "tiny", "torch_dtype": "float32", "bf16": False,
        "use_vllm": False, "per_device_train_batch_size": 4, "steps_per_generation": 4, "num_generations": 4,
        "gradient_accumulation_steps": 1, "max_completion_length": 6, "max_steps": 6, "learning_rate": 1e-2,
        "logging_steps": 1, "use_cpu": True, "output_dir": tmp_path / "out", "gradient_checkpointing": False,
        "save_strategy": "no", "attn_impl": "sdpa", "report_to": "none", "dataset_num_proc": 1,
        "router_aux_loss_coef": 0, "use_hf": True, "eval_strategy": "no", "split_dataset_ratio": 0,
    }  # fmt: skip

    def run(replay, **more):
        monkeypatch.setitem(TrainerFactory.TRAINER_MAPPING, "grpo", f"{__name__}.Spy")
        if replay:
            integration.install(replay=replay)
        given = {"tuner_type": "full", **settings, **more}
        swift.rlhf_main([word for name, value in given.items() for word in (f"--{name}", str(value))])
        return made[-1]

    def logged(trainer, name):
        return [row[name] for row in trainer.state.log_history if name in row]

    plain, measured, replayed = run(None), run("none"), run("R2")
    assert equal(plain, measured) and not equal(plain, replayed)
    adapted = run("R2", tuner_type="lora", target_modules="q_proj", lora_dropout=0, beta=0.05, learning_rate=0.1)
    for trainer in (replayed, adapted):
        assert logged(trainer, "routing/replayed_fraction") == [1.0] * 6
        assert logged(trainer, "routing/first_change") == [0.0] * 2
        for passes in trainer.passes.values():
            scored, updates = passes[0][2], [ids for _, grad, ids in passes if grad]
            assert all(torch.equal(scored, ids) for ids in updates)
        assert sum(grad for passes in trainer.passes.values() for _, grad, _ in passes) == 6
    assert max(logged(replayed, "routing/slot_change")) > 0
    assert max(logged(adapted, "kl")) > 0
