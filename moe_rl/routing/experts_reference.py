"""The five operations of a dropless experts layer in plain torch, as `moe_rl.routing.experts.Backend` describes them.

`bin_ids` and `bins` say where each expert's rows start; the kernels need them, plain indexing does not.
"""

import torch
from torch import Tensor


def sort(ids: Tensor, end_bit: int) -> tuple[Tensor, Tensor]:
    return torch.sort(ids, stable=True)


def histogram(ids: Tensor, num_experts: int) -> Tensor:
    return (ids == torch.arange(num_experts, device=ids.device)[:, None]).sum(1, dtype=torch.int32)


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    # Expand, then permute: in the backward pass every slot is written once and a token's K gradients
    # are summed in one reduction, as in the kernels, instead of being accumulated K times in bf16.
    return x.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, x.shape[-1])[indices]


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
    matrices = (b.mT if trans_b else b).unbind(0)
    return torch.cat([x @ w for x, w in zip(a.split(batch_sizes.tolist()), matrices, strict=True)])


def scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor, bins: Tensor, top_k: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    slots = x[torch.argsort(indices)]
    weighted = (slots.to(wide) * weights.to(wide)[:, None]).to(x.dtype)
    return weighted.view(-1, top_k, x.shape[-1]).sum(1)
