"""Selection noise: a controlled dose of routing volatility. A stress test, not a method."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.routing.calls import Call
from moe_rl.routing.selection import LINEAR, Job, Probe, selection_mode


class _Noise(TorchFunctionMode):
    """Adds Gaussian noise to the linear map that makes the router's logits."""

    def __init__(self, probe: Probe, sigma: float, generator: torch.Generator | None) -> None:
        super().__init__()
        self.probe, self.sigma, self.generator, self.calls = probe, sigma, generator, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in LINEAR and isinstance(out, Tensor) and out.ndim:
            self.calls += 1
            if self.calls - 1 == self.probe.logits:
                device = self.generator.device if self.generator is not None else out.device
                noise = torch.randn(out.shape, generator=self.generator, device=device, dtype=torch.float32)
                # At least float32 from here on: in bfloat16 a small sigma would be rounded away.
                return out.to(torch.promote_types(out.dtype, torch.float32)) + self.sigma * noise.to(out.device)
        return out


class Noise:
    """A listener: before a router runs, find out what it would choose under noisy logits, and have it choose that."""

    def __init__(self, sigma: float, generator: torch.Generator | None) -> None:
        self.sigma, self.generator = sigma, generator

    def begin(self, call: Call) -> None:
        call.disturb = self.choose

    def end(self, call: Call, cache: Any) -> None:
        pass

    def choose(self, name: str, probe: Probe, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
        """`[N,K]` ids. The router runs once more, without gradients, on copies (some scale their input in place)."""
        job = Job()
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        noise = _Noise(probe, self.sigma, self.generator)
        with torch.no_grad(), selection_mode(name, probe, job, module.training), noise:
            module.forward(*copies, **kwargs)
        assert job.chosen is not None
        return job.chosen
