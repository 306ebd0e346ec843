"""Tiny models from scratch and their tokenizer of characters."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from policy_helpers import SMALL, TASK, TOKENIZER, equal

from moe_rl.policy.tiny import ModelError, build_tiny, char_tokenizer, router_parameters


def test_char_tokenizer_is_one_token_per_character():
    text = "^abcd=dcba$"
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text) and TOKENIZER.decode(ids) == text
    assert TOKENIZER(["^a", "^"])["input_ids"] == [TOKENIZER("^a")["input_ids"], TOKENIZER("^")["input_ids"]]
    assert (TOKENIZER.bos_token, TOKENIZER.eos_token, TOKENIZER.pad_token) == ("^", "$", "<pad>")
    assert len(TOKENIZER) == len(set(TASK.alphabet)) + 1 and TOKENIZER.padding_side == "left"
    assert char_tokenizer("dcba=").get_vocab() == TOKENIZER.get_vocab()  # order and repetition do not matter


def test_char_tokenizer_refuses_what_it_does_not_know():
    with pytest.raises(Exception, match=r"(?i)unk"):
        TOKENIZER("^z=")


def test_char_tokenizer_knows_white_space():
    tokenizer = char_tokenizer("a \n")
    assert tokenizer.decode(tokenizer("a \n a")["input_ids"]) == "a \n a"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "minimax_m2"])
def test_tiny_families(family):
    model = build_tiny(replace(SMALL, family=family, num_experts_per_tok=3), TOKENIZER)
    assert model.config.model_type == family and not model.training
    routers = router_parameters(model)
    assert [tuple(p.shape) for p in routers] == [(4, 16)] * 2 and all(p.std() > 0.03 for p in routers)
    scaled = build_tiny(replace(SMALL, family=family, num_experts_per_tok=3, router_init_scale=0.1), TOKENIZER)
    for (name, a), b in zip(model.named_parameters(), scaled.parameters(), strict=True):
        router = any(a is p for p in routers)
        assert torch.equal(a * 0.1 if router else a, b), name


def test_tiny_weights_come_from_its_seed_and_from_nothing_else():
    torch.manual_seed(1)
    first = build_tiny(SMALL, TOKENIZER)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))  # torch's own generator was not moved
    assert equal(first, build_tiny(SMALL, TOKENIZER))
    assert not equal(first, build_tiny(replace(SMALL, seed=1), TOKENIZER))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 5}, "model.tiny.num_experts_per_tok: between 1 and num_experts .4., got 5"),
        ({"hidden_size": 18}, "model.tiny.hidden_size: .* multiple of 2 x num_heads .2., got 18"),
        ({"num_layers": 0}, "model.tiny.num_layers: expected a whole number of at least 1, got 0"),
        ({"router_init_scale": float("nan")}, "model.tiny.router_init_scale: .* of at least 0, got nan"),  # were built
        ({"max_position_embeddings": 0}, "model.tiny.max_position_embeddings: .* of at least 1, got 0"),
        ({"family": "mistral"}, "model.tiny.family: expected one of qwen3_moe, .* Did you mean 'mixtral'?"),
    ],
)
def test_impossible_tiny_models_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        build_tiny(replace(SMALL, **change), TOKENIZER)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="of where it is not installed")
def test_an_implementation_that_is_not_installed_is_refused():
    with pytest.raises(ModelError, match=r"model\.tiny: cannot build .*FlashAttention2"):
        build_tiny(SMALL, TOKENIZER, attn_implementation="flash_attention_2")
