"""The processes (ranks) of a run as one object, here for a single process, whose share is everything.

For several processes the subclass in `moe_rl.training.distributed` overrides these methods: every rank computes its
share, and the results are gathered.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from jaxtyping import Shaped
from torch import Tensor, nn

from moe_rl.rollout import Rollout
from moe_rl.routing import RoutedExperts

TIMEOUT = timedelta(hours=6)
"""How long a rank waits for the others. Rank 0 alone writes checkpoints, which for a large model takes longer than
NCCL's default of ten minutes."""


class Ranks(Accelerator):
    """accelerate's Accelerator with methods for shares and gathering, here for one process, which holds everything.

    Args:
        device: `model.device`.
        tracker: see `moe_rl.training.trackers`.
        folder: the run folder, which a tracker may write to.
        cpu: compute on the CPU, whatever `device` says.

    Attributes:
        rank, size: number of this process, and number of processes.
        mesh: the mesh of ranks over which weights are sharded (fsdp2); None if every rank holds whole weights.
    """

    def __init__(self, device: str = "auto", tracker: str | None = None, folder: Path | None = None, cpu: bool = False):
        super().__init__(
            cpu=cpu or device == "cpu" or torch.backends.mps.is_available(),  # MPS has no float64
            log_with=tracker,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)],
            project_dir=None if tracker is None or folder is None else str(folder / "tracker"),
        )
        self.rank, self.size = self.process_index, self.num_processes
        self.mesh: Any = None

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    # -- models ----------------------------------------------------------------------------------------------------

    @property
    def loads(self) -> bool:
        """Whether this rank loads weights; under fsdp2 only rank 0 does, and the others get shards of its weights."""
        return True

    def shard(self, module: nn.Module) -> nn.Module:
        """Move the module to this rank's device and return it; under fsdp2, shard rank 0's weights, in place."""
        return module.to(self.device)

    def whole(self, module: nn.Module) -> nn.Module:
        """Move the module, unsharded, to this rank's device and return it; in place.

        Under fsdp2 it gets the weights of rank 0, the only rank on which it needs to hold any."""
        return module.to(self.device)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        """Clip gradients by their norm over all ranks' shards, and return that norm.

        A norm that is not finite clips nothing: clipping by NaN would make every gradient NaN, by infinity every
        finite one 0."""
        parameters = list(parameters)
        norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if torch.isfinite(whole):
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return whole

    # -- shares ----------------------------------------------------------------------------------------------------

    def sample(self, engine: Any, problems: list[Any], **options: Any) -> Rollout:
        """Return the engine's responses to all problems; `options` as in `Engine.sample`."""
        return engine.sample(problems, **options)

    def share(self, count: int) -> range:
        """Return which of `count` things are this rank's share."""
        return range(count)

    def mine(self, batch: Any) -> Any:
        """Return this rank's rows of a Batch or Rollout."""
        return batch

    def gather(self, own: Shaped[Tensor, "n ..."], count: int) -> Shaped[Tensor, "N ..."]:
        """Return all `count` rows, on every rank, from the shares of the ranks; on the device of `own`.

        With several processes the result is detached."""
        return own

    def gather_routes(self, own: RoutedExperts, count: int) -> RoutedExperts:
        """Return the routes of all `count` rows, on every rank, from the shares of the ranks."""
        return own

    def sums(self, *own: float | int) -> tuple[float | int, ...]:
        """Return the sum of each number over ranks, in double precision."""
        return own

    def largest(self, own: float) -> float:
        """Return the largest value over ranks; NaN if any is NaN."""
        return own

    # -- agreement -------------------------------------------------------------------------------------------------

    def agree(self, what: str, own: Any) -> None:
        """Raise DistributedError on every rank unless all hold the same `own`.

        what: name of `own` in the message.
        own: JSON data."""

    def agree_on(self, what: str, *own: Any) -> None:
        """Raise as `agree` unless all ranks hold equal tensors, or objects of equal `repr` (SHA-256 is compared)."""

    def agree_on_weights(self, model: nn.Module) -> None:
        """Raise DistributedError unless all ranks loaded the same weights; under fsdp2, the same shapes and dtypes."""

    def first(self, act: Callable[[], bool]) -> bool:
        """Call `act` on rank 0 only, and return its result on every rank; if it raises, every rank raises."""
        return act()
