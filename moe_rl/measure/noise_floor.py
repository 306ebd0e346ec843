"""Noise floor: changes of routes and log-probabilities between scorings of equal weights, by arithmetic alone.

A text is scored again with equal weights under a few variants:

- "repeat"   the same forward once more
- "batch"    the same sequences in pieces (other batch shapes, equal padding)
- "experts"  another experts implementation of transformers (eager against grouped_mm); left out if there is none
- "bf16"     a copy of the weights rounded to bfloat16, which computes in bfloat16

A change rate or a log-ratio below the floor of a model's own arithmetic ("repeat", "batch", "experts") says nothing
about its updates. "bf16" is the gap that a rollout engine of that precision would add. In fp32 on a CPU the first three
are 0 or close to 0: log-probabilities agree to some 1e-6 nats and no expert changes, except at ties closer than that.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from moe_rl.measure.logprobs import hf_model
from moe_rl.measure.metrics import change_metrics
from moe_rl.measure.peer_metrics import gap_metrics
from moe_rl.measure.scoring import Scored, TokenBatch, score_live
from moe_rl.measure.weights import dtypes_as_loaded
from moe_rl.routing import RoutedExperts, UnsupportedModelError, change_counts, flips_per_token
from moe_rl.routing.counts import in_order_of

PIECES = 4
OTHER_EXPERTS = {"grouped_mm": "eager", "eager": "grouped_mm", "batched_mm": "eager"}
"""The experts implementation that each one is compared with; all that are not listed are compared with eager."""


class Variant(NamedTuple):
    """One scoring with equal weights: its kind, the two compared sides in words, and its result."""

    name: str
    detail: str
    scored: Scored


class NoiseFloor:
    """Scorer of texts in every variant that the model and the machine can run.

    Args:
        bf16: also score with a rounded copy, made once and kept until `close`. A sharded model cannot be copied.

    Attributes:
        left_out: the reason why a variant was not run, by variant.
    """

    def __init__(self, bf16: bool = True):
        self.bf16 = bf16
        self.left_out: dict[str, str] = {}
        self._in_pieces = False  # some text was scored in pieces
        self._rounded: nn.Module | None = None

    @torch.no_grad()
    def variants(self, model: nn.Module, text: TokenBatch) -> Iterator[Variant]:
        """Yield the scoring of each variant, to be compared with `score_live(model, text)`."""
        yield Variant("repeat", "same forward", score_live(model, text))
        size = len(text.input_ids)
        if size == 1 and not self._in_pieces:
            self.left_out["batch"] = "one sequence has no other batch shape"
        if size > 1:
            self._in_pieces = True
            self.left_out.pop("batch", None)
            step = -(-size // PIECES)
            pieces = [score_live(model, piece) for piece in text.pieces(step)]
            whole = Scored(torch.cat([p.logps for p in pieces]), RoutedExperts.cat([p.routes for p in pieces]))
            yield Variant("batch", f"{size} sequences at once and in pieces of {step}", whole)
        own = experts_implementation(model)
        other = OTHER_EXPERTS.get(str(own), "eager")
        scored = None
        try:
            with experts_computed_by(model, other):
                scored = self._attempt("experts", lambda: score_live(model, text))
        except OtherExpertsError as error:
            self.left_out["experts"] = first_line(error)
        if scored:  # yielded outside of the context, so that the caller has the model as it is
            yield Variant("experts", f"{own} and {other}", scored)
        dtype = next(model.parameters()).dtype
        if not self.bf16 or dtype == torch.bfloat16:
            return
        if scored := self._attempt("bf16", lambda: score_live(self._copy(model), text)):
            yield Variant("bf16", f"{str(dtype).removeprefix('torch.')} and bfloat16", scored)

    def close(self) -> None:
        """Release the bf16 copy and its memory."""
        self._rounded = None

    def _attempt(self, variant: str, score: Callable[[], Scored]) -> Scored | None:
        """Return the scoring of a variant, or None (also in later calls) if kernels or memory do not allow it.

        The other variants are still measured. For example, grouped_mm needs strides of 16 bytes."""
        if variant in self.left_out:
            return None
        try:
            return score()
        except (RuntimeError, MemoryError, UnsupportedModelError) as error:
            self.left_out[variant] = first_line(error)
            self.close()
            return None

    def _copy(self, model: nn.Module) -> nn.Module:
        if self._rounded is None:
            need, free = 2 * sum(p.numel() for p in model.parameters()), free_bytes(next(model.parameters()).device)
            if free is not None and need > 0.8 * free:
                raise MemoryError(f"a bf16 copy takes {need / 2**30:.3g} GiB, {free / 2**30:.3g} are free")
            self._rounded = rounded_copy(model)
        return self._rounded


def floor_metrics(mask: Bool[Tensor, "B T"], base: Scored, other: Scored) -> dict[str, Any]:
    """Return the changes of routes and log-probability gaps between two scorings of one text on the tokens of `mask`.

    The names are those of the change metrics of updates. Changes are also given by site, as histograms and by
    position."""
    return {
        **change_metrics(change_counts(base.routes, other.routes, mask, pair="engines")),
        **position_metrics(base.routes, other.routes, mask),
        **gap_metrics(other.logps.float(), base.logps.float(), mask),
    }


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if there is no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class OtherExpertsError(RuntimeError):
    """Error for a model without an experts implementation of a given name; the message names both."""


def experts_implementation(model: nn.Module) -> str | None:
    """Return the name of the experts implementation of transformers that a model uses; None if it has none."""
    return getattr(getattr(hf_model(model), "config", None), "_experts_implementation", None)


@contextmanager
def experts_computed_by(model: nn.Module, name: str) -> Iterator[None]:
    """Context manager: the experts are computed by the implementation `name` of transformers.

    Raises OtherExpertsError on entry if the model has no implementation of that name."""
    inner: Any = hf_model(model)
    own = experts_implementation(model)
    try:
        inner.set_experts_implementation(name)
    except (ValueError, AttributeError, ImportError) as error:
        raise OtherExpertsError(f"{type(inner).__name__} has no experts implementation {name!r}: {error}") from error
    try:
        yield
    finally:
        inner.set_experts_implementation(own)


def rounded_copy(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a copy of the model in eval mode, with the dtypes that `from_pretrained(dtype=...)` gives.

    Weights are cast while they are copied, so that no second copy is held (`dtypes_as_loaded`)."""
    memo: dict[int, Any] = {}
    for tensor, wanted in dtypes_as_loaded(model, dtype):
        cast = tensor.detach().to(wanted, copy=True)
        memo[id(tensor)] = nn.Parameter(cast, requires_grad=False) if isinstance(tensor, nn.Parameter) else cast
    return copy.deepcopy(model, memo).eval()


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that are free on a device now; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):  # not Linux
        return None


def position_metrics(old: RoutedExperts, new: RoutedExperts, mask: Bool[Tensor, "B T"]) -> dict[str, Any]:
    """Return how many sites changed at each position of a response: `position_sites_changed` and `position_sites`.

    Both are lists, from position 0 (the first token of `mask` in its row) to the last position of any row. Tokens
    between that are not in `mask`, such as a tool's text, take up positions but add no sites; nor do sites that have no
    route on either side.

    >>> old, new = (RoutedExperts(torch.tensor(ids).view(1, 3, 1, 1), ("gate",), 4) for ids in ([0, 1, 2], [3, 1, 0]))
    >>> {name: x.tolist() for name, x in position_metrics(old, new, torch.tensor([[False, True, True]])).items()}
    {'position_sites_changed': [0, 1], 'position_sites': [1, 1]}
    """
    first = mask.int().argmax(1, keepdim=True)
    position = (torch.arange(mask.shape[1], device=mask.device) - first)[mask].cpu()
    compared = ~(old.live | in_order_of(old, new).live)

    def by_position(sites: Tensor) -> Tensor:
        return torch.bincount(position, sites.cpu()[mask.cpu()].double()).long()

    return {
        "position_sites_changed": by_position(flips_per_token(old, new)),
        "position_sites": by_position(compared.sum(-1)),
    }
