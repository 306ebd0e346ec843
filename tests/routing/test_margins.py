"""Margins of live choices, against the router's own scores, and as what they promise."""

import warnings

import jaxtyping
import pytest
import torch
import transformers
from tiny_families import families, tiny_config, tiny_model
from torch.overrides import TorchFunctionMode
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_rl.routing import (
    RoutingError,
    find_sites,
    noisy_routes,
    record_margins,
    record_router_logits,
    record_routes,
    site_change,
)

COMMON = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}
FAMILIES = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, num_experts=6, moe_intermediate_size=12)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**COMMON, num_experts=6)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**COMMON, num_local_experts=6)),
    "granitemoe": lambda: GraniteMoeForCausalLM(GraniteMoeConfig(**COMMON, num_local_experts=6)),
}


def built(family):
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_margins_are_those_of_the_ranked_scores_and_nothing_changes(family):
    model = built(family)
    ids = torch.randint(0, 19, (3, 7), generator=torch.Generator().manual_seed(0))
    with record_routes(model) as plain:
        expected = model(ids, output_router_logits=True)
    with record_routes(model) as recording, record_margins(model) as margins:
        got = model(ids)
    assert torch.equal(got.logits, expected.logits) and recording.routes.equal(plain.routes)
    for site, logits in enumerate(expected.router_logits):
        ranked = logits.softmax(-1) if family in ("qwen3_moe", "olmoe", "mixtral") else logits
        best = ranked.sort(-1, descending=True).values
        torch.testing.assert_close(margins.values[..., site].flatten(), best[:, 1] - best[:, 2])


@torch.no_grad()
def test_a_block_that_is_run_again_for_its_choice_leaves_no_second_logits_and_needs_no_dtype_of_its_experts():
    model, ids = tiny_model("DbrxForCausalLM"), torch.arange(3, 17).view(2, 7)
    plain = model(ids, output_router_logits=True)
    for context in (record_margins(model), noisy_routes(model, 1.0)):
        with context:
            got = model(ids, output_router_logits=True)
        assert len(got.router_logits) == len(plain.router_logits) == 3
        assert torch.equal(got.router_logits[0], plain.router_logits[0])  # of the same hidden states, without noise
    model.bfloat16()  # noisy logits are float32, for which its experts have no sum
    with noisy_routes(model, 1.0), record_routes(model) as recording:
        assert model(ids).logits.isfinite().all()
    assert recording.routes.shape == (2, 7, 3, 2)


class Shifted(TorchFunctionMode):
    """Logits of one router with the second expert lowered and the third raised."""

    def __init__(self, weight, order, by):
        super().__init__()
        self.weight, self.order, self.by = weight, order, by

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and args[1] is self.weight:
            rows = torch.arange(len(out))
            out[rows, self.order[:, 1]] -= self.by
            out[rows, self.order[:, 2]] += self.by
        return out


@torch.no_grad()
def test_a_change_below_half_the_margin_flips_nothing_and_one_above_it_can():
    """One site; the scores of Granite are logits, so that a shift of the second and third expert is known exactly."""
    torch.manual_seed(0)
    model = GraniteMoeForCausalLM(GraniteMoeConfig(**(COMMON | {"num_hidden_layers": 1}), num_local_experts=6)).eval()
    ids = torch.randint(0, 19, (1, 9), generator=torch.Generator().manual_seed(1))
    with record_routes(model) as old, record_margins(model) as margins:
        logits = model(ids, output_router_logits=True).router_logits[0]
    order = logits.sort(-1, descending=True).indices
    weight = model.model.layers[0].block_sparse_moe.router.weight
    for factor, flips in ((0.49, False), (0.51, True)):
        with record_routes(model) as new, Shifted(weight, order, factor * margins.values[0, :, 0]):
            model(ids)
        assert bool(site_change(old.routes, new.routes).all()) is flips
        assert bool(site_change(old.routes, new.routes).any()) is flips


@torch.no_grad()
@pytest.mark.parametrize("family", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize(("groups", "open_groups"), [(2, 1), (2, 2), (1, 1)])
def test_of_routers_that_first_choose_groups_a_warning_says_what_their_margin_is(family, groups, open_groups):
    config = tiny_config(families()[family])
    config.n_group, config.topk_group = groups, open_groups
    model = getattr(transformers, family)(config).eval()
    with warnings.catch_warnings(record=True) as said, record_margins(model):
        model(torch.zeros(1, 2, dtype=torch.long))
    told = [w for w in said if "layers.1.mlp.gate (one of 2) first chooses groups of experts" in str(w.message)]
    assert len(told) == len(said) == (open_groups < groups)


@torch.no_grad()
def test_the_margin_of_a_router_that_chooses_groups_is_that_within_the_open_one():
    """DeepSeek-V3: of two groups of four that with the larger sum of its best two, and two of its experts."""
    model, ids = tiny_model("DeepseekV3ForCausalLM"), torch.arange(3, 17).view(2, 7)
    routers = [site.module for site in find_sites(model)]
    for i, router in enumerate(routers):
        router.e_score_correction_bias.copy_(0.2 * torch.randn(8, generator=torch.Generator().manual_seed(i)))
    with record_router_logits(model) as reading:
        model(ids)
    with pytest.warns(UserWarning, match="first chooses groups of experts"), record_margins(model) as margins:
        model(ids)
    for site, router in enumerate(routers):
        scores = reading.logits[:, :, site].sigmoid() + router.e_score_correction_bias
        groups = scores.unflatten(-1, (2, 4))
        first = groups.topk(2).values.sum(-1).argmax(-1)
        best = groups.gather(2, first[..., None, None].expand(-1, -1, 1, 4))[:, :, 0].sort(-1, descending=True).values
        torch.testing.assert_close(margins.values[:, :, site], best[..., 1] - best[..., 2].clamp(min=0))


@torch.no_grad()
def test_all_experts_taken_is_infinitely_far_and_nothing_read_is_an_error():
    model = MixtralForCausalLM(MixtralConfig(**(COMMON | {"num_experts_per_tok": 3}), num_local_experts=3)).eval()
    with record_margins(model) as margins:
        with pytest.raises(RoutingError, match="nothing was read"):
            _ = margins.values
        model(torch.zeros(1, 2, dtype=torch.long))
        model(torch.zeros(2, 2, dtype=torch.long))
    assert margins.values.shape == (3, 2, 2) and margins.values.isinf().all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (lambda model: noisy_routes(model, 5.0), record_margins),
        (record_margins, lambda model: noisy_routes(model, 5.0)),
        (lambda model: noisy_routes(model, 5.0), lambda model: noisy_routes(model, 0.0)),
        (record_margins, record_margins),
    ],
)
def test_noise_and_margins_inside_each_other_are_refused_and_not_dropped(outer, inner):
    """Both run the router once more; the inner one used to replace the outer one without a word."""
    model = built("qwen3_moe")
    with pytest.raises(RoutingError, match="open on this model already"), outer(model), inner(model):
        pass
    with inner(model):
        model(torch.zeros(1, 2, dtype=torch.long))


@torch.no_grad()
def test_a_forward_that_failed_leaves_no_margins(monkeypatch):
    model, ids = built("mixtral"), torch.zeros(2, 3, dtype=torch.long)
    with record_margins(model) as expected:
        model(ids)
    with record_margins(model) as margins:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(model.model.layers[1].mlp.experts, "forward", Failing())
            model(ids)
        model(ids)
    assert torch.equal(margins.values, expected.values)


class Failing:
    def __call__(self, *args, **kwargs):
        raise MemoryError


@torch.no_grad()
def test_margins_of_calls_of_several_lengths_are_not_joined():
    model = built("qwen3_moe")
    with record_margins(model) as margins:
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, do_sample=False)
    with pytest.raises(RoutingError, match=r"lengths \[1, 4\]"):
        _ = margins.values


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf"), "1", None, [0.1], torch.ones(2)])
def test_noise_of_no_finite_strength_is_refused(sigma, monkeypatch):
    """Infinite noise has no softmax: all tokens went to the same experts."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    with pytest.raises(RoutingError, match="sigma must be a finite number of at least 0"):
        noisy_routes(tiny_model("OlmoeForCausalLM"), sigma).__enter__()


def test_noise_of_no_generator_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    with pytest.raises(RoutingError, match=r"generator must be a torch.Generator or None, got int"):
        noisy_routes(tiny_model("OlmoeForCausalLM"), 0.1, 3).__enter__()
