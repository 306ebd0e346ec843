"""Interception of a router's selection: its top-k call is answered with given experts and their live scores.

`Selection` is a `TorchFunctionMode` that is on while one router runs. It lets every operation pass except the router's
own selection, which it answers with `(scores.gather(-1, forced), forced)`. What follows (removing a bias,
renormalising, scaling, casting) stays the model's code, so that gates are live, exact and differentiable for every
family. The mode counts the selections: a router that selects otherwise than when it was checked is an error.
"""

import os
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from moe_rl.routing import refusals
from moe_rl.routing.partial import Holes, completed, fill
from moe_rl.routing.traced import no_type_check

TOPK = frozenset({torch.topk, torch.Tensor.topk})
MAX = frozenset({torch.max, torch.Tensor.max})
LINEAR = frozenset({torch.nn.functional.linear, torch.mm, torch.matmul, torch.Tensor.matmul, torch.addmm})
FILL = frozenset({torch.masked_fill, torch.Tensor.masked_fill})
# Called to compute an answer; not one of the functions that are intercepted. If a router is compiled as a frame of its
# own, its graph may run under the mode, and an intercepted function in the graph would be answered a second time.
_topk = torch.ops.aten.topk

_CHECKPOINTING = (
    os.path.join("torch", "utils", "checkpoint.py"),
    os.path.join("activation_checkpointing", "checkpointing.py"),
)
_known: dict[str, bool] = {}  # by file name: whether torch's checkpoint functions are in it


@dataclass(frozen=True)
class Selector:
    """How one site selects its experts, in train or in eval mode, as the self-check found out.

    num_experts, k: width of the scores that are ranked (a skip or zero expert counts) and experts per token.
    calls, selection: how many `topk` calls the router makes, and which of them selects experts (group-limited routers
        make three).
    depth: how many parents up the selection happens: 0 the router itself, 1 the block (DBRX).
    arrival: where the selected ids reach the experts: the child of the block and its argument, by place or by name;
        None where they arrive in another form (all experts run, slots sorted by expert, an id that is remapped).
    output: where in the output tuple the selected ids are, or None where no output holds them unchanged.
    by_max: the selection is a sequence of `max` calls, not a `topk` (Phi-MoE).
    mode: the class of the mode that answers the router, if it is not `Selection` (see `sequential_max`).
    maps: output widths of the router's linear maps up to the one that makes the logits, to which selection noise is
        added; empty: none does.
    grouped: the router first chooses some groups of experts, and ranks only the experts in these groups.
    """

    num_experts: int
    k: int
    calls: int = 1
    selection: int = 0
    depth: int = 0
    arrival: tuple[str, int | str] | None = None
    output: int | None = None
    by_max: bool = False
    mode: "type[Selection] | None" = None
    maps: tuple[int, ...] = ()
    grouped: bool = False


@no_type_check
@dataclass(slots=True, eq=False)
class Job:
    """The task of one site in one model call, and its results.

    forced: `[N,K]` int64, -1 where the slot is chosen live; None: all live.
    holes: which of `forced` may be -1: none, whole rows, or single slots. Decided once per replay, because a test of
        the data in here would wait for the device.
    bias: `[E]`, added to the scores where experts are ranked, and nowhere else; None: none.
    shadow: whether to also rank live. Results: `chosen` [N,K]; with shadow also `live` [N,K], and the scores of both
        choices: `scores` [N,K] of what was used, `best` [N,K] of what the router prefers.
    answer: the tensor of ids with which the selection was answered, and how often it had been written to by then.
    """

    forced: Tensor | None = None
    bias: Tensor | None = None
    holes: Holes = "none"
    shadow: bool = False
    chosen: Tensor | None = None
    live: Tensor | None = None
    best: Tensor | None = None
    scores: Tensor | None = None
    answer: tuple[Tensor, int] | None = None
    closed: bool = False
    imposed: int = 0  # by this many replays

    def is_answer(self, ids: Tensor) -> bool:
        """Return whether `ids` is the very tensor that the router was given, never written to. If so, it holds what was
        forced."""
        return self.answer is not None and self.answer[0] is ids and self.answer[1] == ids._version

    def close(self) -> None:
        """Take no more results after the forward, and keep none."""
        self.closed = True
        self.answer = None
        self.chosen = self.live = self.best = self.scores = None

    def impose(self, forced: Tensor, holes: Holes) -> None:
        """Force the ids of one more replay; where two force a slot, the later one (the inner replay) decides."""
        self.imposed += 1
        if self.forced is not None and holes != "none":
            forced = completed(forced, self.forced)
            holes = self.holes if self.holes == "none" or holes == self.holes else "slots"
        self.forced, self.holes = forced, holes


@no_type_check
def beneath(frame: FrameType | None) -> bool:
    """Return whether the caller runs inside the call that has the Python frame `frame`."""
    own: FrameType | None = sys._getframe(1)
    while own is not None and own is not frame:
        own = own.f_back
    return own is not None


@no_type_check
def stack(until: FrameType | None) -> tuple[bool, bool]:
    """Return whether the caller's caller runs beneath the frame `until`, and whether there is a checkpoint between.

    Checkpoint functions are recognised by file name, because nothing else in torch says, before it happens, that a
    forward will be run again.
    """
    frame: FrameType | None = sys._getframe(2)
    checkpointed = False
    while frame is not None and frame is not until:
        name = frame.f_code.co_filename
        found = _known.get(name)
        if found is None:
            found = _known[name] = name.endswith(_CHECKPOINTING)
        checkpointed = checkpointed or found
        frame = frame.f_back
    return frame is not None, checkpointed


@no_type_check
class Selection(TorchFunctionMode):
    """Torch function mode for routers that select with one `topk`.

    frame: Python frame of the router's call; only this call is answered, because a KeyboardInterrupt, after which torch
        runs no hook, leaves the mode on. None if the call is compiled together with its hooks.
    """

    def __init__(self, name: str, probe: Selector, job: Job, frame: FrameType | None = None) -> None:
        super().__init__()
        self.name, self.probe, self.job, self.frame = name, probe, job, frame
        self.calls = 0
        self.answered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TOPK and self.concerned():
            self.calls += 1
            if self.calls - 1 == self.probe.selection:
                return self.select(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    def concerned(self) -> bool:
        """Return whether the operation comes from the router that this mode is for."""
        return self.frame is None or is_dynamo_compiling() or beneath(self.frame)

    def check(self) -> None:
        """Raise RoutingError if the router, which has run, selected otherwise than when it was checked."""
        if self.calls != self.probe.calls or not self.answered:
            raise refusals.selects_otherwise(self.name, self.calls, self.probe.calls, self.probe.by_max)

    def select(self, input: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:  # argument names of torch.topk
        """Answer the router's `topk` with the ids that are used, forced or live, and their live scores."""
        job = self.job
        if input.shape[-1] != self.probe.num_experts or k != self.probe.k:
            raise refusals.ranks_otherwise(self.name, input.shape[-1], k, (self.probe.num_experts, self.probe.k))
        if job.forced is not None and job.holes == "none" and not job.shadow:
            ids = self.shaped(input)
            values = input.gather(-1, ids)
            self.report(ids)
            return torch.return_types.topk((values, ids))
        ranked = self.ranked(input)
        if job.bias is not None:
            ranked = ranked + job.bias.to(ranked.device)
        best, live = _topk(ranked, k, *args, **kwargs)
        if job.bias is not None:
            best = input.gather(-1, live)  # gates come from the scores without the bias
        if job.forced is None:
            values, ids = best, live
        else:
            ids = fill(self.shaped(input), live, ranked, job.holes)
            values = input.gather(-1, ids)
        self.report(ids, live, best, values)
        return torch.return_types.topk((values, ids))

    def ranked(self, scores: Tensor) -> Tensor:
        """Return the scores that the live choice is made of."""
        return scores

    def shaped(self, scores: Tensor) -> Tensor:
        """Return the forced ids in the shape of the router's scores. Raises RoutingError if the row count does not
        fit."""
        forced = self.job.forced
        assert forced is not None
        if forced.shape[0] * self.probe.num_experts != scores.numel():
            raise refusals.other_rows(self.name, forced.shape[0], scores.shape)
        # A copy: a block may write into its input, and must not change the ids that the experts' ids are compared with.
        return forced.to(scores.device, copy=True).reshape(*scores.shape[:-1], self.probe.k)

    def report(
        self, ids: Tensor, live: Tensor | None = None, best: Tensor | None = None, scores: Tensor | None = None
    ) -> None:
        """Store the ids that are used; with shadow also the live choice, its scores and those of the ids."""
        self.answered = True
        job, k = self.job, self.probe.k
        if job.closed:
            return  # a recomputation for the backward pass: the call has been read already
        job.chosen = ids.reshape(-1, k)
        if not (is_dynamo_compiling() or ids.is_inference()):  # only then torch counts the writes to a tensor
            job.answer = ids, ids._version
        if job.shadow and live is not None and best is not None and scores is not None:
            used = scores.detach().clone()  # a copy: some routers renormalise in place
            best = used if best is scores else best.detach()
            if job.bias is not None:  # the bias is part of what is ranked, not of the gates
                bias = job.bias.to(used.device)
                best, used = best + bias[live], used + bias[ids]
            job.live, job.best, job.scores = live.reshape(-1, k), best.reshape(-1, k), used.reshape(-1, k)
