"""Every number of a configuration has a range, every name a closed set; what lies outside is refused by its field."""

import copy
import dataclasses
import math
import re
import types
import typing

import pytest

from moe_rl.objectives import Objective
from moe_rl.objectives.bounds import Range, check_settings, field_types
from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig
from moe_rl.training import MethodConfig, RunConfig, validate

FULL = RunConfig(model=ModelConfig(lora=LoraConfig()), method=MethodConfig(keep_sites=(0,)))


def numbers_of(cls, prefix=""):
    """Dotted name and range of all settings that can be a number, whether or not they are there by default."""
    for name, hint in field_types(cls).items():
        for leaf in leaves(hint):
            if dataclasses.is_dataclass(leaf) and not prefix.startswith("method."):
                yield from numbers_of(leaf, f"{prefix}{name}.")
            elif typing.get_origin(leaf) is typing.Annotated:
                yield f"{prefix}{name}", typing.get_args(leaf)[1]
            elif leaf in (int, float):
                yield f"{prefix}{name}", None


def leaves(hint):
    """The types in a hint, and the dataclasses in it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return [leaf for part in typing.get_args(hint) for leaf in leaves(part)]
    return [hint]


RANGES = dict(numbers_of(RunConfig))


def put(config, name, value):
    """A copy with that setting, past the type check that tests make when a dataclass is built (users have none)."""
    config = copy.deepcopy(config)
    *path, last = name.split(".")
    object.__setattr__(get(config, ".".join(path)), last, value)
    return config


def get(config, name):
    for part in filter(None, name.split(".")):
        config = getattr(config, part)
    return config


def test_whole_numbers_beyond_every_float_are_refused():
    """`math.isfinite` raises OverflowError for them, which the command line does not catch."""
    for name, value in {"optim.steps": 10**400, "seed": -(10**400), "optim.learning_rate": 10**400}.items():
        message = rf"{name}: expected a .* number .*, got one of 1329 bits, which is larger than any float"
        with pytest.raises(ValueError, match=message):
            validate(put(RunConfig(), name, value))


def test_every_number_has_a_range():
    assert len(RANGES) > 70
    assert all(isinstance(interval, Range) for interval in RANGES.values())


def test_a_knob_of_the_objective_has_the_same_type_in_a_run():
    objective = {name: interval for name, interval in numbers_of(Objective) if "." not in name}
    method = dict(numbers_of(MethodConfig))
    assert len(objective) == 13
    assert {name: method[name] for name in objective} == objective


def test_the_defaults_are_inside():
    check_settings(FULL)


@pytest.mark.parametrize("name", RANGES)
def test_what_is_outside_is_refused_with_field_value_and_range(name):
    interval, default = RANGES[name], get(FULL, name)
    bad = [interval.low if interval.open_low else interval.low - 1] if math.isfinite(interval.low) else []
    if math.isfinite(interval.high):
        bad.append(interval.high if interval.open_high else interval.high + 1)
    if not interval.whole:
        bad += [math.inf, -math.inf, math.nan]
    for value in bad:
        value = int(value) if interval.whole else float(value)
        value = (value, *default[1:]) if isinstance(default, tuple) else value
        with pytest.raises(ValueError) as refused:
            validate(put(FULL, name, value))
        shown = value[0] if isinstance(value, tuple) else value
        assert str(refused.value) == f"{name}: expected {interval}, got {shown!r}"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rollout.temperature", 1e-300, "rollout.temperature: expected a finite number of at least 0.01, got 1e-300"),
        ("optim.max_grad_norm", -1.0, "optim.max_grad_norm: expected a finite number above 0, got -1.0"),
        ("keep_policy_every", -1, "keep_policy_every: expected a whole number of at least 0, got -1"),
        ("checkpoint_every", 0, "checkpoint_every: expected a whole number of at least 1, got 0"),
        ("optim.betas", (0.9, 1.0), "optim.betas: expected a finite number of at least 0 and below 1, got 1.0"),
        ("seed", -1, "seed: expected a whole number of at least 0 and of at most 9223372036854775807, got -1"),
        ("method.kl_coef", math.nan, "method.kl_coef: expected a finite number of at least 0, got nan"),
        ("optim.freeze_router", "no", "optim.freeze_router: expected bool, got 'no'"),
        ("optim.share_prompts", None, "optim.share_prompts: expected bool, got None"),
        ("model.dtype", 32, "model.dtype: expected str, got 32"),
        ("model.path", True, "model.path: expected str, got True"),
        ("model.tiny", {"layers": 2}, "model.tiny: expected TinyConfig, got {'layers': 2}"),
        ("model.lora.target_modules", "q_proj", "model.lora.target_modules: expected a tuple, got 'q_proj'"),
        ("task.options", "digits=2", "task.options: expected dict, got 'digits=2'"),
        ("optim.betas", (0.9,), "optim.betas: expected 2 values, got 1"),
        ("method.corrections", ("token_mask:2",), "method.corrections: expected Correction, got 'token_mask:2'"),
    ],
)
def test_messages(name, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(put(FULL, name, value))


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("method.replay", "R22", "R2"),
        ("method.source", "initials", "initial"),
        ("method.anchor", "rolout", "rollout"),
        ("method.aggregate", "token_means", "token_mean"),
        ("value.model", "heads", "head"),
        ("reward.model", "learnt", "learned"),
        ("model.device", "cudo", "cuda"),
    ],
)
def test_a_name_that_is_none_of_the_set_is_refused_with_the_nearest(name, value, nearest):
    with pytest.raises(ValueError, match=f"^{name}: expected one of .*; got '{value}'. Did you mean '{nearest}'"):
        validate(put(FULL, name, value))
