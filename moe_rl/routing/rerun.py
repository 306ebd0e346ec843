"""Listeners that change or watch the live choice: selection noise, a selection bias, margins.

Noise and margins run a router once more, on copies and without gradients, before it runs, and let it then choose what
it chose in that run. Neither is a model of training: noise is a stress test of a dose that can be set, margins tell how
close each choice was. A bias is added where a router ranks its experts.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.routing.calls import Call
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.router_stats import boundary_margin
from moe_rl.routing.selection import LINEAR, MAX, TOPK, Job, Selector, selection_mode


def _rerun(
    name: str, probe: Selector, module: nn.Module, args: Any, kwargs: Any, bias: Tensor | None, watch: TorchFunctionMode
) -> Tensor:
    """`[N,K]` ids that the router chooses under `watch`."""
    job = Job(bias=bias)
    copies = [a.clone() if isinstance(a, Tensor) else a for a in args]  # some scale their input in place
    with torch.no_grad(), selection_mode(name, probe, job), watch:
        module.forward(*copies, **kwargs)
    if job.chosen is None:
        raise RoutingError(f"site {name} ranked no experts in this forward")
    return job.chosen


class _Noise(TorchFunctionMode):
    """Adds Gaussian noise to the linear map that makes the router's logits."""

    def __init__(self, probe: Selector, sigma: float, generator: torch.Generator | None) -> None:
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
    """Finds out what a router would choose under noisy logits, and has it choose that."""

    def __init__(self, sigma: float, generator: torch.Generator | None) -> None:
        self.sigma, self.generator = sigma, generator

    def begin(self, call: Call) -> None:
        call.disturb = self.choose

    def end(self, call: Call, cache: Any) -> None:
        pass

    def finish(self) -> None:
        pass

    def choose(
        self, name: str, probe: Selector, module: nn.Module, args: Any, kwargs: Any, bias: Tensor | None
    ) -> Tensor:
        return _rerun(name, probe, module, args, kwargs, bias, _Noise(probe, self.sigma, self.generator))


class Bias:
    """Has every router rank its scores with a bias added."""

    def __init__(self, bias: tuple[Tensor, ...]) -> None:
        self.bias = bias

    def begin(self, call: Call) -> None:
        for index, bias in enumerate(self.bias):
            job = call.job(index)
            job.bias = bias if job.bias is None else job.bias + bias.to(job.bias)

    def end(self, call: Call, cache: Any) -> None:
        pass

    def finish(self) -> None:
        pass


class _Watch(TorchFunctionMode):
    """Keeps the scores that a router ranks."""

    def __init__(self, probe: Selector) -> None:
        super().__init__()
        self.probe, self.calls = probe, 0
        self.scores: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (MAX if self.probe.by_max else TOPK):
            if self.calls == (0 if self.probe.by_max else self.probe.selection):
                self.scores = (args[0] if args else kwargs["input"]).detach()
            self.calls += 1
        return func(*args, **(kwargs or {}))


class Margins:
    """Margins of the choices of every router, `.values`."""

    def __init__(self, names: list[str]) -> None:
        self._names = {name: index for index, name in enumerate(names)}
        self._now: list[Tensor | None] = []  # of the call that is under way
        self._calls: list[tuple[int, int, list[Tensor | None]]] = []

    def begin(self, call: Call) -> None:
        self._now = [None] * len(self._names)
        call.disturb = self.read

    def end(self, call: Call, cache: Any) -> None:
        self._calls.append((call.batch, call.length, self._now))

    def finish(self) -> None:
        pass

    def read(
        self, name: str, probe: Selector, module: nn.Module, args: Any, kwargs: Any, bias: Tensor | None
    ) -> Tensor:
        watch = _Watch(probe)
        ids = _rerun(name, probe, module, args, kwargs, bias, watch)
        if watch.scores is None:
            raise RoutingError(f"site {name} ranked no experts in this forward")
        scores = watch.scores.reshape(-1, probe.num_experts)
        scores = scores if bias is None else scores + bias.to(scores.device)
        never = torch.full((len(scores),), float("inf"), device=scores.device)
        margin = boundary_margin(scores.float(), probe.k) if probe.k < probe.num_experts else never
        self._now[self._names[name]] = margin.cpu()
        return ids

    @property
    def values(self) -> Float[Tensor, "B T L"]:
        """float32, on the CPU; NaN at sites without a choice; calls of one length joined along the batch. RoutingError
        for calls of several lengths, as those of generate() are."""
        if not self._calls:
            raise RoutingError("nothing was read: no call of the model happened inside the context")
        lengths = sorted({length for _, length, _ in self._calls})
        if len(lengths) > 1:
            raise RoutingError(
                f"margins of calls of different lengths {lengths} do not make one batch; read them apart"
            )
        parts = []
        for batch, length, rows in self._calls:
            none = torch.full((batch * length,), float("nan"))
            parts.append(torch.stack([none if row is None else row for row in rows], -1).view(batch, length, -1))
        return torch.cat(parts)
