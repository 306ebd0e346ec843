"""An arm's method, resolved: where its responses come from, what they are worth, what is minimised.

The unified view of DeepSeekMath (arXiv:2402.03300, A.1): every method's gradient is an expectation of
GC(q, o, t) grad log pi(o_t | q, o_<t). Methods differ in the data (`Method.source`) and in the gradient coefficient
GC (`Method.advantage` through `Method.objective`; for DPO, `Method.pairs`):

    method       source           coefficient
    sft          demonstrations   1
    rft          initial          1[correct]
    dpo          initial          +-beta sigma(beta (margin of the worse - margin of the better))
    online_rft   policy           1[correct]
    ppo          policy           A_t of a value model, times what ratio and clip make of it
    grpo, ...    policy           A of the group, likewise
"""

from dataclasses import dataclass, replace
from typing import Literal

from moe_rl.objectives import OBJECTIVES, Objective
from moe_rl.training.config import DPO, KNOBS, RunConfig

Source = Literal["policy", "initial", "demonstrations"]

_SOURCES: dict[str, Source] = {"sft": "demonstrations", "rft": "initial", DPO: "initial"}


@dataclass(frozen=True)
class Method:
    """Fields:
    objective: the preset with the arm's own knobs; `length_constant` is the generation budget, in tokens.
    source: "policy", the current one; "initial", the policy that the run began with; "demonstrations", the task's.
    advantage: a kind of `moe_rl.training.advantages.ADVANTAGES`, "gae", or "pair" (DPO).
    """

    objective: Objective
    source: Source
    advantage: str

    @property
    def pairs(self) -> bool:
        """Learns from the best and the worst response of each group, not from `policy_loss`."""
        return self.advantage == "pair"

    @property
    def needs_reference(self) -> bool:
        return self.pairs or bool(self.objective.kl_coef)

    @property
    def weighs_routes(self) -> bool:
        """Weighs tokens by how far the routers moved (RSPO)."""
        return self.objective.route_weight != "none"

    @property
    def needs_rollout_logps(self) -> bool:
        """Whether the loss sees the sampler's own log-probabilities, optional corrections included."""
        return self.objective.anchor == "rollout" or bool(self.objective.corrections)


def resolve_method(config: RunConfig, budget: int) -> Method:
    """What `config.method` asks for, of a task whose responses have at most `budget` tokens.

    Differs: the preset dr_grpo divides by 1, as its equation does; in training its sums are divided by the generation
    budget, as in its authors' code, so that one learning rate serves all methods.
    """
    own = config.method
    source = own.source or _SOURCES.get(own.objective, "policy")
    if own.objective == DPO:
        return Method(Objective(gate="likelihood"), source, "pair")  # type: ignore[arg-type]  # validated
    objective = OBJECTIVES[own.objective]
    objective = replace(objective, **{name: getattr(own, name) for name in KNOBS if getattr(own, name) is not None})
    if objective.aggregate == "constant":
        objective = replace(objective, length_constant=budget)
    return Method(objective, source, own.advantage or objective.advantage)  # type: ignore[arg-type]  # validated
