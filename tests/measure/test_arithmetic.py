"""What arithmetic alone changes: identities that hold exactly, and numbers by hand."""

import copy
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_rl.measure.arithmetic import (
    LAYOUTS,
    SPLIT,
    CannotRun,
    arithmetic_floor,
    compare,
    experts_variants,
    gap_split,
    repadded,
)
from moe_rl.measure.scoring import Scored, TokenBatch, decoded_logps, score_live
from moe_rl.routing import RoutedExperts, find_sites, record_routes

COMMON = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def build(family, **changes):
    torch.manual_seed(0)
    common = COMMON | changes
    if family == "granitemoe":
        return GraniteMoeForCausalLM(GraniteMoeConfig(**common, num_local_experts=6, logits_scaling=4.0)).eval()
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**common, num_local_experts=6, sliding_window=None)).eval()
    config = Qwen3MoeConfig(**common, num_experts=6, moe_intermediate_size=16, head_dim=8, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(config).eval()


def test_tokens_within_the_prefill_are_refused_where_they_are_to_be_decoded():
    batch = text()
    first = int(batch.completion_mask.any(0).int().argmax())
    assert bool((decoded_logps(build("qwen3_moe"), batch, first)[batch.completion_mask] < 0).all())
    with pytest.raises(ValueError, match=r"within the .* columns of the prefill"):  # they were 0
        decoded_logps(build("qwen3_moe"), batch, first + 1)


@pytest.mark.parametrize("family", ["JambaForCausalLM", "MiniMaxForCausalLM", "MixtralForCausalLM"])
def test_padding_is_not_fed_to_a_state_that_would_take_it_in(family):
    """Sequences that end together: the short one begins behind the prefill. Its decoding was off by up to 2 nats."""
    sys.path.append(str(Path(__file__).parents[1] / "routing"))
    from routing_helpers import moe

    model = moe(family).eval()
    ids = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    real = torch.arange(10) >= torch.tensor([[0], [6]])
    together = TokenBatch(ids, real, real & (torch.arange(10) >= torch.tensor([[3], [8]])))
    if family == "MixtralForCausalLM":
        assert (decoded_logps(model, together, 3) - score_live(model, together).logps).abs().max() < 1e-5
    else:
        with pytest.raises(RuntimeError, match="sequence 1 begins behind the 3 columns of the prefill"):
            decoded_logps(model, together, 3)
    apart = repadded(together, "right")
    assert (decoded_logps(model, apart, 2) - score_live(model, apart).logps).abs().max() < 1e-5


def test_masks_of_tokenizers_are_masks():
    batch, model = text(), build("qwen3_moe")
    numbers = TokenBatch(batch.input_ids, batch.attention_mask.long(), batch.completion_mask.int())
    assert arithmetic_floor(model, [numbers])[0].keys() == arithmetic_floor(model, [batch])[0].keys()
    with pytest.raises(ValueError, match="completion_mask: expected only 0 and 1"):
        replace(batch, completion_mask=batch.input_ids)


def text():
    """Three sequences as a trainer lays them out: the prompt ends at column 4, padding on both sides."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 30, (3, 10), generator=generator)
    column = torch.arange(10)
    real = torch.stack([column >= 2, (column >= 1) & (column < 7), column < 9])
    return TokenBatch(ids, real, real & (column >= 4))


FAMILIES = ["qwen3_moe", "granitemoe", "mixtral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_forward_again_is_zero_everywhere(family):
    model, batch = build(family), text()
    metrics = compare(model, [batch, batch], [score_live(model, batch)] * 2, "repeat").metrics()
    assert (metrics["slots_changed"], metrics["slots"]) == (0, 2 * 14 * 2 * 2), "14 measured tokens, 2 sites, K = 2"
    assert metrics["measured"] == metrics["tokens"] == 28
    zeros = ("outside", "extreme_2", "gap_mean", "gap_p99", "gap_max", "m2", "k3", "chi2_token", "chi2_sequence")
    assert all(metrics[f"{name}{end}"] == 0 for name in zeros for end in ("", "_replayed"))
    assert metrics["ess_token"] == metrics["ess_sequence_replayed"] == 1
    assert all(math.isnan(metrics[f"routing_share_{name}"]) for name in SPLIT), "of nothing there is no share"


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_every_layout_says_the_same_of_every_token(family):
    """Tokens that came back to another place, or a cache that was fed wrongly, would differ by far more."""
    model = build(family).double()
    model.set_experts_implementation("eager")  # grouped_mm has no float64
    found, left_out = arithmetic_floor(model, [text()])
    assert set(found) | set(left_out) == {*LAYOUTS, "decode", *experts_variants(model, ("eager", "grouped_mm"))}
    for name in (*LAYOUTS, "decode"):
        assert found[name]["gap_max"] < 1e-12 and found[name]["sites_changed"] == 0, name
        assert found[name]["measured"] == 14


def test_where_only_the_selection_differs_replay_removes_the_whole_gap():
    """With K = 1 a renormalised gate is exactly 1, so that a router acts through its choice and nothing else."""
    model, batch = build("qwen3_moe", num_experts_per_tok=1), text()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for site in find_sites(other):
            weight = site.module.weight
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    metrics = compare(other, [batch], [score_live(model, batch)], "same").metrics()
    assert 0 < metrics["slots_changed"] < metrics["slots"] and metrics["gap_mean"] > 0.01 and metrics["outside"] > 0
    assert metrics["gap_max_replayed"] == metrics["outside_replayed"] == metrics["k3_replayed"] == 0
    assert all(metrics[f"routing_share_{name}"] == 1 for name in SPLIT)


def test_where_the_routes_stay_nothing_is_routing():
    model, batch = build("granitemoe"), text()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight *= 1.5  # after the last router
    metrics = compare(other, [batch], [score_live(model, batch)], "same").metrics()
    assert metrics["slots_changed"] == 0 < metrics["gap_mean"]
    assert all(metrics[f"routing_share_{name}"] == 0 for name in SPLIT)


def test_a_share_of_the_gap_is_what_a_replayed_forward_leaves():
    """bf16 against fp32, recounted from whole logits."""
    model, batch = build("mixtral"), text()
    with torch.no_grad():
        model.lm_head.weight *= 8
    coarse = copy.deepcopy(model).bfloat16()
    metrics = compare(coarse, [batch], [score_live(model, batch)], "same").metrics()
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    said, taken = [], []
    for one in (model, coarse):
        with torch.no_grad(), record_routes(one) as recording:
            logits = one(**inputs).logits.float()
        logps = logits.log_softmax(-1)[:, :-1].gather(2, batch.input_ids[:, 1:, None])[..., 0]
        said.append(logps[batch.completion_mask[:, 1:]])
        taken.append(recording.routes.ids[batch.completion_mask].sort(-1).values)
    gap = (said[1] - said[0]).double()
    assert metrics["gap_mean"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
    assert metrics["outside"] == int(((gap.exp() < 0.9) | (gap.exp() > 1.1)).sum()) > 0
    assert metrics["sites_changed"] == int((taken[0] != taken[1]).any(-1).sum())
    assert metrics["routing_share_gap_mean"] == pytest.approx(1 - metrics["gap_mean_replayed"] / metrics["gap_mean"])


def test_tails_and_shares_by_hand():
    ratios = torch.tensor([[1.05, 1.2, 0.85, 1.0], [3.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    replayed = torch.tensor([[1.05, 1.2, 1.0, 1.0], [1.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
    metrics = gap_split(ratios.log(), replayed.log(), mask)
    assert (metrics["measured"], metrics["outside"], metrics["outside_replayed"], metrics["extreme_2"]) == (5, 3, 1, 1)
    assert metrics["outside_fraction"] == pytest.approx(3 / 5) and metrics["routing_share_outside"] == pytest.approx(
        2 / 3
    )
    sizes = [abs(math.log(r)) for r in (1.05, 1.2, 0.85, 1.0, 3.0)]
    assert metrics["gap_mean"] == pytest.approx(sum(sizes) / 5) and metrics["gap_max"] == pytest.approx(math.log(3))
    squares = [1.05**2, 1.2**2, 0.85**2, 1.0, 9.0]
    assert metrics["chi2_token"] == pytest.approx(sum(squares) / 5 - 1)
    assert metrics["ess_token"] == pytest.approx((1.05 + 1.2 + 0.85 + 1 + 3) ** 2 / (5 * sum(squares)))
    many = torch.where(torch.arange(100) < 29, 1.0, 0.0)[None]  # 0.29 x 100 is a little less than 29
    assert gap_split(many, many, many >= 0)["outside"] == 29


def test_experts_that_changed_in_the_prompt_alone_are_replayed_too():
    """They move the log-probabilities of the response."""
    model, batch = build("qwen3_moe"), text()
    before = score_live(model, batch)
    ids = before.routes.ids
    ids[1, 2, 0] = torch.tensor([e for e in range(6) if e not in ids[1, 2, 0]])[:2]
    routes = RoutedExperts(ids, before.routes.sites, 6, tokens=before.routes.tokens)
    metrics = compare(model, [batch], [Scored(before.logps, routes)], "same").metrics()
    assert metrics["slots_changed"] == 0 == metrics["gap_max"] < metrics["gap_max_replayed"]


def test_a_batch_without_a_token_to_measure_is_no_floor_of_zero():
    model, batch = build("qwen3_moe"), text()
    nothing = replace(batch, completion_mask=torch.zeros_like(batch.completion_mask))
    with pytest.raises(CannotRun, match="no token to measure"):
        compare(model, [nothing], [score_live(model, nothing)], "repeat").metrics()


def test_padding_moves_and_tokens_keep_their_order():
    batch = text()
    for side in ("left", "right"):
        moved = repadded(batch, side)
        edge = moved.attention_mask.int().diff(dim=1)
        assert bool((edge <= 0).all()) if side == "right" else bool((edge >= 0).all())
        for a, b in zip(batch.input_ids[batch.attention_mask], moved.input_ids[moved.attention_mask], strict=True):
            assert a == b
        assert moved.completion_mask.sum(1).tolist() == batch.completion_mask.sum(1).tolist()
        assert bool((moved.completion_mask <= moved.attention_mask).all())


def test_numbers_that_are_not_finite_are_no_floor_of_zero():
    model, batch = build("qwen3_moe"), text()
    reference = [score_live(model, batch)]
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(CannotRun, match="not all finite"):
        compare(model, [batch], reference, "same")
    with pytest.raises(CannotRun, match="not all finite"):
        arithmetic_floor(model, [batch])


def test_decoding_measures_the_first_tokens_of_responses_only():
    model, batch = build("qwen3_moe"), text()
    metrics = compare(model, [batch], [score_live(model, batch)], "decode", decode_tokens=2).metrics()
    assert metrics["measured"] == metrics["tokens"] == 6 and metrics["gap_max"] < 1e-4


def test_a_batch_of_which_nothing_is_measured_changes_nothing():
    """It had no first column to decode, which was a ValueError and the end of all variants."""
    model, batch, told = build("qwen3_moe"), text(), []
    bare = replace(batch, completion_mask=torch.zeros_like(batch.completion_mask))
    reference = [score_live(model, part) for part in (batch, bare)]
    for variant in ("decode", "batch_1"):
        alone = compare(model, [batch], reference[:1], variant).metrics()
        both = compare(model, [batch, bare], reference, variant, tick=lambda: told.append(1)).metrics()
        assert str(both) == str(alone)
    assert len(told) == 4, "of every batch"
    found, left_out = arithmetic_floor(model, [bare])
    assert not found and set(left_out.values()) == {"no token to measure"}


def test_a_row_of_padding_alone_leaves_no_variant_out():
    model, batch = build("qwen3_moe"), text()
    real = batch.attention_mask.clone()
    real[1] = False
    batch = TokenBatch(batch.input_ids, real, batch.completion_mask & real)
    metrics = compare(model, [batch], [score_live(model, batch)], "batch_1_unpadded").metrics()
    assert metrics["measured"] == int(batch.completion_mask.sum()) and metrics["gap_max"] < 1e-4


def test_the_first_token_of_a_sequence_has_nothing_to_compare():
    model, batch = build("qwen3_moe"), text()
    whole = replace(batch, completion_mask=batch.attention_mask)
    with pytest.raises(ValueError, match="first token of a sequence, which follows nothing"):
        compare(model, [whole], [score_live(model, whole)], "repeat")


def test_what_has_no_variant_says_why_and_leaves_the_model_as_it_was():
    model, batch = build("qwen3_moe"), text()
    row = batch.rows(2, 3)
    alone = TokenBatch(row.input_ids[:, :9], row.attention_mask[:, :9], row.completion_mask[:, :9])
    reference = [score_live(model, alone)]
    for variant, why in (("batch_1", "one sequence"), ("padding_left", "no padding would move")):
        with pytest.raises(CannotRun, match=why):
            compare(model, [alone], reference, variant)
    own = model.config._experts_implementation
    with pytest.raises(CannotRun, match="'abacus'"):
        compare(model, [alone], reference, "experts_abacus")
    compare(model, [alone], reference, "experts_eager")
    assert model.config._experts_implementation == own
    assert experts_variants(model, ("eager", own)) == ["experts_eager"]
