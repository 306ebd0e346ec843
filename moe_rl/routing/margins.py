"""How close each choice of experts was: the gap between the last expert chosen and the first that was not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rl.routing.calls import Call
from moe_rl.routing.errors import RoutingError
from moe_rl.routing.router_scores import boundary_margin
from moe_rl.routing.selection import MAX, TOPK, Job, Probe, selection_mode
from moe_rl.routing.tap import _acquire, _listening


class _Watch(TorchFunctionMode):
    """Keeps the scores that a router ranks."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe, self.calls = probe, 0
        self.scores: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (MAX if self.probe.by_max else TOPK):
            if self.calls == (0 if self.probe.by_max else self.probe.selection):
                self.scores = args[0].detach()
            self.calls += 1
        return func(*args, **(kwargs or {}))


class Margins:
    """A listener: before a router runs, it runs once more on copies and its scores are read. The choice is its own."""

    def __init__(self, sites: int) -> None:
        self._sites = sites
        self._names: dict[str, int] = {}
        self._calls: list[tuple[int, int, list[Tensor | None]]] = []

    def begin(self, call: Call) -> None:
        self._calls.append((call.batch, call.length, [None] * self._sites))
        call.disturb = self.read

    def end(self, call: Call, cache: Any) -> None:
        pass

    def read(self, name: str, probe: Probe, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
        """`[N,K]`: the ids that the router chooses by itself."""
        job = Job()
        copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
        with torch.no_grad(), selection_mode(name, probe, job, module.training), _Watch(probe) as watch:
            module.forward(*copies, **kwargs)
        if job.chosen is None or watch.scores is None:
            raise RoutingError(f"site {name} ranked no experts in this forward")
        scores = watch.scores.reshape(-1, probe.num_experts)
        never = torch.full((len(scores),), float("inf"), device=scores.device)
        margin = boundary_margin(scores.float(), probe.k) if probe.k < probe.num_experts else never
        self._calls[-1][2][self._names[name]] = margin.cpu()
        return job.chosen

    @property
    def values(self) -> Float[Tensor, "B T L"]:
        """float32, on the CPU; NaN at sites without a choice; calls of one length joined along the batch."""
        if not self._calls:
            raise RoutingError("nothing was read: no call of the model happened inside the context")
        parts = []
        for batch, length, rows in self._calls:
            none = torch.full((batch * length,), float("nan"))
            parts.append(torch.stack([none if row is None else row for row in rows], -1).view(batch, length, -1))
        return torch.cat(parts)


@contextmanager
def record_margins(model: nn.Module) -> Iterator[Margins]:
    """Record `boundary_margin` of the scores that every router ranks: s_(k) - s_(k+1), in their units (probabilities
    where softmax comes before the selection, as in Qwen3-MoE, OLMoE and Mixtral; logits where it comes after, as in
    Granite; with the selection bias where there is one). A change of scores below half of it cannot change the choice;
    infinite where all experts are taken.

    Outputs are not changed. Not inside `noisy_routes` or a replay: the margin is that of the live choice. Raises as
    `record_routes`.
    """
    tap, names = _acquire(model)
    margins = Margins(len(names))
    margins._names = {name: index for index, name in enumerate(tap.names)}
    with _listening(tap, margins):
        yield margins
