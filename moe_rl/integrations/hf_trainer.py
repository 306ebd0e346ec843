"""Base class and helpers shared by the integrations of TRL and ms-swift.

The trainers of both are subclasses of transformers' Trainer with a buffer of scored batches."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from moe_rl.integrations.measures import Measures, Minibatch, ProbeBatch, Ranks, measure
from moe_rl.integrations.old_policy import OldPolicy, refuse_model, refuse_options, same_policy
from moe_rl.names import seed_of
from moe_rl.routing import RoutedExperts, RoutingError, find_sites, record_routes, replay_routes

if TYPE_CHECKING:  # the base is any trainer class that `routing_replay` is given
    from typing import Any as Trainer
else:
    Trainer = object

_LOG = logging.getLogger(__name__)


class Scoring(NamedTuple):
    """One recorded scoring pass of responses through the policy's module, by the trained policy or the reference.

    routes, choice: as in `OldPolicy`. text: the inputs of the pass.
    """

    logps: Tensor
    routes: RoutedExperts
    choice: RoutedExperts
    text: dict[str, Any]


class ReplayTrainer(Trainer):
    """Mixin in front of a trainer class that records, replays and measures; subclasses know the trainer's batches."""

    _bare: type
    _probes: Sequence[ProbeBatch] = ()
    _taken = 0  # optimizer steps over all calls of train(); each call counts global_step anew
    _scored_at: int | None = None  # value of _taken when the batch in the buffer was scored
    _scorings: list[Scoring] | None = None  # a list while a batch of training prompts is scored
    # While a loss is computed: log-probabilities of each forward, and its load-balancing loss if the loss includes one.
    _forwards: list[tuple[Tensor, Tensor | None]] | None = None
    _not_loaded: Sequence[str] = ()  # weights that transformers did not find in the checkpoint that it loads

    def _choose(self: Any, replay: str, kinds: Sequence[str], first_change_tolerance: float) -> None:
        """Check and keep the options, before the trainer is made."""
        refuse_options(replay, kinds, first_change_tolerance)
        self.replay, self.first_change_tolerance = replay, first_change_tolerance

    def _begin(
        self: Any, run_folder: Any, objective: str, sequence_clip: bool | None, one_update: bool = False
    ) -> None:
        """Set up the measurements, after the trainer is made.

        Raises RoutingError for a model without routers, for settings under which nothing can be measured, and for those
        under which a run folder's rows would be wrong.
        one_update: allow one update per batch, because something else is measured."""
        if not one_update:
            refuse_one_update(self.args, self.num_iterations)
        if run_folder is not None:
            refuse_mixed_updates(self.args, self.num_iterations)
        if self.accelerator.device.type == "mps":
            raise RoutingError("Apple's mps has no float64, in which changes and ratios are summed: set use_cpu=True")
        find_sites(self.model)  # raises for a dense model, before anything is sampled
        refuse_model(self.model)
        if alpha := getattr(self.args, "neftune_noise_alpha", None):
            raise RoutingError(
                f"neftune_noise_alpha={alpha:g} adds noise to the embeddings in every forward of an update and in none "
                "that scores: what is measured would be the noise, not the update. Leave it out"
            )
        self._run_folder, self._objective = run_folder, objective
        self._measures = Measures(Ranks(self.accelerator), self._metrics["train"], sequence_clip)
        self.add_callback(_AfterUpdate(self))

    def _with_scorings(self: Any, make: Callable[[], Any]) -> tuple[Any, list[Scoring]]:
        """Return the result of `make()` and the scoring passes that were made meanwhile."""
        self._scorings = []
        try:
            return make(), self._scorings
        finally:
            self._scorings = None

    def _pass(self: Any, model: Any, score: Callable[[], Any], text: dict[str, Any], aux_loss: int | None) -> Any:
        """Return the result of `score()`, a tuple that begins with log-probabilities, and keep what is needed of it.

        While a batch is scored, a pass of the policy's module is kept with its routes; while a loss is computed, its
        log-probabilities and load-balancing loss are kept. aux_loss: index of the load-balancing loss in the result."""
        if self._scorings is None or model is not self.model:
            found = score()
            if self._forwards is not None:
                self._forwards.append((found[0].detach(), None if aux_loss is None else found[aux_loss]))
            return found
        with record_routes(model) as recording:
            found = score()
        routes = recording.routes  # one object, so that it is kept once
        self._scorings.append(Scoring(found[0], routes, routes, text))
        return found

    def _scoring_of(self: Any, scorings: list[Scoring], old_logps: Tensor | None) -> Scoring:
        """Return the pass that made a batch's old log-probabilities: the one with the very same tensor (`is`)."""
        scoring = next((one for one in scorings if one.logps is old_logps), None)
        if scoring is None:
            raise RoutingError(
                f"{self._bare.__name__} made a batch whose old log-probabilities are not those of a pass of the policy "
                "that was recorded, so that the routes to replay are not known: a subclass that makes the batch keeps "
                "the tensor that the pass returned, not a copy of it"
            )
        return scoring

    def _scored(self: Any, responses: int) -> None:
        """Begin a new step of the measurements, for a batch that was sampled and scored."""
        args = self.args
        updates = self.state.global_step
        # rounded up below, because after a resume a new batch is sampled
        batches = updates * args.gradient_accumulation_steps / (args.steps_per_generation * self.num_iterations)
        self._scored_at = self._taken
        self._measures.scored(responses, updates, math.ceil(batches), self._rewards)

    def _replayed_loss(
        self: Any, model: nn.Module, old: OldPolicy, found: Minibatch, real: Tensor, loss_of: Callable[[], Any]
    ) -> Any:
        """Return the loss of a minibatch whose old policy is `old`, under its routes unless `replay` is "none".

        `found` is filled with the measurements. real: `[B,T]`, true on real tokens. Raises RoutingError if not all
        rows with a route were replayed, if the loss did not call the model exactly once, or if, before any weight
        moved, more slots than `first_change_tolerance` differ from the old policy's choice."""
        first = self._taken == old.step  # no weight has moved since it was scored
        now: RoutedExperts | None = None
        self._forwards = []
        try:
            if self.replay != "none":
                with replay_routes(model, old.routes, shadow=first) as forced:
                    loss = loss_of()
                found.replayed_rows, found.routed_rows = forced.replayed_rows, forced.forced_rows
                now = forced.shadow if first else None
            elif first:
                with record_routes(model) as recording:
                    loss = loss_of()
                if len(recording.calls) > 1:
                    raise RoutingError(
                        f"an update of one forward was expected; its loss called the model {len(recording.calls)} times"
                    )
                now = recording.routes
            else:
                loss = loss_of()
        finally:
            forwards, self._forwards = self._forwards, None
        if found.replayed_rows != found.routed_rows or len(forwards) != 1:
            raise RoutingError(
                f"an update of one forward, all of it replayed, was expected; {len(forwards)} forwards were made, and "
                f"{found.replayed_rows} of {found.routed_rows} (token, site) rows with a route were replayed"
            )
        if self.replay == "none":
            b, t, sites, _ = old.routes.shape
            found.routed_rows = b * t * (sites - len(old.routes.meta.get("hash_routed", ())))
        if now is not None:
            found.first_change = same_policy(old.choice, now, real.bool(), self.first_change_tolerance)
        found.logps, aux_loss = forwards[0]
        if aux_loss is not None:
            added = self.router_aux_loss_coef * aux_loss.detach() / self.current_gradient_accumulation_steps
            found.aux_loss, found.aux_share = float(aux_loss.detach()), float(added)
        self._measures.minibatches.append(found)
        return loss

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        writer = None
        if self._run_folder is not None and self._measures.ranks.main:
            writer = run_writer(self, self._run_folder, self._objective)
        self._measures.begin(writer)
        with writer or nullcontext():
            if writer and writer.next_step and self._scored_at is not None:
                raise RoutingError(
                    f"{writer.folder} has rows of {writer.next_step} batches of an earlier train() of this trainer, "
                    "which would go on in the batch that it holds while its count of steps begins anew: make the "
                    "trainer again and pass resume_from_checkpoint to train(), or choose another run_folder"
                )
            result = super().train(*args, **kwargs)
            if writer and self.state.global_step < self.state.max_steps:  # stopped by a callback: it may go on
                writer.close()
            return result

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(self._measures.minibatches)
        loss = super().training_step(*args, **kwargs)
        if len(self._measures.minibatches) == before:
            raise RoutingError(
                f"{self._bare.__name__} took a training step without the loss that is measured here (does it have a "
                "compute_loss of its own?), or in eval mode (did a reward function call model.eval()?): nothing was "
                "measured or replayed"
            )
        self._measures.loss += float(loss) - sum(one.aux_share for one in self._measures.minibatches[before:])
        return loss

    def _get_grad_norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        self._measures.grad_norm = float("nan") if norm is None else float(norm)
        return norm

    def _issue_warnings_after_load(self: Any, load_result: Any) -> None:
        self._not_loaded = load_result.missing_keys
        if not self._not_loaded:
            super()._issue_warnings_after_load(load_result)

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        self._load_others(resume_from_checkpoint)

    def _load_best_model(self: Any) -> None:
        super()._load_best_model()
        self._load_others(self.state.best_model_checkpoint)

    def _load_others(self: Any, checkpoint: str) -> None:
        names, self._not_loaded = self._not_loaded, ()
        if names:
            load_converted(self.model, names, checkpoint)

    def after_update(self: Any) -> None:
        """Measure an update: called after each step of the optimizer, before the trainer logs."""
        self._taken += 1
        if self._scored_at is None:
            return
        update = self._taken - self._scored_at
        lr, coef = self.optimizer.param_groups[0]["lr"], getattr(self, "router_aux_loss_coef", None)
        self._measures.update(update, self.state.global_step + 1, lr=lr, aux_loss_coef=coef)
        if self._probes:
            self._measures.probed(update, *measure(self.model, self._probes, self._measures.ranks))


def refuse_wrapped(trainer_class: type) -> None:
    """Raise TypeError for a trainer class that records and replays already."""
    if issubclass(trainer_class, ReplayTrainer):
        raise TypeError(
            f"{trainer_class.__name__} is made by routing_replay already: wrap a trainer once (a cell that ran "
            "twice, or a second install?)"
        )


class _AfterUpdate(TrainerCallback):
    """Callback that calls the trainer's `after_update` after each step of the optimizer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.after_update()


def load_converted(model: nn.Module, names: Sequence[str], checkpoint: str) -> None:
    """Load the weights `names`, which a checkpoint has under other names than the model.

    transformers 5 saves each expert by itself, as checkpoints on the hub do, while its Trainer looks for the one tensor
    that the model has: with a warning it leaves the experts unchanged (transformers issue 48805).

    Raises:
        RoutingError: the checkpoint lacks a weight, or `model` is no model of transformers.
    """
    lacking: Any = names
    if isinstance(model, PreTrainedModel):
        here = model.state_dict()
        dtypes = [here[name].dtype for name in names if here[name].is_floating_point()]  # not a hash table's ids
        dtype = max(dtypes, key=lambda one: one.itemsize, default="auto")
        kind: Any = type(model)
        saved, info = kind.from_pretrained(checkpoint, dtype=dtype, output_loading_info=True)
        lacking = sorted(info["missing_keys"])
        found = saved.state_dict()
        with torch.no_grad():
            for name in names:
                here[name].copy_(found[name])
    if lacking:
        raise RoutingError(
            f"{checkpoint} does not fit the model: {len(lacking)} of its weights are not there, {lacking[0]} for one. "
            "Training would go on with what they were when the trainer was made"
        )


AVERAGES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""Loss types that differ only in how tokens are averaged: with a sequence ratio each of them is GSPO."""
BY_SEQUENCE = {"sequence": "gspo", "sequence_token": "gspo_token"}
"""Objective of the types in `AVERAGES` by `importance_sampling_level`; at others, the type itself."""


def objective_of(loss_type: str, level: str) -> str:
    """Return the name that a loss type at a ratio level has in a run folder.

    >>> objective_of("dapo", "sequence"), objective_of("luspo", "sequence"), objective_of("dapo", "token")
    ('gspo', 'luspo', 'dapo')
    """
    return BY_SEQUENCE.get(level, loss_type) if loss_type in AVERAGES else loss_type


def refuse_one_update(args: Any, num_iterations: int) -> None:
    """Raise RoutingError if no weight moves between the scoring of a batch and its last update."""
    every = args.steps_per_generation * num_iterations
    if args.gradient_accumulation_steps % every == 0:
        raise RoutingError(
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) is a multiple of steps_per_generation "
            f"x num_iterations ({args.steps_per_generation} x {num_iterations}): a batch then gets one optimizer step, "
            "the ratio is 1 by construction, and no expert can change between old and new policy. For several updates "
            "on a batch raise steps_per_generation (GSPO's recipe: 4) or num_iterations"
        )


def refuse_mixed_updates(args: Any, num_iterations: int) -> None:
    """Raise RoutingError if an optimizer step may take micro-batches of two batches."""
    every, window = args.steps_per_generation * num_iterations, args.gradient_accumulation_steps
    if every % window:
        raise RoutingError(
            f"steps_per_generation x num_iterations ({args.steps_per_generation} x {num_iterations}) is no multiple of "
            f"gradient_accumulation_steps ({window}): some optimizer steps take micro-batches of two batches, and the "
            "rows of a run folder are of one batch each. Choose a multiple, or leave run_folder out"
        )


GROUPS = {
    "method": ("loss_type", "importance_sampling_level", "epsilon", "delta", "beta", "scale_rewards", "advantage_",
               "sapo_", "vespo_", "top_entropy_quantile", "mask_truncated_completions", "off_policy_mask_threshold",
               "use_bias_correction_kl", "multi_objective_aggregation", "entropy_coef", "entropy_target",
               "use_adaptive_entropy"),
    "run": ("resume_from_checkpoint", "output_dir", "run_name", "project", "disable_tqdm", "local_rank", "do_", "log_",
            "logging_", "save_", "hub_", "push_to_hub", "trackio_", "report_to", "num_completions_to_print",
            "dataloader_num_workers", "ddp_timeout", "vllm_server_", "vllm_group_port", "seed", "data_seed"),
}  # fmt: skip
"""Beginnings of the names of a trainer's arguments by group: `method` says what the method is, `run` where and how a
run writes. Arms may differ in both groups and still be compared; all other arguments are in the group `arguments`."""
LENGTH = ("max_steps", "num_train_epochs")
"""Arguments that may change when a run is resumed; so may those of the group `run`, but for the seeds."""


def run_writer(trainer: Any, run_folder: Any, objective: str) -> Any:
    """Return a RunWriter for a study's folder or a run's (`.../ARM/seedN`), with the trainer's configuration."""
    from moe_rl.run_folder import RunWriter

    folder, args = Path(run_folder), trainer.args
    seed = seed_of(folder)
    if seed not in (None, args.seed):
        _LOG.warning(
            "%s says seed %s, the trainer's arguments say seed=%d, from which it samples: runs that differ by their "
            "folders alone are one run, and would be counted as several",
            folder,
            seed,
            args.seed,
        )
    suffix = "" if trainer.replay == "none" else f"_{trainer.replay.lower()}"
    arm = objective + suffix if seed is None else folder.parent.name
    given = {name: value for name, value in sorted(args.to_dict().items()) if is_plain(value)}
    # Lists and dicts count as defaults, because older runs did not record them.
    nested = {name: value for name, value in given.items() if isinstance(value, list | dict)}
    known = {f.name: f.default for f in fields(args) if f.name in given and is_plain(f.default)} | nested
    group = {name: next((g for g, begins in GROUPS.items() if name.startswith(begins)), "arguments") for name in given}

    def grouped(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {g: {n: value for n, value in values.items() if group[n] == g} for g in (*GROUPS, "arguments")}

    about = {"model": about_model(trainer.model), "rewards": list(getattr(trainer, "reward_func_names", ()))}
    method = {"objective": objective, "replay": trainer.replay, "trainer": trainer._bare.__name__}
    may_change = [name for name in given if name in LENGTH or (group[name] == "run" and "seed" not in name)]
    # Both places, because older runs have every argument under `arguments`.
    free = [f"{place}.{name}" for name in may_change for place in (group[name], "arguments")]
    return RunWriter(
        folder,
        arm=arm,
        seed=args.seed if seed is None else seed,
        config={**method, **about, **grouped(given)},
        defaults={**about, **grouped(known)},
        free=[*free, "model.path"],
    )


def is_plain(value: Any) -> bool:
    """Return whether a configuration can hold a value: a number, bool, string or None, or lists and dicts of these.

    Keys of dicts must be strings."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and is_plain(part) for name, part in value.items())
    return all(map(is_plain, value)) if isinstance(value, list) else isinstance(value, bool | int | float | str | None)


def about_model(model: Any) -> dict[str, Any]:
    """Return what comparable arms must share: the model's path and class, and its number of trained parameters."""
    core = model.get_base_model() if hasattr(model, "get_base_model") else model  # the model inside PEFT's
    return {
        "path": getattr(getattr(core, "config", None), "name_or_path", None) or None,
        "class": type(core).__name__,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
