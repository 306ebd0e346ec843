"""Rollout engines: an fp32 copy samples what the training model does, a coarser one differs by its arithmetic alone."""

import copy
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
)

sys.path.append(str(Path(__file__).parents[1] / "routing"))
from routing_helpers import moe

from moe_rl.names import load_object
from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout import make_task
from moe_rl.rollout.engine import ModelEngine, forward_logps
from moe_rl.rollout.engine_config import WEIGHT_FORMATS
from moe_rl.rollout.engines import (
    EngineConfig,
    EngineError,
    HuggingFaceEngine,
    cast_parameters,
    check_engine,
    make_engine,
    rounded,
    rounded_layer,
)
from moe_rl.rollout.tasks import TaskConfig

TASK = make_task(TaskConfig(name="mod_chain", options={"steps": 1}))
TOKENIZER = char_tokenizer(TASK.alphabet)
TINY = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_experts=6, moe_intermediate_size=8)


@pytest.fixture
def model():
    return build_tiny(TINY, TOKENIZER)


def engine_of(model, **changes):
    return make_engine(EngineConfig(kind="hf", **changes), model, TOKENIZER)


def respond(engine, record=True, temperature=1.0):
    rng = random.Random(0)
    return engine.sample(
        [TASK.problem(rng) for _ in range(3)],
        group_size=4,
        max_new_tokens=7,
        temperature=temperature,
        generator=torch.Generator().manual_seed(1),
        record_routes=record,
    )


def moved(model, scale=0.3):
    """Another policy of the same architecture."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return other


def test_an_fp32_copy_samples_what_the_training_model_does(model):
    own, other = respond(ModelEngine(model, TOKENIZER)), respond(engine_of(model, dtype="float32"))
    assert torch.equal(own.input_ids, other.input_ids)
    torch.testing.assert_close(own.logps, other.logps, rtol=0, atol=1e-5)  # where a weight lies in memory can show
    assert own.routes.equal(other.routes)
    assert respond(ModelEngine(model, TOKENIZER), record=False).routes is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_coarser_copy_differs_by_rounding_and_the_finer_dtype_by_less(model, dtype):
    model = moved(model, 1.0)  # random weights are too flat for a difference
    rollout = respond(ModelEngine(model, TOKENIZER))
    mask, exact = rollout.completion_mask, forward_logps(model, rollout)
    gap = (engine_of(model, dtype=dtype).logps(rollout, 1.0) - exact)[mask].abs().mean()
    assert 0 < gap < {"bfloat16": 0.1, "float16": 0.01}[dtype]
    assert all(not p.is_floating_point() or p.dtype == torch.float32 for p in model.parameters()), "the copy alone"


def test_logps_of_given_completions_are_those_of_sampling_at_its_temperature(model):
    for temperature in (1.0, 0.7):
        engine = ModelEngine(model, TOKENIZER)
        rollout = respond(engine, temperature=temperature)
        torch.testing.assert_close(engine.logps(rollout, temperature), rollout.logps, rtol=1e-5, atol=1e-5)
    assert (engine.logps(rollout, 1.0) - rollout.logps).abs().max() > 1e-3


@pytest.mark.parametrize(
    "changes", [{}, {"router_format": "int4"}, {"router_format": "e5m2", "dtype": "float32"}, {"weight_format": "int4"}]
)
def test_a_synced_engine_is_one_built_anew_from_the_new_weights(model, changes):
    engine, other = engine_of(model, **changes), moved(model)
    assert engine.version == -1
    engine.sync(other.state_dict(), 7)
    fresh = engine_of(other, **changes)
    assert engine.version == 7
    own, new = engine.model.state_dict(), fresh.model.state_dict()
    assert own.keys() == new.keys() and all(torch.equal(own[name], new[name]) for name in own)
    torch.testing.assert_close(respond(engine).logps, respond(fresh).logps, rtol=0, atol=1e-5)


def test_training_on_does_not_reach_the_engine_before_a_sync(model):
    engine = engine_of(model, dtype="float32")
    before = respond(engine).logps
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(respond(engine).logps, before)


def test_a_sync_of_other_names_or_shapes_is_refused_before_anything_is_copied(model):
    engine = engine_of(model, dtype="float32")
    weights = dict(moved(model).state_dict())
    before = respond(engine).logps
    name = "model.layers.1.mlp.gate.weight"
    with pytest.raises(EngineError, match=r"weight sync 3: .*\.gate\.weight is no tensor in the training .*adapters"):
        engine.sync({key: value for key, value in weights.items() if key != name}, 3)
    with pytest.raises(EngineError, match=r"gate\.weight is \[3, 16\] in the training model and \[6, 16\]"):
        engine.sync({**weights, name: weights[name][:3]}, 3)
    with pytest.raises(EngineError, match=rf"{'.* is no .* in the engine, ' * 3}and so on: {len(weights)} in all"):
        engine.sync({}, 3)
    assert torch.equal(respond(engine).logps, before) and engine.version == -1


def test_router_formats_round_routers_and_nothing_else(model):
    plain = engine_of(model, dtype="float32").model.state_dict()
    for router_format, levels in (("int4", 15), ("e5m2", None)):
        coarse = engine_of(model, dtype="float32", router_format=router_format).model.state_dict()
        changed = {name for name in plain if not torch.equal(plain[name], coarse[name])}
        assert changed == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
        for name in changed:
            assert torch.equal(rounded(coarse[name], router_format), coarse[name]), "rounding twice changes nothing"
            assert levels is None or all(len(row.unique()) <= levels for row in coarse[name])


def test_weight_formats_round_layers_and_experts_and_nothing_else(model):
    plain = engine_of(model, dtype="float32").model.state_dict()
    layers = [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
    ]
    layers += ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    rollout = respond(ModelEngine(model, TOKENIZER))
    for weight_format, levels in (("int4", 15), ("fp8", 256), ("mxfp4", 15)):
        engine = engine_of(model, dtype="float32", weight_format=weight_format)
        coarse = engine.model.state_dict()
        changed = {name for name in plain if not torch.equal(plain[name], coarse[name])}
        assert changed == {f"model.layers.{i}.{name}" for i in range(2) for name in layers}
        for name in changed:
            assert all(len(row.unique()) <= levels for row in coarse[name].flatten(0, -2))
        mask = rollout.completion_mask
        gap = (engine.logps(rollout, 1.0) - forward_logps(model, rollout))[mask].abs().mean()
        assert 0 < gap < engine.tolerance.most


def test_layers_are_rounded_by_hand():
    # int4, groups of 128: the 129th entry has a scale of its own and stays; of the first, max 14 is 7 steps of 2.
    weight = torch.zeros(1, 129)
    weight[0, 0], weight[0, 1], weight[0, 128] = 14.0, 3.1, 0.3
    coarse = rounded_layer(weight, "int4")
    assert coarse[0, [0, 1, 2, 128]].tolist() == pytest.approx([14.0, 4.0, 0.0, 0.3])
    # e4m3 between 256 and 448 has steps of 32; the scale of row 1 is 1 / 448, so that 0.6 is 268.8 of them: 256.
    rows = torch.tensor([[448.0, 300.0, -271.0], [1.0, 0.6, 0.0]])
    assert rounded_layer(rows, "fp8").flatten().tolist() == pytest.approx([448, 288, -256, 1.0, 256 / 448, 0.0])
    assert rounded_layer(weight.bfloat16(), "fp8").dtype == torch.bfloat16
    assert rounded_layer(torch.zeros(2, 3), "int4").tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
def test_no_format_makes_a_number_of_a_weight_that_is_none(weight_format, wrong):
    coarse = rounded_layer(torch.tensor([[wrong, 1.0, -3.0], [0.5, 1.0, -3.0]]), weight_format)
    assert bool(coarse[0].isnan().all()) and bool(coarse[1].isfinite().all())


def test_mxfp4_takes_the_nearest_level_and_of_two_the_one_with_the_even_mantissa():
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # in the order of their codes
    eighths = torch.arange(-56, 56).float().reshape(4, 28) / 8  # halfway between two levels, too; up to 7
    weight = torch.cat([eighths, torch.tensor([[4.0, -4.0, 0.1, 0.0]]).expand(4, 4)], 1) / 64  # of 32 the scale is 1/64
    for row, own in zip(rounded_layer(weight, "mxfp4") * 64, weight * 64, strict=True):
        for got, value in zip(row.tolist(), own.tolist(), strict=True):
            distance = (levels - abs(value)).abs()
            nearest = (distance == distance.min()).nonzero()[:, 0].tolist()
            level = min(nearest, key=lambda code: code % 2)
            assert abs(got) == levels[level] and (got == 0 or got * value > 0)
    parts = torch.cat([weight[:1], 1000 * weight[1:2]], 1)  # two groups, each with its own scale
    alone = [rounded_layer(part, "mxfp4") for part in parts.split(32, 1)]
    assert torch.equal(rounded_layer(parts, "mxfp4"), torch.cat(alone, 1))
    tiny = torch.tensor([[1e-40, 0.0]]), torch.zeros(2, 3)
    assert all(bool(torch.isfinite(rounded_layer(rows, "mxfp4")).all()) for rows in tiny)
    assert rounded_layer(weight.bfloat16(), "mxfp4").dtype == torch.bfloat16


def test_rounding_by_hand():
    # int4: the scale of row 0 is 14 / 7 = 2: 14 -> 7, 3.1 / 2 = 1.55 -> 2, -0.9 / 2 = -.45 -> 0; row of zeros stays.
    weight = torch.tensor([[14.0, 3.1, -0.9], [0.0, 0.0, 0.0]])
    assert rounded(weight, "int4").tolist() == [[14.0, 4.0, 0.0], [0.0, 0.0, 0.0]]
    # e5m2 keeps 1, 1.25, 1.5, 1.75 between 1 and 2: 1.3 -> 1.25, -1.7 -> -1.75.
    assert rounded(torch.tensor([[1.3, -1.7]]), "e5m2").tolist() == [[1.25, -1.75]]
    assert rounded(weight.bfloat16(), "int4").dtype == torch.bfloat16


def test_buffers_and_what_the_architecture_keeps_in_fp32_are_not_cast(model):
    model._keep_in_fp32_modules_strict = {"gate"}
    engine = engine_of(model)
    kinds = {name: parameter.dtype for name, parameter in engine.model.named_parameters()}
    assert kinds["model.layers.0.mlp.gate.weight"] == torch.float32
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == torch.bfloat16
    assert all(buffer.dtype == torch.float32 for buffer in engine.model.buffers() if buffer.is_floating_point())


SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "made",
    [
        lambda: Ernie4_5_MoeForCausalLM(  # "gate.weight" in both dtypes
            Ernie4_5_MoeConfig(**SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=8, moe_layer_start_index=0)
        ),
        lambda: GptOssForCausalLM(  # norms in float16
            GptOssConfig(**SIZES, intermediate_size=16, num_local_experts=4)
        ),
        lambda: HunYuanMoEV1ForCausalLM(  # routers that are made in float32
            HunYuanMoEV1Config(**SIZES, intermediate_size=16, num_experts=4, moe_topk=2)
        ),
        lambda: MiniMaxForCausalLM(  # buffers that are multiplied with
            MiniMaxConfig(
                **SIZES,
                intermediate_size=16,
                num_local_experts=4,
                layer_types=["full_attention", "linear_attention"],
            )
        ),
    ],
    ids=["ernie", "gpt_oss", "hunyuan", "minimax"],
)
def test_parameters_and_buffers_are_cast_as_from_pretrained_casts_them(made, dtype, tmp_path):
    model = made()
    model.save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    cast_parameters(model, dtype)
    for own, theirs in (
        (model.named_parameters(), expected.named_parameters()),
        (model.named_buffers(), expected.named_buffers()),
    ):
        assert {name: tensor.dtype for name, tensor in own} == {name: tensor.dtype for name, tensor in theirs}
    with torch.no_grad():
        ids = torch.arange(12).view(2, 6)
        assert torch.equal(model.eval()(ids).logits, expected.eval()(ids).logits)


def test_biases_of_experts_are_no_rows_of_weights():
    model = GptOssForCausalLM(GptOssConfig(**SIZES, intermediate_size=16, num_local_experts=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.linspace(0.1, 1, parameter.numel()).view_as(parameter))
    engine = engine_of(model, dtype="float32", weight_format="int4")
    own = dict(engine.model.named_parameters())
    assert not torch.equal(own["model.layers.0.mlp.experts.down_proj"], model.model.layers[0].mlp.experts.down_proj)
    for name, parameter in model.named_parameters():
        assert not name.endswith("bias") or torch.equal(own[name], parameter), name


def test_a_row_of_transposed_experts_is_what_makes_one_output():
    """gpt-oss keeps experts as [E, inputs, outputs]; a scale is of the weights of one output, as in a linear layer."""
    model = GptOssForCausalLM(GptOssConfig(**SIZES, intermediate_size=16, num_local_experts=4))
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj.mul_(torch.logspace(0, 4, 32))  # by output
    before = model.model.layers[0].mlp.experts.gate_up_proj
    after = engine_of(model, dtype="float32", weight_format="int4").model.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(after, rounded_layer(before.mT, "int4").mT)
    assert ((after - before).abs().amax(1) <= before.abs().amax(1) / 14 * 1.001).all(), "small outputs keep theirs"


def by_name(model):
    return dict(engine_of(model, dtype="float32", weight_format="int4").model.named_parameters())


def test_a_row_of_llama_4s_and_dbrxs_experts_is_what_makes_one_output():
    model = moe("Llama4ForCausalLM")
    name, weight = next((n, p) for n, p in model.named_parameters() if n.endswith("experts.down_proj"))
    with torch.no_grad():
        weight.mul_(torch.logspace(0, 4, weight.shape[-1]))  # [E, inputs, outputs], and nothing says so
    assert torch.equal(by_name(model)[name], rounded_layer(weight.mT, "int4").mT)
    model = moe("DbrxForCausalLM")
    name, weight = next((n, p) for n, p in model.named_parameters() if n.endswith("mlp.w2"))
    with torch.no_grad():
        weight.mul_(torch.logspace(0, 4, weight.shape[-1]))  # all experts' [inputs, outputs] below each other
    experts = model.config.ffn_config.moe_num_experts
    by_expert = [rounded_layer(one.T, "int4").T for one in weight.chunk(experts)]
    assert torch.equal(by_name(model)[name], torch.cat(by_expert))


def test_recurrences_and_convolutions_are_no_linear_layers():
    model = moe("JambaForCausalLM")
    rounded_ones = {n for n, p in by_name(model).items() if not torch.equal(p, model.get_parameter(n))}
    assert any("mamba.in_proj" in n for n in rounded_ones) and any("experts" in n for n in rounded_ones)
    assert not any("A_log" in n or "conv1d" in n for n in rounded_ones)


def test_experts_implementation_is_the_engines_own(model):
    engine = engine_of(model, dtype="float32", experts_implementation="eager")
    assert engine.model.config._experts_implementation == "eager" != model.config._experts_implementation
    rollout = respond(ModelEngine(model, TOKENIZER))
    torch.testing.assert_close(engine.logps(rollout, 1.0), forward_logps(model, rollout), rtol=1e-5, atol=1e-5)
    with pytest.raises(EngineError, match="experts_implementation: 'fastest' is not available"):
        engine_of(model, experts_implementation="fastest")


def test_batch_shapes_are_the_engines_own_or_the_runs(model):
    own = make_engine(EngineConfig(kind="hf", max_batch=2), model, TOKENIZER, max_batch=5)
    assert own.max_batch == 2
    assert make_engine(EngineConfig(kind="hf"), model, TOKENIZER, max_batch=5).max_batch == 5
    assert make_engine(EngineConfig(), model, TOKENIZER, max_batch=5).max_batch == 5
    whole = respond(engine_of(model, dtype="float32"))
    chunked = respond(engine_of(model, dtype="float32", max_batch=5))
    assert torch.equal(whole.input_ids, chunked.input_ids), "randomness does not depend on the batch"


def test_a_closed_engine_has_let_go_of_its_model(model):
    engine = HuggingFaceEngine(model, TOKENIZER, EngineConfig(kind="hf"))
    engine.close()
    assert not hasattr(engine, "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "vlm"}, r"rollout\.engine\.kind: expected one of self, hf, vllm, got 'vlm'"),
        ({"dtype": "bf16"}, r"rollout\.engine\.dtype: expected one of float32, bfloat16, float16, got 'bf16'"),
        ({"router_format": "int8"}, r"rollout\.engine\.router_format: expected one of null, int4, e5m2, got 'int8'"),
        ({"weight_format": "int8"}, r"engine\.weight_format: expected one of null, fp8, int4, mxfp4, got 'int8'"),
        ({"max_batch": 0}, r"rollout\.engine\.max_batch: at least 1, got 0"),
        (
            {"kind": "self", "weight_format": "int4"},
            r"engine\.weight_format: is for kind hf and .* of kind 'self' .*, got 'int4'",
        ),
        ({"kind": "a.py:B", "router_format": "e5m2"}, r"engine\.router_format: is for kind hf and .* of kind 'a.py:B'"),
        ({"kind": "a.py:B", "dtype": "float32"}, r"engine\.dtype: is for kind hf or vllm .* by rollout.engine.options"),
        ({"timeout": 60.0}, r"engine\.timeout: is for kind vllm and .* of kind 'hf', got 60.0"),
        ({"kind": "self", "dtype": "float32"}, r"'self' \(the training model, in model.dtype\), got 'float32'; set"),
        ({"kind": "self", "max_batch": 4}, r"engine\.max_batch: is for kind hf or vllm .* of kind 'self' .*, got 4"),
    ],
)
def test_what_no_engine_knows_is_refused(changes, message):
    with pytest.raises(EngineError, match=message):
        check_engine(replace(EngineConfig(kind="hf"), **changes))


def test_the_file_of_an_engine_runs_once_until_it_is_another(tmp_path):
    own, said = tmp_path / "own.py", tmp_path / "said"
    own.write_text(f"open({str(said)!r}, 'a').write('run ')\nclass Own: pass\nclass Other: pass\n")
    first, again, other = (load_object(f"{own}:{name}", "kind", EngineError) for name in ("Own", "Own", "Other"))
    assert first is again and other.__module__ == first.__module__ and said.read_text() == "run "
    own.write_text(own.read_text() + "1 / 0\n")
    for _ in range(2):
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            load_object(f"{own}:Own", "kind", EngineError)
    assert said.read_text() == "run run run "


def test_a_bias_on_the_choice_that_has_two_dimensions_is_no_router_weight():
    model = moe("Ernie4_5_MoeForCausalLM")
    name, bias = next((n, b) for n, b in model.named_parameters() if n.endswith("e_score_correction_bias"))
    with torch.no_grad():
        bias.copy_(torch.linspace(0.30, 0.37, bias.numel()).view_as(bias))
    assert torch.equal(engine_of(model, router_format="int4", dtype="float32").model.state_dict()[name], bias)
