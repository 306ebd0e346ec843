"""The real vLLM on a CPU, where MOE_RL_VLLM_PYTHON names a Python that has it (docs/engines.md has the commands)."""

import os
import random

import pytest
import torch
from fake_python import lent

from moe_rl.policy.tiny import TinyConfig, build_tiny, char_tokenizer
from moe_rl.rollout import make_task
from moe_rl.rollout.engine import ModelEngine, forward_logps
from moe_rl.rollout.engines import EngineConfig, EngineError, check_engine_here, make_engine
from moe_rl.rollout.tasks import TaskConfig
from moe_rl.routing import record_routes, site_change
from moe_rl.training.rollout_engine import SyncGuard, sync_probe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("MOE_RL_VLLM_PYTHON" not in os.environ, reason="set MOE_RL_VLLM_PYTHON to a Python with vLLM"),
]
TASK = make_task(TaskConfig(name="mod_chain"))
TOKENIZER = char_tokenizer(TASK.alphabet)
TINY = TinyConfig(hidden_size=64, num_heads=2)  # hidden sizes are multiples of 32 on a CPU
PROBLEMS = [TASK.problem(random.Random(seed)) for seed in range(16)]


@pytest.fixture(scope="module")
def model():
    return build_tiny(TINY, TOKENIZER).eval()


def respond(engine, temperature=1.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    how = {"group_size": 8, "max_new_tokens": 24, "generator": generator, "record_routes": True}
    return engine.sample(PROBLEMS, temperature=temperature, **how)


def differing_routers(model, rollout):
    """Routers that chose another set than one forward of `model` does, and all that chose."""
    mask = rollout.attention_mask.long()
    with torch.no_grad(), record_routes(model) as recording:
        model(input_ids=rollout.input_ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    chose = (rollout.routes.ids >= 0).all(-1)
    return int((site_change(rollout.routes, recording.routes) & chose).sum()), int(chose.sum())


def gap(rollout, other):
    return (rollout.logps - other)[rollout.completion_mask].abs().mean()


def test_in_fp32_vllm_samples_and_routes_as_the_training_model_does(model):
    check_engine_here(EngineConfig(kind="vllm"), "cpu")
    few = {"max_num_batched_tokens": 512}  # not all prompts at once
    engine = make_engine(EngineConfig(kind="vllm", dtype="float32", max_batch=100, options=few), model, TOKENIZER)
    try:
        for temperature in (1.0, 0.7):
            rollout = respond(engine, temperature)
            assert gap(rollout, forward_logps(model, rollout, temperature)) < 1e-5
            assert gap(rollout, engine.logps(rollout, temperature)) < 1e-5
            differ, chose = differing_routers(model, rollout)
            assert chose > 10_000 and differ == 0
        again = respond(engine, 0.7)
        assert torch.equal(rollout.input_ids, again.input_ids) and torch.equal(rollout.logps, again.logps)
        assert torch.equal(rollout.routes.ids, again.routes.ids)
        own, found = respond(ModelEngine(model, TOKENIZER), 0.0), respond(engine, 0.0)
        assert torch.equal(own.input_ids, found.input_ids)
        guard = SyncGuard(engine, model, sync_probe(engine, TASK, 12, 1.0), 1.0, lambda: pytest.fail("no gap"))
        assert guard.gap < 1e-5 and guard.noise == 0
    finally:
        engine.close()


def test_what_another_machine_lends_is_the_same_bit_for_bit(model):
    found = []
    with lent(os.environ["MOE_RL_VLLM_PYTHON"]) as host:
        for url in (None, host.url):
            engine = make_engine(EngineConfig(kind="vllm", dtype="float32", url=url), model, TOKENIZER)
            try:
                engine.sync(model.state_dict(), 1)
                rollout = respond(engine, 0.7)
                found.append((rollout.input_ids, rollout.logps, rollout.routes.ids, engine.logps(rollout, 0.7)))
            finally:
                engine.close()
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))
    differ, chose = differing_routers(model, rollout)
    assert chose > 10_000 and differ == 0 and gap(rollout, forward_logps(model, rollout, 0.7)) < 1e-5


def test_in_bf16_vllm_differs_by_its_arithmetic(model):
    engine = make_engine(EngineConfig(kind="vllm"), model, TOKENIZER)
    try:
        rollout = respond(engine)
        assert 1e-5 < gap(rollout, forward_logps(model, rollout)) < engine.tolerance.most
        differ, chose = differing_routers(model, rollout)
        assert 0 < differ < 0.2 * chose
    finally:
        engine.close()


def test_a_model_that_the_cpu_build_cannot_run_is_named():
    small = build_tiny(TinyConfig(hidden_size=48), TOKENIZER)
    with pytest.raises(EngineError, match="want hidden_size divisible by 32, the model has 48"):
        make_engine(EngineConfig(kind="vllm"), small, TOKENIZER)
