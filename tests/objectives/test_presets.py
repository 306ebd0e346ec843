from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from moe_rl.objectives import OBJECTIVES, PRESETS, Correction, Objective, get_objective
from moe_rl.objectives.bounds import unknown
from moe_rl.objectives.gates import GateInputs, clip_gate
from moe_rl.objectives.methods_table import methods_markdown

DOCS = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_is_generated_from_the_presets():
    assert DOCS.read_text(encoding="utf-8") == methods_markdown(), (
        "docs/methods.md is stale; run: python -m moe_rl.objectives.methods_table > docs/methods.md"
    )


def test_every_preset_has_a_row_and_a_source():
    assert all(preset.source for preset in PRESETS.values())
    page = methods_markdown()
    assert all(f"| `{name}` |" in page for name in OBJECTIVES)


def test_published_defaults():
    grpo, gspo = OBJECTIVES["grpo"], OBJECTIVES["gspo"]
    assert (grpo.clip_low, grpo.clip_high, grpo.kl_coef) == (0.2, 0.27, 0.0)  # arXiv:2507.18071, section 5.1
    assert (gspo.ratio, gspo.clip_low, gspo.clip_high, gspo.kl_coef) == ("sequence", 3e-4, 4e-4, 0.0)
    assert OBJECTIVES["gspo_token"] == replace(gspo, ratio="sequence_token")
    assert (OBJECTIVES["dapo"].clip_high, OBJECTIVES["dapo"].aggregate) == (0.28, "token_mean")
    assert (OBJECTIVES["sapo"].temperature_pos, OBJECTIVES["sapo"].temperature_neg) == (1.0, 1.05)
    assert (OBJECTIVES["minirl"].advantage_scale, OBJECTIVES["dr_grpo"].advantage_scale) == ("none", "none")


def test_needs():
    assert OBJECTIVES["minirl"].needs == frozenset()
    assert OBJECTIVES["gspo_rollout"].needs == OBJECTIVES["grpo_tis"].needs == {"rollout_logps"}
    assert OBJECTIVES["rspo"].needs == {"route_weight"}
    assert replace(OBJECTIVES["grpo"], kl_coef=0.04).needs == {"ref_logps"}


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'gspo_token'"):
        get_objective("gspo-token")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"clip_low": -0.1}, "clip_low: expected a finite number of at least 0, got -0.1"),
        ({"clip_high": float("inf")}, "clip_high: expected a finite number"),
        ({"clip_low": 5}, "gate='clip' .* 1 - clip_low, .* at most 1, which is no lower clip; got 5"),
        ({"gate": "cap", "clip_low": 1.01}, "gate='cap' .* at most 1"),
        ({"gate": "sequence_clip", "clip_low": 2.0}, "gate='sequence_clip' .* at most 1"),
        ({"gate": "mask", "clip_low": 2.0}, "gate='mask' .* at most 1"),
        ({"route_floor": 1.5}, "route_floor: expected a finite number of at least 0 and of at most 1, got 1.5"),
        ({"gate": "divergence_tv", "ratio": "sequence"}, "'divergence_tv' is defined for 'token' ratios"),
        ({"gate": "clipp"}, r"Objective.gate: .* got 'clipp'. Did you mean 'clip'"),
        ({"kl_coef": float("nan")}, "kl_coef"),
        ({"temperature_neg": 0.0}, "temperature_neg"),
        ({"gate": "geometric", "ratio": "sequence"}, "'geometric' is defined for 'token' ratios, got 'sequence'"),
        ({"gate": "sigmoid", "dual_clip": 3.0}, "dual_clip"),
        ({"dual_clip": 1.1}, "dual_clip"),
        ({"gate": "soft_dual_clip"}, "gate='soft_dual_clip' needs a ceiling, e.g. 3; got None"),
        ({"gate": "soft_dual_clip", "dual_clip": 1.2}, "dual_clip: expected above 1"),
        ({"local_normalizer": True}, "token_mean"),
    ],
)
def test_refused_knobs(knobs, message):
    with pytest.raises(ValueError, match=message):
        Objective(**knobs)


def test_a_lower_clip_of_1_is_none_and_more_is_refused_of_ratios_alone():
    tiny_ratio, losing = torch.full((1, 1), -50.0), torch.full((1, 1), -1.0)
    x = GateInputs(tiny_ratio, tiny_ratio, tiny_ratio, losing, torch.ones(1, 1, dtype=torch.bool))
    assert not clip_gate(x, clip_low=1.0, clip_high=0.2).clipped
    assert Objective(gate="geometric", clip_low=1.2).clip_low == 1.2, "nats"


@pytest.mark.parametrize(
    "knobs",
    [
        {"kind": "token_mask", "low": 2.0, "high": 1.0},
        {"kind": "token_truncate", "low": 0.5},
    ],
)
def test_refused_corrections(knobs):
    with pytest.raises(ValueError, match="Correction"):
        Correction(**knobs)


def test_an_unknown_choice_names_the_nearest():
    # tests run with literals checked at run time; users see the second message
    with pytest.raises((ValueError, TypeCheckError), match="token_truncate"):
        Correction("tis")
    assert unknown("Objective.gate", "clipp", ("clip", "mask")).endswith("got 'clipp'. Did you mean 'clip'?")


def test_presets_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        OBJECTIVES["grpo"].clip_low = 0.5


def test_a_sigmoid_of_ones_own_has_the_temperatures_of_sapo():
    one, preset = Objective(gate="sigmoid"), OBJECTIVES["sapo"]
    assert (one.temperature_pos, one.temperature_neg) == (preset.temperature_pos, preset.temperature_neg)
