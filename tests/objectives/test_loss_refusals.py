"""What the loss refuses: missing or ignored tensors, shapes that differ, values that are not finite."""

import math
from dataclasses import replace
from inspect import unwrap

import jaxtyping
import pytest
import torch
from loss_helpers import EVERYTHING, whole_of_the_loss

from moe_rl.measure import TokenLogps
from moe_rl.objectives import (
    GATES,
    OBJECTIVES,
    PRESETS,
    Correction,
    Gated,
    Objective,
    dpo_coefficients,
    dpo_loss,
    gate,
    generalized_advantages,
    kl_estimate,
    policy_loss,
    reward_model_loss,
    sequence_log_ratio,
    value_loss,
)
from moe_rl.objectives.advantages import as_groups


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


@pytest.fixture
def unannotated(monkeypatch):
    """As users have it, who run without the checks of annotations that tests run with."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


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
        (PRESETS["grpo"], {}, "objective: expected a name of OBJECTIVES or an Objective, got Preset"),
        (None, {}, "objective: expected a name"),
        ("rspo", {"route_weight": torch.full((2, 3), 1.5)}, "route_weight: expected gamma of at least 0"),
        ("grpo", {"total_sequences": -1}, "total_sequences, total_tokens: expected a count of at least 0, got -1"),
        ("dapo", {"total_tokens": math.nan}, "expected a count of at least 0, got nan"),
        ("dapo", {"total_tokens": math.inf}, "expected a count of at least 0, got inf"),
        ("rspo", {"route_weight": torch.full((2, 3), -0.5)}, "route_weight: expected gamma of at least 0"),
    ],
)
def test_refusals(objective, change, message, unannotated):
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
    from moe_rl.objectives.loss import prepare_terms

    optional = {"ref_logps": None, "rollout_logps": None, "route_weight": None}
    with pytest.raises(ValueError, match=message):
        prepare_terms("grpo", **{**arguments_of(), **optional, **change})


@pytest.mark.parametrize("knobs", [{"clip_low": 0.0}, {"clip_high": 0.0}])
def test_a_bound_that_the_gate_divides_by_is_not_zero(knobs):
    """The loss was NaN, also of tokens without an advantage."""
    with pytest.raises(ValueError, match="gate='quadratic' divides by them, so above 0"):
        replace(OBJECTIVES["drpo"], **knobs)


def test_a_decay_bounds_the_weight_of_every_ratio():
    """With a decay of 0 the weight of a large ratio was infinite or NaN, also of a token that a correction drops."""
    with pytest.raises(ValueError, match=r"Objective\.decay_pos: expected a finite number of at least 0\.0001, got 0"):
        replace(OBJECTIVES["vespo"], decay_pos=0)
    least = replace(OBJECTIVES["vespo"], decay_pos=1e-4, decay_neg=1e-4)
    logps = torch.tensor([[60.0, 100.0]], requires_grad=True)
    loss = policy_loss(least, logps, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)).loss
    loss.backward()
    assert loss.isfinite() and logps.grad.isfinite().all()


@pytest.mark.parametrize("field", ["clip_low", "kl_coef", "length_constant", "temperature_pos"])
def test_a_number_that_is_needed_may_not_be_none(field, unannotated):
    with pytest.raises(ValueError, match=f"Objective.{field}: expected a finite number"):
        Objective(**{field: None})
    assert Objective(dual_clip=None, ratio_cap=None) == Objective()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Objective(kl_importance_weighted="no"), "Objective.kl_importance_weighted: expected bool, got 'no'"),
        (lambda: Objective(local_normalizer=0), "Objective.local_normalizer: expected bool, got 0"),
        (lambda: Objective(gate=["clip"]), r"Objective.gate: expected str, got \['clip'\]"),
        (lambda: Correction("token_mask", high="2"), r"Correction\(token_mask\).high: expected float, got '2'"),
        (lambda: Correction("token_mask", high=None), r"Correction\(token_mask\).high: expected float, got None"),
        (lambda: Correction("token_mask", high=True), r"Correction\(token_mask\).high: expected float, got True"),
        (lambda: Correction("token_mask", optional=1), r"Correction\(token_mask\).optional: expected bool, got 1"),
    ],
)
def test_a_value_of_another_type_is_refused(made, message, unannotated):
    """A text such as "no" counted as true, and a bound that is a text failed in a comparison that named no field."""
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.parametrize("corrections", [("token_truncate:2",), [Correction("token_mask", high=3.0)], None])
def test_corrections_are_a_tuple_of_corrections(corrections, unannotated):
    with pytest.raises(ValueError, match=r"Objective.corrections: expected a tuple of Correction, got "):
        Objective(corrections=corrections)


@pytest.mark.parametrize("function", [sequence_log_ratio, kl_estimate])
def test_tensors_that_would_broadcast_are_refused(function, unannotated):
    """One row against three, or one value a sequence against square batches: tokens that do not belong together."""
    z, all_of_them = torch.zeros(3, 3), torch.ones(3, 3)
    for old, mask, name in ((z[:1], all_of_them, "(old|ref)_logps"), (z[0], all_of_them, ".*"), (z, z[:1], "mask")):
        with pytest.raises(ValueError, match=rf"{name}: expected the shape of logps, \(3, 3\), got"):
            function(z, old, mask)


def test_rewards_and_pairs_that_would_broadcast_are_refused(unannotated):
    z, some = torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="rewards: expected the shape of values"):
        generalized_advantages(torch.ones(3), z, some)  # one reward a response, on every token of others
    with pytest.raises(ValueError, match="returns: expected the shape of values"):
        value_loss(z, z, z[:, :1], some)
    for loss in (dpo_loss, reward_model_loss, dpo_coefficients):
        with pytest.raises(ValueError, match=r"rejected_\w+: expected the shape of chosen_\w+, \(3,\), got \(3, 1\)"):
            loss(z[0], z[:, :1])


@pytest.mark.parametrize("kind", ["off_policy_mask", "binary_kl_mask"])
def test_a_mask_by_one_threshold_has_no_lower_bound(kind):
    with pytest.raises(ValueError, match="it has one threshold"):
        Correction.parse(f"{kind}:0.05:0.1:current")


def test_a_gate_that_is_not_one_is_refused(monkeypatch):
    two = torch.tensor([[-1.0, -2.0]])
    for name, function, said in (
        ("of_rows", lambda x: Gated(x.logps.mean(1, keepdim=True), x.nowhere()), r"each \[B,T\] = \[1, 2\], got"),
        ("floats", lambda x: Gated(x.logps, torch.zeros_like(x.logps)), "clipped must be bool, got torch.float32"),
        ("bare", lambda x: x.logps, "got Tensor"),
    ):
        monkeypatch.delitem(GATES, name, raising=False)  # and so after the test
        gate(name, flow="logps")(function)
        with pytest.raises(ValueError, match=f"gate '{name}'.*{said}"):
            policy_loss(Objective(gate=name), two, two, torch.ones(1), torch.ones(1, 2))


def test_a_gate_that_asks_for_no_field_of_an_objective_is_refused(monkeypatch):
    monkeypatch.setitem(GATES, "mine", replace(GATES["none"], knobs=("clip_low", "width")))
    with pytest.raises(ValueError, match="fields of Objective, which has no width; gate='mine' asks for it"):
        Objective(gate="mine")


def test_a_gate_of_another_flow_is_refused():
    with pytest.raises(ValueError, match="gate 'mine', flow: expected one of ratio, logps, row; got 'rows'"):
        unwrap(gate)("mine", flow="rows")
    assert "mine" not in GATES


def test_a_gate_may_be_registered_again_by_its_own_cell_only(monkeypatch):
    monkeypatch.delitem(GATES, "mine", raising=False)

    def cell():  # of a notebook
        @gate("mine")
        def mine(x):
            return Gated(x.logps * x.advantages, x.nowhere())

        return mine

    cell()
    assert cell() is GATES["mine"].surrogate
    for name in ("mine", "clip"):
        with pytest.raises(ValueError, match=f"'{name}' is registered already"):
            gate(name)(lambda x: Gated(x.logps, x.nowhere()))


def test_what_is_no_tensor_is_named():
    """As users meet it, without the type checks of the tests around these functions."""
    logps = torch.zeros(2, 3)
    scored = TokenLogps(logps=logps, entropy=None, aux_loss=None, router_logits=None)
    with pytest.raises(ValueError, match=r"logps: expected a tensor, got TokenLogps; pass its \.logps"):
        unwrap(policy_loss)("grpo", scored, logps, torch.zeros(2), logps.bool())
    with pytest.raises(ValueError, match=r"old_logps: expected a tensor, got list"):
        unwrap(policy_loss)("grpo", logps, [[0.0] * 3] * 2, torch.zeros(2), logps.bool())
    for name in ("logps", "old_logps", "advantages", "mask"):
        given = {"logps": logps, "old_logps": logps, "advantages": torch.zeros(2), "mask": logps.bool()} | {name: None}
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got NoneType"):
            unwrap(policy_loss)("grpo", **given)
    with pytest.raises(ValueError, match=r"rewards: expected a tensor \[B\], got list"):
        unwrap(as_groups)([1.0, 0.0], 2)
