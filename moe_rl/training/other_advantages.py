"""Advantages other than `group_advantages`: of other methods, of rewards of steps, of several rewards."""

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
from moe_rl.objectives.bounds import unknown
from moe_rl.rollout import Rollout, named_rewards, step_rewards


def other_advantages(
    kind: str, scale: str, rewards: Float[Tensor, " B"], rollout: Rollout, task: Any, tokenizer: Any
) -> tuple[Float[Tensor, " B"] | Float[Tensor, "B T"], dict[str, float]]:
    """Advantages of a rollout's responses, `[B]` or, for `process`, `[B,T]`; and what is to be logged of them.

    Args:
        kind: `leave_one_out`, `one`, `accepted`; `process` (step rewards of the task, normalised in the group,
            returns-to-go) and `decoupled` (several rewards of the task, GDPO) do not look at `rewards`.
        scale: as in `group_advantages`; for `process`.
        rewards: what counts as each response's reward, the verifier's or a learned model's.
        task, tokenizer: the tokenizer places step rewards on tokens.
    """
    size = rollout.group_size
    match kind:
        case "leave_one_out":
            return leave_one_out_advantages(rewards, size), {}
        case "one":
            return torch.ones_like(rewards), {}
        case "accepted":
            accepted = accepted_advantages(rewards)
            return accepted, {"accepted": float(accepted.mean())}
        case "process":
            values, ends = step_rewards(task, tokenizer, rollout)
            count = int(ends.sum())
            metrics = {"step_reward": float(values.sum()) / max(1, count), "steps_per_response": count / len(rollout)}
            return process_advantages(values, ends, size, scale=scale), metrics
        case "decoupled":
            names, table = named_rewards(task, rollout)
            metrics = {f"reward_{name}": float(column.mean()) for name, column in zip(names, table.T, strict=True)}
            return decoupled_advantages(table, size), metrics
    raise ValueError(unknown("advantage", kind, ["leave_one_out", "one", "accepted", "process", "decoupled"]))
