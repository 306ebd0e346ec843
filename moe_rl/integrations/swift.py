"""Routing Replay (R2) and routing diagnostics inside ms-swift's GRPO trainer (the Hugging Face one, not Megatron's).

Write a plugin file of two lines, which `swift rlhf --rlhf_type grpo --external_plugins replay.py ...` imports:

    from moe_rl.integrations.swift import install
    install(replay="R2")

The trainer that ms-swift then makes is a subclass of ms-swift's own trainer class. ms-swift scores each micro-batch
where it makes the micro-batch (`_prepare_batch_inputs`); the routes of that very pass are stored on the micro-batch's
`GRPOBatch` and replayed in `compute_loss`. The metrics are those of `moe_rl.integrations.trl` but for those of the
engine that samples, in ms-swift's own log.

ms-swift 4.6.0 pins transformers < 5.20 and trl < 1.0, moe_rl needs transformers >= 5.19: use a separate environment.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_rl.integrations.hf_trainer import ReplayTrainer, objective_of, refuse_wrapped
from moe_rl.integrations.measures import Minibatch, ProbeBatch
from moe_rl.integrations.old_policy import OldPolicy, refuse_other_version
from moe_rl.routing import RoutingError

VERSIONS = ("4.6.0", "4.6.0.dev0")
"""Versions of ms-swift with a trainer that was read and is supported."""
KINDS = ("none", "R2")
_ROUTING = "routing_old_policy"
"""Attribute of a GRPOBatch that holds its `OldPolicy`."""


def install(replay: str = "R2", **options: Any) -> type:
    """Make ms-swift train GRPO with routing replay; return the new trainer class. Options: those of `routing_replay`.

    Raises:
        RoutingError: an unknown version of ms-swift; the message names the version.
        TypeError: `install` was called before, or ms-swift's trainer is not the one that is expected.
    """
    import swift
    from swift.trainers.trainer_factory import TrainerFactory

    refuse_other_version("ms-swift", swift, VERSIONS, "trainer", "its grpo_trainer.py")
    place = TrainerFactory.TRAINER_MAPPING["grpo"]
    own = TrainerFactory.get_cls(SimpleNamespace(rlhf_type="grpo"), {"grpo": place})
    trainer = routing_replay(own, replay, **options)
    globals()["InstalledGRPOTrainer"] = trainer
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.InstalledGRPOTrainer"
    return trainer


def routing_replay(
    trainer_class: type,
    replay: str = "R2",
    *,
    run_folder: Any = None,
    probe: bool = True,
    first_change_tolerance: float = 0.0,
) -> Any:
    """Return a subclass of ms-swift's GRPOTrainer that records and replays routes.

    replay: "none" or "R2". run_folder, first_change_tolerance: as in `moe_rl.integrations.trl`. probe: score the
    batch's first micro-batch twice more after each update.

    Raises TypeError for another class, or one made by `routing_replay` already. When the trainer is made, RoutingError
    for a model without routers; options out of their ranges; settings under which the ratio is 1 by construction or,
    with `run_folder`, an update mixes two batches; dropout, router jitter, `neftune_noise_alpha`; Apple's mps;
    padding-free batches, sequence parallelism, the losses of Liger and CHORD, dynamic numbers of samples (once a batch
    was sampled) and images, whose forwards are not one call on the rows of the micro-batch. While it trains: whatever
    would be a step without replay, or under routes of another policy.
    """
    needed = ("_prepare_batch_inputs", "_get_per_token_logps_and_entropies", "compute_loss")
    missing = [name for name in needed if not hasattr(trainer_class, name)]
    if missing:
        raise TypeError(f"expected ms-swift's GRPOTrainer, got {trainer_class.__name__} without {missing[0]}")
    refuse_wrapped(trainer_class)
    chosen = {"replay": replay, "first_change_tolerance": first_change_tolerance}
    chosen |= {"_bare": trainer_class, "_probing": probe, "_run_folder": run_folder}
    return type(f"RoutingReplay{trainer_class.__name__}", (_RoutingReplay, trainer_class), chosen)


class _RoutingReplay(ReplayTrainer):
    """The overrides of ms-swift's trainer; `routing_replay` puts them in front of a trainer class."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self._choose(self.replay, KINDS, self.first_change_tolerance)
        super().__init__(*args, **kwargs)
        refuse(self)
        # ms-swift's clip fractions count tokens at every level, because its advantages are `[B,T]`. Of several
        # processes they are means of means, and a sequence mask takes out tokens that are counted here: neither fits.
        objective = objective_of(self.loss_type, self.importance_sampling_level)
        exact = (
            self.accelerator.num_processes == 1 and getattr(self.args, "off_policy_sequence_mask_delta", None) is None
        )
        self._begin(self._run_folder, objective, sequence_clip=False if exact else None)

    # -- scoring ------------------------------------------------------------------------------------------------------

    def _prepare_batch_inputs(self: Any, samples: Any) -> Any:
        if not self.model.training:  # evaluation
            return super()._prepare_batch_inputs(samples)
        refuse(self)  # ms-swift knows only now how many samples a multi-turn scheduler makes
        batches, scorings = self._with_scorings(partial(super()._prepare_batch_inputs, samples))
        for batch in batches:
            routes = self._scoring_of(scorings, batch["grpo_batch"].old_per_token_logps).routes
            setattr(batch["grpo_batch"], _ROUTING, OldPolicy(routes, routes, self._taken))
        return batches

    def _generate_and_score_completions(self: Any, inputs: Any) -> Any:
        batches = super()._generate_and_score_completions(inputs)
        if self.model.training:  # only now are the rewards in the log
            self._scored(sum(len(batch["grpo_batch"].old_per_token_logps) for batch in batches))
            self._probes = [self._probe_of(batches[0])] if self._probing else []
        return batches

    def _rewards(self: Any) -> dict[str, float]:
        log = self._metrics["train"]
        if self.kl_in_reward and self.beta:  # the logged reward then has beta times the logged mean KL subtracted
            return {"reward": log["reward"][-1] + self.beta * log["kl"][-1]}
        found = {"reward": log["reward"][-1], "groups_equal": log["frac_reward_zero_std"][-1]}
        if self.scale_rewards == "batch":  # else the logged value is a mean over the groups' standard deviations
            found["reward_std"] = log["reward_std"][-1]
        return found

    def _get_per_token_logps_and_entropies(
        self: Any, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies
        scored = partial(score, model, model_inputs, grpo_batch, *args, **kwargs)
        return self._pass(model, scored, model_inputs, aux_loss=None)

    def _probe_of(self: Any, batch: dict[str, Any]) -> ProbeBatch:
        found, inputs, score = batch["grpo_batch"], batch["model_inputs"], super()._get_per_token_logps_and_entropies
        routes = getattr(found, _ROUTING).routes

        def scored() -> tuple[Tensor, Tensor | None]:
            return score(self.model, dict(inputs), found, compute_entropy=True)

        return ProbeBatch(scored, self._counted(found), found.old_per_token_logps, routes)

    def _counted(self: Any, grpo_batch: Any) -> Tensor:
        """Return `[B,T]`, 1 on the tokens that the loss counts: with `overlong_filter` none of a truncated response."""
        mask = grpo_batch.completion_mask.bool()
        return (mask & ~grpo_batch.truncated_mask[:, None] if self.overlong_filter else mask).long()

    # -- the update ---------------------------------------------------------------------------------------------------

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss_of = partial(super().compute_loss, model, inputs, *args, **kwargs)
        if not self.model.training:
            return loss_of()
        batch = inputs[0] if isinstance(inputs, list) else inputs
        grpo_batch, tokens = batch["grpo_batch"], batch["model_inputs"]["input_ids"]
        old = getattr(grpo_batch, _ROUTING, None)
        if old is None:
            raise RoutingError("a micro-batch without routes: it was not made by this trainer's _prepare_batch_inputs")
        mask = batch["model_inputs"].get("attention_mask")
        real = mask if isinstance(mask, Tensor) and mask.shape == tokens.shape else torch.ones_like(tokens)
        found = Minibatch(grpo_batch.old_per_token_logps, self._counted(grpo_batch), grpo_batch.advantages)
        return self._replayed_loss(model, old, found, real, loss_of)


def refuse(trainer: Any) -> None:
    """Raise RoutingError for settings under which ms-swift's forward is not one call on the rows of a micro-batch."""
    chord = getattr(trainer, "chord_sft_iterator", None) is not None
    reasons = {
        "padding_free=True packs sequences into one row": trainer.template.padding_free,
        "sequence parallelism splits rows": trainer.template.sequence_parallel_size > 1,
        "use_liger_kernel with GRPO scores by another way than it trains": getattr(trainer, "use_liger_loss", False),
        "a dynamic number of samples (multi-turn) splits micro-batches": getattr(trainer, "dynamic_num_samples", False),
        "a model with images": trainer.is_multimodal,
        "CHORD's loss calls the model on texts of its own, too": chord,
    }
    for reason, present in reasons.items():
        if present:
            raise RoutingError(f"routing replay in ms-swift is not supported here: {reason}")
