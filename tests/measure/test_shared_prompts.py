"""Responses that share a prompt: the layout, the numbers and gradients of rows of their own, and who may not."""

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from logprobs_helpers import QWEN, SIZES, assert_same_gradients, gradients
from sweeps import mostly_swept
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.measure import check_shared_prompts, share_prompts, token_logps
from moe_rl.measure.decoding import decoded_logps
from moe_rl.measure.scoring import TokenBatch
from moe_rl.measure.shared_prompts import too_long
from moe_rl.routing import RoutedExperts, change_counts, record_routes, replay_routes

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from tiny_families import supported, tiny_model

REFUSED = {  # a state along the row, or attention that chooses among all of its tokens
    "AXK2ForCausalLM", "BailingHybridForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM",
    "Dots3NoteForCausalLM", "GlmMoeDsaForCausalLM", "GraniteMoeHybridForCausalLM", "HYV4ForCausalLM",
    "Inkling2ForCausalLM", "InklingForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM",
    "LaraMiniForCausalLM", "Lfm2MoeForCausalLM", "MiniMaxForCausalLM", "MiniMaxM3VLForCausalLM",
    "NemotronHForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM", "ZayaForCausalLM",
}  # fmt: skip
# Prompts (padded on the left) and responses; the last text is a prompt alone.
TEXTS = [
    ([3, 4, 5], [6, 7, 8, 9]),
    ([3, 4, 5], [6]),
    ([3, 4, 5], [10, 11]),
    ([12], [6, 7, 8, 13]),
    ([12], [6, 14]),
    ([3, 4], []),
]
P, R = 3, 4


def texts():
    """input_ids, attention_mask, completion_mask of TEXTS, 0 on padding."""
    ids = torch.zeros(len(TEXTS), P + R, dtype=torch.long)
    for row, (prompt, response) in zip(ids, TEXTS, strict=True):
        row[P - len(prompt) : P] = torch.tensor(prompt)
        row[P : P + len(response)] = torch.tensor(response)
    return ids, ids > 0, (ids > 0) & (torch.arange(P + R) >= P)


def model(attention="sdpa", **more):
    torch.manual_seed(0)
    found = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **QWEN, **more)).double().eval()
    found.set_attn_implementation(attention)
    with torch.no_grad():
        found.lm_head.weight.mul_(20)
    return found


def histories(shared):
    """Of every place that is not padding, the tokens that it attends to, its own the last."""
    rows, places = (shared.source >= 0).nonzero(as_tuple=True)
    return [shared.input_ids[r][shared.allowed[r, i]].tolist() for r, i in zip(rows, places, strict=True)]


def test_a_prompt_stands_once_and_last_tokens_not_at_all():
    shared = share_prompts(*texts())
    of_the_first = [[3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8], [3, 4, 5, 10]]
    of_the_fourth = [[12], [12, 6], [12, 6, 7], [12, 6, 7, 8], [12, 6]]
    assert sorted(histories(shared)) == sorted([*of_the_first, *of_the_fourth, [3]])
    positions = shared.position_ids[shared.source >= 0]
    assert positions.tolist() == [len(history) - 1 for history in histories(shared)]


def test_rows_are_as_long_as_asked_for_unless_one_text_is_longer():
    assert share_prompts(*texts(), longest=7).input_ids.shape[1] <= 7
    assert share_prompts(*texts(), longest=1).input_ids.shape == (6, 6)  # 3 4 5 6 7 8, and five shorter ones
    assert share_prompts(*texts(), longest=1).tokens == 6 + 3 + 4 + 4 + 2 + 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("longest", [None, 7, 1])
@pytest.mark.parametrize("replay", [True, False])
def test_log_probabilities_entropies_and_gradients_are_those_of_rows_of_their_own(
    replay, longest, attention, float64_throughout
):
    policy, tokens = model(attention), texts()
    with record_routes(policy) as recording:
        want = token_logps(policy, *tokens, entropy=True)
    routes = recording.routes
    shared = share_prompts(*tokens, routes=routes, longest=longest)
    weight = torch.randn(want.logps.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with replay_routes(policy, shared.pack(routes)) if replay else record_routes(policy) as replayed:
        got = token_logps(policy, *tokens, entropy=True, shared=shared)
        found = gradients(policy, (got.logps * weight).sum() + got.entropy.sum())
    torch.testing.assert_close(got.logps, want.logps, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got.entropy, want.entropy, atol=1e-10, rtol=1e-10)
    assert_same_gradients(found, gradients(policy, (want.logps * weight).sum() + want.entropy.sum()), 1e-10)
    if replay:
        assert replayed.replayed_rows == shared.tokens * 2  # sites


def test_recorded_routes_come_back_to_their_tokens(float64_throughout):
    policy, tokens = model(), texts()
    with record_routes(policy) as apart:
        token_logps(policy, *tokens)
    shared = share_prompts(*tokens)
    with record_routes(policy) as together:
        token_logps(policy, *tokens, shared=shared)
    back = shared.unpack(together.routes)
    ids, attended, _ = tokens
    last = attended & (attended.long().flip(1).cumsum(1).flip(1) == 1)
    assert torch.equal(~back.live[..., 0], attended & ~last)
    assert torch.equal(back.tokens.long(), ids.masked_fill(~attended | last, -1))
    counts = change_counts(apart.routes, back, attended)
    assert counts.slots_changed == 0 and counts.slots_total == int((attended & ~last).sum()) * 2 * 2


def test_prompts_that_were_routed_otherwise_are_not_shared(float64_throughout):
    policy, tokens = model(), texts()
    with record_routes(policy) as recording:
        token_logps(policy, *tokens)
    ids = recording.routes.ids
    ids[1, 1, 0] = torch.tensor([e for e in range(4) if e not in ids[1, 1, 0]])  # token 4 of the second text
    routes = RoutedExperts(ids, recording.routes.sites, 4, tokens=recording.routes.tokens)
    with replay_routes(policy, routes):
        want = token_logps(policy, *tokens).logps
    with pytest.raises(ValueError, match="whose routes on it differ: give routes= to share_prompts"):
        share_prompts(*tokens).pack(routes)
    shared = share_prompts(*tokens, routes=routes)
    assert shared.tokens == share_prompts(*tokens).tokens + P
    with replay_routes(policy, shared.pack(routes)):
        got = token_logps(policy, *tokens, shared=shared).logps
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


def test_rows_and_routes_of_another_batch_and_outputs_that_rows_do_not_have_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    policy, (ids, attended, completion) = model(), texts()
    shared = share_prompts(ids, attended, completion)
    shorter = attended.clone()
    shorter[0, -1] = False
    another_prompt = ids.clone()
    another_prompt[0, 0] = 9  # not a token that is predicted, nor predicts one
    for other, mask in ((another_prompt, attended), (ids, shorter), (ids[:3], attended[:3])):
        with pytest.raises(ValueError, match="of another batch"):
            token_logps(policy, other, mask, completion[: len(other)] & mask, shared=shared)
    for asked in ({"aux_loss": True}, {"router_logits": True}, {"position_ids": ids}):
        with pytest.raises(ValueError, match="share prompts have no"):
            token_logps(policy, ids, attended, completion, shared=shared, **asked)
    with record_routes(policy.float()) as recording:
        token_logps(policy, ids, attended, completion)
    routes = recording.routes
    for other in (routes.columns(slice(1, None)), routes.rows([0, 1])):
        with pytest.raises(ValueError, match="do not fit a batch of"):
            shared.pack(other)
        with pytest.raises(ValueError, match="routes: expected the shape of input_ids"):
            share_prompts(ids, attended, completion, routes=other)
    with pytest.raises(ValueError, match="completion_mask: expected the shape"):
        share_prompts(ids, attended, completion[:, 1:])
    with pytest.raises(ValueError, match="longest counts tokens and must be at least 1, got 0"):
        share_prompts(ids, attended, completion, longest=0)
    with pytest.raises(ValueError, match="no sequence has two tokens"):
        share_prompts(ids[:, :1], attended[:, :1], completion[:, :1])


# -- which models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", mostly_swept([torch.float32, torch.bfloat16], [torch.float32]))
def test_every_family_computes_such_rows_or_is_refused(dtype):
    refused = set()
    for family in supported():
        policy = tiny_model(family).to(dtype)
        try:
            check_shared_prompts(policy)
        except ValueError as error:
            assert "cannot share prompts" in str(error), family
            refused.add(family)
    assert refused == REFUSED & set(supported())  # those that the installed transformers has


def embedded(change):
    """A model whose embeddings `[B,T,d]` are changed."""
    policy = model()
    policy.model.embed_tokens.register_forward_hook(lambda module, args, output: change(output))
    return policy


def test_models_that_mix_responses_or_count_places_in_the_row_are_refused(monkeypatch):
    place = torch.arange(64, dtype=torch.float64).sin()
    changes = [lambda x, size: x + size * place[: x.shape[1], None], lambda x, size: x + size * x.cumsum(1)]
    for change in changes:
        for size in (1e-3, 1e-1):
            with pytest.raises(ValueError, match="cannot share prompts: log-probabilities differ"):
                check_shared_prompts(embedded(partial(change, size=size)))
    policy = model()
    forward = type(policy.model).forward
    monkeypatch.setattr(
        type(policy.model), "forward", lambda self, attention_mask=None, **inputs: forward(self, **inputs)
    )
    with pytest.raises(ValueError, match="cannot share prompts"):
        check_shared_prompts(policy)


def test_attention_of_another_kind_and_models_that_do_not_run_at_all():
    policy = model()
    policy.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="its attention is flash_attention_2; set_attn_implementation"):
        check_shared_prompts(policy)
    with pytest.raises(ValueError, match=r"self-check could not run") as found:
        check_shared_prompts(embedded(lambda x: x[:, :, 1:]))
    assert "share prompts" not in str(found.value), "it runs in no rows"


@pytest.mark.parametrize(
    ("settings", "fits", "why"),
    [
        ({"sliding_window": 7}, 7, r"a window .sliding_window 7., and a sequence has 8 tokens"),
        ({"attention_chunk_size": 7, "layer_types": ["chunked_attention"]}, 7, "attention_chunk_size 7"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, 10**6, None),
        ({"sliding_window": 4, "use_sliding_window": False}, 10**6, None),
        ({"rope_parameters": {"rope_type": "dynamic"}}, 20, "depends on the longest sequence"),
        (
            {"rope_parameters": {"full": {"rope_type": "longrope", "original_max_position_embeddings": 12}}},
            12,
            "depends on the longest sequence",
        ),
        ({"attn_temperature_tuning": True, "floor_scale": 16}, 7, "scaled by the place in a row, which has 16"),
    ],
)
def test_lengths_that_the_mask_does_not_stand_for(settings, fits, why):
    config = SimpleNamespace(max_position_embeddings=20, **settings)
    assert too_long(config, fits, 2 * fits) is None
    assert why is None or re.search(why, too_long(config, fits + 1, 2 * fits + 2))


def test_a_batch_with_a_text_longer_than_the_window_is_an_error():
    policy, tokens = model(sliding_window=6, use_sliding_window=True), texts()
    policy.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"a window .sliding_window 6., and a sequence has 7 tokens"):
        token_logps(policy, *tokens, shared=share_prompts(*tokens))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_such_rows_under_autocast(attention):
    policy, tokens = tiny_model("OlmoeForCausalLM"), texts()
    policy.set_attn_implementation(attention)
    with torch.no_grad():  # a trained head is as sharp: rounding in 16 bits moves a log-probability by hundredths
        policy.lm_head.weight.mul_(50)
    with torch.autocast("cpu", torch.bfloat16):
        check_shared_prompts(policy)
        with record_routes(policy) as recording:
            want = token_logps(policy, *tokens).logps
        shared = share_prompts(*tokens, routes=recording.routes)
        with replay_routes(policy, shared.pack(recording.routes)):
            got = token_logps(policy, *tokens, shared=shared).logps
    torch.testing.assert_close(got, want, rtol=0, atol=0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_such_rows_on_a_gpu(dtype):
    policy, tokens = tiny_model("Qwen3MoeForCausalLM").to("cuda", dtype), [part.cuda() for part in texts()]
    check_shared_prompts(policy)
    with record_routes(policy) as recording, torch.no_grad():
        want = token_logps(policy, *tokens).logps
    shared = share_prompts(*tokens, routes=recording.routes)
    with replay_routes(policy, shared.pack(recording.routes)) as replayed:
        got = token_logps(policy, *tokens, shared=shared).logps
        got.sum().backward()
    assert replayed.replayed_rows == shared.tokens * len(recording.routes.sites)
    torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.05)


def test_nothing_goes_to_torchs_default_device():
    model = tiny_model("Qwen3MoeForCausalLM")
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    masks = ids > 0, (ids > 0) & (torch.arange(4) > 1)
    with torch.device("meta"):  # holds no values
        check_shared_prompts(model)
        shared = share_prompts(ids, *masks)
        got = token_logps(model, ids, *masks, shared=shared, entropy=True)
        decoded = decoded_logps(model, TokenBatch(ids, *masks), 2)
    torch.testing.assert_close(got.logps.double(), decoded, rtol=0, atol=1e-5)
    assert got.entropy.device.type == "cpu"
