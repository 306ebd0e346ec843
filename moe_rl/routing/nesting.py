"""What an inner and an outer context force together."""

import torch
from jaxtyping import Int
from torch import Tensor

from moe_rl.routing.traced import no_type_check


@no_type_check
def completed(own: Int[Tensor, "N K"], other: Int[Tensor, "N K"]) -> Int[Tensor, "N K"]:
    """`own`, its -1 filled with the experts of `other`'s row that it does not have, in their order; what of it remains
    -1 has no expert in either.

    >>> completed(torch.tensor([[5, -1, -1], [-1, -1, -1]]), torch.tensor([[2, 5, 3], [2, 5, -1]])).tolist()
    [[5, 2, 3], [2, 5, -1]]
    """
    free = (other >= 0) & ~(other[:, :, None] == own[:, None, :]).any(-1)
    rest = other.where(free, -1).gather(-1, (~free).to(torch.uint8).argsort(dim=-1, stable=True))
    holes = own < 0
    return own.where(~holes, rest.gather(-1, holes.cumsum(-1).sub(1).clamp(min=0)))
