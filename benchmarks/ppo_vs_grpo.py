"""What GRPO saves by having no value model: CPU time, parameters, optimizer state, peak memory.

    python benchmarks/ppo_vs_grpo.py                # the main study's model and batch
    python benchmarks/ppo_vs_grpo.py --rounds 9 --hidden 96

Same policy, same responses, same objective (PPO's clip); only where advantages come from differs: the group's mean
(grpo), a value model as large as the policy's backbone (ppo), a linear map of the policy's hidden states (ppo_head).

What must be paid at least: `ppo` trains a second backbone, so without activations its weights, gradients and AdamW
moments are 16 bytes a parameter in fp32 once more. Its scoring has one forward more and its updates one forward and
backward more, hence at most twice the time of both; sampling costs the same.

Time is CPU time of scoring, advantages and updates without probes, the methods taking turns on one thread, as a ratio
to grpo (median and range over rounds); sampling is counted apart. Peak memory is of torch's own allocations (its
profiler), the most held at once above what was held before a step.
"""

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import add_option, check_rounds, row, write
from torch.profiler import ProfilerActivity, profile

from moe_rl.policy.models import ModelConfig
from moe_rl.policy.tiny import TinyConfig
from moe_rl.rollout import Rollout
from moe_rl.training import MethodConfig, ProbeConfig, RunConfig, State, ValueConfig, begin
from moe_rl.training.batch import minibatches
from moe_rl.training.loop import advantages_of, responses, update_on
from moe_rl.training.optimizer import memory_metrics
from moe_rl.training.score import make_batch, score_rollout

MIB = 2**20
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"method": MethodConfig(objective="ppo", advantage="group")},
    "ppo_head": {"method": MethodConfig(objective="ppo"), "value": ValueConfig(model="head")},
    "ppo": {"method": MethodConfig(objective="ppo")},
}


def step(state: State, rollout: Rollout) -> None:
    """A training step without its sampling: scoring, advantages, updates."""
    config = state.config
    scores = score_rollout(
        rollout, state.policy, state.ranks, temperature=config.rollout.temperature, scorers=state.scorers
    )
    advantages, returns, _ = advantages_of(state, rollout, scores)
    batch = make_batch(rollout, scores, advantages, replay=config.method.replay, step=state.step, returns=returns)
    order = minibatches(len(batch), config.optim.num_minibatches, config.rollout.group_size, state.generator("order"))
    for update, rows in enumerate(order, start=1):
        update_on(state, batch.rows(rows), update)
    state.step += 1


def timed(action: Any) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def peak_bytes(action: Any) -> int:
    """The most that torch's allocations grew by during `action`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    held = most = 0
    for event in sorted((e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=_when):
        held += event.nbytes()
        most = max(most, held)
    return most


def _when(event: Any) -> int:
    return event.start_ns()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--layers", type=int, default=4)
    add_option(parser)
    options = parser.parse_args()
    check_rounds(parser, options.rounds)
    torch.set_num_threads(1)

    tiny = TinyConfig(hidden_size=options.hidden, num_layers=options.layers)
    base = RunConfig(model=ModelConfig(tiny=tiny, cold_start=None, device="cpu"), probe=ProbeConfig(every=0))
    with tempfile.TemporaryDirectory() as folder:
        states = {name: begin(replace(base, **arm), Path(folder) / name) for name, arm in ARMS.items()}
        sampler = states["grpo"]
        started = time.process_time()
        rollout = responses(sampler, random.Random(0), sampler.generator("sample"))
        sampling = time.process_time() - started
        # A random policy's answers are all wrong; rewards by coin give all methods something to learn.
        coin = torch.rand(len(rollout), generator=torch.Generator().manual_seed(0)).round()
        rollout = replace(rollout, rewards=coin)
        for state in states.values():
            step(state, rollout)  # warm up
        times: dict[str, list[float]] = {name: [] for name in states}
        for _ in range(options.rounds):
            for name, state in states.items():
                times[name].append(timed(lambda state=state: step(state, rollout)))
        peaks = {name: peak_bytes(lambda state=state: step(state, rollout)) for name, state in states.items()}
        memory = {name: memory_metrics(state.trained, state.frozen, state.ranks) for name, state in states.items()}

    found = {}
    for name in ARMS:
        ratios = [seconds / grpo for seconds, grpo in zip(times[name], times["grpo"], strict=True)]
        own = memory[name]
        trained = [key for key in ("model", "value") if f"{key}_bytes" in own]
        found[name] = {
            "cpu_ratio": statistics.median(ratios),
            "cpu_ratio_range": (min(ratios), max(ratios)),
            "cpu_seconds": statistics.median(times[name]),
            "parameters": sum(own[f"{key}_parameters"] for key in trained),
            "weight_bytes": sum(own[f"{key}_bytes"] for key in trained),
            "optimizer_bytes": sum(own[f"{key}_optimizer_bytes"] for key in trained),
            "peak_bytes": peaks[name],
        }
    print(f"{len(rollout)} responses, {int(rollout.lengths.sum())} tokens; sampling takes {sampling:.2f} CPU s")
    print(f"{'':9} {'CPU time / grpo':>24} {'CPU s':>7} {'parameters':>11} {'optimizer':>10} {'peak above held':>16}")
    for name, of in found.items():
        low, high = of["cpu_ratio_range"]
        print(
            f"{name:9} {of['cpu_ratio']:8.2f} ({low:5.2f} to {high:5.2f}) {of['cpu_seconds']:7.2f} "
            f"{of['parameters']:11,} {of['optimizer_bytes'] / MIB:6.2f} MiB {of['peak_bytes'] / MIB:12.1f} MiB"
        )
    rows = []
    for name in ("ppo_head", "ppo"):
        held = [found[key]["peak_bytes"] / MIB for key in (name, "grpo")]
        note = f"peak {held[0]:.1f} MiB above what is held, grpo {held[1]:.1f}"
        rows.append(row("ppo_vs_grpo", f"a step: {name}", times[name], "grpo", times["grpo"], note=note))
    write(options.json, rows)


if __name__ == "__main__":
    main()
