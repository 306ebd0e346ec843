"""The probe: measurements on a fixed subset of a batch after each update, made alike in every arm.

Under replay the change rate is zero by construction, so the probe uses live routing; a second forward replays the old
policy's routes with the same weights. The difference between the two is the part of the log-ratio that routing adds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl.measure.logprobs import TokenLogps, token_logps
from moe_rl.measure.metrics import (
    as_logits,
    change_metrics,
    load_metrics,
    router_metrics,
    routing_confidence,
    routing_ratio_metrics,
)
from moe_rl.routing import RoutedExperts, change_counts, record_routes, replay_routes
from moe_rl.training.batch import Batch
from moe_rl.training.probe_options import Decomposition, replay_gradients
from moe_rl.training.ranks import Ranks
from moe_rl.training.rollout_engine import engine_gaps
from moe_rl.training.token_tables import Observation, routers_said


@dataclass(eq=False)
class Probe:
    """The probe of one step: after each update it compares a subset of the batch with the batch's old policy.

    Args:
        part: the probed responses.
        live: measure change rates, variances, router scores; two forwards of `part` per update.
        decompose: split the log-ratio into weights, routes and their interaction, see `Decomposition`.
        loss: makes a forward of some of the probed responses and returns their loss, whose gradients under live and
            under the old routes are compared. Three forwards and backwards, one of them in halves, and four copies of
            the weights' size. One process only.
        tables: keep the values for the tables of tokens and routes.

    Attributes:
        observations: one per update so far, if `live` and `tables`.
    """

    policy: nn.Module
    part: Batch
    ranks: Ranks
    temperature: float
    live: bool
    decompose: bool
    loss: Callable[[Batch], Tensor] | None = None
    tables: bool = False
    observations: list[Observation] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.old_logits = self._old_router_logits() if self.live else None  # on the CPU
        self._old_said: dict[str, Tensor] = {}
        self.decomposition = Decomposition(self.policy, self.part, self.temperature) if self.decompose else None

    def rows(self, update: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Measure the policy after an update; yield kind (probe, engine or decomposition) and values of each row."""
        if self.old_logits is not None:
            metrics, natural, routes = self._measure(update)
            if self.loss is not None:
                metrics |= replay_gradients(self.policy, self.part, self.loss)
            yield "probe", {"update": update, **metrics}
            if self.part.rollout_routes is not None:  # mu -> pi, live routing: engine and staleness together
                apart = engine_gaps(self.part, natural, routes, self.part.completion_mask)
                yield "engine", {"pair": "rollout_to_new", "update": update, **apart}
        if self.decomposition is not None:
            yield "decomposition", {"update": update, **self.decomposition.shares()}

    @torch.no_grad()
    def _measure(self, update: int) -> tuple[dict[str, Any], Float[Tensor, "B T"], RoutedExperts]:
        """Return metrics of the present policy, and its log-probabilities and routes under live routing."""
        policy, part, ranks, mask = self.policy, self.part, self.ranks, self.part.completion_mask
        mine = ranks.mine(part)
        policy.eval()
        with record_routes(policy) as recording:
            live = self._logps(mine, entropy=True, router_logits=True)
        with replay_routes(policy, mine.routes):
            replayed = ranks.gather(self._logps(mine).logps, len(part))
        assert live.entropy is not None
        entropy, natural = (ranks.gather(values, len(part)) for values in (live.entropy, live.logps))
        routes = ranks.gather_routes(recording.routes, len(part))
        metrics = change_metrics(change_counts(part.routes, routes, mask)) | {"entropy": entropy[mask].mean()}
        metrics |= routing_ratio_metrics({"natural": natural, "replayed": replayed}, part.live_old_logps, mask)
        metrics |= load_metrics(part.routes, routes, mask)
        logits, kept, routers = self._response_logits(live), self.old_logits or [], dict[str, Tensor]()
        if len(logits) == len(kept) == len(routes.sites):
            old_logits = [old.to(new.device) for old, new in zip(kept, logits, strict=True)]
            metrics |= router_metrics(old_logits, logits, part.routes.shape[-1])
            chosen = routes.ids.to(mask.device)[mask]
            metrics["site_routing_confidence"] = [
                float(routing_confidence(scores.softmax(-1), ids.to(scores.device)))
                for scores, ids in zip(logits, chosen.unbind(1), strict=True)
            ]
            if self.tables:
                self._old_said = self._old_said or routers_said("old", mask, old_logits, part.routes)
                routers = {**self._old_said, **routers_said("new", mask, logits, routes)}
        if self.tables:
            self.observations.append(Observation(update, natural, replayed, routes, routers))
        return metrics, natural, routes

    @torch.no_grad()
    def _old_router_logits(self) -> list[Float[Tensor, "n E"]]:
        """Return, by site, the router logits on the n response tokens before the step's updates, on the CPU.

        Under rollout lag they are those of newer weights than the weights that sampled the batch."""
        self.policy.eval()
        found = self._response_logits(self._logps(self.ranks.mine(self.part), router_logits=True))
        return [logits.cpu() for logits in found]

    def _response_logits(self, out: TokenLogps) -> list[Float[Tensor, "n E"]]:
        """Return the router logits of all ranks on the response tokens, as many tensors as the family returns."""
        mask = self.part.completion_mask
        B, T = mask.shape
        found = []
        for logits in out.router_logits or ():
            if logits.numel():
                whole = self.ranks.gather(logits.detach().reshape(len(out.logps), T, -1), B)
                found.append(as_logits(whole[mask.to(whole.device)]))
        return found

    def _logps(self, part: Batch, **options: Any) -> TokenLogps:
        return token_logps(self.policy, *part.tokens, temperature=self.temperature, **options)


def probed_rows(responses: int, sequences: int) -> Tensor:
    """Return the rows of a batch that are probed: `sequences` of them, spread over its groups."""
    return torch.linspace(0, responses - 1, sequences, dtype=torch.float64).round().long()  # in fp32 two may coincide
