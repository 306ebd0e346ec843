"""Facts of ratios, routers and load against arithmetic done by hand; the noise floor of a real forward."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import MICRO

from moe_rl.routing import RoutedExperts, change_counts
from moe_rl.training import ProbeConfig, Trainer
from moe_rl.training import floor as floor_of
from moe_rl.training.facts import (
    change_facts,
    effective_share,
    load_facts,
    position_facts,
    ratio_facts,
    router_facts,
    spread_facts,
)
from moe_rl.training.floor import other_experts, rounded_copy

LN2 = math.log(2)
# Ratios 1, 4 | 1/4, padding. d = 0, 2 ln 2 | -2 ln 2.
D = torch.tensor([[0.0, 2 * LN2], [-2 * LN2, 99.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True], [True, False]])


def test_spread_of_three_tokens():
    facts = {name: float(value) for name, value in spread_facts(D, MASK).items()}
    assert facts["k1"] == pytest.approx(0.0, abs=1e-12)
    assert facts["m2"] == pytest.approx(8 * LN2**2 / 3)  # (0 + 4 + 4) ln²2 / 3
    assert facts["k2"] == pytest.approx(facts["m2"] / 2)
    assert facts["k3"] == pytest.approx((0 + (3 - 2 * LN2) + (-0.75 + 2 * LN2)) / 3)
    assert facts["gap_mean"] == pytest.approx(4 * LN2 / 3)
    assert facts["gap_p99"] == facts["gap_max"] == pytest.approx(2 * LN2)
    assert [facts[f"extreme_{tau}"] for tau in (2, 3, 5, 10)] == [2, 2, 0, 0]
    assert facts["var_ratio"] == pytest.approx(((1 - 1.75) ** 2 + (4 - 1.75) ** 2 + (0.25 - 1.75) ** 2) / 2)
    assert facts["chi2_token"] == pytest.approx((1 + 16 + 1 / 16) / 3 - 1)
    assert facts["ess_token"] == pytest.approx(5.25**2 / (3 * (17 + 1 / 16)))
    assert facts["chi2_sequence"] == pytest.approx((4 + 1 / 16) / 2 - 1)  # s = 2 and 1/4
    assert facts["ess_sequence"] == pytest.approx(2.25**2 / (2 * (4 + 1 / 16)))
    assert facts["var_within"] == pytest.approx(LN2**2 / 2)  # ln²2 in the first, 0 in the second
    assert facts["max_token_kl_max"] == pytest.approx(3 - 2 * LN2)
    assert facts["max_token_kl_mean"] == pytest.approx((3 - 2 * LN2 - 0.75 + 2 * LN2) / 2)


def test_equal_policies_give_zeros_and_full_samples():
    facts = spread_facts(torch.zeros(2, 2), MASK)
    assert {n for n, v in facts.items() if float(v) != 0} == {"ess_token", "ess_sequence"}
    assert float(facts["ess_token"]) == float(facts["ess_sequence"]) == 1


def test_no_tokens_give_nan_and_nothing_raises():
    facts = spread_facts(D, torch.zeros_like(MASK))
    assert all(math.isnan(float(v)) for n, v in facts.items() if not n.startswith("extreme"))
    assert float(facts["extreme_2"]) == 0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
@settings(deadline=None, max_examples=30)
def test_effective_share_is_one_over_one_plus_the_squared_variation(weights):
    w = torch.tensor(weights, dtype=torch.float64)
    variation = w.var(correction=0) / w.mean() ** 2
    assert float(effective_share(w)) == pytest.approx(float(1 / (1 + variation)))


def test_p99_is_the_nearest_rank_and_padding_counts_nowhere():
    d = torch.zeros(1, 201)
    d[0, :2] = torch.tensor([3.0, 2.0])
    d[0, 200] = 50.0
    mask = torch.ones(1, 201, dtype=torch.bool)
    mask[0, 200] = False
    facts = spread_facts(d, mask)  # 200 tokens: rank 198 of 200, the largest two lie above
    assert float(facts["gap_p99"]) == 0 and float(facts["gap_max"]) == 3


def test_an_updates_facts_count_clipped_tokens_inside_the_mask_only():
    clipped = torch.tensor([[False, True], [False, True]])
    facts = ratio_facts(D, torch.tensor([LN2, -2 * LN2], dtype=torch.float64), clipped, MASK)
    assert [int(facts[n]) for n in ("clipped_tokens", "tokens", "clipped_sequences", "sequences")] == [1, 3, 1, 2]
    assert float(facts["var_token_log_ratio"]) == pytest.approx(4 * LN2**2)  # (0 + 4 + 4) ln²2 / 2
    assert float(facts["var_sequence_log_ratio"]) == pytest.approx(4.5 * LN2**2)  # (1.5² + 1.5²) ln²2


def test_router_facts_of_one_token_at_one_site():
    old, new = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[2.0, 1.0, 3.0]])
    p, q = old.softmax(-1), new.softmax(-1)
    m = (p + q) / 2
    facts = router_facts([old], [new], k=2)
    assert facts["router_kl"] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    assert facts["router_js"] == pytest.approx(float((p * (p / m).log() + q * (q / m).log()).sum() / 2), rel=1e-5)
    assert float(facts["margin_median"]) == pytest.approx(1.0)  # 2 - 1: the third is chosen now
    assert float(facts["shift_over_margin"]) == pytest.approx(4.0)  # changes -1, -1, +2; half the old margin is 0.5


def test_a_common_shift_of_logits_moves_no_router():
    old = [torch.randn(4, 6), torch.randn(4, 6)]
    facts = router_facts(old, [logits + 5 for logits in old], k=2)
    assert facts["router_kl"] == pytest.approx(0, abs=1e-6)
    assert float(facts["shift_over_margin"]) == pytest.approx(0, abs=1e-3)
    assert "margin_median" not in router_facts(old, old, k=6), "all experts are taken: there is no boundary"


def test_load_of_two_tokens_on_four_experts():
    mask = torch.ones(1, 2, dtype=torch.bool)
    old, new = (
        RoutedExperts(torch.tensor(ids), ("gate",), 4) for ids in ([[[[0, 1]], [[0, 1]]]], [[[[0, 1]], [[0, 2]]]])
    )
    facts = {name: float(value) for name, value in load_facts(old, new, mask).items()}
    assert facts["load_cv_mean"] == facts["load_cv_max"] == pytest.approx(math.sqrt(0.5))  # 2, 1, 1, 0 around 1
    assert facts["load_entropy_mean"] == pytest.approx(1.5 * LN2)  # ½ ln 2 + 2 · ¼ ln 4
    assert facts["active_set_churn"] == pytest.approx(1 / 3)  # {0, 1} -> {0, 1, 2}


def test_changes_by_site_and_position_of_two_responses():
    """Sites 0 and 1, K = 2. Row 0 responds at columns 1, 2, row 1 at column 2 alone; columns before are prompts.

    Row 0: the prompt changes (counts nowhere); position 0 changes one slot at site 0; position 1 both slots at site 1.
    Row 1: position 0 changes one slot at each site.
    """
    old = torch.tensor([0, 1]).expand(2, 3, 2, 2)
    new = old.clone()
    new[0, 0, 0] = torch.tensor([2, 3])
    new[0, 1, 0] = torch.tensor([1, 2])
    new[0, 2, 1] = torch.tensor([2, 3])
    new[1, 2] = torch.tensor([[0, 3], [3, 1]])
    mask = torch.tensor([[False, True, True], [False, False, True]])
    routes = [RoutedExperts(ids, ("l.0.gate", "l.1.gate"), 4) for ids in (old, new)]
    facts = change_facts(change_counts(*routes, mask))
    assert [facts[n] for n in ("slots_changed", "slots", "sites_changed", "sites", "tokens_changed", "tokens")] == [
        5, 12, 4, 6, 3, 3,
    ]  # fmt: skip
    assert facts["site_slots_changed"].tolist() == [2, 3] and facts["site_slots"].tolist() == [6, 6]
    assert facts["flips_histogram"].tolist() == [0, 2, 1]  # tokens of 0, 1, 2 changed sites
    assert facts["deviation_histogram"].tolist() == [2, 3, 1]  # pairs of 0, 1, 2 changed slots
    by_position = {name: values.tolist() for name, values in position_facts(*routes, mask).items()}
    assert by_position == {"position_sites_changed": [3, 1], "position_sites": [4, 2]}


def test_the_floor_by_site_and_position_is_a_recount_of_the_routes(tmp_path, monkeypatch):
    seen = []

    def watched(part, old, new):
        facts = compare(part, old, new)
        seen.append((part, old[1].ids, new[1].ids, facts))
        return facts

    compare = floor_of.compare
    monkeypatch.setattr(floor_of, "compare", watched)
    Trainer(replace(MICRO, probe=ProbeConfig(sequences=8, tokens_every=0)), tmp_path).run()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    rows = [row for row in lines if row["kind"] == "floor"]
    assert [row["variant"] for row in rows] == ["repeat", "batch", "experts", "bf16"]
    for row, (part, old, new, _) in zip(rows, seen, strict=True):
        by_site, by_position, flips = [0, 0], {}, []
        for b, mask in enumerate(part.completion_mask.tolist()):
            columns = [t for t, counted in enumerate(mask) if counted]
            for position, t in enumerate(columns):
                lost = [len(set(old[b, t, site].tolist()) - set(new[b, t, site].tolist())) for site in (0, 1)]
                by_site = [total + n for total, n in zip(by_site, lost, strict=True)]
                flips.append(sum(n > 0 for n in lost))
                by_position.setdefault(position, []).append(flips[-1])
        assert row["site_slots_changed"] == by_site and row["site_slots"] == [2 * len(flips)] * 2
        assert row["flips_histogram"] == [flips.count(n) for n in (0, 1, 2)]
        assert row["position_sites_changed"] == [sum(by_position[p]) for p in sorted(by_position)]
        assert row["position_sites"] == [2 * len(by_position[p]) for p in sorted(by_position)]
    assert sum(rows[-1]["site_slots_changed"]) > 0, "rounding to bfloat16 changes some choice"


def test_the_floor_is_measured_once_and_changes_nothing(tmp_path):
    rows = {}
    for floor in (True, False):
        probe = ProbeConfig(sequences=8, tokens_every=0, floor=floor)
        trainer = Trainer(replace(MICRO, probe=probe), tmp_path / str(floor))
        trainer.run()
        lines = (tmp_path / str(floor) / "metrics.jsonl").read_text().splitlines()
        rows[floor] = [json.loads(line) for line in lines]
    found = {row["variant"]: row for row in rows[True] if row["kind"] == "floor"}
    assert list(found) == ["repeat", "batch", "experts", "bf16"]
    assert found["repeat"]["gap_max"] == found["repeat"]["slots_changed"] == 0, "one forward twice is the same twice"
    assert found["batch"]["gap_max"] < 1e-5 and found["experts"]["gap_max"] < 1e-5, "fp32 on a CPU"
    assert 1e-5 < found["bf16"]["gap_max"] < 1
    assert all(row["slots"] == 2 * row["sites"] == 4 * row["tokens"] > 0 for row in found.values())  # K = 2, L = 2
    plain, floored = ([r for r in rows[f] if r["kind"] not in ("floor", "step")] for f in (False, True))
    assert plain == floored


def test_a_floor_that_a_kernel_cannot_run_is_left_out_and_ends_no_run(tmp_path):
    """Experts of 12 inner units have rows of 24 bytes in bf16, and grouped_mm wants multiples of 16."""
    tiny = replace(MICRO.model.tiny, moe_intermediate_size=12)
    config = replace(MICRO, model=replace(MICRO.model, tiny=tiny), probe=ProbeConfig(sequences=4, tokens_every=0))
    with pytest.warns(UserWarning, match="noise floor: bf16 is left out.*multiple of 16 bytes"):
        Trainer(config, tmp_path).run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows if row["kind"] == "floor"] == ["repeat", "batch", "experts"]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(MICRO.optim.steps))


def test_a_rounded_copy_leaves_the_model_and_another_implementation_is_given_back(tmp_path):
    model = Trainer(MICRO, tmp_path).model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = rounded_copy(model)
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    name = model.config._experts_implementation
    with pytest.raises(ZeroDivisionError), other_experts(model) as names:
        assert names is not None and model.config._experts_implementation == names[1] != name
        raise ZeroDivisionError
    assert model.config._experts_implementation == name
