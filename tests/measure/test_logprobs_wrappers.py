"""Token log-probabilities of wrapped models: data parallel, sharded, LoRA, compiled, autocast."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from logprobs_helpers import assert_same_gradients, batch, build, gradients, reference, weights
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_rl.measure import logprobs
from moe_rl.measure.head import LogitMap, head_logps
from moe_rl.measure.logprobs import token_logps
from moe_rl.measure.other_heads import logit_map_of
from moe_rl.routing import record_routes


def assert_as_reference(model, bare, tolerance=1e-10, strip=""):
    data, a = batch(), weights()
    want = reference(bare, *data)[0]
    want_gradients = gradients(bare, (want * a).sum())
    got = token_logps(model, *data, chunk_size=3).logps
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    found = {
        name.replace(strip, ""): g.full_tensor() if hasattr(g, "full_tensor") else g
        for name, g in gradients(model, (got * a).sum()).items()
    }
    assert_same_gradients(found, want_gradients, tolerance)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("unused", [False, True])
def test_distributed_data_parallel(one_process, unused, float64_throughout):
    bare = build()
    model = DistributedDataParallel(copy.deepcopy(bare), find_unused_parameters=unused)
    assert_as_reference(model, bare, strip="module.")


@pytest.mark.parametrize("apart", [False, True])
def test_fully_sharded_and_resharded(one_process, apart, float64_throughout):
    """The head's weight is a DTensor outside the model's forward, and is freed again before backward."""
    bare = build()
    model = copy.deepcopy(bare)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True)
    if apart:
        fully_shard(model.lm_head, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    assert_as_reference(model, bare)


def test_lora_on_the_backbone_and_on_the_head(float64_throughout):
    peft = pytest.importorskip("peft")
    for targets in (["q_proj", "v_proj"], ["q_proj", "lm_head"]):
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = peft.get_peft_model(build(), config).double()
        assert_as_reference(model, model)


def test_compiled_as_a_whole_or_in_part():
    bare = build()
    bare.model.layers, bare.config.num_hidden_layers = bare.model.layers[:1], 1  # compiling takes long
    bare.set_experts_implementation("batched_mm")
    whole = torch.compile(copy.deepcopy(bare), backend="aot_eager")
    assert_as_reference(whole, bare, 1e-7, strip="_orig_mod.")
    backbone = copy.deepcopy(bare)
    backbone.model.compile(backend="aot_eager")
    assert isinstance(logprobs.head_treatment(backbone, backbone), LogitMap)
    assert_as_reference(backbone, bare, 1e-7)


def test_autocast_rounds_the_product_as_the_model_would():
    model, data = build(dtype=torch.float32), batch()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = token_logps(model, *data, chunk_size=64).logps, reference(model, *data)[0]
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    exact = token_logps(model, *data).logps
    assert (got - exact).abs().max() > 1e-4  # autocast was in force
    hidden, weight, bias = (weights(s, dtype=torch.float32) for s in ((5, 3), (4, 3), (4,)))
    targets = torch.tensor([0, 3, 3, 1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = head_logps(hidden, weight, targets, bias=bias, chunk_size=5)
        want = F.linear(hidden, weight, bias).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


# -- what changes the logits on their way to the caller -----------------------------------------------------------


class Around(torch.nn.Module):
    def __init__(self, model, divide=None):
        super().__init__()
        self.model, self.divide = model, divide

    def forward(self, *args, **kwargs):
        out = self.model(*args, **kwargs)
        if self.divide is not None:
            out.logits = out.logits / self.divide
        return out


def halved(out):
    out.logits = out.logits / 2
    return out


def with_forward(model, forward):
    model.forward = forward
    return model


def hooked(model, module, hook):
    module.register_forward_hook(hook)
    return model


class Halving(ModelHook):
    def post_forward(self, module, output):
        return halved(output)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: hooked(m, m.lm_head, lambda module, args, out: out * 0.5), "a forward hook of its output head"),
        (lambda m: hooked(m, m, lambda module, args, out: halved(out)), "a forward hook of its Qwen3MoeForCausalLM"),
        (lambda m: with_forward(m, partial(lambda own, **kw: halved(own(**kw)), m.forward)), "was replaced"),
        (lambda m: add_hook_to_module(m, Halving()), "the forward of its Qwen3MoeForCausalLM was replaced"),
        (lambda m: Around(m, 2), "Around around it does not hand out its logits as they are"),
        (lambda m: Around(Around(m, 2)), "Around around it"),
    ],
)
def test_what_changes_the_logits_is_heeded(change, why, float64_throughout):
    model, data = build(), batch()
    changed = change(model)
    lm = logprobs.causal_lm(changed)
    unchanged = reference(build(), *data)[0]
    for _ in range(2):
        assert why in logprobs.head_treatment(changed, lm)
        with record_routes(changed) as recording:
            got = token_logps(changed, *data).logps
        assert len(recording.steps) == 1, "trying it out is no call of the model"
        torch.testing.assert_close(got, reference(changed, *data)[0], atol=1e-12, rtol=1e-12)
    assert (got - unchanged).abs().max() > 0.1


def test_a_wrapper_is_looked_at_again_when_its_numbers_change():
    wrapper = Around(build(), 1)
    lm = logprobs.causal_lm(wrapper)
    assert isinstance(logprobs.head_treatment(wrapper, lm), LogitMap)
    wrapper.divide = 2
    assert "does not hand out" in logprobs.head_treatment(wrapper, lm)
    assert not {"forward", "_call_impl"} & set(vars(lm))


@pytest.fixture
def bf16_accelerator(one_process):
    """One of its own: accelerate keeps the first of a process, with its precision."""
    AcceleratorState._reset_state(True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(True)


def test_what_leaves_the_logits_alone_does_not_cost_the_memory(monkeypatch, bf16_accelerator):
    bare, data, tried = build(), batch(), []
    want = token_logps(bare, *data).logps
    moved = add_hook_to_module(add_hook_to_module(build(), AlignDevicesHook("cpu")), ModelHook(), append=True)
    sharded = build()
    fully_shard(sharded)
    before = build()
    before.register_forward_pre_hook(lambda *_: None)
    models = [before, moved, Around(build()), DistributedDataParallel(build()), sharded]
    peft = pytest.importorskip("peft")
    models.append(peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["q_proj"])))  # adds 0 at first
    models.append(bf16_accelerator.prepare_model(build(), device_placement=False))
    monkeypatch.setattr(logprobs, "logit_map_of", lambda lm: tried.append(lm) or logit_map_of(lm))
    for model in models:
        lm = logprobs.causal_lm(model)
        for context in (nullcontext, record_routes, nullcontext):
            with context(model):
                assert isinstance(logprobs.head_treatment(model, lm), LogitMap)
                if model is not models[-1]:  # it computes in bf16
                    torch.testing.assert_close(token_logps(model, *data).logps, want, atol=1e-7, rtol=1e-7)
    assert len(tried) == len(models), "once each, whatever contexts put hooks on it"
