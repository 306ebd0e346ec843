"""What the loss refuses: missing or ignored tensors, shapes that differ, values that are not finite."""

import math
from dataclasses import replace

import pytest
import torch
from loss_helpers import EVERYTHING, whole_of_the_loss

from moe_rl.objectives import OBJECTIVES, Correction, policy_loss


@pytest.mark.parametrize("argument", ["logps", "old_logps", "ref_logps", "rollout_logps", "advantages"])
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_what_is_not_finite_on_a_token_that_counts_is_refused(argument, value):
    tensors = whole_of_the_loss(EVERYTHING, 3)
    del tensors["route_weight"]
    tensors["mask"][:] = True
    tensors["mask"][0, 0] = False
    place = (2,) if argument == "advantages" else (2, 4)
    tensors[argument][place] = value
    count, token = (6, 0) if argument == "advantages" else (1, 4)
    message = f"{argument}: {count} of the 17 tokens that count are not finite, the first is .* at row 2, token {token}"
    with pytest.raises(FloatingPointError, match=message):
        policy_loss("grpo", **tensors)
    if argument != "advantages":  # the same value under the mask is nobody's business
        tensors[argument][2, 4] = -1.0
        tensors[argument][0, 0] = value
        assert policy_loss("grpo", **tensors).loss.isfinite()


def arguments_of(shape=(2, 3)):
    z = torch.zeros(shape)
    return {"logps": z, "old_logps": z, "advantages": z[:, 0], "mask": torch.ones(shape, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("objective", "change", "message"),
    [
        ("grop", {}, "Did you mean 'grpo'"),
        (replace(OBJECTIVES["grpo"], kl_coef=0.1), {}, "ref_logps is missing: kl_coef is not 0"),
        ("gspo_rollout", {}, "rollout_logps is missing"),
        ("grpo_tis", {}, "rollout_logps is missing"),
        ("rspo", {}, "route_weight is missing"),
        ("grpo", {"route_weight": torch.ones(2, 3)}, "would ignore it"),
        ("grpo", {"mask": torch.full((2, 3), 2.0)}, "only 0 and 1"),
    ],
)
def test_refusals(objective, change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(objective, **{**arguments_of(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_logps": torch.zeros(2, 4)}, "old_logps: expected the shape of logps"),
        ({"advantages": torch.zeros(3)}, "advantages: expected"),
        ({"advantages": torch.zeros(2, 1)}, "advantages: expected"),
        ({"ref_logps": torch.zeros(1, 3)}, "ref_logps: expected the shape of logps"),
    ],
)
def test_shapes_that_differ_are_named(change, message):
    # below the run-time shape check of the tests, where users without it arrive
    from moe_rl.objectives.terms import prepare_terms

    optional = {"ref_logps": None, "rollout_logps": None, "route_weight": None}
    with pytest.raises(ValueError, match=message):
        prepare_terms("grpo", **{**arguments_of(), **optional, **change})


@pytest.mark.parametrize("knobs", [{"clip_low": 0.0}, {"clip_high": 0.0}])
def test_a_bound_that_the_gate_divides_by_is_not_zero(knobs):
    """The loss was NaN, also of tokens without an advantage."""
    with pytest.raises(ValueError, match="gate='quadratic' divides by them, so above 0"):
        replace(OBJECTIVES["drpo"], **knobs)


def test_an_off_policy_mask_has_no_lower_bound():
    with pytest.raises(ValueError, match="it has delta only"):
        Correction.parse("off_policy_mask:0.05:0.1:current")
