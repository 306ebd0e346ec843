"""Runs of several processes: the share of each rank, the gathering of results, and checks that all ranks agree.

Every rank holds every batch (tokens, log-probabilities, routes: 384 bytes per token for 48 sites of 8 experts) but
computes only its share: it samples responses to its prompts, scores its responses, and goes forward and backward on its
rows of each minibatch. Measured values are gathered per token, in the order of a single process, and then reduced, so
that a mean is one over tokens and not over ranks, and a variance is that of all tokens.
"""

import atexit
import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from moe_rl.measure.logprobs import evaluating
from moe_rl.policy.lora import AdaptersOff
from moe_rl.rollout import Rollout
from moe_rl.rollout.completions import padded
from moe_rl.rollout.engine_config import DTYPES
from moe_rl.routing import RoutedExperts
from moe_rl.settings import differences
from moe_rl.training.config import DistributedConfig
from moe_rl.training.launch import DistributedError, check_launch, launched_processes
from moe_rl.training.ranks import Ranks
from moe_rl.training.sharding import fill_from_rank_0, is_sharded, rebind, shard_from_rank_0


def ranks_of(
    config: DistributedConfig | None = None,
    device: str = "auto",
    tracker: str | None = None,
    folder: Path | None = None,
) -> Ranks:
    """Return the `Ranks` of the processes that were launched, after a check that they are those asked for.

    Args:
        config: the strategy, and the number of processes that must have been launched.
        device, tracker, folder: see `Ranks`.

    Raises:
        DistributedError: the processes are not those that `config` asks for.
    """
    config = config or DistributedConfig()
    launched, started = launched_processes(), "LOCAL_RANK" in os.environ
    check_launch(config, launched, os.environ, device)
    cpu = started and not torch.accelerator.is_available()
    alone = launched == 1 and config.strategy != "fsdp2"
    ranks = Ranks(device, tracker, folder, cpu) if alone else Group(config, device, tracker, folder, cpu)
    if ranks.size != launched:
        raise DistributedError(
            f"the launcher started {launched} processes, and accelerate sees {ranks.size}: each would train by "
            f"itself. On a CPU set model.device: cpu (it is {device!r})"
        )
    if config.strategy == "fsdp2":
        ranks.mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    return ranks


def uses_all(module: nn.Module) -> bool:
    """Return whether all trained parameters get a gradient from a forward, which is made here on two tokens.

    In some families a few do not: selection biases (Ernie 4.5), indexers of sparse attention. DDP then has to look for
    unused parameters in every forward."""
    if isinstance(module, nn.Linear):  # a scalar head
        return True
    trained = [p for p in module.parameters() if p.requires_grad]
    ids = torch.zeros(1, 2, dtype=torch.long, device=trained[0].device)
    with evaluating(module), torch.enable_grad():
        out = module(input_ids=ids, attention_mask=torch.ones_like(ids))
    said = out if isinstance(out, Tensor) else out.logits
    return all(grad is not None for grad in torch.autograd.grad(said.float().sum(), trained, allow_unused=True))


class Group(Ranks):
    """The `Ranks` of several processes, or of one process under fsdp2; arguments and methods as those of `Ranks`."""

    def __init__(self, config: DistributedConfig, device: str, tracker: str | None, folder: Path | None, cpu: bool):
        super().__init__(device, tracker, folder, cpu)
        self.distributed = config
        if dist.is_initialized():
            atexit.register(_leave)

    # -- models ----------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: Any) -> Any:
        if self.mesh is not None:
            before = dict(model.named_parameters())
            self.shard(model)
            rebind(optimizer, before, model)
            return model, optimizer
        self.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=not uses_all(model))
        model, optimizer = super().prepare(model, optimizer)
        if self.size > 1 and not isinstance(model, DistributedDataParallel):
            raise DistributedError(
                f"distributed.strategy: ddp was asked for over {self.size} processes, and accelerate gave a "
                f"{type(model).__name__}: the ranks would train apart"
            )
        return model, optimizer

    def shard(self, module: nn.Module) -> nn.Module:
        if self.mesh is not None and not isinstance(module, AdaptersOff):  # its modules are the policy's
            name = self.distributed.compute_dtype
            shard_from_rank_0(module, self.mesh, DTYPES[name] if name else None)
        return module.to(self.device)

    def whole(self, module: nn.Module) -> nn.Module:
        if self.mesh is not None:
            fill_from_rank_0(module, module.state_dict() if self.main else {}, self.device)
        return module.to(self.device)

    @property
    def loads(self) -> bool:
        return self.mesh is None or self.main

    @contextmanager
    def lock_step(self, model: nn.Module | None) -> Iterator[None]:
        """Context manager: let each rank call a sharded model as often as it needs (lengths of samples differ).

        A call gathers weights on all ranks, so a rank that is done calls the model with one token until all are."""
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
        """Return whether `mine` is True on any rank."""
        flag = torch.tensor(float(mine), device=self.device)
        dist.all_reduce(flag)
        return bool(flag > 0)

    # -- shares ----------------------------------------------------------------------------------------------------

    def sample(self, engine: Any, problems: list[Any], **options: Any) -> Rollout:
        """Sample responses to this rank's share of the problems; return those of all ranks, padded as by one process.

        Random numbers are drawn in the order of rows, so that a response depends neither on the number of ranks nor on
        the rank that samples it.

        Raises:
            DistributedError: ranks whose problems differ.
        """
        self.agree_on("the prompts", [(p.prompt, p.answer) for p in problems])
        mine, rows = self.share(len(problems)), options["group_size"] * options["max_new_tokens"]
        torch.rand(mine.start * rows, generator=options["generator"], dtype=torch.float64)  # those of lower ranks
        with self.lock_step(getattr(engine, "model", None)):
            own = engine.sample([problems[i] for i in mine], **options)
        return self._joined(own, problems)

    def share(self, count: int, rank: int | None = None) -> range:
        """Return the numbers, out of range(count), of a rank's share; shares differ in size by one at most.

        Raises DistributedError if `count` is below the number of ranks."""
        if count < self.size:
            raise DistributedError(f"{count} rows or prompts cannot be shared by {self.size} ranks: one each at least")
        rank = self.rank if rank is None else rank
        start, stop = ((r * count) // self.size for r in (rank, rank + 1))
        return range(start, stop)

    def mine(self, batch: Any) -> Any:
        return batch.rows(torch.tensor(self.share(len(batch))))

    def gather(self, own: Shaped[Tensor, "n ..."], count: int) -> Shaped[Tensor, "N ..."]:
        sizes = [len(self.share(count, rank)) for rank in range(self.size)]
        if len(own) != sizes[self.rank]:
            raise DistributedError(f"rank {self.rank} has {len(own)} rows to gather; its share is {sizes[self.rank]}")
        rows = own.detach().reshape(len(own), -1).contiguous().view(torch.uint8)  # bytes: any dtype on any backend
        padded = nn.functional.pad(rows, (0, 0, 0, max(sizes) - len(rows))).to(self.device)  # NCCL needs it there
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        joined = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return joined.to(own.device).view(own.dtype).reshape(count, *own.shape[1:])

    def gather_routes(self, own: RoutedExperts, count: int) -> RoutedExperts:
        # `_tokens`, because `tokens` does not say which of them the attention mask hid
        tokens = None if own._tokens is None else self.gather(own._tokens, count)
        return own._with(self.gather(own.packed, count), tokens)

    def sums(self, *own: float | int) -> tuple[float | int, ...]:
        return tuple(sum(values) for values in zip(*self.exchange(own), strict=True))

    def largest(self, own: float) -> float:
        everyone = self.exchange(float(own))
        return next((value for value in everyone if value != value), max(everyone))

    def _joined(self, own: Rollout, problems: list[Any]) -> Rollout:
        """Return the rollouts of all ranks as one; prompts are padded on the left, responses on the right."""
        G, widths = own.group_size, [own.first, own.input_ids.shape[1] - own.first]
        everyone = self.exchange([*widths, own.completions])
        own = padded(own, *(max(of[i] for of in everyone) - widths[i] for i in (0, 1)))

        def joined(x: Tensor) -> Tensor:
            # Shares are of problems; shares of rows would be the same only if problems divide evenly.
            per_problem = x.reshape(-1, G, *x.shape[1:])
            return self.gather(per_problem, len(problems)).flatten(0, 1)

        whole: dict[str, Any] = {n: joined(part) for n, part in own.parts.items() if isinstance(part, Tensor)}
        if (routes := own.routes) is not None:
            whole["routes"] = routes.with_ids(joined(routes.ids.to(torch.int16)), whole["input_ids"])
        return replace(
            own,
            **whole,
            problems=[problem for problem in problems for _ in range(G)],
            completions=[text for *_, texts in everyone for text in texts],
        )

    # -- agreement -------------------------------------------------------------------------------------------------

    def exchange(self, own: Any) -> list[Any]:
        """Return `own` of every rank, in the order of ranks, on every rank; as JSON, because torch would pickle."""
        said = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(said)], device=self.device))
        longest = max(int(size) for size in sizes)
        parts = [said.new_empty(longest) for _ in sizes]
        dist.all_gather(parts, nn.functional.pad(said, (0, longest - len(said))))
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def agree(self, what: str, own: Any) -> None:
        everyone = self.exchange(json.loads(json.dumps(own, sort_keys=True, default=str)))
        others = [rank for rank, value in enumerate(everyone) if value != everyone[0]]
        if others:
            first, other = everyone[0], everyone[others[0]]
            name, (here, there) = next(iter(differences(first, other).items()), ("", (first, other)))
            raise DistributedError(
                f"ranks disagree on {what}: {name and f'{name} is '}{here!r} on rank 0, {there!r} on rank {others[0]} "
                f"(of {self.size} ranks, {len(others)} differ from rank 0). Different files, versions or command lines?"
            )

    def agree_on(self, what: str, *own: Any) -> None:
        self.agree(what, digest(*own))

    def agree_on_weights(self, model: nn.Module) -> None:
        # Under fsdp2 only shapes and dtypes must agree, since all ranks will get the weights of rank 0.
        self.agree("the weights that they loaded", fingerprint(model, sums=self.mesh is None))

    def first(self, act: Callable[[], bool]) -> bool:
        answer, error = False, None
        if self.main:
            try:
                answer = act()
            except Exception as raised:
                error = raised
        answer, said = self.exchange((answer, str(error) or type(error).__name__ if error else None))[0]
        if error:
            raise error
        if said:
            raise DistributedError(f"rank 0: {said}")
        return answer


# -- digests ----------------------------------------------------------------------------------------------------------


def fingerprint(module: nn.Module, sums: bool = True) -> dict[str, str]:
    """Return dtype, shape and (if `sums`) sum of each parameter, to tell whether ranks loaded the same weights."""
    return {
        name: f"{p.dtype} {list(p.shape)}" + (f" {p.detach().sum(dtype=torch.float64).item():.17g}" if sums else "")
        for name, p in module.named_parameters()
    }


def digest(*values: Any) -> str:
    """Return the SHA-256 sum (hex) of the values: of the bytes of tensors, and of the `repr` of anything else."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def _leave() -> None:
    """Leave the process group, and free all that belongs to it now instead of at the end of the interpreter.

    A DDP model that is freed at the end can abort the process (seen with gloo, torch 2.13), and the launcher then stops
    the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state()
    PartialState._reset_state()
    gc.collect()
