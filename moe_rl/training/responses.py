"""Who responds to a run's prompts: the policy through its engine, the initial policy, or demonstrations.

Several processes sample and verify in shares; all of them hold all responses.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_rl.rollout import Rollout, demonstrate, sample
from moe_rl.training.spread import spread_sampling, spread_scores

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer


def respond(trainer: "Trainer", rng: random.Random, generator: torch.Generator) -> Rollout:
    """Responses to new prompts, from whomever the method learns from, with the verifier's rewards."""
    config, source, task = trainer.config.rollout, trainer.method.source, trainer.task
    count = config.prompts * (config.group_size if source == "demonstrations" else 1)
    problems = [task.problem(rng) for _ in range(count)]
    if source == "demonstrations":
        rollout = demonstrate(task, trainer.tokenizer, problems, rng)
    elif source == "policy":
        rollout = _spread(trainer, trainer.rollouts.sample, None, problems, config.group_size, generator)
    else:
        rollout = plainly(trainer, problems, config.group_size, generator, trainer.initial)
    return spread_scores(trainer.accelerator, task, rollout).to(trainer.accelerator.device)


def held_out(trainer: "Trainer", prompts: int, generator: torch.Generator) -> Rollout:
    """One response of the current policy to each held-out prompt, with its reward; the same prompts every time."""
    rng = random.Random("held-out")
    problems = [trainer.task.problem(rng, held_out=True) for _ in range(prompts)]
    return spread_scores(trainer.accelerator, trainer.task, plainly(trainer, problems, 1, generator))


def plainly(
    trainer: "Trainer",
    problems: list[Any],
    group_size: int,
    generator: torch.Generator,
    model: nn.Module | None = None,
) -> Rollout:
    """Responses of `model` (of the current policy by default) sampled by itself, whatever the run's engine is."""
    config = trainer.config.rollout
    sampling = trainer.accelerator.unwrap_model(trainer.model) if model is None else model

    def sampler(problems: list[Any], generator: torch.Generator) -> Rollout:
        return sample(
            sampling,
            trainer.tokenizer,
            problems,
            group_size=group_size,
            max_new_tokens=trainer.budget,
            temperature=config.temperature,
            generator=generator,
            max_batch=config.max_batch,
        )

    return _spread(trainer, sampler, sampling, problems, group_size, generator)


def _spread(
    trainer: "Trainer",
    sampler: Callable[[list[Any], torch.Generator], Rollout],
    model: nn.Module | None,
    problems: list[Any],
    group_size: int,
    generator: torch.Generator,
) -> Rollout:
    model = trainer.accelerator.unwrap_model(trainer.model) if model is None else model
    return spread_sampling(trainer.accelerator, sampler, model, problems, group_size, trainer.budget, generator)
