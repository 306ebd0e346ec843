"""Parts of every integration: a batch's old policy with its routes, the proof that these are its routes, and checks."""

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
    """The old policy, which computed a batch's old log-probabilities: its choice, and the routes an update replays.

    routes: the routes that an update replays, `[B,T,L,K]`: under R2 the old policy's own, under R3 those of the engine
        that sampled.
    choice: the experts that the old policy's routers chose at the hidden states of that scoring; under R2 equal to
        `routes`. A policy with the same weights makes the same choice again.
    step: number of optimizer steps taken when the batch was scored.
    """

    routes: RoutedExperts
    choice: RoutedExperts
    step: int

    def rows(self, index: Int[Tensor, " b"]) -> "OldPolicy":
        """Return the old policy of some sequences of the batch."""
        routes = self.routes.rows(index)
        return OldPolicy(routes, routes if self.choice is self.routes else self.choice.rows(index), self.step)


def same_policy(old: RoutedExperts, now: RoutedExperts, tokens: Bool[Tensor, "B T"], tolerance: float = 0.0) -> float:
    """Return the share of expert slots that differ from the scoring of the batch, at equal weights; raise if too large.

    The share must be 0, because weights and tokens are the same. Routes of another policy (a reference that the same
    module scores) replay without an error, at a fraction of 1; only this share shows the mistake.

    Args:
        tokens: true on real tokens; routes of padding are not compared.
        tolerance: the largest share that passes, for kernels whose sums depend on what else is in the batch.

    Raises:
        RoutingError: the share is above `tolerance`.
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
    """Raise RoutingError for an unknown kind of replay, or a tolerance that is no share in [0, 1].

    A tolerance of 5, meant as %, would let every change pass."""
    if replay not in kinds:
        raise RoutingError(f"replay must be one of {', '.join(kinds)}{where}, got {replay!r}")
    refusal = FRACTION.refusal("first_change_tolerance, a share of the expert slots", first_change_tolerance)
    if refusal is not None:
        raise RoutingError(refusal)


def refuse_other_version(name: str, package: Any, versions: Sequence[str], part: str, file: str) -> None:
    """Raise RoutingError for a version of a package that is not in `versions`.

    The integration was written after reading `part` of the package, in `file`, in these versions."""
    version = getattr(package, "__version__", "unknown")
    if version not in versions:
        raise RoutingError(
            f"{name} {version} is not known here ({', '.join(versions)} are): its {part} may score and train "
            f"elsewhere. Install one of these, or compare {file} and add the version to "
            f"moe_rl.integrations.{package.__name__}.VERSIONS"
        )


def refuse_model(model: nn.Module) -> None:
    """Raise RoutingError for a model in which routes are not laid beside a batch's tokens, or not those of its weights.

    Raises:
        RoutingError: the model has dropout or router jitter, so that equal weights choose other experts each time, or
            adapters that add tokens. The message names the module and what to set.
    """
    adapters = [one for module in model.modules() for one in dict(getattr(module, "peft_config", None) or {}).values()]
    if kinds := [one.peft_type.value for one in adapters if getattr(one, "is_prompt_learning", False)]:
        raise RoutingError(
            f"PEFT's {kinds[0]} adds virtual tokens that are not in the batch, so that routes have no place beside its "
            "tokens. Train LoRA adapters, or all weights"
        )
    for name, _, attribute, amount in random_parts(model):
        what = "dropout" if attribute == "p" else attribute
        raise RoutingError(
            f"{name} has {what} = {amount:g}, drawn anew in every forward: the policy would choose other experts than "
            "it chose a moment ago with the same weights, and nothing that is measured would be of the update. Turn it "
            "off: disable_dropout=True in TRL's arguments, lora_dropout=0, or all of it, before the trainer is made: "
            "from moe_rl.measure.randomness import turn_off_randomness; turn_off_randomness(model)"
        )
