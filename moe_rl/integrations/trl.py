"""Routing Replay and routing diagnostics inside TRL's GRPOTrainer.

    from trl import GRPOTrainer
    from moe_rl.integrations.trl import routing_replay

    trainer = routing_replay(GRPOTrainer)(model=..., reward_funcs=..., args=..., train_dataset=..., replay="R2")
    trainer.train()

Nothing in TRL is patched: the trainer is a subclass. The routes are recorded in the pass that makes TRL's old
log-probabilities. A tensor of row numbers goes through TRL's own shuffle and split and says which routes belong to a
minibatch. The routes are replayed in the forward of the loss, and by gradient checkpointing in its backward. All of
TRL's loss types, GMPOTrainer, and GSPO (`importance_sampling_level="sequence"`) go through the same place.

Tested with TRL 1.16.0, transformers 5.24, torch 2.13, on a CPU, in one process (see tests/integrations/test_trl.py) and
in two (DDP over gloo). Not tested: GPUs, FSDP, DeepSpeed; vLLM only by a stand-in with the signatures that TRL uses.
"""

import logging
from functools import cache, partial
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from moe_rl.integrations.hf_trainer import ReplayTrainer, Scoring, objective_of, refuse_wrapped
from moe_rl.integrations.measures import Minibatch, ProbeBatch
from moe_rl.integrations.old_policy import KINDS, OldPolicy
from moe_rl.integrations.trl_sampled import SampledRoutes, refuse_unsampled, replayed_in_chunks
from moe_rl.measure.engine_routes import refuse_shifted
from moe_rl.objectives import sequence_log_ratio
from moe_rl.objectives.bounds import COUNT_OR_NONE
from moe_rl.routing import RoutedExperts, RoutingError, attach, record_routes, replay_routes

OLDEST = "1.16"
"""The oldest supported version of TRL, whose trainer was read; checks during training find changes in newer ones."""
ROWS = "routing_rows"
"""Key of the row numbers in TRL's batch."""
_LOG = logging.getLogger(__name__)


@cache
def routing_replay(trainer_class: type) -> Any:
    """Return a subclass of TRL's GRPOTrainer (or of a subclass of it) that records and replays routes.

    The subclass takes the arguments of `trainer_class`, and by name:

    - replay: "none" (the default; a warning if `replay` is not named) measures only, and changes no bit of the
      training. "R2" forces the experts that the old policy chose when TRL scored the batch. "R3" forces the experts
      that the sampling engine chose, in the scoring pass and in the updates: `rollout_func` returns their ids in the
      field "routed_experts", per sequence integers `[P+G-1, layers, K]`, or vLLM does (colocated only).
    - run_folder: where to write rows for `moe_rl.study.load`, `moe-rl figures` and `moe-rl watch`; a study's folder, or
      a run's (`.../ARM/seedN`).
    - probe_sequences: sequences per process that are scored twice more after each update, live and replayed, for the
      change rates, variances and loads. Default: `per_device_train_batch_size`. 0: no probe.
    - measure_engine: compare the engine that sampled with the old policy, also without R3. The engine's routes come as
      for R3, and its log-probabilities are needed. With "none" under vLLM, and TRL's importance sampling correction
      on (its default), a batch may then get one update.
    - first_change_tolerance: share of slots, in [0, 1], that may differ at the first update of a batch, where none
      should (`moe_rl.integrations.old_policy.same_policy`). Default: 0.

    TRL's log, and so every tracker that it reports to, gets `routing/...`, which docs/integrations.md defines: change
    rates and `f2_natural` (fractions), variances of the log-ratio (nats²) and loads of the probe after each update;
    `replayed_fraction` and `first_change` of the update itself, proven, and `ceiling_fraction` (the share of its tokens
    with a negative advantage and a ratio above 3); of the sampling engine, if it is compared, `engine_slot_change`, and
    `engine_k3` and `engine_gap_mean` (nats) live and as `..._replayed`. Run folders have more metrics.

    Raises:
        TypeError: not a GRPOTrainer (AsyncGRPOTrainer computes its loss elsewhere); made by `routing_replay` already.
        RoutingError: TRL before 1.16. When the trainer is made: a model without routers, or with images; a `replay`
            that is not known; other options out of their ranges; settings under which the ratio is 1 by construction
            or, with `run_folder`, an update mixes two batches; dropout, router jitter, `neftune_noise_alpha`; Apple's
            mps; evaluation with continuous batching; R3 or `measure_engine` without a source of routes. While it
            trains: whatever would be a step without replay, or under routes of another policy; an engine to be
            measured that gives no routes or no log-probabilities.
    """
    import trl

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, trl.GRPOTrainer)):
        name = getattr(trainer_class, "__name__", repr(trainer_class))
        why = ": it has a loss and batches of its own, and scores no old policy" if "Async" in name else ""
        raise TypeError(f"routing_replay takes trl.GRPOTrainer or a subclass of it, got {name}{why}")
    refuse_wrapped(trainer_class)
    if Version(trl.__version__) < Version(OLDEST):
        raise RoutingError(
            f"TRL {trl.__version__} is older than what this integration supports: pip install 'trl>={OLDEST}'"
        )
    return type(f"RoutingReplay{trainer_class.__name__}", (_RoutingReplay, trainer_class), {"_bare": trainer_class})


class _RoutingReplay(ReplayTrainer):
    """The overrides; `routing_replay` puts them in front of a trainer class."""

    _old: OldPolicy | None = None

    def __init__(
        self: Any,
        *args: Any,
        replay: str | None = None,
        run_folder: Any = None,
        probe_sequences: int | None = None,
        measure_engine: bool = False,
        first_change_tolerance: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if replay is None:
            replay = "none"
            _LOG.warning(
                'replay is not named, so nothing is replayed: replay="none" (measure only), "R2" replays the experts '
                'of the old policy, "R3" those of the engine that sampled'
            )
        self._choose(replay, KINDS, first_change_tolerance)
        refusal = None if probe_sequences is None else COUNT_OR_NONE.refusal("probe_sequences", probe_sequences)
        if measure_engine and probe_sequences == 0:
            refusal = "measure_engine compares the probed sequences, and probe_sequences=0 probes none: leave one out"
        if refusal is not None:
            raise RoutingError(refusal)
        self._sampled, self._measure_engine = SampledRoutes(), measure_engine
        self._listening = replay == "R3" or measure_engine
        with self._sampled.asked_of_vllm(self._listening):
            super().__init__(*args, **kwargs)
        if self._is_vlm:
            raise RoutingError(
                "models with images are not supported: replay with more than rows of tokens was not tried"
            )
        if self.use_transformers_continuous_batching and self.args.eval_strategy != "no":
            raise RoutingError(
                "use_transformers_continuous_batching leaves the model in train mode, so that TRL takes an evaluation "
                "for training: leave one out (eval_strategy='no')"
            )
        if self._listening:
            refuse_unsampled(self)
        self._probe_sequences = self.args.per_device_train_batch_size if probe_sequences is None else probe_sequences
        if self._listening and self.use_vllm and self.vllm_mode == "colocate":  # a server has no engine here
            self._sampled.listen(self.vllm_generation.llm)
        level = self.importance_sampling_level
        gmpo = any("GMPO" in kind.__name__ for kind in self._bare.__mro__)
        objective = "gmpo" if gmpo else objective_of(self.loss_type, level)
        # GMPO ignores the level: its clip fractions count tokens.
        sequence_clip = level == "sequence" and not gmpo
        # With this setting TRL scores the batch even if it gets one update.
        scored = self.use_vllm and self.vllm_importance_sampling_correction
        self._begin(run_folder, objective, sequence_clip, one_update=measure_engine and replay == "none" and scored)
        if self.aux_loss_enabled and self.args.router_aux_loss_coef is None and not gmpo:  # GMPO's loss leaves it out
            _LOG.warning(
                "TRL adds the model's own load-balancing loss (coefficient %g) to the policy loss, in the arm without "
                "replay, too: a comparison of methods sets router_aux_loss_coef=0.0 or names it",
                self.router_aux_loss_coef,
            )
        if self.args.torch_compile:  # compiled in train(): hooks must be there before; last, as they stay
            models = (self.model, self.ref_model)
            self._attached = [attach(getattr(model, "_orig_mod", model)) for model in models if model is not None]

    # -- scoring ------------------------------------------------------------------------------------------------------

    def _generate(self: Any, prompts: Any) -> Any:
        self._sampled.forget()
        scorings, self._scorings = self._scorings, None  # a `rollout_func` may score, too: not for the ratio
        try:
            generated = super()._generate(prompts)
        finally:
            self._scorings = scorings
        if self.model.training and self._listening:
            prompt_ids, completion_ids, _, _, logps, *_ = generated
            fields = generated[5] if self.rollout_func is not None else None
            self._sampled.take(fields, prompt_ids, completion_ids, logps)
            if self._measure_engine and self._sampled.problem:
                raise RoutingError(f"measure_engine compares log-probabilities: {self._sampled.problem}")
        return generated

    def _generate_and_score_completions(self: Any, inputs: Any) -> Any:
        if not self.model.training:  # evaluation: the batch in the buffer keeps its routes
            return super()._generate_and_score_completions(inputs)
        output, scorings = self._with_scorings(partial(super()._generate_and_score_completions, inputs))
        old_logps = output.get("old_per_token_logps")
        scoring = self._scoring_of(scorings, old_logps)
        self._old = OldPolicy(scoring.routes, scoring.choice, self._taken)
        self._scored(len(old_logps))
        self._probes = self._probes_of(scoring, output)
        output[ROWS] = torch.arange(len(old_logps), device=old_logps.device)
        return output

    def _get_per_token_logps_and_entropies(
        self: Any,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies
        text = {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep}
        if self.replay == "R3" and self._scorings == [] and model is self.model:  # the old policy comes first
            routes = self._sampled.routes(model, **text)
            logps, choice = replayed_in_chunks(score, model, text, routes, batch_size or len(input_ids))
            self._scorings.append(Scoring(logps, routes, choice, text))
            return logps, None, None
        return self._pass(model, partial(score, model, **text, batch_size=batch_size, **kwargs), text, aux_loss=2)

    def _calculate_rewards(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        by_function: Tensor = super()._calculate_rewards(*args, **kwargs)
        self._has_reward = ~by_function.isnan().all(1)  # of all processes; TRL's mean leaves out the others
        return by_function

    def _rewards(self: Any) -> dict[str, float]:
        log = self._metrics["train"]
        found = {name: log[name][-1] for name in ("reward", "reward_std")} | {"reward_n": int(self._has_reward.sum())}
        by_group = self.scale_rewards in ("group", "none") and self.multi_objective_aggregation == "sum_then_normalize"
        if by_group and self._has_reward.all():  # else the logged value is of the whole batch, or takes NaN for unequal
            found["groups_equal"] = log["frac_reward_zero_std"][-1]
        return found

    def _probes_of(self: Any, scoring: Scoring, output: dict[str, Any]) -> list[ProbeBatch]:
        """Return probes of sequences spread over the batch, in TRL's chunks, with the old policy's live scores.

        With R3 or `measure_engine`, raise RoutingError for shifted routes and, if there are probes, measure how far the
        old policy is from the engine that sampled."""
        size, mask = len(scoring.logps), output["completion_mask"] * output.get("tool_mask", 1)
        sampled: RoutedExperts | None = None
        if self._listening:
            sampled = scoring.routes if self.replay == "R3" else self._sampled.routes(self.model, **scoring.text)
            refuse_shifted(sampled, scoring.choice, scoring.text["attention_mask"].bool(), self._measures.ranks.sums)
        if not self._probe_sequences:
            return []
        chosen = torch.linspace(0, size - 1, min(self._probe_sequences, size)).round().long()
        probes: list[ProbeBatch] = []
        forced: list[Tensor] = []
        for rows in chosen.split(self.args.per_device_train_batch_size):
            where, routes = rows.to(mask.device), scoring.routes.rows(rows)
            text = {key: x[where] if isinstance(x, Tensor) else x for key, x in scoring.text.items()}
            score, logps = partial(self._probed, text), scoring.logps[where]
            if self.replay == "R3":  # the batch was scored under the engine's routes
                forced.append(logps)
                with torch.no_grad(), record_routes(self.model) as recording:
                    logps = score()[0]
                routes = recording.routes
            elif sampled is not None:
                with torch.no_grad(), replay_routes(self.model, sampled.rows(rows)):
                    forced.append(score()[0])
            probes.append(ProbeBatch(score, mask[where], logps, routes))
        if sampled is not None:
            said = output.get("sampling_per_token_logps")
            said = None if said is None or self._sampled.problem else said[chosen.to(said.device)]
            self._measures.engine(sampled.rows(chosen), probes, torch.cat(forced), said)
        return probes

    def _probed(self: Any, text: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        score = super()._get_per_token_logps_and_entropies
        return score(self.model, **text, batch_size=len(text["input_ids"]), compute_entropy=True)[:2]

    # -- the update ---------------------------------------------------------------------------------------------------

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        if self._old is None or ROWS not in inputs:
            raise RoutingError("a batch without routes: it was not made by this trainer's _prepare_inputs")
        mask, advantages = inputs["completion_mask"] * inputs.get("tool_mask", 1), inputs["advantages"]
        found = Minibatch(inputs["old_per_token_logps"], mask, advantages)
        real = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        loss_of = partial(super()._compute_loss, model, inputs)
        loss = self._replayed_loss(model, self._old.rows(inputs[ROWS]), found, real, loss_of)
        if self._measures.sequence_clip:
            found.clipped_tokens, found.clipped_sequences = self._in_clipped_sequences(found)
        return loss

    def _in_clipped_sequences(self: Any, found: Minibatch) -> tuple[int, int]:
        """Return how many tokens TRL clips by the ratio of their sequence, by TRL's rule, and in how many sequences.

        TRL's log has only a share: of sequences, or of tokens if each token has its own advantage."""
        assert found.logps is not None
        ratio = sequence_log_ratio(found.logps, found.old_logps, found.mask).exp()[:, None]
        if self.args.delta is not None:
            ratio = ratio.clamp(max=self.args.delta)
        signed = found.token_advantages
        low, high = (ratio < 1 - self.epsilon_low) & (signed < 0), (ratio > 1 + self.epsilon_high) & (signed > 0)
        clipped = (low | high) & found.mask.bool()
        return int(clipped.sum()), int(clipped.any(1).sum())
