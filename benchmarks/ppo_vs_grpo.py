"""Savings of GRPO, which has no value model, against PPO: CPU time, parameters, optimizer state, peak memory.

    python benchmarks/ppo_vs_grpo.py                # the main study's model and batch
    python benchmarks/ppo_vs_grpo.py --rounds 9 --hidden 96

Policy, responses and objective (PPO's clip) are the same; only the source of the advantages differs: the group's mean
(grpo), a value model as large as the policy's backbone (ppo), a linear map of the policy's hidden states (ppo_head).

The least extra cost of a value model: `ppo` trains a second backbone, so its weights, gradients and AdamW moments take
another 16 bytes a parameter in fp32, activations not counted. Scoring has one forward more, and an update one forward
and backward more, so both take at most twice the time; sampling costs the same.

Time is CPU time of scoring, advantages and updates without probes, as a ratio to grpo (median and spread over rounds);
the methods take turns on one thread, and sampling is measured separately. Peak memory is the most that torch held at
once during a step (by its profiler), above what it held before.
"""

import random
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import allocated_peak, command_line, in_turns, row, write

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
    """Make a training step without its sampling: scoring, advantages, updates."""
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


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)

    tiny = TinyConfig(hidden_size=options.hidden, num_layers=options.layers)
    base = RunConfig(model=ModelConfig(tiny=tiny, cold_start=None, device="cpu"), probe=ProbeConfig(every=0))
    with tempfile.TemporaryDirectory() as folder:
        states = {name: begin(replace(base, **arm), Path(folder) / name) for name, arm in ARMS.items()}
        sampler = states["grpo"]
        began = time.process_time()
        rollout = responses(sampler, random.Random(0), sampler.generator("sample"))
        sampling = time.process_time() - began
        # A random policy's answers are all wrong: with random rewards all methods have something to learn.
        coin = torch.rand(len(rollout), generator=torch.Generator().manual_seed(0)).round()
        rollout = replace(rollout, rewards=coin)
        steps = {name: partial(step, state, rollout) for name, state in states.items()}
        times = in_turns(steps, options.rounds)
        peaks = {name: allocated_peak(run) for name, run in steps.items()}
        memory = {name: memory_metrics(state.trained, state.frozen, state.ranks) for name, state in states.items()}

    print(f"{len(rollout)} responses, {int(rollout.lengths.sum())} tokens; sampling takes {sampling:.2f} CPU s")
    print(f"{'':9} {'CPU time / grpo':>24} {'CPU s':>7} {'parameters':>11} {'optimizer':>10} {'peak above held':>16}")
    rows = []
    for name, own in memory.items():
        trained = [key for key in ("model", "value") if f"{key}_bytes" in own]
        parameters, optimizer = (
            sum(own[f"{key}_{what}"] for key in trained) for what in ("parameters", "optimizer_bytes")
        )
        note = f"peak {peaks[name] / MIB:.1f} MiB above what is held, grpo {peaks['grpo'] / MIB:.1f}"
        one = row("ppo_vs_grpo", f"a step: {name}", times[name], "grpo", times["grpo"], note=note)
        low, high = one["spread"]
        print(
            f"{name:9} {one['ratio']:8.2f} ({low:5.2f} to {high:5.2f}) {1e-6 * one['us']:7.2f} "
            f"{parameters:11,} {optimizer / MIB:6.2f} MiB {peaks[name] / MIB:12.1f} MiB"
        )
        rows.append(one)
    write(options.json, rows[1:])


if __name__ == "__main__":
    main()
