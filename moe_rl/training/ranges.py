"""What every number of a run's configuration may be, one row each, and the check of all settings against it.

A setting that is a name says what there is in its type, a `Literal`. Both are refused before anything is computed.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

from moe_rl.objectives.bounds import COUNT, COUNT_OR_NONE, FRACTION, NOT_NEGATIVE, POSITIVE, Range, unknown
from moe_rl.objectives.objective import RANGES as OF_OBJECTIVE

SEED = Range(0, 2**63 - 1, whole=True)

RANGES: dict[str, Range] = {
    "model.tiny.hidden_size": COUNT,
    "model.tiny.num_layers": COUNT,
    "model.tiny.num_heads": COUNT,
    "model.tiny.num_experts": COUNT,
    "model.tiny.num_experts_per_tok": COUNT,
    "model.tiny.moe_intermediate_size": COUNT,
    "model.tiny.initializer_range": POSITIVE,
    "model.tiny.router_init_scale": NOT_NEGATIVE,
    "model.tiny.max_position_embeddings": COUNT,
    "model.tiny.seed": SEED,
    "model.cold_start.steps": COUNT_OR_NONE,
    "model.cold_start.until_reward": Range(-math.inf),
    "model.cold_start.check_every": COUNT,
    "model.cold_start.check_problems": COUNT,
    "model.cold_start.batch_size": COUNT,
    "model.cold_start.learning_rate": POSITIVE,
    "model.cold_start.betas": Range(0, 1, open_high=True),
    "model.cold_start.warmup_steps": COUNT_OR_NONE,
    "model.cold_start.demonstration_noise": FRACTION,
    "model.cold_start.aux_loss_coef": NOT_NEGATIVE,
    "model.cold_start.seed": SEED,
    "model.lora.rank": COUNT,
    "model.lora.alpha": POSITIVE,
    "model.lora.seed": SEED,
    "task.verifier_seconds": POSITIVE,
    "method.keep": FRACTION,
    "method.keep_sites": COUNT_OR_NONE,
    "method.noise": NOT_NEGATIVE,
    "method.beta": POSITIVE,
    "method.predictor_learning_rate": POSITIVE,
    **{f"method.{name}": interval for name, interval in OF_OBJECTIVE.items()},
    "rollout.prompts": COUNT,
    "rollout.group_size": COUNT,
    "rollout.temperature": POSITIVE,
    "rollout.max_new_tokens": COUNT,
    "rollout.lag": COUNT_OR_NONE,
    "rollout.segment": COUNT,
    "rollout.dynamic_sampling": COUNT_OR_NONE,
    "rollout.overlong_buffer": COUNT_OR_NONE,
    "rollout.max_batch": COUNT,
    "rollout.engine.max_batch": COUNT,
    "rollout.engine.timeout": POSITIVE,
    "optim.steps": COUNT,
    "optim.num_minibatches": COUNT,
    "optim.micro_batch": COUNT,
    "optim.learning_rate": POSITIVE,
    "optim.warmup_updates": COUNT_OR_NONE,
    "optim.betas": Range(0, 1, open_high=True),
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.max_grad_norm": POSITIVE,
    "optim.router_lr_multiplier": POSITIVE,
    "optim.aux_loss_coef": NOT_NEGATIVE,
    "optim.expert_bias_rate": NOT_NEGATIVE,
    "optim.reference_reset_every": COUNT_OR_NONE,
    "value.learning_rate": POSITIVE,
    "value.gamma": FRACTION,
    "value.lam": FRACTION,
    "value.clip": POSITIVE,
    "reward.learning_rate": POSITIVE,
    "reward.initial_batches": COUNT,
    "reward.retrain_every": COUNT,
    "reward.epochs": COUNT,
    "reward.batch_size": COUNT,
    "reward.history_fraction": Range(0, 1, open_high=True),
    "reward.history_size": COUNT,
    "eval.every": COUNT_OR_NONE,
    "eval.prompts": COUNT,
    "probe.every": COUNT_OR_NONE,
    "probe.sequences": COUNT_OR_NONE,
    "probe.tokens_every": COUNT_OR_NONE,
    "probe.decompose_every": COUNT_OR_NONE,
    "distributed.processes": COUNT,
    "checkpoint_every": COUNT,
    "keep_policy_every": COUNT_OR_NONE,
    "seed": SEED,
}


def check_settings(config: Any) -> None:
    """Raises ValueError for the first setting of a configuration (nested dataclasses) that is none of the names its
    type lists, or outside its row of `RANGES`; the message names the field, what it may be and what came. A setting
    that is None, where its type allows that, is not looked at."""
    for name, hint, value in settings(config):
        choices = _choices(hint)
        if choices and value not in choices:
            raise ValueError(unknown(name, value, [choice for choice in choices if isinstance(choice, str)]))
        if name in RANGES and value is not None:
            for number in value if isinstance(value, list | tuple) else (value,):
                refusal = RANGES[name].refusal(name, number)
                if refusal is not None:
                    raise ValueError(refusal)


def settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name, type and value of every setting of nested dataclasses."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{name}.")
        else:
            yield name, hints[field.name], value


def _choices(hint: Any) -> tuple[Any, ...]:
    """What a type made of `Literal`s, and None, allows; empty for other types."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        found = [_choices(part) for part in parts]
        if all(found):
            return (*(choice for choices in found for choice in choices), None)
    return ()
