"""Every method as one line: what it changes in another. `docs/methods.md` is generated from this file:

python -m moe_rl.objectives.methods_table > docs/methods.md
"""

import difflib
from dataclasses import replace
from typing import NamedTuple

from moe_rl.objectives.corrections import Correction
from moe_rl.objectives.objective import Objective

PPO = Objective(advantage="gae")
GRPO = replace(PPO, advantage="group", clip_high=0.27)
GSPO = replace(GRPO, ratio="sequence", clip_low=3e-4, clip_high=4e-4)
GMPO = replace(GRPO, gate="geometric", clip_low=0.4, clip_high=0.4)
SFT = Objective(gate="likelihood", advantage="one")

TIS_5_OPTIONAL = Correction("token_truncate", high=5.0, optional=True)

OBJECTIVES: dict[str, Objective] = {
    # The methods that the GSPO paper compares
    "ppo": PPO,
    "grpo": GRPO,
    "gspo": GSPO,
    "gspo_token": replace(GSPO, ratio="sequence_token"),
    # Relatives of GRPO: aggregation and clip range
    "dr_grpo": replace(GRPO, clip_high=0.2, aggregate="constant", advantage_scale="none"),
    "dapo": replace(GRPO, clip_high=0.28, aggregate="token_mean"),
    "bnpo": replace(GRPO, aggregate="token_mean", local_normalizer=True),
    "dual_clip": replace(GRPO, dual_clip=3.0),
    # Relatives of GRPO: another gate
    "cispo": replace(GRPO, gate="cap", clip_low=1.0, clip_high=4.0, aggregate="token_mean"),
    "sapo": replace(GRPO, gate="sigmoid", temperature_pos=1.0, temperature_neg=1.05),
    "gmpo": GMPO,
    "minirl": replace(GRPO, gate="mask", aggregate="sum", advantage_scale="none", corrections=(TIS_5_OPTIONAL,)),
    # Router-shift weight
    "rspo": replace(GMPO, route_weight="before_clip", route_floor=0.8),
    "rspo_after_clip": replace(GMPO, route_weight="after_clip", route_floor=0.8),
    # Anchored at the engine that sampled, or corrected for it
    "gspo_rollout": replace(GSPO, anchor="rollout"),
    "grpo_tis": replace(GRPO, corrections=(Correction("token_truncate", high=2.0),)),
    "grpo_mis": replace(GRPO, corrections=(Correction("token_mask", high=3.0),)),
    "grpo_icepop": replace(GRPO, corrections=(Correction("token_mask", low=0.5, high=5.0),)),
    "grpo_seq_tis": replace(GRPO, corrections=(Correction("sequence_truncate", high=3.0),)),
    "grpo_seq_mis": replace(GRPO, corrections=(Correction("sequence_mask", high=3.0),)),
    "grpo_geo_rs": replace(GRPO, corrections=(Correction("geometric_mask", low=0.99, high=1.01),)),
    "grpo_opsm": replace(GRPO, corrections=(Correction("off_policy_mask", high=0.1, policy="current"),)),
    # The unified view of DeepSeekMath: imitation as a policy gradient
    "sft": SFT,
    "rft": replace(SFT, advantage="accepted"),
    "online_rft": replace(SFT, advantage="accepted"),
}


class Note(NamedTuple):
    """Where a preset comes from, and in what it departs from there."""

    source: str
    differs: str = ""


_GSPO_PAPER = "arXiv:2507.18071"
_OWN_CLIP = "clip range of the `grpo` preset, so that only the named knob differs from it."
_REJECT = "dropped tokens stay in the denominators; verl takes them out."

NOTES: dict[str, Note] = {
    "ppo": Note(f"arXiv:1707.06347; {_GSPO_PAPER} eq. 1", "KL, if any, in the loss and not in the reward."),
    "grpo": Note(
        f"arXiv:2402.03300 eq. 3; {_GSPO_PAPER} eq. 2, clip range of section 5.1",
        "beta 0, not 0.04; unbiased standard deviation, plus 1e-4.",
    ),
    "gspo": Note(f"{_GSPO_PAPER} eqs 5-7, section 5.1", "unbiased standard deviation, plus 1e-4."),
    "gspo_token": Note(f"{_GSPO_PAPER} eqs 13, 14", "unbiased standard deviation, plus 1e-4."),
    "dr_grpo": Note(
        "arXiv:2503.20783",
        "`length_constant` is 1, as in the equation; the authors' code divides by the generation budget.",
    ),
    "dapo": Note("arXiv:2503.14476 eq. 8", "the objective alone: no dynamic sampling, no overlong shaping."),
    "bnpo": Note("TRL `loss_type='bnpo'`", _OWN_CLIP),
    "dual_clip": Note("arXiv:1912.09729", _OWN_CLIP),
    "cispo": Note("arXiv:2506.13585; cap 5 of ScaleRL and TRL", "the paper does not print its cap."),
    "sapo": Note("arXiv:2511.20347"),
    "gmpo": Note("arXiv:2507.20673"),
    "minirl": Note(
        "arXiv:2512.01374",
        "without rollout log-probabilities the engine weight is 1: one engine samples and scores.",
    ),
    "rspo": Note("arXiv:2510.23027 v2", "floor 0.8 from public code; the paper's default was not seen."),
    "rspo_after_clip": Note("arXiv:2510.23027 v1", "floor 0.8 from public code."),
    "gspo_rollout": Note(f"{_GSPO_PAPER} section 5.4"),
    "grpo_tis": Note("fengyao.notion.site/off-policy-rl; cap 2 of verl and TRL", _OWN_CLIP),
    "grpo_mis": Note("verl, TRL `token_mask`, cap 3", _REJECT),
    "grpo_icepop": Note("arXiv:2510.18855", _REJECT),
    "grpo_seq_tis": Note("verl, TRL `sequence_truncate`, cap 3"),
    "grpo_seq_mis": Note("verl, TRL `sequence_mask`, cap 3", _REJECT),
    "grpo_geo_rs": Note("verl, geometric rejection sampling", f"bounds are ours; {_REJECT}"),
    "grpo_opsm": Note("arXiv:2512.02556 section 3.1", "delta 0.1 is ours, the paper prints none."),
    "sft": Note("arXiv:2402.03300 A.1"),
    "rft": Note("arXiv:2402.03300 A.1; responses of the initial policy"),
    "online_rft": Note("arXiv:2402.03300 A.1; responses of the current policy"),
}


def get_objective(name: str) -> Objective:
    """The preset of that name.

    Raises:
        ValueError: there is none; the message has the nearest name.
    """
    if name not in OBJECTIVES:
        near = difflib.get_close_matches(name, OBJECTIVES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"objective: no preset {name!r}; there are {', '.join(OBJECTIVES)}.{hint}")
    return OBJECTIVES[name]


if __name__ == "__main__":  # the same table, for those who look for it here
    from moe_rl.objectives.methods_table import methods_markdown

    print(methods_markdown(), end="")
