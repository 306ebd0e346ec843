"""The 2x2 of weights and routes: identities on real models, and a golden by hand."""

import copy

import jaxtyping
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_rl.measure.decompose import Decomposition, decompose, decompose_update
from moe_rl.measure.scoring import TokenBatch, decoded_logps, in_order_of, score_live, score_replayed
from moe_rl.measure.weights import copy_weights, temporary_weights
from moe_rl.routing import RoutedExperts, RoutingError, record_routes, replay_routes, site_change

V = 23


def build(family="qwen3_moe", layers=2, experts=6, k=2, seed=0):
    torch.manual_seed(seed)
    common = {
        "vocab_size": V,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": k,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**common, num_local_experts=experts)).eval()
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**common, num_experts=experts, moe_intermediate_size=12, head_dim=8)
    ).eval()


def moved(model, scale=0.05, seed=1):
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return new


@pytest.fixture(scope="module")
def pair():
    old = build()
    return old, moved(old)


def logps_by_hand(model, ids, attention, routes):
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), replay_routes(model, routes):
        logits = model(input_ids=ids, attention_mask=attention.long(), position_ids=positions, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def test_weights_that_accelerate_offloads_are_scored_where_the_model_computes(pair, text):
    accelerate = pytest.importorskip("accelerate")
    expected = decompose(*pair, *text)
    away = [accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu") for model in pair]
    assert all(parameter.is_meta for model in away for parameter in model.parameters())
    found = decompose(*away, *text)
    torch.testing.assert_close(found.log_ratio, expected.log_ratio, rtol=0, atol=1e-5)
    assert found.old_routes.equal(expected.old_routes) and found.new_routes_taken.equal(expected.new_routes_taken)
    decoded = [decoded_logps(model, TokenBatch(*text), 5) for model in (away[0], pair[0])]
    torch.testing.assert_close(*decoded, rtol=0, atol=1e-5)


def test_the_first_token_of_a_sequence_is_refused_and_dilutes_nothing(pair, text):
    ids, attention, completion = text
    first = attention & (attention.cumsum(1) == 1)
    with pytest.raises(ValueError, match="first token of a sequence"):
        decompose(*pair, ids, attention, completion | first)


def test_masks_of_other_tokens_are_refused(pair, text, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests, where no types are checked
    ids, attention, completion = text
    with pytest.raises(ValueError, match=r"completion_mask: expected the shape of input_ids, \(5, 12\), got \(5, 11\)"):
        decompose(*pair, ids, attention, completion[:, 1:])


@pytest.mark.parametrize("part", [(slice(0, 0), slice(None)), (slice(None), slice(0, 0))], ids=["rows", "columns"])
def test_a_text_without_a_token_is_refused(pair, text, part):
    with pytest.raises(ValueError, match=r"input_ids: no tokens to score, got shape \("):
        decompose(*pair, *(x[part] for x in text))


def test_parts_are_the_four_corners_scored_independently(pair, text):
    ids, attention, completion = text
    found = decompose(*pair, ids, attention, completion)
    routes = {}
    for name, model in zip(("old", "new"), pair, strict=True):
        positions = (attention.long().cumsum(1) - 1).clamp(min=0)
        with torch.no_grad(), record_routes(model) as recording:
            model(input_ids=ids, attention_mask=attention.long(), position_ids=positions, use_cache=False)
        routes[name] = recording.routes
    f = {
        (w, e): logps_by_hand(model, ids, attention, routes[e])
        for w, model in zip(("old", "new"), pair, strict=True)
        for e in routes
    }
    expected = {
        "log_ratio": f["new", "new"] - f["old", "old"],
        "weight": f["new", "old"] - f["old", "old"],
        "routing": f["old", "new"] - f["old", "old"],
        "interaction": f["new", "new"] - f["new", "old"] - f["old", "new"] + f["old", "old"],
        "replay_effect": f["new", "new"] - f["new", "old"],
    }
    assert (site_change(routes["old"], routes["new"])[completion]).any(), "nothing to measure"
    for name, values in expected.items():
        got = getattr(found, name)
        torch.testing.assert_close(got[:, 1:][completion[:, 1:]].float(), values[completion[:, 1:]], atol=2e-5, rtol=0)
        assert (got[~completion] == 0).all()


def test_parts_sum_to_the_log_ratio_in_every_way(pair, text):
    found = decompose(*pair, *text)
    torch.testing.assert_close(found.weight + found.routing + found.interaction, found.log_ratio, atol=1e-14, rtol=0)
    torch.testing.assert_close(found.weight + found.replay_effect, found.log_ratio, atol=1e-14, rtol=0)
    mask = text[2]
    by_hand = torch.stack([found.routing[b][mask[b]].mean() for b in range(len(mask))])
    torch.testing.assert_close(found.sequence(found.routing), by_hand)
    assert found.shares().token.total == pytest.approx(float(found.log_ratio[mask].var()), rel=1e-9)
    assert found.shares().sequence.total == pytest.approx(float(found.sequence(found.log_ratio).var()), rel=1e-9)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_equal_checkpoints_give_exactly_zero(family, text):
    old = build(family)
    found = decompose(old, copy.deepcopy(old), *text, per_site=True)
    for name in ("log_ratio", "weight", "routing", "interaction", "site_alone", "site_last"):
        assert (getattr(found, name) == 0).all(), name
    assert (found.old[text[2]] < 0).all()


def test_where_no_set_of_experts_changes_only_the_weights_speak(text):
    """The router keeps every expert set (all of them are used) but not their order: routing is exactly 0."""
    old = build(experts=3, k=3)
    new = moved(old, scale=0.2)
    found = decompose(old, new, *text, per_site=True)
    assert (found.old_routes.ids != found.new_routes_taken.ids).any(), "the order of slots must differ"
    assert (found.routing == 0).all() and (found.interaction == 0).all() and (found.site_alone == 0).all()
    assert (found.weight[text[2]] != 0).all()


def test_a_token_whose_past_did_not_flip_has_no_routing_part(text):
    ids, attention, completion = text
    old = build()
    found = decompose(old, moved(old, scale=0.01), ids, attention, completion)
    flipped = site_change(found.old_routes, found.new_routes_taken).any(-1) & attention
    past = torch.zeros_like(flipped)
    past[:, 1:] = flipped[:, :-1].cumsum(1) > 0  # token t is predicted from the tokens before it
    quiet, loud = completion & ~past, completion & past
    # With AVX2 kernels an expert's product rounds by how many rows it has.
    rounding = 1e-5 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 0
    assert quiet.any() and (found.routing[quiet] == 0).all() and found.interaction[quiet].abs().max() <= rounding
    assert (found.routing[loud].abs() > 1e-3).any()


def test_experts_alone_changed_give_no_routing_at_the_last_site_and_routers_alone_no_weight(text):
    old = build(layers=1)
    new = copy.deepcopy(old)
    with torch.no_grad():
        new.model.layers[0].mlp.gate.weight.mul_(-1)  # the worst experts are the best now
    found = decompose(old, new, *text)
    assert site_change(found.old_routes, found.new_routes_taken).any()
    with torch.no_grad():
        new = copy.deepcopy(old)
        new.model.layers[0].mlp.experts.down_proj.mul_(1.3)
    found = decompose(old, new, *text)  # one site, and nothing before it moved: its routes cannot change
    assert (found.routing == 0).all() and (found.interaction == 0).all() and (found.weight != 0).any()


def test_two_sites_alone_and_last_sum_to_the_whole_effect(pair, text):
    found = decompose(*pair, *text, per_site=True)
    alone, last = found.site_alone, found.site_last
    changed = site_change(found.old_routes, found.new_routes_taken)[text[1]].any(0)
    assert changed.all(), "both sites must change for this to say something"
    torch.testing.assert_close(alone[0] + last[1], found.replay_effect, atol=1e-14, rtol=0)
    torch.testing.assert_close(alone[1] + last[0], found.replay_effect, atol=1e-14, rtol=0)
    rows = found.site_shares().rows()
    assert rows["token_var_alone"][1] == pytest.approx(float(alone[1][text[2]].var()))
    assert rows["sequence_var_last"][0] == pytest.approx(float(found.sequence(last)[0].var()))
    assert rows["token_share_alone"][0] + rows["token_share_last"][1] == pytest.approx(1)


def test_one_site_alone_is_the_whole_effect(text):
    old = build(layers=1)
    found = decompose(old, moved(old), *text, per_site=True)
    assert torch.equal(found.site_alone[0], found.replay_effect) and torch.equal(
        found.site_last[0], found.replay_effect
    )
    assert (found.replay_effect != 0).any()


def test_batches_padding_and_modes_do_not_matter(pair, text):
    ids, attention, completion = text
    old, new = pair
    whole = decompose(old, new, ids, attention, completion, per_site=True)
    new = copy.deepcopy(new).train()
    for layer in new.model.layers:
        layer.self_attn.attention_dropout = 0.5  # else both modes compute the same
    pieces = decompose(old, new, ids, attention.long(), completion.long(), per_site=True, batch_size=2)
    assert new.training and all(m.training for m in new.modules()) and not old.training
    for name in ("log_ratio", "routing", "site_alone", "site_last"):
        torch.testing.assert_close(getattr(pieces, name), getattr(whole, name), atol=1e-5, rtol=0)
    assert pieces.old_routes.shape == whole.old_routes.shape
    with pytest.raises(ValueError, match="batch_size"):
        decompose(old, new, ids, attention, completion, batch_size=0)


def test_temperature_is_that_of_the_scored_distribution(pair, text):
    hot, plain = decompose(*pair, *text, temperature=1e6), decompose(*pair, *text)
    assert float(hot.log_ratio.abs().max()) < 1e-5 < float(plain.log_ratio.abs().max())


def test_golden_of_one_token():
    # f(old,old) = -2, f(new,old) = -1.5, f(old,new) = -2.25, f(new,new) = -1: log r 1 = weight .5 + routing -.25 + .75
    one = torch.ones(1, 1, dtype=torch.float64)
    routes = RoutedExperts(torch.zeros(1, 1, 1, 1, dtype=torch.long), ["gate"], 2)
    mask = torch.ones(1, 1, dtype=torch.bool)
    d = Decomposition(-2 * one, -1.5 * one, -2.25 * one, -1 * one, mask, routes, routes)
    got = [float(x) for x in (d.log_ratio, d.weight, d.routing, d.interaction, d.replay_effect)]
    assert got == [1, 0.5, -0.25, 0.75, 0.5]
    assert d.site_shares() is None


def test_order_is_taken_where_sets_agree_and_only_there():
    def routes(*rows):
        return RoutedExperts(torch.tensor([[[list(row)] for row in rows]]), ["gate"], 5, tokens=[[7, 8]])

    ordered = in_order_of(routes((3, 1), (0, 2)), routes((1, 3), (2, 4)))
    assert ordered.ids[0, :, 0].tolist() == [[3, 1], [2, 4]]
    assert ordered.tokens.tolist() == [[7, 8]], "which a replay compares"
    ordered = in_order_of(routes((3, 1), (0, 2)), routes((-1, -1), (2, 0)))
    assert ordered.ids[0, :, 0].tolist() == [[-1, -1], [0, 2]], "what is not forced stays the router's to decide"
    ordered = in_order_of(routes((-1, -1), (0, 2)), routes((1, 3), (2, 0)))
    assert ordered.ids[0, :, 0].tolist() == [[1, 3], [0, 2]], "a row is not lost because the other has no route there"


def test_a_replay_is_told_which_tokens_the_mask_of_its_routes_hid(pair, text):
    ids, attention, completion = text
    bare = TokenBatch(ids, torch.ones_like(attention), completion)
    hidden, own = (score_live(pair[0], one).routes for one in (TokenBatch(*text), bare))
    with pytest.raises(RoutingError, match="was its attention_mask forgotten"):
        score_replayed(pair[0], bare, hidden, own)


def test_two_architectures_are_refused(text):
    for old, new in ((2, 1), (1, 2)):
        with pytest.raises(RoutingError, match=f"do not fit this model of {new} sites: they hold {old}"):
            decompose(build(layers=old), build(layers=new), *text)
    with pytest.raises(RoutingError, match="2 of 8 experts"):
        decompose(build(experts=6), build(experts=8), *text)


def test_swapped_weights_are_there_and_gone(pair, text):
    old, new = pair
    held = copy.deepcopy(new)
    kept = copy_weights(new)
    with temporary_weights(held, copy_weights(old)):
        assert all(torch.equal(a, b) for a, b in zip(held.parameters(), old.parameters(), strict=True))
    with pytest.raises(KeyError), temporary_weights(held, copy_weights(old)):
        raise KeyError
    assert all(torch.equal(kept[name], tensor) for name, tensor in copy_weights(held).items())
    with pytest.raises(ValueError, match="another model"), temporary_weights(held, {}):
        pass


def test_one_model_and_kept_weights_give_what_two_models_give(pair, text):
    old, new = pair
    batch = TokenBatch(*text)
    one = copy.deepcopy(new)
    a = decompose_update(one, copy_weights(old), batch, score_live(old, batch), per_site=True)
    b = decompose(old, new, *text, per_site=True)
    for name in ("old", "new", "new_weights", "new_routes", "site_alone", "site_last"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
