"""Rollouts of several engines or processes as one: padding, joining."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_rl.rollout.completions import Rollout
from moe_rl.routing import RoutedExperts


def padded(rollout: Rollout, left: int, right: int, token: int = 0) -> Rollout:
    """The rollout with so many more columns of padding, whose `token` nothing reads, before and behind; copied."""
    values = {"input_ids": token, "versions": -1}
    wide: dict[str, Any] = {
        name: F.pad(part, (left, right), value=values.get(name, 0))
        for name, part in rollout.parts.items()
        if isinstance(part, Tensor) and part.ndim == 2
    }
    if rollout.routes is not None:
        wide["routes"] = rollout.routes.realign(rollout.attention_mask, wide["attention_mask"])
    return replace(rollout, **wide)


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Rollouts of one group size as one, in order: prompts padded on the left and completions on the right to the
    widest. Routes and versions are kept where all have them."""
    widths = [(part.first, part.input_ids.shape[1] - part.first) for part in parts]
    left, right = (max(of) for of in zip(*widths, strict=True))
    wide = [padded(part, left - before, right - behind) for part, (before, behind) in zip(parts, widths, strict=True)]
    joined: dict[str, Any] = {"routes": None, "versions": None}
    for name in set.intersection(*(set(part.parts) for part in wide)):
        of_all: list[Any] = [part.parts[name] for part in wide]
        joined[name] = RoutedExperts.cat(of_all) if name == "routes" else torch.cat(of_all)
    return replace(
        parts[0],
        **joined,
        problems=[problem for part in parts for problem in part.problems],
        completions=[text for part in parts for text in part.completions],
    )
