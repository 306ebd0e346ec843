"""The same-weights noise floor: what changes when nothing changes but arithmetic.

Rows of kind "floor", once per run, before its first update, on the probe's subset. Each compares the policy with itself
(equal weights, equal tokens) under one `variant`:

- "repeat"   the same forward once more
- "batch"    the same sequences in pieces (other batch shapes, equal padding)
- "experts"  another experts implementation of transformers (eager against grouped_mm); left out where there is none
- "bf16"     a copy of the weights rounded to bfloat16, computing in it

A change rate or a log-ratio below the floor of a run's own arithmetic ("repeat", "batch", "experts") says nothing of
its updates. "bf16" is what a rollout engine of that precision would add. In fp32 on a CPU the first three are 0 or next
to it: log-probabilities agree to some 1e-6 nats and no expert changes, save at ties closer than that.

The names are those of the probe's and the engines' change counts, by site and as histograms too, so that every change
rate has its floor; and by position in the response.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from moe_rl.rollout.sampler import hf_model
from moe_rl.routing import RoutedExperts, UnsupportedModelError, change_counts, record_routes
from moe_rl.training.batch import Batch
from moe_rl.training.facts import change_facts, logp_gap, position_facts

if TYPE_CHECKING:
    from moe_rl.training.trainer import Trainer

T = TypeVar("T")
PIECES = 4
OTHER = {"grouped_mm": "eager", "eager": "grouped_mm", "batched_mm": "eager"}
"""What an experts implementation is compared with; all others are compared with eager."""


@torch.no_grad()
def log_floor(trainer: "Trainer", part: Batch) -> None:
    """Append one row per variant that this model and machine can run."""
    model = trainer.model
    model.eval()
    base = _score(trainer, model, [part])

    def row(variant: str, detail: str, found: tuple[Tensor, RoutedExperts] | None) -> None:
        if found is not None:
            trainer.log.append("floor", trainer.step, variant=variant, detail=detail, **compare(part, base, found))

    row("repeat", "same forward", _score(trainer, model, [part]))
    pieces = [part.rows(rows) for rows in torch.arange(len(part)).chunk(PIECES)]
    row("batch", f"{len(part)} sequences at once and in pieces of {len(pieces[0])}", _score(trainer, model, pieces))
    with other_experts(model) as names:
        if names:
            row("experts", f"{names[0]} and {names[1]}", attempt("experts", lambda: _score(trainer, model, [part])))
    dtype = next(model.parameters()).dtype
    if dtype != torch.bfloat16 and trainer.accelerator.num_processes == 1:  # a sharded model cannot be copied
        rounded = attempt("bf16", lambda: _score(trainer, rounded_copy(model), [part]))
        row("bf16", f"{str(dtype).removeprefix('torch.')} and bfloat16", rounded)


def attempt(variant: str, score: Callable[[], T]) -> T | None:
    """What `score` gives, or None with a warning where kernels or memory do not allow it: grouped_mm wants strides of
    16 bytes, for one, and a floor that cannot be measured is no reason to end a run."""
    try:
        return score()
    except (RuntimeError, UnsupportedModelError) as error:
        warnings.warn(f"noise floor: {variant} is left out, it cannot be run here: {error}", stacklevel=2)
        return None


def compare(part: Batch, old: tuple[Tensor, RoutedExperts], new: tuple[Tensor, RoutedExperts]) -> dict[str, Any]:
    """Changes and log-probability gaps of two scorings of one batch, on its response tokens."""
    mask = part.completion_mask
    return {
        **change_facts(change_counts(old[1], new[1], mask, pair="engines")),
        **position_facts(old[1], new[1], mask),
        **logp_gap(new[0].float(), old[0].float(), mask),
    }


@contextmanager
def other_experts(model: nn.Module) -> Iterator[tuple[str, str] | None]:
    """Inside, the experts are computed by another implementation; None where the model has but one."""
    inner: Any = hf_model(model)
    name = getattr(getattr(inner, "config", None), "_experts_implementation", None)
    other = OTHER.get(str(name), "eager")
    try:
        inner.set_experts_implementation(other)
    except (ValueError, AttributeError, ImportError):
        yield None
        return
    try:
        yield str(name), other
    finally:
        inner.set_experts_implementation(name)


def rounded_copy(model: nn.Module) -> nn.Module:
    """A bf16 copy of the weights in the same modules: parameters are rounded as they are copied, never held twice."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=False)
        for p in model.parameters()
        if p.is_floating_point()
    }
    return copy.deepcopy(model, memo).eval()


def _score(trainer: "Trainer", model: nn.Module, parts: list[Batch]) -> tuple[Tensor, RoutedExperts]:
    logps, routes = [], []
    for part in parts:
        with record_routes(model) as recording:
            logps.append(trainer.logps(model, part).logps)
        routes.append(recording.routes)
    return torch.cat(logps), RoutedExperts.cat(routes)
