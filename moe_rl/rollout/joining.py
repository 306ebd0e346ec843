"""Rollouts of several engines or processes as one: padding, joining."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from moe_rl.rollout.completions import TENSORS, Rollout
from moe_rl.routing import RoutedExperts


def padded(rollout: Rollout, left: int, right: int) -> Rollout:
    """The rollout with so many more columns of padding, whose tokens are 0, which nothing reads, before and behind."""
    versions = rollout.versions
    tensors: dict[str, Any] = {name: getattr(rollout, name) for name in TENSORS}
    wide: dict[str, Any] = {
        n: F.pad(value, (left, right)) if value.ndim == 2 else value for n, value in tensors.items()
    }
    routes = rollout.routes
    return replace(
        rollout,
        **wide,
        routes=None if routes is None else routes.realign(rollout.attention_mask, wide["attention_mask"]),
        versions=None if versions is None else F.pad(versions, (left, right), value=-1),
    )


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Rollouts of one group size as one, in order: prompts padded on the left and completions on the right to the
    widest. Routes and versions are kept where all have them."""
    widths = [(part.first, part.input_ids.shape[1] - part.first) for part in parts]
    left, right = (max(of) for of in zip(*widths, strict=True))
    wide = [padded(part, left - before, right - behind) for part, (before, behind) in zip(parts, widths, strict=True)]
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in wide]) for name in TENSORS}
    routes = [part.routes for part in wide if part.routes is not None]
    versions = [part.versions for part in wide if part.versions is not None]
    return replace(
        parts[0],
        **joined,
        problems=[problem for part in parts for problem in part.problems],
        completions=[text for part in parts for text in part.completions],
        routes=RoutedExperts.cat(routes) if len(routes) == len(parts) else None,
        versions=torch.cat(versions) if len(versions) == len(parts) else None,
    )
