"""What a run's models and optimizers weigh, for comparisons of methods by memory."""

from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.training.ranks import Ranks


def memory_metrics(
    trained: dict[str, tuple[nn.Module, Any]], frozen: dict[str, nn.Module], ranks: Ranks
) -> dict[str, int]:
    """Parameters, and bytes of weights and optimizer states, of everything that a method trains or keeps.

    `<name>_parameters`, `<name>_bytes` for each model; `<name>_optimizer_bytes` for those that are trained, 0 before
    the first update; on a GPU also `peak_bytes`, the most that torch held at once since the process began, the largest
    over ranks. Parameters that two models share (a LoRA policy and its reference) count for the first alone; of sharded
    ones all shards count.
    """
    found: dict[str, int] = {}
    counted: set[int] = set()
    for name, module in ({name: module for name, (module, _) in trained.items()} | frozen).items():
        own = [p for p in module.parameters() if id(p) not in counted]
        counted |= {id(p) for p in own}
        found[f"{name}_parameters"] = sum(p.numel() for p in own)
        found[f"{name}_bytes"] = sum(p.numel() * p.element_size() for p in own)
    for name, (_, optimizer) in trained.items():
        states = [value for state in optimizer.state.values() for value in state.values()]
        found[f"{name}_optimizer_bytes"] = sum(s.numel() * s.element_size() for s in states if isinstance(s, Tensor))
    if ranks.device.type == "cuda":
        found["peak_bytes"] = int(ranks.largest(torch.cuda.max_memory_allocated(ranks.device)))
    return found
