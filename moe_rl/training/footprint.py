"""What a run's models and optimizers weigh, for comparisons of methods by memory."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer


def footprint(trainer: "Trainer") -> dict[str, int]:
    """Parameters, and bytes of weights and optimizer states, of everything that the method trains or keeps.

    `<name>_parameters`, `<name>_bytes` for model (the policy), value (PPO), reward (learned), reference, initial, as
    far as the method has them; `<name>_optimizer_bytes` for those that are trained, 0 before the first update; on a GPU
    also `peak_bytes`, the most that torch held at once since the process began.
    """
    found: dict[str, int] = {}
    modules = {name: module for name, (module, _) in trainer.trained.items()} | trainer.frozen
    for name, module in modules.items():
        found[f"{name}_parameters"] = sum(p.numel() for p in module.parameters())
        found[f"{name}_bytes"] = sum(p.numel() * p.element_size() for p in module.parameters())
    for name, (_, optimizer) in trainer.trained.items():
        states = [value for state in optimizer.state.values() for value in state.values()]
        found[f"{name}_optimizer_bytes"] = sum(s.numel() * s.element_size() for s in states if isinstance(s, Tensor))
    if trainer.accelerator.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(trainer.accelerator.device)
    return found
