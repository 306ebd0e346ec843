"""More than one process: who has which share, what is put together again, and everything that must agree.

Every rank holds every batch (tokens, log-probabilities, routes: 384 bytes per token for 48 sites of 8 experts) but
computes only its share of it: samples its prompts, scores its responses, goes forward and backward on its rows of each
minibatch. What is measured is gathered per token, in the order of a single process, and then reduced, so that a
mean is one over tokens and not over ranks, and a variance is that of all tokens. Under one process every function here
gives back what it was given.
"""

import atexit
import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from moe_rl.policy.lora import AdaptersOff
from moe_rl.routing import RoutedExperts
from moe_rl.training.config import DistributedConfig
from moe_rl.training.launch import DistributedError, check_launch, launched_processes
from moe_rl.training.sharding import fill_from_rank_0, is_sharded, rebind, shard_from_rank_0

COMPUTE = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Ranks(Accelerator):
    """accelerate's Accelerator, held to what was asked for, with shares and gathering.

    Args:
        config: the strategy and what is expected of the launcher.
        device: `model.device`.
        tracker: see `moe_rl.training.trackers`.
        folder: the run folder, which a tracker may write to.

    Raises:
        DistributedError: other processes than `config` asks for.
    """

    def __init__(
        self,
        config: DistributedConfig | None = None,
        device: str = "auto",
        tracker: str | None = None,
        folder: Path | None = None,
    ):
        self.distributed = config or DistributedConfig()
        launched, started = launched_processes(), "LOCAL_RANK" in os.environ
        check_launch(self.distributed, launched, os.environ, device)
        super().__init__(
            cpu=device == "cpu" or (started and not torch.accelerator.is_available()),
            log_with=tracker,
            project_dir=None if tracker is None or folder is None else str(folder / "tracker"),
        )
        self.rank, self.size = self.process_index, self.num_processes
        if self.size != launched:
            raise DistributedError(
                f"the launcher started {launched} processes, and accelerate sees {self.size}: each would train by "
                f"itself. On a CPU set model.device: cpu (it is {device!r})"
            )
        if self.size > 1:
            atexit.register(_leave)
        self.mesh = init_device_mesh(self.device.type, (self.size,)) if self.distributed.strategy == "fsdp2" else None

    @property
    def main(self) -> bool:
        """The rank that writes files and speaks."""
        return self.rank == 0

    # -- models ----------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: Any) -> Any:
        """Model and optimizer under the strategy, made sure of."""
        if self.mesh is not None:
            before = dict(model.named_parameters())
            self.shard(model)
            rebind(optimizer, before, model)
            return model, optimizer
        model, optimizer = super().prepare(model, optimizer)
        if self.size > 1 and not isinstance(model, DistributedDataParallel):
            raise DistributedError(
                f"distributed.strategy: ddp was asked for over {self.size} processes, and accelerate gave a "
                f"{type(model).__name__}: the ranks would train apart"
            )
        return model, optimizer

    def shard(self, module: nn.Module) -> nn.Module:
        """Under fsdp2 the module is sharded in place, as rank 0 has it; in any case it is on this rank's device."""
        if self.mesh is not None and not isinstance(module, AdaptersOff):  # whose modules are the policy's
            compute = COMPUTE[self.distributed.compute_dtype]
            shard_from_rank_0(module, self.mesh, compute, self.distributed.router_fp32)
        return module.to(self.device)

    def whole(self, module: nn.Module) -> nn.Module:
        """The module, whole and on this rank's device; under fsdp2 as rank 0 has it, where alone it may hold anything.
        In place."""
        if self.mesh is not None:
            fill_from_rank_0(module, module.state_dict() if self.main else {}, self.device)
        return module.to(self.device)

    @property
    def loads(self) -> bool:
        """Whether this rank loads weights: under fsdp2 the first alone, since the others get shards of its own."""
        return self.mesh is None or self.main

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        """Clip, unless the norm over all ranks' shards is not finite: clipping would spread that to every gradient.
        Returns the norm."""
        parameters = list(parameters)
        norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if torch.isfinite(whole):
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return whole

    @contextmanager
    def lock_step(self, model: nn.Module | None) -> Iterator[None]:
        """Inside, ranks may call a sharded model as often as each needs to (sampling ends at different lengths): each
        call gathers weights on all ranks, so those that are done go on, with one token, until all are."""
        if self.size == 1 or model is None or not is_sharded(model):
            yield
            return

        def one_more(*_: Any) -> None:
            self._any(True)

        handle = model.register_forward_pre_hook(one_more, prepend=True)
        try:
            yield
        finally:
            handle.remove()
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            while self._any(False):
                model(input_ids=token, attention_mask=token + 1, use_cache=False)

    def _any(self, mine: bool) -> bool:
        flag = torch.tensor(float(mine), device=self.device)
        dist.all_reduce(flag)
        return bool(flag > 0)

    # -- shares ----------------------------------------------------------------------------------------------------

    def share(self, count: int, rank: int | None = None) -> range:
        """Which of `count` things are this rank's: consecutive ones, as many as every other rank's, give or take one.

        Raises:
            DistributedError: fewer things than ranks.
        """
        if count < self.size:
            raise DistributedError(f"{count} things cannot be shared by {self.size} ranks: one each at least")
        rank = self.rank if rank is None else rank
        start, stop = ((r * count) // self.size for r in (rank, rank + 1))
        return range(start, stop)

    def mine(self, batch: Any) -> Any:
        """This rank's rows of a Batch or Rollout."""
        return batch if self.size == 1 else batch.rows(torch.tensor(self.share(len(batch))))

    def gather(self, own: Shaped[Tensor, "n ..."], count: int) -> Shaped[Tensor, "N ..."]:
        """All `count` rows, on every rank, of which each computed its `share`. Detached."""
        if self.size == 1:
            return own
        sizes = [len(self.share(count, rank)) for rank in range(self.size)]
        if len(own) != sizes[self.rank]:
            raise DistributedError(f"rank {self.rank} has {len(own)} rows to gather; its share is {sizes[self.rank]}")
        rows = own.detach().reshape(len(own), -1).contiguous().view(torch.uint8)  # bytes: any dtype, on any backend
        padded = nn.functional.pad(rows, (0, 0, 0, max(sizes) - len(rows)))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        joined = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return joined.view(own.dtype).reshape(count, *own.shape[1:])

    def gather_routes(self, own: RoutedExperts, count: int) -> RoutedExperts:
        """The same for routes."""
        if self.size == 1:
            return own
        packed = self.gather(own.packed, count)
        ids = packed.view(torch.int16)
        if packed.dtype == torch.uint8:
            ids = packed.to(torch.int16)
            ids.masked_fill_(packed == 255, -1)
        tokens = None if own.tokens is None else self.gather(own.tokens, count)
        return RoutedExperts(ids, own.sites, own.num_experts, tokens=tokens, meta=own.meta)

    def sums(self, *own: float | int) -> tuple[float | int, ...]:
        """Sums over ranks, in double precision."""
        if self.size == 1:
            return own
        everyone = [json.loads(text) for text in self.exchange(json.dumps(own))]
        return tuple(sum(values) for values in zip(*everyone, strict=True))

    def largest(self, own: float) -> float:
        """The largest over ranks; NaN if any is."""
        everyone = [float(text) for text in self.exchange(repr(float(own)))]
        return next((value for value in everyone if value != value), max(everyone))

    # -- agreement -------------------------------------------------------------------------------------------------

    def exchange(self, text: str) -> list[str]:
        """Every rank's text, in the order of ranks, on every rank."""
        if self.size == 1:
            return [text]
        own = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text.encode())], device=self.device))
        counts = [int(size) for size in sizes]
        padded = nn.functional.pad(own, (0, max(*counts, 1) - len(own)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return [bytes(part[:n].tolist()).decode() for part, n in zip(parts, counts, strict=True)]

    def agree(self, what: str, own: Any) -> None:
        """Raises DistributedError on every rank unless all hold the same `own` (JSON data)."""
        if self.size == 1:
            return
        everyone = [json.loads(text) for text in self.exchange(json.dumps(own, sort_keys=True, default=str))]
        others = [rank for rank, value in enumerate(everyone) if value != everyone[0]]
        if others:
            raise DistributedError(
                f"ranks disagree on {what}: {_difference(everyone[0], everyone[others[0]], others[0])} "
                f"(of {self.size} ranks, {len(others)} differ from rank 0). Different files, versions or command lines?"
            )

    def agree_on(self, what: str, *own: Any) -> None:
        """The same of tensors, and of what is told apart by its `repr`: their SHA-256 is compared."""
        if self.size > 1:
            self.agree(what, digest(*own))

    def agree_on_weights(self, model: nn.Module) -> None:
        """Raises DistributedError unless all ranks loaded the same: under fsdp2 the same shapes and dtypes, since they
        will get the weights of rank 0, else also the same weights."""
        if self.size > 1:
            self.agree("the weights that they loaded", fingerprint(model, sums=self.mesh is None))

    def first(self, act: Callable[[], bool]) -> bool:
        """What `act` says on rank 0, on every rank; its error on every rank, too."""
        if self.size == 1:
            return act()
        answer, error = False, None
        if self.main:
            try:
                answer = act()
            except Exception as raised:
                error = raised
        said = json.loads(self.exchange(json.dumps([answer, str(error) if error else None]))[0])
        if error:
            raise error
        if said[1]:
            raise DistributedError(f"rank 0: {said[1]}")
        return said[0]


# -- digests ----------------------------------------------------------------------------------------------------------


def fingerprint(module: nn.Module, sums: bool = True) -> dict[str, str]:
    """For each parameter its dtype, shape and sum: enough to tell that ranks loaded the same weights."""
    return {
        name: f"{p.dtype} {list(p.shape)}" + (f" {p.detach().sum(dtype=torch.float64).item():.17g}" if sums else "")
        for name, p in module.named_parameters()
    }


def digest(*values: Any) -> str:
    """SHA-256 of tensors and of what `repr` shows of anything else."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def _difference(a: Any, b: Any, rank: int) -> str:
    """The first place where two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                inner = _difference(a.get(key), b.get(key), rank)
                return f"{key}.{inner}" if isinstance(a.get(key), dict) else f"{key} is {inner}"
    return f"{a!r} on rank 0, {b!r} on rank {rank}"


def _leave() -> None:
    """Leave the group, and leave nothing that belongs to it to the end of the interpreter: a DDP model that is freed
    there can abort the process (seen with gloo, torch 2.13), and the launcher then stops the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state()
    PartialState._reset_state()
    gc.collect()
