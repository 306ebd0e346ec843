"""GRPO with Routing Replay on a Mixture-of-Experts policy: the whole algorithm in one file, with public functions.

    python examples/grpo_replay.py                      # about three minutes on one core, cold start included
    python examples/grpo_replay.py --objective gspo --no-replay

This file makes the same weights, bit for bit, as `moe-rl run` with the same settings; a test checks that. The trainer
adds what this file leaves out: measurements, checkpoints, other methods, several processes.
"""

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from moe_rl.measure import check_shared_prompts, share_prompts, token_logps
from moe_rl.objectives import OBJECTIVES, group_advantages, policy_loss
from moe_rl.policy import ModelConfig, load_policy, seeded
from moe_rl.rollout import TaskConfig, make_task, sample, score, seeded_generator, seeded_random
from moe_rl.routing import record_routes, replay_routes

METHODS = [
    name
    for name, o in OBJECTIVES.items()
    if o.advantage == "group" and o.aggregate != "constant" and not (o.needs or o.corrections)
]
"""Objectives that this loop can train; the others need more than the rewards of a group, or other responses."""


def train(
    policy: nn.Module,
    tokenizer: Any,
    task: Any,
    objective: str = "grpo",  # "gspo": ratio and clipping at the sequence level
    replay: bool = True,
    scoring: bool = True,  # False: old log-probabilities and routes are those of decoding, which saves a forward
    shared: bool = False,  # True: a forward computes a prompt once for all of its responses, with little padding
    steps: int = 31,
    prompts: int = 32,
    group_size: int = 8,
    num_minibatches: int = 4,
    learning_rate: float = 5e-4,
    warmup_updates: int = 20,
    seed: int = 0,
) -> None:
    """Train `policy` in place on `task`, whose verifier gives the rewards."""
    if shared:
        check_shared_prompts(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    for step in range(steps):
        # 1. Sample G responses to each prompt from the current policy, which is the old policy of this step.
        rng = seeded_random(seed, "prompts", step, 0)
        rollout = sample(
            policy,
            tokenizer,
            [task.problem(rng) for _ in range(prompts)],
            group_size=group_size,
            max_new_tokens=task.max_new_tokens,
            generator=seeded_generator(seed, "sample", step),
            record=not scoring,
        )
        rewards = score(task, rollout).rewards
        advantages = group_advantages(rewards, group_size, scale=OBJECTIVES[objective].advantage_scale)
        tokens = rollout.input_ids, rollout.attention_mask, rollout.completion_mask

        # 2. Score the responses once: old log-probabilities and, in the same forward, the old policy's routed experts.
        old_logps, routes = rollout.logps, rollout.routes
        if scoring:
            policy.eval()
            layout = share_prompts(*tokens) if shared else None
            with torch.no_grad(), record_routes(policy) as recording:
                old_logps = token_logps(policy, *tokens, shared=layout).logps
            routes = layout.unpack(recording.routes) if layout else recording.routes

        # 3. Make one update per minibatch of whole groups. From the second on, the weights are no longer the old ones.
        groups = torch.randperm(prompts, generator=seeded_generator(seed, "order", step))
        order = groups[:, None] * group_size + torch.arange(group_size)
        for update, rows in enumerate(order.chunk(num_minibatches)):
            rows = rows.flatten()
            warmup = min(1.0, (step * num_minibatches + update + 1) / warmup_updates)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * warmup
            policy.train()
            part, forced = [x[rows] for x in tokens], routes.rows(rows)
            layout = share_prompts(*part, routes=forced) if shared else None
            forced = layout.pack(forced) if layout else forced
            # The old policy's experts are forced; their gate weights, and so the gradient, come from the live router.
            with replay_routes(policy, forced, once=True) if replay else nullcontext():  # all of them, or an error
                logps = token_logps(policy, *part, shared=layout).logps
                loss = policy_loss(
                    OBJECTIVES[objective], logps, old_logps[rows], advantages[rows], rollout.completion_mask[rows]
                )
                loss.loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        clipped = float(loss.clipped.sum() / rollout.completion_mask[rows].sum())
        print(f"step {step:2d}  reward {float(rewards.mean()):.3f}  clipped in the last update {100 * clipped:.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", default="grpo", choices=METHODS, help="default: grpo")
    parser.add_argument("--no-replay", action="store_true", help="let the routers choose anew in every update")
    parser.add_argument("--no-scoring", action="store_true", help="take old log-probabilities and routes from decoding")
    parser.add_argument("--shared", action="store_true", help="compute a prompt once for all of its responses")
    parser.add_argument("--steps", type=int, default=31, help="RL steps (default: 31)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: at least 1, got {options.steps}")
    if options.seed < 0:
        parser.error(f"--seed: at least 0, got {options.seed}")
    torch.set_num_threads(1)  # the fastest for a model this small
    task = make_task(TaskConfig())
    # A tiny Qwen3-MoE; its cold start takes a minute.
    policy, tokenizer = load_policy(seeded(ModelConfig(), options.seed), task)
    how = {
        "replay": not options.no_replay,
        "scoring": not options.no_scoring,
        "shared": options.shared,
        "seed": options.seed,
    }
    train(policy, tokenizer, task, options.objective, steps=options.steps, **how)


if __name__ == "__main__":
    main()
