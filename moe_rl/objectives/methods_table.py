"""Generator of `docs/methods.md`: all presets in one table, a row per method and a column per knob. Usage:

python -m moe_rl.objectives.methods_table > docs/methods.md
"""

import inspect
import math
import textwrap

from moe_rl.objectives.corrections import Correction
from moe_rl.objectives.gates import GATES
from moe_rl.objectives.objective import Objective
from moe_rl.objectives.presets import LEFT_OUT, PRESETS

_HEADER = """# Methods

Generated from `moe_rl/objectives/presets.py` by

    python -m moe_rl.objectives.methods_table > docs/methods.md

Do not edit; a test compares this page with the presets.

Every method is `loss = -Agg[ c G(r; A) ] + beta Agg[ KL ]` with ratio r, gate G, advantage A, engine
correction c and aggregation Agg. DPO learns from pairs and is in `moe_rl/objectives/preferences.py`. `Objective` in
`moe_rl/objectives/objective.py` defines the values of each column of the table:

- **Gate**: what is made of ratio and advantage ([formulas](#gates)).
- **Range**: the bounds of the clip (`clip`, `mask`, `geometric`) or of the weight (`cap`). For `sigmoid` it has the
  temperatures for A > 0 and A <= 0; for `gamma` the weight; for the gates of a divergence its bounds, with p and q the
  token's current and old probability, and the ceiling of the ratio.
- **Anchor**: the denominator of the ratio, the training engine's old policy or the rollout engine's.
- **Correction**: kind and bounds of the weight that corrects for the rollout engine, and its numerator: the old policy
  or the current one.
- **Route weight**: where the weight of RSPO's router shift enters.
- **Needs**: arguments of `policy_loss` that the method cannot do without.

Each goes with each kind of replay (`method.replay`): `none`; `R2`, the routes of the training engine's old policy; `R3`
(arXiv:2510.11370), those of the rollout engine; `PR2` (PR², arXiv:2606.00395), predicted ones, as
`moe_rl/training/predictor.py` defines them. But for `sft` and `rft`, whose responses the current policy did not sample:
`none` and `R2` alone.
"""

_COLUMNS = (
    "Method",
    "Ratio",
    "Gate",
    "Range",
    "Anchor",
    "Correction",
    "Route weight",
    "Aggregation",
    "Advantage",
    "KL",
    "Needs",
    "Source",
)


def methods_markdown() -> str:
    """Return the text of `docs/methods.md`, with a trailing newline."""
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS)]
    rows += [_row(name, preset.objective, preset.source) for name, preset in PRESETS.items()]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    departures = "\n".join(
        f"- `{name}` Differs: {preset.differs}" for name, preset in PRESETS.items() if preset.differs
    )
    left_out = "\n".join(f"- {name}: {reason}" for name, reason in LEFT_OUT.items())
    sections = {"Gates": _gates(), "Departures from the sources": departures, "Left out": left_out}
    return f"{_HEADER}\n{table}\n" + "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())


def _gates() -> str:
    """Return the section on gates: the `gate` entries of the docstring of `Objective`."""
    text = inspect.getdoc(Objective) or ""
    lines = text[text.index("    gate: ") : text.index("    clip_low, clip_high: ")].splitlines(keepends=True)[1:]
    return (
        "G(r; A) of a token's ratio r and advantage A. sg: its gradient is stopped; M: a mask; sigma: the logistic "
        f"function.\n\n```\n{textwrap.dedent(''.join(lines))}```"
    )


def _row(name: str, o: Objective, source: str) -> tuple[str, ...]:
    without_ratio = o.gate == "likelihood"
    return (
        f"`{name}`",
        "–" if without_ratio else o.ratio,
        o.gate,
        _range(o),
        "–" if without_ratio else o.anchor,
        ", ".join(_correction(c) for c in o.corrections) or "–",
        "–" if o.route_weight == "none" else f"{o.route_weight}, floor {o.route_floor:g}",
        _aggregation(o),
        f"group, {o.advantage_scale}" if o.advantage == "group" else o.advantage,
        "–" if o.kl_coef == 0 else f"{o.kl_coef:g} {o.kl_estimator}",
        ", ".join(f"`{need}`" for need in sorted(o.needs)) or "–",
        source,
    )


def _range(o: Objective) -> str:
    match o.gate:
        case "sigmoid":
            return f"τ {o.temperature_pos:g}, {o.temperature_neg:g}"
        case "geometric":
            return f"[e^-{o.clip_low:g}, e^{o.clip_high:g}]"
        case "gamma":
            return f"r^{o.power_pos:g} e^({o.decay_pos:g}(1-r)), A<0: r^{o.power_neg:g} e^({o.decay_neg:g}(1-r))"
        case "divergence_tv" | "quadratic":
            text = f"p - q in [-{o.clip_low:g}, {o.clip_high:g}]"
            return text if o.ratio_cap is None or o.gate == "quadratic" else f"{text}, r ≤ {o.ratio_cap:g}"
        case "divergence_kl":
            text = f"KL ≤ {o.clip_high:g} nats, A<0: {o.clip_low:g}"
            return text if o.ratio_cap is None else f"{text}, r ≤ {o.ratio_cap:g}"
        case "sequence_clip":
            return f"sequence in [{1 - o.clip_low:g}, {1 + o.clip_high:g}]"
        case "clip" | "soft_dual_clip" | "mask" | "cap":
            text = f"[{1 - o.clip_low:g}, {1 + o.clip_high:g}]"
            return text if o.dual_clip is None else f"{text}, A<0: ≤ {o.dual_clip:g}"
    return ", ".join(f"{knob} {getattr(o, knob)}" for knob in GATES[o.gate].knobs) or "–"


def _aggregation(o: Objective) -> str:
    if o.aggregate == "constant":
        return f"constant {o.length_constant:g}"
    return f"{o.aggregate}, local" if o.local_normalizer else o.aggregate


def _correction(c: Correction) -> str:
    if c.kind == "off_policy_mask":
        bounds = f"δ {c.high:g}"
    elif c.kind.endswith("truncate") or c.low == 0:
        bounds = f"≤ {c.high:g}"
    else:
        bounds = f"[{c.low:g}, {'∞' if math.isinf(c.high) else f'{c.high:g}'}]"
    return f"{c.kind} {bounds} ({c.policy}{', optional' if c.optional else ''})"


if __name__ == "__main__":
    print(methods_markdown(), end="")
