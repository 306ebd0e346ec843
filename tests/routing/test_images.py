"""Models that also take images: every token has routes, those of an image too."""

import pytest
import torch
from routing_helpers import routes_of
from transformers import Qwen3OmniMoeConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from moe_rl.routing import RoutingError, record_routes, replay_routes, slot_change
from moe_rl.routing.others import sites_of

IMAGE, START, END = 60, 62, 63


@pytest.fixture(scope="module")
def model():
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, **dict(zip(names, (IMAGE, 61, START, END), strict=True))
    )
    torch.manual_seed(0)
    return Qwen3VLMoeForConditionalGeneration(config).eval()


def inputs(seed):
    """An image of 4 x 4 patches, which are 4 tokens, between words."""
    ids = torch.tensor([[5, START, *[IMAGE] * 4, END, 7, 8, 9]])
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def test_routes_of_an_image_are_recorded_and_replayed(model):
    given = inputs(0)
    with torch.no_grad(), record_routes(model) as recording:
        logits = model(**given).logits
    routes = recording.routes
    assert routes.shape == (1, 10, 3, 2) and not routes.has_live
    with replay_routes(model, routes) as replay:
        own = model(**given).logits
        own.sum().backward()
    assert replay.replayed_fraction == 1.0 and torch.equal(own, logits)
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.language_model.layers)
    with torch.no_grad(), record_routes(model) as other:
        model(**inputs(1))
    image = given["input_ids"][0] == IMAGE
    assert slot_change(routes, other.routes)[0, image].float().mean() > 0.2  # another image, other experts
    with torch.no_grad(), record_routes(model) as forced, replay_routes(model, routes):
        model(**inputs(1))
    assert forced.routes.equal(routes)


def test_an_image_is_part_of_what_is_generated_from(model):
    with torch.no_grad(), record_routes(model) as recording:
        text = model.generate(**inputs(0), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert text.shape == (1, 14) and recording.routes.shape == (1, 13, 3, 2)
    assert recording.routes.tokens.equal(text[:, :-1].int())  # the language model itself is called with embeddings
    with torch.no_grad(), record_routes(model) as prompt:
        model(**inputs(0))
    assert recording.routes.ids[:, :10].equal(prompt.routes.ids)


def test_words_alone_are_as_in_any_model(model):
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    routes = routes_of(model, ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(RoutingError, match="recorded for other tokens"), replay_routes(model, routes):
        model(input_ids=ids.flip(0), attention_mask=torch.ones_like(ids))


def test_its_configuration_names_the_sites_as_a_recording_does(model):
    """transformers has no causal language model for it, which was an error that named all classes that have one."""
    assert sites_of(model.config) == sites_of(model)
    with pytest.raises(RoutingError, match=r"no language model of a Qwen3OmniMoeConfig: .*\. Give the model itself"):
        sites_of(Qwen3OmniMoeConfig())
