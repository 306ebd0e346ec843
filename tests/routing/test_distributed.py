"""DistributedDataParallel and FSDP2 over two gloo processes: same routes, same gradients as one process."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_two
from routing_helpers import disturbed, grads, moe, routes_of, tokens
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_rl.routing import find_sites, record_routes, replay_routes


def step(model: Any, inputs: Tensor, routes: Any, late: bool) -> dict[str, Tensor]:
    """Gradients of a replayed step; with `late`, the backward pass comes after the context."""
    with replay_routes(model, routes), record_routes(model) as recording:
        loss = model(input_ids=inputs, use_cache=False).logits.square().mean()
        if not late:
            loss.backward()
    if late:
        loss.backward()
    assert recording.routes.equal(routes)
    return grads(model)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def worker(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    both = tokens(2, 7)
    mine = both[rank : rank + 1]
    reference = moe()
    old = routes_of(reference, both)
    reference = disturbed(reference).train()
    wanted = step(reference, both, old, late=False)

    wrapped = DistributedDataParallel(disturbed(moe()).train())
    assert [site.name for site in find_sites(wrapped)] == list(old.sites)
    found = step(wrapped, mine, old.rows(rank), late=False)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found["module." + name], gradient)

    for reentrant in (None, False):
        model = disturbed(moe()).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in model.model.layers:
            fully_shard(layer.mlp.gate)  # the router is sharded by itself, so its class is swapped
            fully_shard(layer)
        fully_shard(model)
        assert isinstance(model.model.layers[0].mlp.gate, FSDPModule)
        assert [site.name for site in find_sites(model)] == list(old.sites)
        found = step(model, mine, old.rows(rank), late=reentrant is not None)
        for name, gradient in wanted.items():
            torch.testing.assert_close(whole(found[name]), gradient)
        assert routes_of(model, mine).shape == old.rows(rank).shape
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_replay_like_one() -> None:
    run_two(worker)
