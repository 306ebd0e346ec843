"""AdamW with fp32 master weights, so that small updates of low-precision weights are not lost.

A bf16 weight has 8 significant bits: an update smaller than 2^-9 of it is rounded away. At a learning rate of 1e-6 that
is nearly every update of nearly every weight (weights are of the order 1e-2), and such a policy does not learn, without
any error. So weights of less than 32 bits get a master copy in fp32, to which updates are applied; the model holds the
rounded copy. Training through weights of a few bits (`optim.weight_format`) works alike: the master weights get the
gradient at the rounded weights.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from moe_rl.rollout.engines import round_layers
from moe_rl.routing import router_parameters
from moe_rl.training.config import OptimConfig
from moe_rl.training.ranks import Ranks

LOW = (torch.bfloat16, torch.float16)


class MasterAdamW(Optimizer):
    """AdamW (arXiv 1711.05101, algorithm 2) with its moments and a master copy of each weight in fp32.

    12 bytes of state per parameter: `master`, `exp_avg`, `exp_avg_sq`. Gradients come in the weights' own dtype.
    For fp32 weights use `torch.optim.AdamW`, whose result is the same, unless they are rounded.

    Args:
        rounding: rounds the weights in place, after every step; the master weights, which begin as copies of the
            weights before rounding, get the gradient at the rounded weights as if rounding were the identity (the
            straight-through estimator, arXiv 1308.3432).

    >>> w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = MasterAdamW([w], lr=1e-3)
    >>> for _ in range(4):  # each is a quarter of what bf16 can resolve just below 1
    ...     w.grad = torch.ones_like(w)
    ...     optimizer.step()
    >>> w.item()
    0.99609375
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rounding: Callable[[], None] | None = None,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.rounding = rounding
        for group in self.param_groups if rounding else ():
            for parameter in group["params"]:
                self._begin(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # overloads
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("MasterAdamW takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
                elif self.rounding:  # its weights are rounded anew from its master, too
                    parameter.copy_(self.state[parameter]["master"])
        if self.rounding:
            self.rounding()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, but keep all states in fp32, which torch casts to the dtype of their weights."""
        super().load_state_dict(state_dict)
        own = (parameter for group in self.param_groups for parameter in group["params"])
        saved = (index for group in state_dict["param_groups"] for index in group["params"])
        for parameter, index in zip(own, saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[parameter][name] = value.to("cpu" if name == "step" else parameter.device)

    def _begin(self, parameter: Tensor) -> None:
        """Create the state of a parameter: step count, master copy, moments."""
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["master"] = parameter.detach().float().clone()
        state["exp_avg"] = torch.zeros_like(state["master"])
        state["exp_avg_sq"] = torch.zeros_like(state["master"])

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Apply AdamW to the master copy of a parameter, and copy it to the parameter."""
        if not self.state[parameter]:
            self._begin(parameter)
        state = self.state[parameter]
        adamw(
            [state["master"]],
            [parameter.grad.float()],  # type: ignore[union-attr]  # filtered above
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        parameter.copy_(state["master"])


def make_optimizer(
    groups: list[dict[str, Any]],
    betas: tuple[float, float],
    weight_decay: float,
    master_weights: bool = True,
    rounding: Callable[[], None] | None = None,
) -> Optimizer:
    """Return AdamW over parameter groups.

    It has master weights if `rounding` is given, or if `master_weights` is True and any weight is bf16 or fp16."""
    parameters = [p for group in groups for p in group["params"]]
    if rounding or (master_weights and any(p.dtype in LOW for p in parameters)):
        return MasterAdamW(groups, betas=betas, weight_decay=weight_decay, rounding=rounding)
    fused = all(p.device.type in ("cpu", "cuda", "meta") for p in parameters)
    return torch.optim.AdamW(groups, betas=betas, weight_decay=weight_decay, fused=fused)


def policy_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return AdamW over the policy, with the routers' own parameters (adapters included) in a group of their own.

    Each group has its learning-rate multiplier under `multiplier`. From now on frozen routers get no gradient and, with
    `optim.weight_format`, the policy's weights are rounded.

    Raises:
        ValueError: a multiplier for routers of which none is trained.
    """
    own = router_parameters(model)
    routers = set(own)
    rest = [p for p in model.parameters() if p not in routers]
    trained = config.freeze_router or any(p.requires_grad for p in own)
    if config.router_lr_multiplier != 1 and not trained:
        raise ValueError(
            f"optim.router_lr_multiplier: {config.router_lr_multiplier} has no effect: model.lora trains no router; "
            "set model.lora.train_router to true, or leave the multiplier out"
        )
    if config.freeze_router:
        for parameter in own:
            parameter.requires_grad_(False)
    groups = [
        {"params": [p for p in rest if p.requires_grad], "multiplier": 1.0},
        {"params": [p for p in own if p.requires_grad], "multiplier": config.router_lr_multiplier},
    ]
    groups = [{**group, "lr": config.learning_rate} for group in groups if group["params"]]
    if config.weight_format is None:
        return make_optimizer(groups, config.betas, config.weight_decay, config.master_weights)
    rounding = partial(round_layers, model, config.weight_format, frozen=False)
    optimizer = make_optimizer(groups, config.betas, config.weight_decay, rounding=rounding)
    round_layers(model, config.weight_format)
    return optimizer


def memory_metrics(
    trained: dict[str, tuple[nn.Module, Any]], frozen: dict[str, nn.Module], ranks: Ranks
) -> dict[str, int]:
    """Return numbers of parameters, and bytes of weights and optimizer states, of all models that a method holds.

    `<name>_parameters`, `<name>_bytes` for each model; `<name>_optimizer_bytes` for those that are trained, 0 before
    the first update; on a GPU also `peak_bytes`, the most that torch held at once since the process began, the largest
    over ranks. Parameters that two models share (a LoRA policy and its reference) count for the first only; of sharded
    parameters the shards of all ranks count.
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
