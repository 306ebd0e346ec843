"""Alternatives to GRPO's sampling, rewards and advantages for other methods and options, and work between steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.objectives import (
    accepted_advantages,
    decoupled_advantages,
    leave_one_out_advantages,
    process_advantages,
)
from moe_rl.rollout import Rollout, demonstrate, named_rewards, seeded_random, step_rewards
from moe_rl.rollout.continuing import partial_responses, version_metrics
from moe_rl.rollout.dapo import overlong_penalty, refill
from moe_rl.rollout.task import problems_of
from moe_rl.training.batch import Batch
from moe_rl.training.checkpoint import checked_restorable
from moe_rl.training.critic import Critic
from moe_rl.training.method import Method
from moe_rl.training.reward_model import RewardModel
from moe_rl.training.score import score_rollout
from moe_rl.training.scorers import RouterScores
from moe_rl.training.state import State


def other_responses(state: State, rng: Any, options: dict[str, Any]) -> Rollout:
    """Return responses that the policy does not write in one call: demonstrations or partial rollouts.

    These are the task's demonstrations, as many as a batch has responses, or responses written a segment at a time
    (`rollout.segment`).

    options: those of `Engine.sample`."""
    config, task = state.config.rollout, state.task
    if state.method.source == "demonstrations":
        problems = problems_of(task, rng, config.prompts * config.group_size)
        return demonstrate(task, state.tokenizer, problems, rng)
    assert config.segment is not None
    return partial_responses(
        state.drafts,
        state.engine,
        lambda: checked_restorable(problems_of(task, rng, config.prompts)),
        partial(state.generator, "sample"),
        segment=config.segment,
        longest=state.max_new_tokens,
        version=state.step,
        **options,
    )


def other_sampling(
    state: State, rollout: Rollout, more: Callable[[torch.Generator, int], Rollout]
) -> tuple[Rollout, dict[str, Any]]:
    """Return the rollout after dynamic sampling (`rollout.dynamic_sampling`), if that is on, and metrics to log.

    Dynamic sampling replaces groups whose rewards are all equal. For partial rollouts, metrics include token ages.

    more: (generator, number of prompts at least) -> responses to new prompts.
    """
    index, attempts = len(state.waiting), state.config.rollout.dynamic_sampling
    logged = {} if rollout.versions is None else version_metrics(rollout, state.step)
    if not attempts:
        return rollout, logged
    return refill(rollout, lambda attempt, count: more(state.generator(f"refill/{attempt}", index), count), attempts)


def rescored(state: State, batch: Batch) -> Batch:
    """Return a batch that waited, scored again with the present weights as its old policy (`rollout.rescore`).

    Old log-probabilities, routes and, for RSPO, route scores are new. The sampler's log-probabilities, the advantages
    and the reference's log-probabilities stay."""
    scores = score_rollout(
        batch,
        state.policy,
        state.ranks,
        temperature=state.config.rollout.temperature,
        batch_size=state.config.optim.micro_batch,
        scorers=[scorer for scorer in state.scorers if isinstance(scorer, RouterScores)],
    )
    return replace(batch, old_logps=scores.logps, routes=scores.routes, route_scores=scores.route_scores)


def other_rewards(
    rollout: Rollout,
    learned: Float[Tensor, " B"] | None,
    reward_model: RewardModel | None,
    buffer: int | None,
    longest: int,
) -> tuple[Float[Tensor, " B"], dict[str, Any]]:
    """Return the rewards for the advantages, and metrics to log, for a reward model or an overlong penalty.

    The rewards are those of the reward model (`learned`; None: the verifier's) plus the penalty of overlong responses,
    which is 0 or less. The reward model gets the verifier's rewards as new comparisons.

    buffer: tokens before the length limit `longest` in which a response is overlong (`rollout.overlong_buffer`).
    """
    metrics = dict[str, Any]()
    rewards = rollout.rewards if learned is None else learned
    if reward_model and learned is not None:
        agreement = reward_model.agreement(rollout.rewards, learned, rollout.group_size)
        metrics = {"learned_reward": learned.mean(), "learned_reward_agreement": agreement}
        reward_model.observe(rollout)
    if buffer:
        penalty = overlong_penalty(rollout.lengths, longest, buffer).to(rewards)
        rewards = rewards + penalty
        metrics |= {"overlong_penalty": penalty.mean(), "overlong": (penalty < 0).float().mean()}
    return rewards, metrics


def other_advantages(
    method: Method,
    rewards: Float[Tensor, " B"],
    rollout: Rollout,
    *,
    task: Any,
    tokenizer: Any,
    seconds: float | None = None,
    critic: Critic | None = None,
    values: Float[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, " B"] | Float[Tensor, "B T"], Float[Tensor, "B T"] | None, dict[str, Any]]:
    """Return advantages of any kind but `group`, the value model's returns (None without one), and metrics to log.

    Advantages are `[B]` or, for `gae` and `process`, `[B,T]`.

    The kinds: `gae` (a value model), `leave_one_out`, `one`, `accepted`; `process` (step rewards of the task,
    normalised in the group, returns-to-go) and `decoupled` (several rewards of the task, GDPO), which do not read
    `rewards`; `pair` (DPO), whose advantages are 0 until the pairs are made.

    Args:
        rewards: the reward of each response, the verifier's or a learned model's.
        seconds: how long the task may take for the rewards of one response; None: no limit.
        critic, values: for `gae`: the value model and its predictions for the responses, units of reward.
    """
    size = rollout.group_size
    match method.advantage:
        case "gae":
            assert critic is not None and values is not None
            return critic.advantages(rewards, values, rollout.completion_mask)
        case "pair":
            return torch.zeros_like(rewards), None, {}
        case "leave_one_out":
            return leave_one_out_advantages(rewards, size), None, {}
        case "one":
            return torch.ones_like(rewards), None, {}
        case "accepted":
            accepted = accepted_advantages(rewards)
            return accepted, None, {"accepted": float(accepted.mean())}
        case "process":
            steps, ends = step_rewards(task, tokenizer, rollout, seconds)
            count = int(ends.sum())
            metrics = {"step_reward": float(steps.sum()) / max(1, count), "steps_per_response": count / len(rollout)}
            return process_advantages(steps, ends, size, scale=method.objective.advantage_scale), None, metrics
        case "decoupled":
            names, table = named_rewards(task, rollout, seconds)
            metrics = {f"reward_{name}": float(column.mean()) for name, column in zip(names, table.T, strict=True)}
            return decoupled_advantages(table, size), None, metrics
    raise AssertionError(f"no kind of advantage that `Objective` allows: {method.advantage!r}")


# -- between steps -----------------------------------------------------------------------------------------------------


def reset_reference(state: State) -> None:
    """Copy the policy's weights to the reference, every `optim.reference_reset_every` steps: iterative GRPO."""
    every = state.config.optim.reference_reset_every
    if state.reference is not None and every and state.step and state.step % every == 0:
        state.reference.load_state_dict(state.ranks.unwrap_model(state.policy).state_dict())


def retrain_reward_model(state: State, sample: Callable[..., Rollout]) -> dict[str, Any]:
    """Retrain the reward model, every `reward.retrain_every` steps, and return metrics to log.

    The model learns from what the policy has sampled since the last time or, at step 0, from batches that `sample`
    (`responses` of the loop) samples for it."""
    config, model = state.config.reward, state.reward_model
    if model is None or state.step % config.retrain_every:
        return {}
    for index in range(config.initial_batches if state.step == 0 else 0):
        model.observe(
            sample(state, seeded_random(state.config.seed, "reward", index), state.generator("reward", index))
        )
    return {f"reward_model_{name}": value for name, value in model.retrain(state.generator("retrain")).items()}
