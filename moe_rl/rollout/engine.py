"""Whoever samples: the `Engine` that the loop asks, and the plainest one, the model itself.

The policy that samples (mu) and the training engine's old policy (pi_old) are two things even at equal weights:
kernels, precision and batch shapes differ, routers near a tie flip, and log-probabilities move. Engines with weights
and arithmetic of their own are in `moe_rl.rollout.engines`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_rl.measure.logprobs import token_logps
from moe_rl.rollout.completions import Rollout
from moe_rl.rollout.continuing import extend
from moe_rl.rollout.sampler import sample
from moe_rl.rollout.task import Problem

NEVER = -1
"""Version of an engine whose weights nobody has named yet."""


class Tolerance(NamedTuple):
    """How far an engine's log-probabilities may be from the training model's at equal weights: mean absolute
    difference, nats per token.

    least: what is always allowed: a token or two whose router flips at a tie.
    most: what its arithmetic explains; a gap above means other weights, or weights that are read otherwise.
    """

    least: float = 1e-3
    most: float = 1e-2


EXACT = Tolerance()


@runtime_checkable
class Engine(Protocol):
    """What the training loop asks of whoever samples.

    Attributes:
        version: of the weights that it holds, as named at the last `sync`; `NEVER` before.
        tolerance: what its arithmetic may make of equal weights.

    It may also have:
        slow_sync: True where a sync takes seconds; the test at the start then changes fewer tensors.
        renewed(): itself, made anew from the training model's weights, where there can be no second one beside it.
    """

    version: int
    tolerance: Tolerance

    def sample(
        self,
        problems: Sequence[Problem],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
        record_routes: bool,
    ) -> Rollout:
        """Completions with the engine's own `logps` (nats, at the sampling temperature) and, if asked, its `routes`:
        of prefill for the prompt, of decoding for the rest, -1 on padding and on each row's last token."""
        ...

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over these weights (names and shapes of the training model's state dict, any floating dtype). Whatever
        was cached under the old ones (prefixes, KV) must be gone when this returns. Of a sharded training model they
        are DTensors, to be gathered (`gathered`) one after another, on all ranks in the same order."""
        ...

    def logps(self, rollout: Rollout, temperature: float) -> Float[Tensor, "B T"]:
        """The engine's log-probabilities of given completions, nats, 0 elsewhere: the probe after each sync."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it is not used again."""
        ...


class ModelEngine:
    """A model that samples by itself: never stale, and no mismatch but that of cached decoding against one forward."""

    tolerance = EXACT

    def __init__(self, model: nn.Module, tokenizer: Any, max_batch: int | None = None):
        self.model, self.tokenizer, self.max_batch = model, tokenizer, max_batch
        self.version = NEVER

    def sample(
        self,
        problems: Sequence[Problem],
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        record_routes: bool = False,
    ) -> Rollout:
        return sample(
            self.model,
            self.tokenizer,
            problems,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            generator=generator,
            record=record_routes,
            max_batch=self.max_batch,
        )

    def extend(
        self,
        rollout: Rollout,
        *,
        tokens: int,
        longest: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        version: int | None = None,
        record_routes: bool = False,
    ) -> Rollout:
        """Unfinished responses go on, see `moe_rl.rollout.continuing.extend`."""
        return extend(
            self.model,
            self.tokenizer,
            rollout,
            tokens=tokens,
            longest=longest,
            temperature=temperature,
            generator=generator,
            version=version,
            record=record_routes,
            max_batch=self.max_batch,
        )

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Nothing to copy: `weights` are this model's own."""
        self.version = version

    def logps(self, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
        return forward_logps(self.model, rollout, temperature)

    def close(self) -> None:
        pass


def gathered(tensor: Tensor) -> Tensor:
    """A sharded tensor (DTensor), whole on every rank, all of which must ask; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def forward_logps(model: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Float[Tensor, "B T"]:
    """Log-probabilities (nats) of a rollout's completion tokens under the model's own arithmetic, 0 elsewhere; on the
    rollout's device."""
    device = next(model.parameters()).device
    inputs = (rollout.input_ids, rollout.attention_mask, rollout.completion_mask)
    out = token_logps(model, *(x.to(device) for x in inputs), temperature=temperature)
    return out.logps.to(rollout.input_ids.device)
