"""Log-probabilities and entropies from an output head, computed for a chunk of tokens at a time to save memory.

For N tokens, hidden size H and vocabulary V, forward and backward together take 8 N V H operations and hold chunk x V
logits. A computation that holds all N x V logits takes 6 N V H operations; the difference is one recomputed product.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def default_chunk(vocabulary: int, hidden_size: int) -> int:
    """Return the default number of tokens whose logits are held at once.

    The logits take 128 MiB in fp32, or a quarter of the memory of the weight's gradient if that is more: each chunk
    reads and writes that gradient once, so chunks far smaller than the gradient are slow.

    >>> default_chunk(151_936, 512), default_chunk(151_936, 4096), default_chunk(28, 48)
    (220, 1024, 1198372)
    """
    return max(1, 2**25 // vocabulary, hidden_size // 4)


class LogitMap(NamedTuple):
    """Map from a head's output x to the model's logits: `softcap tanh(scale x / softcap)`, or `scale x` uncapped."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def head_logps(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    logit_map: LogitMap | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Return `log softmax(logit_map(hidden @ weight.T + bias) / temperature)[target]` and the entropy, in chunks.

    With p the softmax, l its log-probabilities and H its entropy, the gradient at the divided logit j is

        d logp / d z_j = [j = target] - p_j            d H / d z_j = -p_j (l_j + H)

    The product is computed in the inputs' dtype, as in the model (under autocast, in autocast's dtype), all that
    follows in fp32 (float64 for float64), and so is the sum of the weight's gradient over chunks.

    Args:
        chunk_size: tokens whose logits are held at once; default `default_chunk(V, H)`.

    Returns:
        Log-probabilities and entropies (None unless asked for) in nats, fp32 or float64, differentiable once.

    >>> h, w = torch.zeros(2, 3), torch.zeros(4, 3)
    >>> logps, entropy = head_logps(h, w, torch.tensor([0, 3]), entropy=True)
    >>> logps.exp(), entropy.exp()
    (tensor([0.2500, 0.2500]), tensor([4., 4.]))
    """
    logps, entropies, _ = threaded_head_logps(
        hidden, weight, targets, bias, logit_map or LogitMap(), temperature, entropy, chunk_size
    )
    return logps, entropies


def threaded_head_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    logit_map: LogitMap,
    temperature: float,
    entropy: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the results of `head_logps` and an empty tensor from the same autograd node.

    In backward, everything that depends on the empty tensor is computed before the head's own backward."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    chunk = chunk_size or default_chunk(*weight.shape)
    with torch.autocast(device, enabled=False):
        return _ChunkedHead.apply(hidden, weight, bias, targets, logit_map, temperature, entropy, chunk)


class _ChunkedHead(torch.autograd.Function):
    """Autograd function that keeps the hidden states, the weight and up to two numbers per token, but no logits.

    Backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        logit_map: LogitMap,
        temperature: float,
        entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        N = hidden.shape[0]
        logps, lse = hidden.new_empty(N, dtype=dtype), hidden.new_empty(N, dtype=dtype)
        entropies = hidden.new_empty(N, dtype=dtype) if entropy else None
        for start in range(0, N, chunk):
            rows = slice(start, start + chunk)
            z, _ = _divided_logits(hidden[rows], weight, bias, logit_map, temperature, dtype)
            chosen = z.gather(1, targets[rows, None]).squeeze(1)
            top = z.amax(1)
            z.sub_(top[:, None])
            p = z.exp_() if entropies is None else z.exp()
            total = p.sum(1)
            lse[rows] = top + total.log()
            logps[rows] = chosen - lse[rows]
            if entropies is not None:  # H = log sum e^z - sum p z, where z is the logit minus the largest one
                z.clamp_(min=torch.finfo(dtype).min)  # an excluded token (-inf, p = 0) adds 0 and no NaN
                entropies[rows] = total.log() - p.mul_(z).sum(1) / total
            del z, p  # free the memory before the next chunk
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies)
        ctx.options = logit_map, temperature, chunk
        ctx.set_materialize_grads(False)
        return logps, entropies, hidden.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None, _: Any) -> tuple[Any, ...]:
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        logit_map, temperature, chunk = ctx.options
        if d_logps is None and d_entropies is None:
            return (None,) * 8
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        sums = lse.dtype if hidden.shape[0] > chunk else weight.dtype  # one chunk: nothing to sum
        d_weight = torch.zeros_like(weight, dtype=sums) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], chunk):
                rows = slice(start, start + chunk)
                z, slope = _divided_logits(hidden[rows], weight, bias, logit_map, temperature, lse.dtype)
                d_z = z.sub_(lse[rows, None])  # log p, in z's memory
                del z
                if d_entropies is None:
                    d_z.exp_().mul_(-d_logps[rows, None])  # type: ignore[index]  # not None: one of the two is given
                else:
                    p = d_z.exp()
                    d_z.add_(entropies[rows, None]).mul_(-d_entropies[rows, None])
                    if d_logps is not None:
                        d_z.sub_(d_logps[rows, None])
                    d_z.mul_(p).masked_fill_(p == 0, 0.0)
                    del p
                if d_logps is not None:
                    d_z.scatter_add_(1, targets[rows, None], d_logps[rows, None])
                if slope is not None:
                    d_z.mul_(slope)
                if (factor := logit_map.scale / temperature) != 1:
                    d_z.mul_(factor)
                if d_bias is not None:
                    d_bias += d_z.sum(0)
                d_z = d_z.to(hidden.dtype)
                if d_hidden is not None:
                    torch.mm(d_z, weight, out=d_hidden[rows])
                if d_weight is not None and d_weight.dtype == d_z.dtype:
                    d_weight.addmm_(d_z.T, hidden[rows])
                elif d_weight is not None:
                    d_weight += d_z.T @ hidden[rows]
                del d_z, slope  # free the memory before the next chunk
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _divided_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_map: LogitMap,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Return logits divided by the temperature in a new `dtype` buffer, and the slope of the soft cap, if any."""
    z = F.linear(hidden, weight, bias).to(dtype)
    if logit_map.softcap is not None:
        z.mul_(logit_map.scale / logit_map.softcap).tanh_()
        slope = 1 - z * z
        return z.mul_(logit_map.softcap / temperature), slope
    factor = logit_map.scale / temperature
    return (z if factor == 1 else z.mul_(factor)), None
