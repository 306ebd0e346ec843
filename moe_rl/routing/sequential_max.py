"""Modes for routers that do not select by one plain `topk`, and a mode that reads and changes a router's logits. The
first are for routers that mask closed groups of experts, and for Phi-MoE."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_rl.routing import refusals
from moe_rl.routing.partial import is_held
from moe_rl.routing.selection import FILL, LINEAR, MAX, Selection, Selector
from moe_rl.routing.traced import no_type_check


@no_type_check
class SequentialMax(Selection):
    """Mode for Phi-MoE's sparsemixer, which takes k times a `max` of the remaining scores (in train mode, of a sample).

    It makes no `topk` call. The `max` of slot j returns the forced expert. The threshold stays that of the live
    maximum, and the mask drawn around this maximum is opened for the expert of slot j, so that its gate is never zero.
    Shadow reports the top k of the logits.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.per_slot = self.probe.calls // self.probe.k  # 1, or 3 in train mode: threshold, sample, Heun's rule
        self.slots: list[Tensor] = []
        self.top: tuple[Tensor, Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MAX and "dim" in kwargs and self.concerned():
            return self.answer(args, kwargs)
        if (
            func in FILL
            and self.concerned()
            and self.job.forced is not None
            and args[0].shape[-1] == self.probe.num_experts
        ):
            own = self.slot(args[0], (self.calls - 1) // self.per_slot)
            return torch.ops.aten.masked_fill(
                args[0], args[1] & ~is_held(own, self.probe.num_experts), *args[2:], **kwargs
            )
        return func(*args, **kwargs)

    def slot(self, scores: Tensor, j: int) -> Tensor:
        """Return the forced ids of slot j."""
        return self.shaped(scores)[..., j : j + 1]

    def answer(self, args: Any, kwargs: Any) -> Any:
        """Answer one `max` of the router; after the last slot, report the choice."""
        scores, (values, ids) = args[0], torch.ops.aten.max(*args, **kwargs)
        j, step = divmod(self.calls, self.per_slot)
        self.calls += 1
        if self.calls == 1 and self.job.shadow:
            self.top = (scores, *torch.ops.aten.topk(scores, self.probe.k))
        if step == (0 if self.per_slot == 1 else 1):
            chosen = ids if kwargs.get("keepdim") else ids.unsqueeze(-1)
            if self.job.forced is not None:
                own = self.slot(scores, j)
                chosen = own.where(own >= 0, chosen)
            self.slots.append(chosen)
            ids = chosen if kwargs.get("keepdim") else chosen.squeeze(-1)
            if j + 1 == self.probe.k:
                used = torch.cat(self.slots, -1)
                logits, best, live = self.top or (None, None, None)
                self.report(used, live, best, None if logits is None else logits.gather(-1, used))
        return torch.return_types.max((values, ids))


@no_type_check
class MaskedSelection(Selection):
    """Mode for routers that mask the experts of closed groups; some of these read gates from the masked scores.

    A forced expert has to keep its score, whichever groups are open now.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.opened: Tensor | None = None
        self.masked: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FILL and self.job.forced is not None and self.concerned():
            return self.open(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def open(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer the `masked_fill` of the scores such that forced experts keep their scores."""
        scores, mask = args[0], args[1] if len(args) > 1 else kwargs.get("mask")
        if scores.shape[-1] != self.probe.num_experts or not isinstance(mask, Tensor) or mask.shape != scores.shape:
            return func(*args, **kwargs)
        if self.job.holes == "none" and not self.job.shadow:
            return scores  # nothing is ranked any more, and ranking is all the mask is for
        self.masked = torch.ops.aten.masked_fill(*args, **kwargs)
        self.opened = scores.where(is_held(self.shaped(scores), scores.shape[-1]), self.masked)
        return self.opened

    def ranked(self, scores: Tensor) -> Tensor:
        return self.masked if self.masked is not None and scores is self.opened else scores


class WithLogits(TorchFunctionMode):
    """Mode that hands the router's input and logits to `become`, and continues with the logits it returns."""

    def __init__(self, probe: Selector, become: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.maps, self.become, self.calls, self.known = probe.maps, become, 0, True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in LINEAR and isinstance(out, Tensor) and out.ndim and self.calls < len(self.maps):
            self.known = self.known and out.shape[-1] == self.maps[self.calls]
            self.calls += 1
            if self.calls == len(self.maps) and self.known:
                place, name = (1, "mat1") if func is torch.addmm else (0, "input")
                return self.become(args[place] if place < len(args) else kwargs[name], out)
        return out

    def check(self, name: str) -> None:
        """Raise RoutingError if the site `name`, which has run, has other linear maps than when it was checked."""
        if self.calls < len(self.maps) or not self.known:
            raise refusals.other_maps(name)
