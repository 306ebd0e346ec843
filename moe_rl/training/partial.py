"""Partial rollouts: batches of responses that are written a segment per step, each by the weights of its step."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from moe_rl.rollout import Problem, Rollout
from moe_rl.rollout.continuing import unfinished


def partial_responses(
    drafts: deque[Rollout],
    engine: Any,
    problems: Callable[[], list[Problem]],
    generator: Callable[[int], torch.Generator],
    *,
    segment: int,
    longest: int,
    version: int,
    group_size: int,
    temperature: float,
    record_routes: bool,
) -> Rollout:
    """The oldest batch, finished; all others in `drafts` are one segment further, and a new one has begun.

    A batch takes as many calls as its longest response has segments; before the first is finished, several are begun
    under one version, so that from then on one is finished at every step.

    Args:
        engine: which can `extend`.
        problems: of a new batch.
        generator: (number) -> random numbers for one segment of one batch.
        segment: tokens.
        longest: tokens that a response may have.
        version: of the weights that write now.
    """
    options: dict[str, Any] = {"temperature": temperature, "record_routes": record_routes}
    numbers = itertools.count(1)
    while True:
        for index, draft in enumerate(drafts):
            more = {"tokens": segment, "longest": longest, "version": version, **options}
            drafts[index] = engine.extend(draft, generator=generator(next(numbers)), **more)
        begun = engine.sample(
            problems(),
            group_size=group_size,
            max_new_tokens=min(segment, longest),
            generator=generator(next(numbers)),
            **options,
        )
        drafts.append(replace(begun, versions=torch.where(begun.completion_mask, version, -1)))
        if not bool(unfinished(drafts[0], longest).any()):
            return drafts.popleft()


def version_metrics(rollout: Rollout, version: int) -> dict[str, float]:
    """How old a rollout's tokens are, in versions (= steps) before the present one, and how mixed its responses."""
    assert rollout.versions is not None
    ages = version - rollout.versions[rollout.completion_mask]
    rows = [row[mask].unique().numel() for row, mask in zip(rollout.versions, rollout.completion_mask, strict=True)]
    counts = torch.tensor(rows, dtype=torch.float64)
    return {
        "version_age": float(ages.double().mean()),
        "version_age_max": float(ages.max()),
        "old_tokens": float((ages > 0).double().mean()),
        "mixed_responses": float((counts > 1).double().mean()),
    }
