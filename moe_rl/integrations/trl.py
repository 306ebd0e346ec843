"""Routing Replay and routing diagnostics inside TRL's GRPOTrainer.

    from trl import GRPOTrainer
    from moe_rl.integrations.trl import routing_replay

    trainer = routing_replay(GRPOTrainer)(model=..., reward_funcs=..., args=..., train_dataset=..., replay="R2")
    trainer.train()

Nothing in TRL is patched: the trainer is a subclass. The routes are recorded in the pass that makes TRL's old
log-probabilities; a tensor of row numbers rides through TRL's own shuffle and split and says which routes belong to a
minibatch; they are replayed in the forward of the loss, and by gradient checkpointing in its backward. All of TRL's
loss types, GMPOTrainer, and GSPO (`importance_sampling_level="sequence"`) go through the same place.

Run: TRL 1.16.0, transformers 5.23, torch 2.13, one CPU process (tests/integrations/test_trl.py has what). Not run:
GPUs, several processes, DeepSpeed; of vLLM only a stand-in with the signatures that TRL uses.
"""

import logging
import math
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerCallback

from moe_rl.integrations.old_policy import KINDS, OldPolicy, refuse_random
from moe_rl.integrations.trl_measures import Measures, Minibatch, Probe, Ranks
from moe_rl.integrations.trl_sampled import SampledRoutes, refuse_unsampled, replayed_in_chunks
from moe_rl.routing import RoutedExperts, RoutingError, attach, change_counts, record_routes, replay_routes

if TYPE_CHECKING:  # whatever trainer it is put in front of
    from typing import Any as _Trainer
else:
    _Trainer = object

ROWS = "routing_rows"
"""Key of the row numbers in TRL's batch."""
_LOG = logging.getLogger(__name__)


class Scoring(NamedTuple):
    """One pass that scored the batch through the policy's module: its policy is the trained one or the reference."""

    logps: Tensor
    routes: RoutedExperts
    choice: RoutedExperts
    text: dict[str, Any]


@cache
def routing_replay(trainer_class: type) -> Any:
    """A subclass of a GRPOTrainer (or of a subclass of it) that records and replays routes.

    It takes the arguments of `trainer_class`, and by name:

    - replay: "none" measures only, and changes no bit of the training. "R2" forces the experts that the old policy
      chose when TRL scored the batch. "R3" forces those that the engine chose that sampled it, in the scoring pass and
      in the updates: `rollout_func` returns them as the field "routed_experts", per sequence integers `[P+G-1, layers,
      K]`, or vLLM does (colocated only).
    - run_folder: rows for `moe_rl.study.load`, `moe-rl figures` and `moe-rl watch`; a study's folder, or a run's
      (`.../ARM/seedN`).
    - probe_sequences: sequences per process that are scored twice more after each update, live and replayed, for the
      change rates and variances. Default: `per_device_train_batch_size`. 0: no probe.
    - first_change_tolerance: share of slots that may differ at the first update of a batch, where none should
      (`moe_rl.integrations.old_policy.same_policy`). Default: 0.

    In TRL's log, and so in every tracker that it reports to:

    - `routing/slot_change`, `routing/site_change`, `routing/token_change`: old policy of the batch against the weights
      after the update, both routing live, on the response tokens of the probe; fractions
    - `routing/replayed_fraction`: share of the (token, site) rows of the update's forwards whose experts were those of
      the routes, proven. Under R3 the last token of a response has no route
    - `routing/var_token_natural`, `routing/var_token_replayed`, `routing/var_sequence_natural`,
      `routing/var_sequence_replayed`: variance of the log-ratio (nats²) over tokens, and of its mean over a sequence,
      live and under the old routes
    - `routing/first_change`: `slot_change` at the first update of the batch, before a weight moved: asserted
    - under R3 `routing/engine_slot_change`: the sampling engine's routes against the old policy's

    Raises (when the trainer is made):
        TypeError: not a GRPOTrainer. AsyncGRPOTrainer computes its loss elsewhere.
        RoutingError: settings under which the ratio is 1 by construction; dropout; R3 without a source of routes; and,
            while it trains, whatever would be a step without replay, or under routes of another policy.
    """
    import trl

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, trl.GRPOTrainer)):
        name = getattr(trainer_class, "__name__", repr(trainer_class))
        why = "it has a loss and batches of its own, and scores no old policy" if "Async" in name else "it is none"
        raise TypeError(f"routing_replay takes trl.GRPOTrainer or a subclass of it, got {name}: {why}")
    return type(f"RoutingReplay{trainer_class.__name__}", (_RoutingReplay, trainer_class), {"_bare": trainer_class})


class _RoutingReplay(_Trainer):
    """The overrides; `routing_replay` puts them in front of a trainer class."""

    _scorings: list[Scoring] | None = None  # a list while TRL scores a batch of training prompts
    _forwards: list[Tensor] | None = None  # log-probabilities of the forward of a loss that is under way
    _old: OldPolicy | None = None
    _probe: Probe | None = None

    def __init__(
        self: Any,
        *args: Any,
        replay: str = "none",
        run_folder: Any = None,
        probe_sequences: int | None = None,
        first_change_tolerance: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if replay not in KINDS:
            raise RoutingError(f"replay must be one of {', '.join(KINDS)}, got {replay!r}")
        self.replay, self.first_change_tolerance = replay, first_change_tolerance
        self._sampled = SampledRoutes()
        with self._sampled.asked_of_vllm(replay == "R3"):
            super().__init__(*args, **kwargs)
        refuse(self)
        if self.args.torch_compile:  # the models are compiled in train(), and must carry their hooks by then
            models = (self.model, self.ref_model)
            self._attached = [attach(getattr(model, "_orig_mod", model)) for model in models if model is not None]
        self._probe_sequences = self.args.per_device_train_batch_size if probe_sequences is None else probe_sequences
        if replay == "R3" and self.use_vllm:
            self._sampled.listen(self.vllm_generation.llm)
        ranks = Ranks(self.accelerator)
        by_sequence = self.importance_sampling_level == "sequence"
        writer = run_writer(self, run_folder) if run_folder is not None and ranks.main else None
        self._measures = Measures(ranks, self._metrics["train"], writer, by_sequence)
        self.add_callback(_AfterUpdate(self))

    # -- scoring ------------------------------------------------------------------------------------------------------

    def _generate(self: Any, prompts: Any) -> Any:
        generated = super()._generate(prompts)
        if self.replay == "R3" and self.model.training:
            prompt_ids, completion_ids, *_ = generated
            fields = generated[5] if self.rollout_func is not None else {}
            self._sampled.take(fields, prompt_ids, completion_ids)
        return generated

    def _generate_and_score_completions(self: Any, inputs: Any) -> Any:
        if not self.model.training:  # evaluation: the batch in the buffer keeps its routes
            return super()._generate_and_score_completions(inputs)
        self._scorings = []
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            scorings, self._scorings = self._scorings, None
        old_logps = output.get("old_per_token_logps")
        scoring = next((one for one in scorings if one.logps is old_logps), None)
        if old_logps is None or scoring is None:
            raise RoutingError(
                f"{self._bare.__name__} returned a batch whose old log-probabilities are not those of a pass of the "
                "policy that was recorded: whose routes an update would replay is not known"
            )
        self._old = OldPolicy(scoring.routes, scoring.choice, self.state.global_step)
        args = self.args  # after a resume TRL samples a new batch
        before = self.state.global_step * args.gradient_accumulation_steps
        self._measures.scored(len(old_logps), math.ceil(before / (args.steps_per_generation * self.num_iterations)))
        self._probe = self._probe_of(scoring, output) if self._probe_sequences else None
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
        if self._scorings is None or model is not self.model:
            found = score(model, **text, batch_size=batch_size, **kwargs)
            if self._forwards is not None:
                self._forwards.append(found[0].detach())
            return found
        if self.replay == "R3" and not self._scorings:  # the old policy comes first; `is` proves it afterwards
            routes = self._sampled.routes(model, **text)
            logps, choice = replayed_in_chunks(score, model, text, routes, batch_size or len(input_ids))
            self._scorings.append(Scoring(logps, routes, choice, text))
            return logps, None, None
        with record_routes(model) as recording:
            found = score(model, **text, batch_size=batch_size, **kwargs)
        self._scorings.append(Scoring(found[0], recording.routes, recording.routes, text))
        return found

    def _probe_of(self: Any, scoring: Scoring, output: dict[str, Any]) -> Probe:
        """Sequences spread over the batch, with what the old policy says of them when it routes live."""
        size = len(scoring.logps)
        rows = torch.linspace(0, size - 1, min(self._probe_sequences, size)).round().long()
        where = rows.to(scoring.logps.device)
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        text = {key: x[where] if isinstance(x, Tensor) else x for key, x in scoring.text.items()}
        batch_size = self.args.per_device_train_batch_size
        logps, natural, forced = scoring.logps[where], scoring.routes.rows(rows), scoring.routes.rows(rows)
        if self.replay == "R3":
            score = super()._get_per_token_logps_and_entropies
            with torch.no_grad(), record_routes(self.model) as recording:
                logps = score(self.model, **text, batch_size=batch_size)[0]
            natural = recording.routes
        probe = Probe(text, mask[where], logps, natural, forced, batch_size)
        if self.replay == "R3":
            self._measures.engine(change_counts(forced, natural, probe.tokens, pair="engines"))
        return probe

    # -- the update ---------------------------------------------------------------------------------------------------

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._measures.writer or nullcontext():
            return super().train(*args, **kwargs)

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(self._measures.minibatches)
        loss = super().training_step(*args, **kwargs)
        if len(self._measures.minibatches) == before:
            raise RoutingError(
                f"{self._bare.__name__} took a training step without _compute_loss: nothing was measured or replayed"
            )
        self._measures.loss += float(loss)
        return loss

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        old, rows = self._old, inputs.get(ROWS)
        if old is None or rows is None:
            raise RoutingError("a batch without routes: it was not made by this trainer's _prepare_inputs")
        first = self.state.global_step == old.step  # no weight has moved since it was scored
        found = Minibatch(inputs["old_per_token_logps"], inputs["completion_mask"] * inputs.get("tool_mask", 1))
        now: RoutedExperts | None = None
        self._forwards = []
        try:
            if self.replay != "none":
                routes = old.routes.rows(rows)
                with replay_routes(model, routes, shadow=first) as forced:
                    loss = super()._compute_loss(model, inputs)
                found.replayed_rows, found.routed_rows = forced.replayed_rows, int((~routes.live).sum())
                now = forced.shadow if first else None
            elif first:
                with record_routes(model) as recording:
                    loss = super()._compute_loss(model, inputs)
                now = recording.routes
            else:
                loss = super()._compute_loss(model, inputs)
        finally:
            forwards, self._forwards = self._forwards, None
        if found.replayed_rows != found.routed_rows or len(forwards) != 1:
            raise RoutingError(
                f"an update of one forward, all of it replayed, was expected; {len(forwards)} forwards were made, and "
                f"{found.replayed_rows} of {found.routed_rows} (token, site) rows with a route were replayed"
            )
        if now is not None:
            real = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            found.first_change = old.prove(rows, now, real, self.first_change_tolerance)
        found.logps = forwards[0]
        self._measures.minibatches.append(found)
        return loss

    def _get_grad_norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        self._measures.grad_norm = float("nan") if norm is None else float(norm)
        return norm

    def after_update(self: Any) -> None:
        """After each step of the optimizer, before TRL logs it."""
        if self._old is None:
            return
        update = self.state.global_step + 1 - self._old.step
        self._measures.update(update, lr=self.optimizer.param_groups[0]["lr"])
        if self._probe is not None:
            score = super()._get_per_token_logps_and_entropies
            self._measures.probed(update, *self._probe.measure(self.model, score, self._measures.ranks))


class _AfterUpdate(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.after_update()


def refuse(trainer: Any) -> None:
    """RoutingError for settings of a GRPOTrainer under which nothing could be measured or replayed, and why."""
    args = trainer.args
    every = args.steps_per_generation * trainer.num_iterations
    if args.gradient_accumulation_steps % every == 0:
        raise RoutingError(
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) is a multiple of steps_per_generation "
            f"x num_iterations ({args.steps_per_generation} x {trainer.num_iterations}): TRL then takes one optimizer "
            "step on a batch, the ratio is 1 by construction, and no expert can change between old and new policy. For "
            "several updates on a batch raise steps_per_generation (GSPO's recipe: 4) or num_iterations"
        )
    if trainer._is_vlm:
        raise RoutingError("models with images are not supported: their chunks of a batch are not rows of tokens alone")
    refuse_random(trainer.model)
    if trainer.replay == "R3":
        refuse_unsampled(trainer)
    if getattr(trainer, "aux_loss_enabled", False) and args.router_aux_loss_coef is None:
        _LOG.warning(
            "TRL adds the model's own load-balancing loss (coefficient %g) to the policy loss, in the arm without "
            "replay, too: a comparison of methods sets router_aux_loss_coef=0.0 or names it",
            trainer.router_aux_loss_coef,
        )


def run_writer(trainer: Any, run_folder: Any) -> Any:
    """A RunWriter on a study's folder, or on a run's (`.../ARM/seedN`)."""
    from moe_rl.run_folder import RunWriter

    folder, args = Path(run_folder), trainer.args
    objective = "gspo" if trainer.importance_sampling_level == "sequence" else trainer.loss_type
    objective = "gmpo" if "GMPO" in trainer._bare.__name__ else objective
    seed = re.fullmatch(r"seed(\d+)", folder.name)
    arm = folder.parent.name if seed else objective + ("" if trainer.replay == "none" else f"_{trainer.replay.lower()}")
    plain = (bool, int, float, str, type(None))
    config = {
        "objective": objective,
        "replay": trainer.replay,
        "trainer": trainer._bare.__name__,
        "trl": {name: value for name, value in sorted(args.to_dict().items()) if isinstance(value, plain)},
    }
    return RunWriter(folder, arm=arm, seed=int(seed[1]) if seed else args.seed, config=config)
