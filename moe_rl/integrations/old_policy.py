"""What every integration needs: the routes of a batch's old policy, and the proof that they are its."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor, nn

from moe_rl.measure.randomness import random_parts
from moe_rl.objectives.bounds import FRACTION
from moe_rl.routing import RoutedExperts, RoutingError, change_counts

KINDS = ("none", "R2", "R3")


@dataclass(frozen=True, eq=False)
class OldPolicy:
    """The policy that a batch's old log-probabilities come from.

    routes: what an update replays, `[B,T,L,K]`: R2 its own routes, R3 those of the engine that sampled.
    choice: what its routers chose at the hidden states of that scoring; under R2 the routes themselves. A policy with
        the same weights makes the same choice again.
    step: optimizer steps taken when it was scored.
    """

    routes: RoutedExperts
    choice: RoutedExperts
    step: int

    def rows(self, index: Int[Tensor, " b"]) -> "OldPolicy":
        """Some sequences of the batch."""
        routes = self.routes.rows(index)
        return OldPolicy(routes, routes if self.choice is self.routes else self.choice.rows(index), self.step)


def same_policy(old: RoutedExperts, now: RoutedExperts, tokens: Bool[Tensor, "B T"], tolerance: float = 0.0) -> float:
    """The share of expert slots that the routers chose otherwise than when the batch was scored, at equal weights.

    It must be 0: the same weights on the same tokens. Routes of another policy (a reference that the same module
    scores) replay without an error, at a fraction of 1, and nothing but this tells.

    Args:
        tokens: true on real tokens; what is routed for padding means nothing.
        tolerance: the largest share that passes, for kernels whose sums depend on what else is in the batch.

    Raises:
        RoutingError: a larger share.
    """
    changed = change_counts(old, now, tokens)
    share = changed.slots_changed / changed.slots_total if changed.slots_total else 0.0
    if share > tolerance:
        raise RoutingError(
            f"at the first update of a batch, before any weight moved, {100 * share:.3g} % of the expert slots are not "
            f"those that were recorded with the old log-probabilities (allowed: {100 * tolerance:.3g} %). Either the "
            "routes are of another policy than the one that is trained, or the model is random in train mode, or its "
            "kernels sum otherwise in another batch (bf16 on a GPU may): only in the last case raise "
            f"first_change_tolerance above {share:.3g}"
        )
    return share


def refuse_options(replay: str, kinds: Sequence[str], first_change_tolerance: Any, where: str = "") -> None:
    """RoutingError for a kind of replay that there is not, and for what is no share of the expert slots, in [0, 1]: 5,
    meant as %, would let every change pass."""
    if replay not in kinds:
        raise RoutingError(f"replay must be one of {', '.join(kinds)}{where}, got {replay!r}")
    refusal = FRACTION.refusal("first_change_tolerance, a share of the expert slots", first_change_tolerance)
    if refusal is not None:
        raise RoutingError(refusal)


def refuse_other_version(name: str, package: Any, versions: Sequence[str], part: str, file: str) -> None:
    """RoutingError for a version of a package whose `part`, in `file`, was not read; `versions` were."""
    version = getattr(package, "__version__", "unknown")
    if version not in versions:
        raise RoutingError(
            f"{name} {version} is not known here ({', '.join(versions)} are): its {part} may score and train "
            f"elsewhere. Install one of these, or compare {file} and add the version to "
            f"moe_rl.integrations.{package.__name__}.VERSIONS"
        )


def refuse_random(model: nn.Module) -> None:
    """Dropout and router jitter make a policy choose other experts when it is asked again.

    Raises:
        RoutingError: naming the module and what to set.
    """
    for name, _, attribute, amount in random_parts(model):
        what = "dropout" if attribute == "p" else attribute
        raise RoutingError(
            f"{name} has {what} = {amount:g}, drawn anew in every forward: the policy would choose other experts than "
            "it chose a moment ago with the same weights, and nothing that is measured would be of the update. Turn it "
            "off: disable_dropout=True in the trainer's arguments, lora_dropout=0, or all of it, before the trainer is "
            "made: from moe_rl.measure.randomness import turn_off_randomness; turn_off_randomness(model)"
        )
