"""Several sequences in a row: the numbers of rows of their own, or an error."""

import sys
from pathlib import Path

import pytest
import torch
from logprobs_helpers import FAMILIES, SIZES, V, build
from sweeps import mostly_swept
from transformers import GptOssConfig, GptOssForCausalLM

from moe_rl.measure import token_logps, unpacked
from moe_rl.routing import record_routes, replay_routes

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from tiny_families import families, tiny_model

LEAKING = {
    "AfmoeForCausalLM", "BailingHybridForCausalLM", "DeepseekV4ForCausalLM", "DogeForCausalLM", "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM", "Inkling2ForCausalLM", "Inkling2LoopForCausalLM", "InklingForCausalLM",
    "JambaForCausalLM", "KimiLinearForCausalLM", "LaraMiniForCausalLM", "Lfm2MoeForCausalLM", "MiniMaxForCausalLM",
    "NemotronHForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM", "ZayaForCausalLM",
}  # fmt: skip
LENGTHS = (6, 9)


def rows(count=1, vocabulary=V):
    """Token ids, masks of ones and positions, of two sequences in each row."""
    ids = torch.randint(3, vocabulary, (count, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids), torch.cat([torch.arange(n) for n in LENGTHS]).expand(count, -1)


@torch.no_grad()
def packed(model, ids, ones, positions):
    return token_logps(model, ids, ones, ones, position_ids=positions).logps


@torch.no_grad()
def apart(model, ids):
    return torch.cat(
        [token_logps(model, x, torch.ones_like(x), torch.ones_like(x)).logps for x in ids.split(LENGTHS, 1)], 1
    )


def forwards(model):
    calls = []
    model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(model.training))
    return calls


@pytest.mark.parametrize("dtype", mostly_swept([torch.float32, torch.bfloat16], [torch.float32]))
def test_no_family_gives_other_numbers_than_in_rows_of_their_own(dtype):
    refused = set()
    for family in sorted(families()):
        model = tiny_model(family).to(dtype).eval()
        try:
            found = packed(model, *rows(2, 64))
        except ValueError as error:
            assert "does not keep sequences apart" in str(error) and "row of its own" in str(error), family
            refused.add(family)
        else:
            torch.testing.assert_close(
                found, apart(model, rows(2, 64)[0]), rtol=0, atol=float(20 * torch.finfo(dtype).eps)
            )
    leaking = LEAKING & set(families())
    # In 16 bits that of a tiny Doge is below rounding, as the comparison has just shown.
    hidden = {"DogeForCausalLM"} if dtype == torch.bfloat16 else set()
    assert leaking - hidden <= refused <= leaking


def test_a_leak_is_refused_at_every_call():
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"GptOss.*does not keep sequences apart that stand in one row: log-prob"):
            packed(model, *rows())
    assert model.training


@pytest.mark.parametrize("family", ["qwen3_moe", "cohere"])  # the second has no experts
def test_a_model_is_tried_out_once(family):
    assert family in FAMILIES
    model = build(family).train()
    calls = forwards(model)
    packed(model, *rows())
    assert len(calls) > 2 and not any(calls[:-1]) and calls[-1] and model.training, "tried out in eval mode"
    calls.clear()
    packed(model, *rows())
    assert len(calls) == 1


def test_open_contexts_do_not_see_it_tried_out():
    model, (ids, ones, positions) = build(), rows()
    random = torch.get_rng_state()
    with record_routes(model) as recording:
        want = packed(model, ids, ones, positions)
    assert len(recording.steps) == 1 and recording.routes.shape[1] == sum(LENGTHS)
    other = build()
    with replay_routes(other, recording.routes, once=True) as replay:
        got = packed(other, ids, ones, positions)
    assert torch.equal(got, want) and replay.replayed_fraction == 1
    assert torch.equal(torch.get_rng_state(), random)


def test_rows_that_are_kept_apart_one_by_one_may_not_be_in_a_batch(monkeypatch):
    """Flash attention looks for packed sequences in a batch of one row only."""
    model = build()
    forward = type(model.model).forward

    def as_flash(self, input_ids=None, attention_mask=None, **inputs):
        mask = attention_mask if len(input_ids) == 1 else torch.ones_like(input_ids)
        return forward(self, input_ids=input_ids, attention_mask=mask, **inputs)

    monkeypatch.setattr(type(model.model), "forward", as_flash)
    torch.testing.assert_close(packed(model, *rows()), apart(model, rows()[0]), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="does not keep sequences apart"):
        packed(model, *rows(2))


def test_models_without_positions_are_refused(monkeypatch):
    model = build()
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, **inputs: forward(self, **inputs))
    with pytest.raises(ValueError, match="it takes no position_ids"):
        packed(model, *rows())


def test_packed_rows_are_brought_to_one_sequence_a_row_with_their_gradient():
    lengths, values = [3, 1, 4, 2, 6], torch.randn(2, 8, 3, requires_grad=True)
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, 8)
    apart = unpacked(values, positions)
    kept = apart.new_tensor(lengths)[:, None] > torch.arange(6)
    assert apart.shape == (5, 6, 3) and torch.equal(apart[kept], values.flatten(0, 1)) and not apart[~kept].any()
    assert torch.equal(unpacked(torch.ones(2, 8, dtype=torch.bool), positions), kept)
    apart.sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))
    with pytest.raises(ValueError, match=r"0 where a sequence and each row begins, got .* rows from \[1, 1\]"):
        unpacked(values, positions + 1)
