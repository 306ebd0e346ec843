"""Who else is asked about a rollout while the old policy scores it.

Plain GRPO asks the old policy alone (`moe_rl.training.score`), in one pass. A method or an option that needs more of
it, or that has a model of its own, gives the run a `Scorer` (`State.scorers`): a class here, or the model itself
(`Critic`, `RewardModel`).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from moe_rl.measure.logprobs import TokenLogps, token_logps
from moe_rl.measure.router_shift import chosen_scores
from moe_rl.measure.shared_prompts import SharedPrompts, share_prompts
from moe_rl.rollout import Rollout
from moe_rl.rollout.completions import Responses
from moe_rl.routing import RoutedExperts, record_margins, replay_routes
from moe_rl.training.batch import Batch, Totals


@dataclass(frozen=True)
class Seen:
    """What the old policy said of a part of a rollout.

    Attributes:
        out: its log-probabilities, natural routing.
        routes: the experts that it chose, rows and columns as those of the part.
        layout: the rows in which responses share prompts, where they do.
    """

    out: TokenLogps
    routes: RoutedExperts
    layout: SharedPrompts | None = None


class Scorer:
    """Base class: watches nothing, and has yet to say what it knows.

    Attributes:
        router_logits: whether it needs the router logits of the policy's pass.
    """

    router_logits = False

    def watch(self, policy: nn.Module) -> AbstractContextManager[Any]:
        """Open around the policy's pass over a part; what it gives comes back to `say`."""
        return nullcontext()

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        """Fields of `Scores` for a part of the rollout, by name. Called without gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define say(part, seen, watched)")


@runtime_checkable
class Learner(Protocol):
    """What is trained in the policy's updates beside it: a value model, route predictors."""

    def watch(self, policy: nn.Module) -> AbstractContextManager[Any]:
        """Open around the policy's forward on a micro-batch; what it gives comes back to `backward`."""

    def backward(self, part: Batch, watched: Any, totals: Totals) -> None:
        """Add the gradient on a micro-batch of a minibatch that has these totals."""

    def step(self, warmup: float, hold: bool) -> dict[str, Any]:
        """One optimizer step at `warmup` times the learning rate, or none (`hold`); what is logged of the minibatch."""


class Reference(Scorer):
    """The frozen policy that a KL term or DPO is tied to."""

    def __init__(self, model: nn.Module, temperature: float):
        self.model, self.temperature = model, temperature

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        out = token_logps(self.model, *part.tokens, temperature=self.temperature, shared=seen.layout)
        return {"ref_logps": out.logps}


class RouterScores(Scorer):
    """The router's scores of the chosen experts (RSPO)."""

    router_logits = True

    def say(self, part: Responses, seen: Seen, watched: Any) -> dict[str, Tensor]:
        assert seen.out.router_logits is not None
        return {"route_scores": chosen_scores(seen.out.router_logits, seen.routes)}


class Margins(Scorer):
    """The margins of the routers' choices (replay of a part of the routes)."""

    def watch(self, policy: nn.Module) -> AbstractContextManager[Any]:
        return record_margins(policy)

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        return {"margins": watched.values.to(seen.out.logps.device)}


class EngineRoutes(Scorer):
    """The old policy once more, under the routes of the engine that sampled; nothing of a rollout without such."""

    def __init__(self, policy: nn.Module, temperature: float):
        self.policy, self.temperature = policy, temperature

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        routes = part.routes
        if routes is None or routes is seen.routes:  # none, or the old policy's own (`decoded`)
            return {}
        layout = share_prompts(*part.tokens, routes=routes) if seen.layout else None
        with replay_routes(self.policy, layout.pack(routes) if layout else routes, once=True):
            out = token_logps(self.policy, *part.tokens, temperature=self.temperature, shared=layout)
        return {"replayed_logps": out.logps}
