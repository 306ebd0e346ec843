"""A GRPOTrainer of a few thousand parameters, and a spy that sees which experts TRL's passes used."""

import torch
from datasets import Dataset
from trl import GRPOConfig

from moe_rl.policy import TinyConfig, build_tiny, char_tokenizer
from moe_rl.routing import record_routes

TOKENIZER = char_tokenizer("0123456789+=^$")
TINY = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)
MEASURED = {"replay": "none"}
CHANGES = ("routing/slot_change", "routing/site_change", "routing/token_change")
PROMPTS = [f"^{a}+{b}=" for a in (1, 23, 456) for b in (7, 89)]  # of unequal length


def reward(completions, **_):
    return [float(sum(map(ord, text)) % 3) for text in completions]


def make(trainer_class, folder, model=None, config_class=GRPOConfig, options=None, **settings):
    """A trainer on the tiny model: 4 sequences per update, 4 updates per batch; `options` go to the trainer."""
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "router_aux_loss_coef": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }
    return trainer_class(
        model=build_tiny(TINY, TOKENIZER) if model is None else model,
        reward_funcs=reward,
        args=config_class(**{**defaults, **settings}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=TOKENIZER,
        **(options or {}),
    )


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def trained(*args, **settings):
    """Made and trained at once: TRL seeds torch when a trainer is made."""
    trainer = make(*args, **settings)
    trainer.train()
    return trainer


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))


def logged(trainer, name):
    """The values of a metric, by optimizer step."""
    return {row["step"]: row[name] for row in trainer.state.log_history if name in row}


def spying(trainer_class):
    """`trainer_class`, recording by itself which experts its scoring of a batch and its losses used: (batch, tokens of
    a sequence) -> routes of that sequence."""

    class Spy(trainer_class):
        batch, forced, used = 0, {}, []

        def _generate_and_score_completions(self, inputs):
            if self.model.training:
                self.batch += 1
            return super()._generate_and_score_completions(inputs)

        def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
            with record_routes(model) as recording:
                found = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
            if model.training and not torch.is_grad_enabled() and kwargs.get("batch_size"):
                for row, ids in enumerate(input_ids.tolist()):  # the reference comes second, and must not count
                    self.forced.setdefault((self.batch, *ids), recording.routes.rows(row).ids)
            return found

        def _compute_loss(self, model, inputs):
            if not self.model.training:
                return super()._compute_loss(model, inputs)
            with record_routes(model) as recording:
                loss = super()._compute_loss(model, inputs)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            for row, tokens in enumerate(ids.tolist()):
                self.used.append(((self.batch, *tokens), recording.routes.rows(row).ids))
            return loss

    Spy.forced, Spy.used = {}, []
    return Spy


def replayed_all(trainer):
    """Whether each update used the experts of its batch's scoring, as the spy saw both."""
    assert trainer.used
    return all(torch.equal(trainer.forced[key], routes) for key, routes in trainer.used)
