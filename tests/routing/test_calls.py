"""Padding, KV caches and generation modes: what is recorded is what the model did, or it is refused."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from routing_helpers import disturbed, hooked, moe, routes_of, sets, tokens
from tiny_families import tiny_config
from transformers import DynamicCache, GptOssForCausalLM, QuantizedCache, StaticCache, cache_utils

from moe_rl.routing import (
    RoutedExperts,
    RoutingError,
    record_routes,
    replay_routes,
)
from moe_rl.routing.calls import cache_left


def test_left_and_right_padding_route_alike_after_realignment() -> None:
    model, inputs = moe(), tokens(2, 8)
    left = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    right = left.flip(1)
    moved = inputs.clone()
    moved[0] = torch.cat([inputs[0, 3:], inputs[0, :3]])
    position = (left.cumsum(1) - 1).clamp(min=0)
    a = routes_of(model, inputs, attention_mask=left, position_ids=position)
    b = routes_of(model, moved, attention_mask=right)
    assert torch.equal(a.ids[0, 3:].sort(-1)[0], b.ids[0, :5].sort(-1)[0])
    assert torch.equal(a.ids[1].sort(-1)[0], b.ids[1].sort(-1)[0])
    other = disturbed(model)
    with replay_routes(other, b), record_routes(other) as recording:
        other(input_ids=moved, attention_mask=right)
    assert recording.routes.equal(b)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"prompt_lookup_num_tokens": 2},
        {"do_sample": True},
        {"cache_implementation": "offloaded"},
    ],
    ids=["dynamic", "static", "chunked prefill", "prompt lookup", "sampled", "offloaded"],
)
def test_generate_records_what_teacher_forcing_routes(options: dict[str, Any]) -> None:
    model = moe()
    # a repetitive prompt, so that prompt lookup has candidates to accept and to reject
    batch = 1 if "prompt_lookup_num_tokens" in options else 3
    inputs = tokens(batch, 4).repeat(1, 3)
    if "offloaded" in str(options) and not torch.cuda.is_available():
        options = {"cache_implementation": "dynamic"}
    torch.manual_seed(0)
    with record_routes(model) as recording:
        output = model.generate(inputs, max_new_tokens=9, attention_mask=torch.ones_like(inputs), **options)
    routes = recording.routes
    assert routes.shape[:2] == (batch, output.shape[1] - 1)
    assert routes.tokens is not None and torch.equal(routes.tokens.long(), output[:, :-1])
    assert routes.equal(routes_of(model, output[:, :-1]))
    assert not hooked(model)


def test_drafts_that_a_convolutions_cache_drops_are_no_other_sequences() -> None:
    # A short convolution's state is cropped along its last axis: the same rows, which begin elsewhere in memory.
    model = moe("Lfm2MoeForCausalLM")
    inputs = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])
    with record_routes(model) as recording:
        output = model.generate(inputs, max_new_tokens=10, do_sample=False, prompt_lookup_num_tokens=3)
    made = recording.routes.columns(slice(output.shape[1] - 1))
    assert torch.equal(sets(made.ids), sets(routes_of(model, output[:, :-1]).ids))


def test_drafts_that_a_windows_cache_drops_are_no_other_sequences_in_inference_mode() -> None:
    # Only sums of keys can be compared there, and those of a window move when it is cropped.
    config = tiny_config("gpt_oss")
    config.sliding_window = 6
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    inputs = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])
    with torch.inference_mode(), record_routes(model) as recording:
        output = model.generate(inputs, max_new_tokens=10, do_sample=False, prompt_lookup_num_tokens=3)
    assert any(step.shape[1] > 1 for step in recording.steps[1:])
    made = recording.routes.columns(slice(output.shape[1] - 1))
    assert torch.equal(sets(made.ids), sets(routes_of(model, output[:, :-1]).ids))


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no such cache")
def test_a_quantised_cache_is_followed_and_refused_where_it_was_reordered() -> None:
    model, inputs = moe(), tokens(2, 8)
    for reordered in (False, True):
        cache = QuantizedCache("fp8", model.config)
        with torch.no_grad(), record_routes(model) as recording:
            model(inputs[:, :5], past_key_values=cache)
            if reordered:
                cache.reorder_cache(torch.tensor([1, 0]))
            model(inputs[:, 5:], past_key_values=cache)
        if not reordered:
            assert torch.equal(recording.routes.tokens, inputs.int())
    with pytest.raises(RoutingError, match="reordered"):
        _ = recording.routes


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_a_replay_sees_a_reordered_cache_whatever_ran_in_between(between: bool, as_tuple: bool) -> None:
    model, inputs = moe().model, tokens(2, 8)
    inputs[:, 5:] = inputs[:1, 5:]  # equal tokens: only the cache shows the order
    with torch.no_grad():
        routes = routes_of(model, inputs)
        for reordered in (False, True):
            context = pytest.raises(RoutingError, match="reordered") if reordered else nullcontext()
            with context, replay_routes(model, routes):
                output = model(inputs[:, :5], use_cache=True, return_dict=not as_tuple)
                cache = cache_left(output)
                if between:
                    model(inputs[:, :5], past_key_values=DynamicCache(config=model.config))
                if reordered:
                    cache.reorder_cache(torch.tensor([1, 0]))
                model(inputs[:, 5:], past_key_values=cache)


def test_generate_follows_replayed_routes() -> None:
    model, inputs = moe(), tokens()
    with record_routes(model) as recording:
        output = model.generate(inputs, max_new_tokens=5, do_sample=False)
    other = disturbed(model)
    with replay_routes(other, recording.routes, check_tokens=False) as replay, record_routes(other) as again:
        other.generate(inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(again.routes.ids, recording.routes.ids)
    assert replay.replayed_fraction == 1
    with replay_routes(other, recording.routes, check_tokens=False), pytest.raises(RoutingError, match="do not fit"):
        other.generate(inputs, max_new_tokens=6, do_sample=False)
    with replay_routes(other, recording.routes), pytest.raises(RoutingError, match="other tokens: sequence 0, token 7"):
        other.generate(inputs, max_new_tokens=5, do_sample=False)
    assert output.shape[1] == recording.routes.shape[1] + 1


def test_left_padded_generation_equals_teacher_forcing() -> None:
    model, inputs = moe(), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with record_routes(model) as recording:
        output = model.generate(inputs, attention_mask=mask, max_new_tokens=4, do_sample=False)
    full = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], dim=1)
    position = (full.cumsum(1) - 1).clamp(min=0)
    forced = routes_of(model, output[:, :-1], attention_mask=full, position_ids=position)
    assert torch.equal(recording.routes.ids[full.bool()], forced.ids[full.bool()])


def test_speculative_decoding_with_an_assistant_drops_the_rejected_tokens() -> None:
    model, inputs = moe(), tokens(1, 6)
    assistant = disturbed(model, 0.02)
    with record_routes(model) as recording, record_routes(assistant) as helper:
        output = model.generate(inputs, assistant_model=assistant, max_new_tokens=12, do_sample=False)
    plain = model.generate(inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(output, plain)
    assert any(step.shape[1] > 1 for step in recording.steps[1:])  # it did verify several tokens at once
    routes = recording.routes
    length = min(routes.shape[1], output.shape[1])
    assert length >= output.shape[1] - 1
    forced = routes_of(model, output[:, : output.shape[1] - 1])
    assert torch.equal(routes.ids[:, : forced.shape[1]], forced.ids)
    assert helper.steps


def test_beam_search_is_refused_and_steps_stay() -> None:
    model, inputs = moe(), tokens()
    with record_routes(model) as recording:
        model.generate(inputs, num_beams=3, max_new_tokens=4, do_sample=False)
    with pytest.raises(RoutingError, match="beam search"):
        _ = recording.routes
    assert [step.shape[:2] for step in recording.steps] == [(6, 7), (6, 1), (6, 1), (6, 1)]


def test_replay_refuses_a_cache_that_was_reordered_and_follows_one_that_was_cropped() -> None:
    model, inputs = moe(), tokens(2, 6)
    routes = routes_of(model, inputs)
    with replay_routes(model, routes):
        cache = model(inputs[:, :4], use_cache=True).past_key_values
        cache.crop(-2)
        model(inputs[:, 2:4], past_key_values=cache)
        model(inputs[:, 4:], past_key_values=cache)
    with replay_routes(model, routes), pytest.raises(RoutingError, match=r"reordered.*beam search"):
        cache = model(inputs[:, :4], use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        model(inputs[:, 4:], past_key_values=cache)


def test_packed_continuous_batching_is_refused() -> None:
    model = moe()
    with record_routes(model), pytest.raises(RoutingError, match="continuous batching"):
        model.model(input_ids=tokens(1, 4), block_table=torch.zeros(1, 1))
    said: list[str] = []

    def batched() -> None:  # as `generate_batch` does, in a thread of its own
        try:
            model.model(input_ids=tokens(1, 4), block_table=torch.zeros(1, 1))
        except RoutingError as error:
            said.append(str(error))

    with record_routes(model):
        thread = threading.Thread(target=batched)
        thread.start()
        thread.join()
    assert "continuous batching" in said[0]


def test_manual_cache_loop_joins_steps_and_a_cache_from_before_has_no_routes() -> None:
    model, inputs = moe(), tokens(2, 8)
    whole = routes_of(model, inputs)
    with torch.no_grad(), record_routes(model) as recording:
        cache = model(inputs[:, :3]).past_key_values
        for t in range(3, 8):
            model(inputs[:, t : t + 1], past_key_values=cache)
    assert recording.routes.equal(whole)
    with torch.no_grad():
        cache = model(inputs[:, :3]).past_key_values
        with record_routes(model) as recording:
            model(inputs[:, 3:], past_key_values=cache)
    assert torch.equal(recording.routes.ids[:, 3:], whole.ids[:, 3:])
    assert bool(recording.routes.live[:, :3].all())


def test_a_reordered_cache_is_noticed() -> None:
    model, inputs = moe(), tokens(2, 6)
    with torch.no_grad(), record_routes(model) as recording:
        cache = model(inputs[:, :4]).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        model(inputs[:, 4:5], past_key_values=cache)
        model(inputs[:, 5:], past_key_values=cache)  # which finds it as it was left
    with pytest.raises(RoutingError, match="reordered"):
        _ = recording.routes
    assert len(recording.steps) == 3


def test_calls_on_two_caches_in_turn_are_two_forwards() -> None:
    model, inputs = moe(), tokens(2, 6)
    with torch.no_grad(), record_routes(model) as recording:
        caches = [model(row[None, :4]).past_key_values for row in inputs]
        for row, cache in zip(inputs, caches, strict=True):
            model(row[None, 4:], past_key_values=cache)
    assert [call.shape[1] for call in recording.calls] == [6, 6]
    assert recording.routes.equal(routes_of(model, inputs))


def test_static_cache_by_hand() -> None:
    model, inputs = moe(), tokens(2, 6)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), record_routes(model) as recording:
        model(inputs[:, :4], past_key_values=cache)
        model(inputs[:, 4:], past_key_values=cache)
    assert recording.routes.equal(routes_of(model, inputs))


def test_several_forwards_join_along_the_batch_or_are_told_apart() -> None:
    model, inputs = moe(), tokens(4, 6)
    with torch.no_grad(), record_routes(model) as recording:
        model(inputs[:1])
        model(inputs[1:])
    assert recording.routes.equal(routes_of(model, inputs))
    with torch.no_grad(), record_routes(model) as recording:
        model(inputs)
        model(inputs[:, :4])
    with pytest.raises(RoutingError, match=r"different lengths \[4, 6\]"):
        _ = recording.routes
    assert [call.shape[1] for call in recording.calls] == [6, 4]


def test_the_base_model_is_one_model_with_its_wrapper() -> None:
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    base = routes_of(model.model, inputs)
    assert torch.equal(base.ids, routes.ids) and base.sites[0] == "layers.0.mlp.gate"
    other = disturbed(model)
    with replay_routes(other.model, routes), record_routes(other) as recording:
        other.model(inputs_embeds=other.get_input_embeddings()(inputs))
    assert torch.equal(recording.routes.ids, routes.ids)
    assert recording.routes.tokens is None


def test_a_forgotten_attention_mask_is_said() -> None:
    """Padding in front of others would be seen by them, and so route them otherwise; behind them it is not."""
    model, ids = moe(), tokens(3, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with record_routes(model) as left:
        model(ids, attention_mask=mask)
    assert torch.equal(left.routes.tokens, ids.int()), "what is hidden is known all the same"
    with replay_routes(model, left.routes, once=True) as replay:
        model(ids, attention_mask=mask.bool())
    assert replay.replayed_fraction == 1
    for given in (None, torch.ones_like(mask)):
        forgotten = r"hides 3 tokens .*\(first sequence 1, position 0\).*attention_mask forgotten\?"
        with pytest.raises(RoutingError, match=forgotten), replay_routes(model, left.routes):
            model(ids, attention_mask=given)
    with replay_routes(model, left.routes, check_tokens=False):
        model(ids)
    for moved in (left.routes.rows([1, 0]), RoutedExperts.cat([left.routes.rows([1]), left.routes.rows([2])])):
        with pytest.raises(RoutingError, match=r"first sequence 0, position 0"), replay_routes(model, moved):
            model(moved.tokens.long())
    with replay_routes(model, left.routes.rows([0, 2])):  # none of them has padding
        model(ids[[0, 2]])
    mask[1] = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0])
    with record_routes(model) as right:
        model(ids, attention_mask=mask)
    with replay_routes(model, right.routes):
        model(ids)
    with replay_routes(model, right.routes):
        cache = model(ids[:, :4], use_cache=True).past_key_values
        model(ids[:, 4:], past_key_values=cache)


def test_padding_that_generation_hid_must_be_hidden_when_it_is_scored(tmp_path: Path) -> None:
    model, ids = moe(), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with record_routes(model) as recording:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    whole = torch.cat([mask, mask.new_ones(2, 4)], dim=1)
    with replay_routes(model, recording.routes):
        model(out, attention_mask=whole)
    with pytest.raises(RoutingError, match="hides 2 tokens"), replay_routes(model, recording.routes):
        model(out)
    recording.routes.save(tmp_path / "routes.safetensors")
    loaded = RoutedExperts.load(tmp_path / "routes.safetensors")
    assert loaded.equal(recording.routes) and loaded.token_hash == recording.routes.token_hash
    assert torch.equal(loaded.attended, whole[:, :-1].bool())
    with pytest.raises(RoutingError, match="hides 2 tokens"), replay_routes(model, loaded):
        model(out)


def test_a_check_inside_an_open_context_leaves_what_that_has_counted() -> None:
    """On a GPU and in compiled code rows that were lost are added up: that sum was forgotten, and could not go on."""
    model, inputs = moe(), tokens()
    routes = routes_of(model, inputs)
    with replay_routes(model, routes) as outer:
        model(inputs, past_key_values=DynamicCache())
        before = outer._tap.lost, outer._tap.left
        with record_routes(model.train()):  # checked in this mode for the first time
            assert before[0] is outer._tap.lost and before[1] is outer._tap.left
