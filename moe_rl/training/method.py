"""The method of an arm, with presets filled in: source of responses, kind of advantage, and objective.

In the unified view of DeepSeekMath (its table: `moe_rl.objectives.preferences`) methods differ in the data
(`Method.source`) and in the gradient coefficient (`Method.advantage` through `Method.objective`; for DPO,
`Method.pairs`).
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from types import FunctionType
from typing import Any

from moe_rl.names import load_object
from moe_rl.objectives import GATES, Objective, get_objective
from moe_rl.rollout import make_task
from moe_rl.training.config import DPO, MethodConfig, RunConfig, Source

_SOURCES: dict[str, Source] = {"sft": "demonstrations", "rft": "initial", DPO: "initial"}


@dataclass(frozen=True)
class Method:
    """The method that an arm asks for, with presets filled in.

    Attributes:
        objective: the preset with the arm's own settings; `length_constant` is the generation budget, in tokens.
        source: whose responses are learned from: "policy", the current one; "initial", the policy that the run began
            with; "demonstrations", the task's.
        advantage: "group", a kind of `moe_rl.training.other_methods`, "gae", or "pair" (DPO).
    """

    objective: Objective
    source: Source
    advantage: str

    @cached_property
    def pairs(self) -> bool:
        """Whether the method learns from pairs, the best and the worst response of each group, not by `policy_loss`."""
        return self.advantage == "pair"

    @cached_property
    def needs_reference(self) -> bool:
        """Whether the method needs a frozen reference policy."""
        return self.pairs or bool(self.objective.kl_coef)

    @cached_property
    def weighs_routes(self) -> bool:
        """Whether the method weighs tokens by how far the routers moved (RSPO)."""
        return self.objective.route_weight != "none"

    @cached_property
    def needs_rollout_logps(self) -> bool:
        """Whether the loss reads the sampler's own log-probabilities, be it only for corrections.

        Demonstrations were not sampled, so that their corrections are 1 and do not need log-probabilities."""
        corrected = bool(self.objective.corrections) and self.source != "demonstrations"
        return corrected or self.objective.anchor == "rollout"


def overrides(own: MethodConfig) -> dict[str, Any]:
    """Return the fields of `Objective` that an arm sets itself, in place of those of the preset.

    >>> overrides(MethodConfig(objective="gspo", clip_low=0.003, replay="R2"))
    {'clip_low': 0.003}
    """
    values = {field.name: getattr(own, field.name) for field in fields(Objective)}
    if own.gate is not None and ":" in own.gate:
        values["gate"] = _gate_of(own.gate)
    return {name: value for name, value in values.items() if value is not None}


def _gate_of(place: str) -> str:
    """Return the name under which the gate function at `place` is registered.

    place: `package.module:function` or `path/to/file.py:function`. Raises ValueError if it registers no gate."""
    function = load_object(place, "method.gate", ValueError, FunctionType, "function")
    names = [name for name, gate in GATES.items() if gate.surrogate is function]
    if not names:
        raise ValueError(f"method.gate: {place} is no gate; one has @gate(NAME) over it (docs/extending.md)")
    return names[0]


def resolve_method(config: RunConfig, budget: int) -> Method:
    """Return the method that `config.method` asks for, for responses of at most `budget` tokens.

    Differs: the preset dr_grpo divides by 1, as its equation does; in training its sums are divided by the generation
    budget, as in its authors' code, so that one learning rate serves all methods.

    Raises:
        ValueError: an unknown preset, a value that no method knows, or a combination that means nothing.
    """
    own = config.method
    source = own.source or _SOURCES.get(own.objective, "policy")
    if own.objective == DPO:
        return Method(Objective(gate="likelihood"), source, "pair")
    changes = overrides(own)
    try:
        objective = replace(get_objective(own.objective), **changes)
    except ValueError as error:
        raise ValueError(f"method: {error}") from error
    if objective.aggregate == "constant" and own.length_constant is None:
        objective = replace(objective, length_constant=budget)
    return Method(objective, source, objective.advantage)


def resolved_objective(config: RunConfig) -> dict[str, Any]:
    """Return the objective that a run minimises as plain data, for its `config.yaml`.

    That is every field of its `Objective`, presets filled in, and the source of its responses (`source`). For DPO,
    which has no such fields, it is `beta` and `source`.

    >>> resolved_objective(RunConfig(method=MethodConfig(objective="gspo", clip_low=0.003)))["clip_high"]
    0.0004
    """
    method = resolve_method(config, budget=1)
    if method.pairs:
        return {"source": method.source, "beta": config.method.beta}
    if method.objective.aggregate == "constant":
        method = resolve_method(config, config.rollout.max_new_tokens or make_task(config.task).max_new_tokens)
    values = asdict(method.objective)
    return {"source": method.source, **values, "corrections": list(values["corrections"])}
