"""Token log-probabilities against `log_softmax` and `gather` on the model's own logits, in float64."""

import logging
import threading

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from logprobs_helpers import (
    FAMILIES,
    MOE_WITH_AUX,
    QWEN,
    SIZES,
    B,
    T,
    assert_same_gradients,
    batch,
    build,
    gradients,
    reference,
    weights,
)
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_rl.measure import logprobs
from moe_rl.measure.head import LogitMap
from moe_rl.measure.logprobs import token_logps
from moe_rl.measure.other_heads import logit_map_of, warn_once
from moe_rl.routing import record_routes

# -- against the plain computation ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_log_softmax_and_gather(family, float64_throughout):
    model = build(family)
    data = batch("right" if family == "gemma2" else "both")  # gemma2 itself gives NaN for left padding in float64
    assert isinstance(logprobs.head_treatment(model, model), LogitMap)  # else the plain way is compared with itself
    want_logps, want_entropy = reference(model, *data, temperature=0.8)
    got = token_logps(model, *data, temperature=0.8, entropy=True, chunk_size=3)
    assert got.logps.dtype == torch.float64
    torch.testing.assert_close(got.logps, want_logps, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got.entropy, want_entropy, atol=1e-10, rtol=1e-10)
    a, b = weights(), weights(seed=4)
    want = gradients(model, (want_logps * a).sum() + (want_entropy * b).sum())
    assert_same_gradients(gradients(model, (got.logps * a).sum() + (got.entropy * b).sum()), want, 1e-10)


@pytest.mark.parametrize("which", ["logps", "entropy"])
def test_gradient_through_one_of_the_two_results(which, float64_throughout):
    model, data = build(), batch()
    got = getattr(token_logps(model, *data, entropy=True, chunk_size=4), which)
    want = reference(model, *data)[0 if which == "logps" else 1]
    assert_same_gradients(gradients(model, (got * weights()).sum()), gradients(model, (want * weights()).sum()), 1e-10)


def test_exactly_zero_outside_the_completion_and_at_a_first_token():
    model = build()
    ids, attended, _ = batch()
    completion = attended.clone()  # every real token is asked for, the first of each row included
    out = token_logps(model, ids, attended, completion, entropy=True)
    first = attended & (attended.cumsum(1) == 1)
    for values in (out.logps, out.entropy):
        assert torch.equal(values == 0, ~attended | first)


def test_rows_without_completion_give_no_gradient():
    model = build()
    ids, attended, completion = batch()
    alone = token_logps(model, ids[1:2], attended[1:2], completion[1:2], entropy=True)
    assert torch.equal(alone.logps, torch.zeros(1, T, dtype=torch.float64))
    model.zero_grad()
    (alone.logps.sum() + alone.entropy.sum()).backward()
    assert all(p.grad is None or torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_padding_side_and_padding_values_do_not_matter(float64_throughout):
    model = build()
    ids, completion_from = torch.tensor([[5, 6, 7, 8, 9]]), 2
    results = []
    for left, right, pad in ((0, 0, 0), (3, 0, 0), (3, 0, 17), (0, 2, 4), (1, 1, 2)):
        padded = F.pad(ids, (left, right), value=pad)
        real = F.pad(torch.ones_like(ids), (left, right))
        asked = F.pad((torch.arange(5) >= completion_from)[None], (left, right))
        results.append(token_logps(model, padded, real, asked).logps[:, left : left + 5])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-12, rtol=1e-12)


def test_positions_count_real_tokens():
    model, seen = build(), []
    model.model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["position_ids"]), with_kwargs=True)
    ids, _, completion = batch()
    attended = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [1, 1, 1, 1, 1, 0, 0], [1] * 7])
    token_logps(model, ids, attended, completion)
    assert seen[0][0].tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert seen[0][1].tolist() == [0, 1, 2, 3, 4, 5, 6]
    given_ids = torch.arange(T).expand(B, T) + 3
    token_logps(model, ids, attended, completion, position_ids=given_ids)
    assert torch.equal(seen[1], given_ids)


def test_sequences_behind_each_other_in_a_row_do_not_see_each_other(float64_throughout):
    model, ids = build(), batch()[0][:1]
    ones, positions = torch.ones_like(ids), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    got = token_logps(model, ids, ones, ones, position_ids=positions, chunk_size=3).logps
    parts = ids.split([3, 4], 1)
    apart = [token_logps(model, part, torch.ones_like(part), torch.ones_like(part)).logps for part in parts]
    torch.testing.assert_close(got, torch.cat(apart, 1), atol=1e-10, rtol=1e-10)
    assert got[0, 0] == got[0, 3] == 0  # they follow nothing
    padded = ones.clone()
    padded[0, -1] = 0
    with pytest.raises(ValueError, match=r"begin anew within a row.*padding"):
        token_logps(model, ids, padded, padded, position_ids=positions)


def test_integer_and_bool_masks_agree():
    model = build()
    ids, attended, completion = batch()
    want = token_logps(model, ids, attended, completion).logps
    assert torch.equal(token_logps(model, ids, attended.long(), completion.int()).logps, want)


def test_bfloat16_model_gives_fp32_from_its_own_logits():
    model, data = build(dtype=torch.bfloat16), batch()
    got, want = token_logps(model, *data, chunk_size=5), reference(model, *data)[0]
    assert got.logps.dtype == torch.float32
    torch.testing.assert_close(got.logps, want, atol=1e-5, rtol=1e-5)
    a = weights(dtype=torch.float32)
    got, want = gradients(model, (got.logps * a).sum()), gradients(model, (want * a).sum())
    assert got["lm_head.weight"].dtype == torch.bfloat16
    assert_same_gradients(got, want, 0.03)  # bf16 has 8 bits


# -- what the model does around its head ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "want"),
    [
        ("qwen3_moe", LogitMap()),
        ("granitemoe", LogitMap(1 / 6.0)),
        ("cohere", LogitMap(0.0625)),
        ("gemma2", LogitMap(1.0, 0.7)),
    ],
)
def test_the_treatment_of_logits_is_found(family, want):
    model, calls = build(family), []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
    found = logit_map_of(model)
    assert found.scale == pytest.approx(want.scale, rel=1e-12)
    assert found.softcap == pytest.approx(want.softcap, rel=1e-12) if want.softcap else found.softcap is None
    assert not calls  # nothing ran that a recording could see


def test_the_treatment_is_tried_out_once_for_every_setting_of_the_model(monkeypatch, float64_throughout):
    model, data, tried = build("gemma2"), batch(), []
    monkeypatch.setattr(logprobs, "logit_map_of", lambda lm: tried.append(lm) or logit_map_of(lm))
    for softcap in (0.7, 0.3):
        model.config.final_logit_softcapping = softcap
        for _ in range(2):
            got = token_logps(model.train(not model.training), *data).logps
        torch.testing.assert_close(got, reference(model, *data)[0], atol=1e-10, rtol=1e-10)
    assert len(tried) == 2


class Squared(Qwen3MoeForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 0.01 * out.logits**2
        return out


def test_an_unknown_treatment_takes_whole_logits_and_says_so_once(caplog, float64_throughout):
    model = Squared(Qwen3MoeConfig(**SIZES, **QWEN)).double()
    data = batch()
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        got = [token_logps(model, *data, temperature=0.8, entropy=True) for _ in range(2)][1]
    assert [r.message for r in caplog.records if "Squared" in r.message and "whole logits" in r.message] == [
        "Squared: it treats its head's output to more than a scale and a soft cap; its log-probabilities are taken "
        "from whole logits"
    ]
    want_logps, want_entropy = reference(model, *data, temperature=0.8)
    torch.testing.assert_close(got.logps, want_logps, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got.entropy, want_entropy, atol=1e-10, rtol=1e-10)
    none = token_logps(model, *(x[1:2] for x in data))  # no completion token at all
    assert torch.equal(none.logps, torch.zeros(1, T, dtype=torch.float64))


def test_both_ways_agree(float64_throughout):
    model = build()
    data = batch()
    fast = token_logps(model, *data).logps
    model.lm_head.forward = model.lm_head.forward  # a forward of its own, as other libraries give it
    assert "forward of its own" in logprobs.head_treatment(model, model)
    torch.testing.assert_close(token_logps(model, *data).logps, fast, atol=1e-12, rtol=1e-12)


def test_entropy_of_whole_logits_has_a_gradient_where_a_probability_is_0(float64_throughout):
    model, data = build(), batch()
    banned = torch.tensor([0])
    model.lm_head.register_forward_hook(lambda module, args, out: out.index_fill(-1, banned, float("-inf")))
    got = gradients(model, token_logps(model, *data, entropy=True).entropy.sum())
    assert all(slope.isfinite().all() for slope in got.values())
    near = build()
    near.lm_head.register_forward_hook(lambda module, args, out: out.index_fill(-1, banned, -60.0))
    assert_same_gradients(got, gradients(near, token_logps(near, *data, entropy=True).entropy.sum()), 1e-10)


def test_every_module_runs_once_and_the_head_is_given_back():
    model, runs = build(), []
    routers = [layer.mlp.gate for layer in model.model.layers]
    for module in (model, model.model, *routers, model.lm_head):
        module.register_forward_hook(lambda module, *_: runs.append(module))
    token_logps(model, *batch())
    assert len(runs) == 5 and len(set(map(id, runs))) == 5
    assert "forward" not in vars(model.lm_head)

    def fail(*_):
        raise KeyError("a hook failed")

    model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError, match="a hook failed"):
        token_logps(model, *batch())
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("family", MOE_WITH_AUX)
def test_the_load_balancing_loss_is_the_models_own(family, float64_throughout):
    model = build(family)
    ids, attended, completion = batch()
    out = token_logps(model, ids, attended, completion, aux_loss=True)
    positions = (attended.long().cumsum(1) - 1).clamp(min=0)
    own = model(input_ids=ids, attention_mask=attended.long(), position_ids=positions, output_router_logits=True)
    assert torch.equal(out.aux_loss, own.aux_loss) and out.aux_loss > 0
    assert len(out.router_logits) == 2
    assert_same_gradients(gradients(model, out.aux_loss), gradients(model, own.aux_loss), 1e-12)


# -- refusals ---------------------------------------------------------------------------------------------------


def test_masks_of_one_row_are_not_taken_for_all(monkeypatch):
    """Broadcast, they would score the first row and leave zeros, which look like numbers, in all others."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    ids, attended, completion = batch()
    for masks, name in (((attended[:1], completion[:1]), "attention_mask"), ((attended, completion[:1]), "completion")):
        with pytest.raises(ValueError, match=f"{name}.*: expected the shape of input_ids"):
            token_logps(build(), ids, *masks)


def test_refusals():
    model = build()
    ids, attended, completion = batch()
    with pytest.raises(ValueError, match=r"true on padding \(first at row 0, position 1\)"):
        wrong = completion.clone()
        wrong[0, 1] = True
        token_logps(model, ids, attended, wrong)
    with pytest.raises(ValueError, match=r"right behind padding within a sequence \(first at row 3, position 3\)"):
        gap = attended.clone()
        gap[3, 1:3] = False  # a prompt padded on the right, and the response behind
        token_logps(model, ids, gap, completion)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        token_logps(model, ids, attended, completion, temperature=0.0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        token_logps(model, ids, attended, completion, chunk_size=0)
    with pytest.raises(TypeError, match="Linear holds no transformers model with an output head"):
        token_logps(torch.nn.Linear(2, 2), ids, attended, completion)
    with pytest.raises(TypeError, match="Qwen3MoeModel holds no transformers model with an output head"):
        token_logps(model.model, ids, attended, completion)
    sizes = {name: size for name, size in SIZES.items() if name != "experts_implementation"}
    with pytest.raises((ValueError, TypeError), match=r"aux_loss|load-balancing"):
        token_logps(LlamaForCausalLM(LlamaConfig(**sizes)), ids, attended, completion, aux_loss=True)


@pytest.mark.parametrize("part", [0, slice(0, 0), (slice(None), slice(0, 0))], ids=["one sequence", "rows", "columns"])
def test_what_is_no_batch_of_tokens_is_refused_by_its_shape(part, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users have it
    tokens = [x[part] for x in batch()]
    with pytest.raises(ValueError, match=r"input_ids: expected tokens \[B,T\], got shape \("):
        token_logps(build(), *tokens)


def test_of_two_threads_on_one_model_the_second_is_refused_and_plain_forwards_stay_what_they_are():
    model = build()
    ids, attended, completion = batch()
    want, plain, found = reference(model, ids, attended, completion)[0], model(ids).logits, []

    def meanwhile(*_):
        def other():
            found.append(model(ids).logits)
            with pytest.raises(RuntimeError, match="under way already, in another thread"):
                token_logps(model, ids, attended, completion)
            with pytest.raises(RuntimeError, match="under way already"):  # it began while no stand-in was there yet
                logprobs._through_head(model, model.lm_head, {"input_ids": ids}, ids[0], lambda *_: pytest.fail())
            found.append("refused")

        if not found and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    model.model.register_forward_hook(meanwhile)
    torch.testing.assert_close(token_logps(model, ids, attended, completion).logps, want)
    torch.testing.assert_close(found[0], plain)
    assert found[1:] == ["refused"] and "forward" not in vars(model.lm_head)


def test_labels_are_no_mask():
    """-100 is true, and a label that is token 0 is false."""
    ids = torch.tensor([[3, 0, 5]])
    labels, ones = torch.tensor([[-100, 0, 5]]), torch.ones_like(ids)
    for attention, completion, name in ((ones, labels, "completion_mask"), (labels, ones, "attention_mask")):
        with pytest.raises(ValueError, match=f"{name}: expected only 0 and 1"):
            token_logps(build(), ids, attention, completion)


def test_trying_out_the_head_is_no_call_of_the_model():
    """Llama4ForCausalLM calls its backbone by another name than it has: trying out ran all of it, as calls that a
    recording joined with the one that scores."""
    sizes = {"vocab_size": 32, "pad_token_id": 0, "num_hidden_layers": 2, "num_local_experts": 4}
    sizes |= {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "interleave_moe_layer_step": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads)).eval()
    ids = torch.randint(1, 32, (2, 5))
    ones = torch.ones_like(ids)
    with torch.no_grad(), record_routes(model) as recording:
        logps = token_logps(model, ids, ones, ones).logps
    assert len(recording.calls) == 1 and recording.routes.shape[:2] == (2, 5)
    plain = model(ids, attention_mask=ones).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(logps[:, 1:], plain.detach())
    assert logit_map_of(model) == LogitMap(1.0, None)
