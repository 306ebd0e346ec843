"""Ways in which live routes could pass for replayed ones, or routes stand at wrong tokens, without a word."""

import copy
import threading
import warnings

import pytest
import torch
from routing_helpers import disturbed, grads, moe, routes_of, tokens
from tiny_families import tiny_config
from torch import nn
from torch._dynamo import eval_frame
from transformers import DynamicCache, Gemma4Config, Gemma4ForConditionalGeneration

from moe_rl.routing import RoutingError, UnsupportedModelError, record_routes, replay_routes


class SortRouter(nn.Module):
    """A router of a class of its own, in the place of one that transformers registers, without topk."""

    def __init__(self, old):
        super().__init__()
        self.weight, self.k, self.num_experts = old.weight, old.top_k, old.num_experts

    def forward(self, x):
        logits = x.reshape(-1, x.shape[-1]) @ self.weight.T
        scores, ids = logits.softmax(-1).sort(-1, descending=True)
        return logits, scores[:, : self.k], ids[:, : self.k]


def test_a_router_of_an_unknown_class_is_not_taken_for_a_table_over_token_ids():
    model = moe()
    model.model.layers[1].mlp.gate = SortRouter(model.model.layers[1].mlp.gate)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.gate \(SortRouter\).* not by a table over token"):
        routes_of(model, tokens())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_knows_its_padding_whatever_the_form_of_the_mask(cache, attention):
    model, ids = moe(), tokens(2, 7)
    model.set_attn_implementation(attention)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}
    with torch.no_grad(), record_routes(model) as recording:
        whole = model.generate(ids, attention_mask=mask, **options)
    assert recording.routes.attended.int().tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9]
    with (
        pytest.raises(RoutingError, match="attention mask that hides 3 tokens"),
        replay_routes(model, recording.routes),
    ):
        model(input_ids=whole)


def test_a_model_that_also_takes_images_knows_its_padding():
    config = Gemma4Config(text_config=tiny_config("gemma4_text").to_dict(), vision_config=None, audio_config=None)
    model, ids = Gemma4ForConditionalGeneration(config).eval(), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    routes = routes_of(model, ids, attention_mask=mask)
    assert torch.equal(routes.attended, mask.bool())
    with pytest.raises(RoutingError, match="attention mask that hides 4 tokens"), replay_routes(model, routes):
        model(input_ids=ids)


class OwnCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint as other libraries write it; it is in no file that is known."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(x), gradient)
        return None, x.grad


def test_a_checkpoint_of_ones_own_is_refused_although_its_recomputation_comes_after_the_context():
    model, ids = moe(), tokens()
    routes, other = routes_of(model, ids), disturbed(model, 0.3)
    plain = copy.deepcopy(other)
    for layer in other.model.layers:
        layer.mlp.forward = lambda x, forward=layer.mlp.forward: OwnCheckpoint.apply(forward, x)
    said = "recomputation in the backward pass cannot be told"
    with pytest.raises(RoutingError, match=said), replay_routes(other, routes):
        other(input_ids=ids)
    assert torch.equal(routes_of(other, ids).ids, routes_of(plain, ids).ids), "without gradients nothing is recomputed"
    with record_routes(other):  # a recording forces nothing
        loss = other(input_ids=ids).logits.square().mean()
    loss.backward()
    plain(input_ids=ids).logits.square().mean().backward()
    torch.testing.assert_close(grads(other), grads(plain))


def test_tokens_that_came_into_the_cache_unseen_are_a_gap_in_the_recording():
    model, ids = moe(), tokens(2, 8)
    twin, cache = copy.deepcopy(model), DynamicCache(config=model.config)
    with torch.inference_mode(), record_routes(model) as recording:
        model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True)
        twin(input_ids=ids[:, 3:5], past_key_values=cache, use_cache=True)
        model(input_ids=ids[:, 5:], past_key_values=cache, use_cache=True)
    whole = routes_of(model, ids)
    assert recording.routes.shape[1] == 8
    live = (recording.routes.ids < 0).all(-1).all(-1)
    assert live.int().tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]] * 2
    assert torch.equal(recording.routes.ids[~live], whole.ids[~live])


def test_self_checks_in_several_threads_leave_the_process_as_it_was():
    ids, models = tokens(2, 7), [moe(seed=seed) for seed in range(4)]
    before = (eval_frame._stance.stance, list(warnings.filters))

    def work(model):
        for _ in range(3):
            with torch.no_grad(), record_routes(model):
                model(ids)
            model.train(not model.training)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (eval_frame._stance.stance, list(warnings.filters)) == before
