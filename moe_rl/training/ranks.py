"""The processes of a run, as its steps see them; here for one process, which gives back whatever it is given.

Several processes (`moe_rl.training.distributed`) give the same methods another body: every rank computes its share, and
what is measured is put together again.
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
"""How long a rank waits for the others: rank 0 alone writes checkpoints, of a large model for longer than NCCL's ten
minutes."""


class Ranks(Accelerator):
    """accelerate's Accelerator with shares and gathering; one process, to which everything belongs.

    Args:
        device: `model.device`.
        tracker: see `moe_rl.training.trackers`.
        folder: the run folder, which a tracker may write to.
        cpu: compute on the CPU, whatever `device` says.

    Attributes:
        rank, size: this process and how many there are.
        mesh: of the ranks that weights are sharded over (fsdp2); None where every rank holds them whole.
    """

    def __init__(self, device: str = "auto", tracker: str | None = None, folder: Path | None = None, cpu: bool = False):
        super().__init__(
            cpu=cpu or device == "cpu" or torch.backends.mps.is_available(),  # which has no float64
            log_with=tracker,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)],
            project_dir=None if tracker is None or folder is None else str(folder / "tracker"),
        )
        self.rank, self.size = self.process_index, self.num_processes
        self.mesh: Any = None

    @property
    def main(self) -> bool:
        """The rank that writes files and speaks."""
        return self.rank == 0

    # -- models ----------------------------------------------------------------------------------------------------

    @property
    def loads(self) -> bool:
        """Whether this rank loads weights; under fsdp2 the first alone, since the others get shards of its own."""
        return True

    def shard(self, module: nn.Module) -> nn.Module:
        """Under fsdp2 the module is sharded in place, as rank 0 has it; in any case it is on this rank's device."""
        return module.to(self.device)

    def whole(self, module: nn.Module) -> nn.Module:
        """The module, whole and on this rank's device; under fsdp2 as rank 0 has it, where alone it may hold anything.
        In place."""
        return module.to(self.device)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        """Clip, unless the norm over all ranks' shards is not finite: clipping would spread that to every gradient.
        Returns the norm."""
        parameters = list(parameters)
        norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if torch.isfinite(whole):
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return whole

    # -- shares ----------------------------------------------------------------------------------------------------

    def sample(self, engine: Any, problems: list[Any], **options: Any) -> Rollout:
        """The engine's responses to all problems; `options` as in `Engine.sample`."""
        return engine.sample(problems, **options)

    def share(self, count: int) -> range:
        """Which of `count` things are this rank's."""
        return range(count)

    def mine(self, batch: Any) -> Any:
        """This rank's rows of a Batch or Rollout."""
        return batch

    def gather(self, own: Shaped[Tensor, "n ..."], count: int) -> Shaped[Tensor, "N ..."]:
        """All `count` rows, on every rank, of which each computed its `share`; on the device of `own`. Of
        several processes detached."""
        return own

    def gather_routes(self, own: RoutedExperts, count: int) -> RoutedExperts:
        """The same for routes."""
        return own

    def sums(self, *own: float | int) -> tuple[float | int, ...]:
        """Sums over ranks, in double precision."""
        return own

    def largest(self, own: float) -> float:
        """The largest over ranks; NaN if any is."""
        return own

    # -- agreement -------------------------------------------------------------------------------------------------

    def agree(self, what: str, own: Any) -> None:
        """Raises DistributedError on every rank unless all hold the same `own` (JSON data)."""

    def agree_on(self, what: str, *own: Any) -> None:
        """The same of tensors, and of what is told apart by its `repr`: their SHA-256 is compared."""

    def agree_on_weights(self, model: nn.Module) -> None:
        """Raises DistributedError unless all ranks loaded the same."""

    def first(self, act: Callable[[], bool]) -> bool:
        """What `act` says on rank 0, on every rank; its error on every rank, too."""
        return act()
