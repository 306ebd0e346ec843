"""Training with the vLLM engine: R3 with a stand-in for vLLM, and with the real one where there is one."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from micro import MICRO, rows

from moe_rl.policy.lora import LoraConfig
from moe_rl.rollout.engines import EngineConfig
from moe_rl.training import EvalConfig, MethodConfig, ProbeConfig, run, validate
from moe_rl.training.config import DistributedConfig

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from fake_python import fake_python, lent

R3 = replace(
    MICRO,
    model=replace(MICRO.model, tiny=replace(MICRO.model.tiny, initializer_range=0.3)),
    rollout=replace(MICRO.rollout, engine=EngineConfig(kind="vllm", dtype="float32")),
    method=MethodConfig(objective="grpo", replay="R3"),
    eval=EvalConfig(every=0, prompts=2),
    probe=ProbeConfig(every=0),
)


def trained(state_of, folder, config):
    """Both steps; the state, closed."""
    state = state_of(config, folder)
    try:
        assert state.sync_guard is not None and state.sync_guard.engine is state.engine
        run(state)
    finally:
        state.close()
    assert state.engine.server.process.poll() is not None and not state.engine.server.folder.exists()
    assert [row["sync_gap"] < 1e-4 for row in rows(folder, "engine", pair="engines")] == [True, True]
    return state


def killed(state_of, folder, config):
    """In a process of its own, after its first checkpoint."""
    child = os.fork()
    if child == 0:
        try:
            run(state_of(config, folder))
        finally:
            os._exit(0)
    while not (folder / "checkpoint").exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it failed"
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def through_both(state_of, tmp_path, monkeypatch, config, python):
    """Folders of a run by way of `python`, and of one by way of a url that is killed and goes on."""
    monkeypatch.setenv("MOE_RL_VLLM_PYTHON", python)
    trained(state_of, tmp_path / "by_python", config)
    with lent(python) as host:
        url = replace(config.rollout.engine, url=host.url)
        config = replace(config, rollout=replace(config.rollout, engine=url))
        killed(state_of, tmp_path / "by_url", config)
        state = state_of(config, tmp_path / "by_url")
        assert 0 < state.step < config.optim.steps
        try:
            run(state)
        finally:
            state.close()
    assert rows(tmp_path / "by_url") == rows(tmp_path / "by_python")
    return tmp_path / "by_python"


def test_r3_replays_the_routes_of_an_engine_in_another_process(state_of, tmp_path, monkeypatch):
    folder = through_both(state_of, tmp_path, monkeypatch, R3, fake_python(tmp_path))
    engines = rows(folder, "engine", pair="engines")
    assert engines and all(row["slots_changed"] == 0 < row["slots"] for row in engines)
    for row in rows(folder, "update"):
        assert 0 < row["replayed_rows"] < row["routed_rows"], "all but last tokens"
    first = rows(folder, "update")[0]
    assert first["var_token_log_ratio"] < 1e-12, "the old policy was scored under the same routes"


@pytest.mark.slow
@pytest.mark.skipif("MOE_RL_VLLM_PYTHON" not in os.environ, reason="set MOE_RL_VLLM_PYTHON to a Python with vLLM")
def test_r3_with_the_real_vllm(state_of, tmp_path, monkeypatch):
    tiny = replace(R3.model.tiny, hidden_size=64, num_heads=2, moe_intermediate_size=32)
    config = replace(R3, model=replace(R3.model, tiny=tiny))
    folder = through_both(state_of, tmp_path, monkeypatch, config, os.environ["MOE_RL_VLLM_PYTHON"])
    engines = rows(folder, "engine", pair="engines")
    assert engines and all(row["slots_changed"] == 0 < row["slots"] for row in engines)
    assert all(row["replayed_rows"] > 0 for row in rows(folder, "update"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": replace(R3.model, lora=LoraConfig())}, "vllm does not go with this model.lora"),
        ({"distributed": DistributedConfig(strategy="ddp")}, "vllm does not go with this distributed.strategy"),
        ({"rollout": replace(R3.rollout, segment=2)}, "rollout.segment does not go with this rollout.engine.kind"),
    ],
)
def test_what_does_not_go_with_vllm_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(replace(R3, **{"method": MethodConfig(objective="grpo"), **changes}))
