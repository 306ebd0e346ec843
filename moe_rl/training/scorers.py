"""Scorers: what is computed about a rollout besides the old policy's log-probabilities and routes.

Plain GRPO needs the old policy alone (`moe_rl.training.score`), in one pass. A method or an option that needs other
values from this pass, or that has a model of its own, adds a `Scorer` to the run (`State.scorers`): a class of this
module, or the model itself (`Critic`, `RewardModel`).
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
    """The result of the old policy's pass over a part of a rollout.

    Attributes:
        out: log-probabilities of the pass: under live routing, or under the engine's routes (`EngineRoutes.readers`).
        routes: the experts that the policy chose live; rows and columns are those of the part.
        layout: the layout of rows in which responses share prompts; None if they do not.
    """

    out: TokenLogps
    routes: RoutedExperts
    layout: SharedPrompts | None = None


class Scorer:
    """Base class of scorers, which compute fields of `Scores`; a subclass must define `say`, and may define `watch`.

    Attributes:
        router_logits: whether the scorer needs the router logits of the policy's pass.
    """

    router_logits = False

    def watch(self, policy: nn.Module) -> AbstractContextManager[Any]:
        """Context manager around the policy's pass over a part; its value is the argument `watched` of `say`."""
        return nullcontext()

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        """Return fields of `Scores` for a part of the rollout, by name. Called without gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define say(part, seen, watched)")


@runtime_checkable
class Learner(Protocol):
    """Protocol of a model that is trained beside the policy in its updates: a value model, route predictors."""

    def watch(self, policy: nn.Module) -> AbstractContextManager[Any]:
        """Context manager around the policy's forward on a micro-batch; its value is passed to `backward`."""

    def backward(self, part: Batch, watched: Any, totals: Totals) -> None:
        """Add the gradient on a micro-batch `part` of a minibatch with these `totals`."""

    def clip(self) -> Tensor:
        """Clip the gradient on the minibatch, unless the learner leaves it as it is; return its norm before that."""

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield what is trained, by name."""

    def step(self, warmup: float, hold: bool) -> dict[str, Any]:
        """Make one optimizer step at `warmup` times the learning rate (with `hold` none); return metrics to log."""


class Reference(Scorer):
    """Scorer of the frozen reference policy of a KL term or of DPO: its log-probabilities."""

    def __init__(self, model: nn.Module, temperature: float):
        self.model, self.temperature = model, temperature

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        out = token_logps(self.model, *part.tokens, temperature=self.temperature, shared=seen.layout)
        return {"ref_logps": out.logps}


class RouterScores(Scorer):
    """Scorer of the router's log-probabilities of the chosen experts (RSPO)."""

    router_logits = True

    def say(self, part: Responses, seen: Seen, watched: Any) -> dict[str, Tensor]:
        assert seen.out.router_logits is not None
        return {"route_scores": chosen_scores(seen.out.router_logits, seen.routes)}


class Margins(Scorer):
    """Scorer of the margins of the routers' choices (for replay of a part of the routes)."""

    def watch(self, policy: nn.Module) -> AbstractContextManager[Any]:
        return record_margins(policy)

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        return {"margins": watched.values.to(seen.out.logps.device)}


class EngineRoutes(Scorer):
    """Scorer of a second pass of the old policy, under the rollout engine's routes, if they were recorded.

    readers: scorers of this pass instead of the live one, for values that updates under these routes compare with."""

    def __init__(self, policy: nn.Module, temperature: float, readers: Sequence[Scorer] = ()):
        self.policy, self.temperature, self.readers = policy, temperature, readers

    def say(self, part: Rollout, seen: Seen, watched: Any) -> dict[str, Tensor]:
        routes = part.routes
        if routes is None or routes is seen.routes:  # not recorded, or the old policy's own (`decoded`)
            return {}
        layout = share_prompts(*part.tokens, routes=routes) if seen.layout else None
        router_logits = any(reader.router_logits for reader in self.readers)
        with ExitStack() as stack:
            stack.enter_context(replay_routes(self.policy, layout.pack(routes) if layout else routes, once=True))
            read = [stack.enter_context(reader.watch(self.policy)) for reader in self.readers]
            out = token_logps(
                self.policy, *part.tokens, temperature=self.temperature, router_logits=router_logits, shared=layout
            )
        said = {"replayed_logps": out.logps}
        for reader, own in zip(self.readers, read, strict=True):
            said |= reader.say(part, Seen(out, seen.routes, layout), own)
        return said
