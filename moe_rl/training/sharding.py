"""FSDP2: sharding of a module over ranks, checks that it is sharded, and loading of whole tensors into it.

accelerate applies FSDP only on some device types and silently takes DDP on the others (CPU among them), so the modules
are sharded here, with torch's own `fully_shard`, and the result is checked.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from moe_rl.measure.weights import KEPT_FP32


class ShardingError(RuntimeError):
    """Error for a model that cannot be sharded, or that should be sharded and is not."""


def shard(module: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None = None) -> None:
    """Shard a module by FSDP2, in place: each decoder layer is a group, gathered when it runs, and the rest is another.

    Args:
        module: a transformers model, or a module around one.
        mesh: one-dimensional.
        compute: dtype in which parameters are gathered and to which inputs are cast; gradients are then reduced in
            fp32. None: the parameters' own dtype.

    Modules that must compute in fp32 (`KEPT_FP32`: a scalar head, routers) are groups of their own, without `compute`.
    So are modules whose dtype is not that of the first layer's first parameter, since the trained parameters of a group
    must have one dtype.

    Raises:
        ShardingError: layers that cannot be found; a parameter that is not sharded afterwards.
    """
    if getattr(module, KEPT_FP32, False):
        compute = None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    layers = decoder_layers(module)
    common = next(p.dtype for part in (*layers, module) for p in part.parameters())
    inner = [part for part in module.modules() if part is not module]
    for part in inner:  # if one is inside another (PEFT around a router), only the outer one
        if _forms_group(part) and not any(isinstance(p, DTensor) for p in part.parameters()):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    for leaf in inner:
        own = [p for p in leaf.parameters(recurse=False) if not isinstance(p, DTensor)]
        if any(p.dtype != common for p in own):
            fully_shard(leaf, mesh=mesh, reshard_after_forward=True)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # The outermost group, too, is sharded again after each forward, so that outside a forward parameters are shards.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    check_sharded(module)


def shard_from_rank_0(module: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None = None) -> None:
    """Shard a module as `shard` does, and fill the shards of every rank with the weights of rank 0.

    Only on rank 0 does the module need to hold weights; on other ranks its tensors have no memory (the meta device)
    until they are shards. One tensor at a time is sent. Raises ShardingError.
    """
    whole_tensors: dict[str, Any] = module.state_dict() if dist.get_rank() == 0 else {}
    if dist.get_rank() != 0:
        module.to("meta")
    shard(module, mesh, compute)
    fill_from_rank_0(module, whole_tensors, torch.device(mesh.device_type))


def fill_from_rank_0(module: nn.Module, whole_tensors: dict[str, Any], device: torch.device) -> None:
    """Move a module, sharded or not, to `device`, and fill it with the tensors and buffers of rank 0.

    On other ranks the module's tensors need no memory before. Buffers that no state dict has are filled, too.

    whole_tensors: on rank 0, the state dict of the module before it was sharded; empty elsewhere."""
    if dist.get_rank() == 0:
        module.to(device)
    else:
        module.to_empty(device=device)
    set_model_state_dict(
        module, whole_tensors, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)


def check_sharded(module: nn.Module) -> None:
    """Raise ShardingError unless the module, each decoder layer and every parameter is sharded."""
    for name, part in {"": module, **{f"layer {i}": m for i, m in enumerate(decoder_layers(module))}}.items():
        if not isinstance(part, FSDPModule):
            raise ShardingError(
                f"distributed.strategy: fsdp2 was asked for, and {name or 'the model'} ({type(part).__name__}) is not "
                "sharded"
            )
    whole_ones = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
    if whole_ones:
        raise ShardingError(
            f"distributed.strategy: fsdp2 was asked for, and {len(whole_ones)} parameters of {type(module).__name__} "
            f"are whole on every rank, first {whole_ones[0]}"
        )


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Return the outermost layers that transformers says must not be split (`_no_split_modules`).

    A module that holds no transformers model (a value head) has none. Raises ShardingError if a model names none."""
    inner_models = [inner for inner in module.modules() if isinstance(inner, PreTrainedModel)]
    names = {name for inner in inner_models for name in inner._no_split_modules or ()}
    found: list[nn.Module] = []
    for inner in module.modules():
        classes = {cls.__name__ for cls in type(inner).__mro__}  # sharding puts FSDP2's own class in front
        if classes & names and not any(inner in set(layer.modules()) for layer in found):
            found.append(inner)
    if inner_models and not found:
        raise ShardingError(
            f"{type(module).__name__} names no layers that are sharded one at a time (_no_split_modules); "
            "distributed.strategy=ddp keeps whole copies"
        )
    return found


def _forms_group(part: nn.Module) -> bool:
    """Return whether a module and all modules in it must be one group.

    That is so if it must compute in fp32, or is PEFT's wrapper of a weight (`lora.target_parameters`) with several
    dtypes or fp32 modules inside, because that wrapper reads parameters without calling the modules that have them."""
    kept = [getattr(inner, KEPT_FP32, False) for inner in part.modules()]
    several = any(kept) or len({p.dtype for p in part.parameters()}) > 1
    return kept[0] or (hasattr(part, "parameter_name") and several)


def is_sharded(module: nn.Module) -> bool:
    """Return whether a forward of `module` gathers shards, be it those of a module that it calls (`AdaptersOff`)."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def rebind(optimizer: Any, before: dict[str, nn.Parameter], module: nn.Module) -> None:
    """Replace the parameters of an optimizer without state, in `before` by name, by the module's new parameters."""
    names = {id(parameter): name for name, parameter in before.items()}
    after = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [after[names[id(parameter)]] for parameter in group["params"]]


# -- tensors ---------------------------------------------------------------------------------------------------


def as_placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, which every rank holds whole, sharded and placed as `like` is; without communication."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_whole(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load a state dict of whole tensors into a module, sharded or not.

    If the tensors come one at a time, only this rank's shards of them are kept in memory."""
    own = module.state_dict()
    module.load_state_dict({name: as_placed(tensor, own[name]) if name in own else tensor for name, tensor in tensors})
