# ruff: noqa: E501  (a table: one method, one row)
"""`PRESETS`, the table of methods: name, settings that differ from another method, source, departures from the source.

`docs/methods.md` is generated from this file: python -m moe_rl.objectives.methods_table > docs/methods.md
"""

from dataclasses import replace
from typing import NamedTuple

from moe_rl.objectives.bounds import unknown
from moe_rl.objectives.corrections import Correction
from moe_rl.objectives.diagnostics import CEILING
from moe_rl.objectives.objective import Objective


class Preset(NamedTuple):
    """A method: its objective, its source, and in what it departs from the source."""

    objective: Objective
    source: str
    differs: str = ""


PPO = Objective(advantage="gae")
GRPO = replace(PPO, advantage="group", clip_high=0.27)
GSPO = replace(GRPO, ratio="sequence", clip_low=3e-4, clip_high=4e-4)
GMPO = replace(GRPO, gate="geometric", clip_low=0.4, clip_high=0.4)
DPPO = replace(GRPO, gate="divergence_tv", clip_low=0.15, clip_high=0.15, ratio_cap=20.0, aggregate="token_mean")
SFT = Objective(gate="likelihood", advantage="one")

_GSPO = "arXiv:2507.18071"
_UNBIASED = "unbiased standard deviation, plus 1e-4."
_OWN_CLIP = "clip range of the `grpo` preset, so that only the named knob differs from it."
_REJECT = "dropped tokens stay in the denominators; verl takes them out."
_GAMMA_AT = "gamma of a token is of the routers that read it; public code (a fork of verl) takes those that predict it, one position before."
_ANCHOR = "anchored at the training engine's old policy; the paper (section 5.2), TRL and verl's example anchor at the rollout engine, `anchor: rollout`. Advantages with standard deviation; verl's example has none."

PRESETS: dict[str, Preset] = {
    # The methods that the GSPO paper compares
    "ppo": Preset(PPO, f"arXiv:1707.06347; {_GSPO} eq. 1", "KL, if any, in the loss and not in the reward."),
    "grpo": Preset(GRPO, f"arXiv:2402.03300 eq. 3; {_GSPO} eq. 2, clip range of section 5.1", f"beta 0, not 0.04; {_UNBIASED}"),
    "gspo": Preset(GSPO, f"{_GSPO} eqs 5-7, section 5.1", _UNBIASED),
    "gspo_token": Preset(replace(GSPO, ratio="sequence_token"), f"{_GSPO} eqs 13, 14", _UNBIASED),
    # Relatives of GRPO and GSPO: aggregation and clip range
    "dr_grpo": Preset(replace(GRPO, clip_high=0.2, aggregate="constant", advantage_scale="none"), "arXiv:2503.20783", "`length_constant` is 1, as in the equation; a run divides by the generation budget, as the authors' code does, unless it sets `method.length_constant`."),
    "dapo": Preset(replace(GRPO, clip_high=0.28, aggregate="token_mean"), "arXiv:2503.14476 eq. 8", "the objective alone; dynamic sampling and overlong shaping are `rollout.dynamic_sampling` and `rollout.overlong_buffer`."),
    "bnpo": Preset(replace(GRPO, aggregate="token_mean", local_normalizer=True), "TRL `loss_type='bnpo'`", _OWN_CLIP),
    "dual_clip": Preset(replace(GRPO, dual_clip=CEILING), "arXiv:1912.09729", _OWN_CLIP),
    "luspo": Preset(replace(GSPO, aggregate="sum", clip_low=2e-3, clip_high=2.5e-3), "arXiv:2602.05261, section 5.1, as TRL `loss_type='luspo'` has it", "the paper itself was not seen."),
    # Relatives of GRPO: another gate
    "cispo": Preset(replace(GRPO, gate="cap", clip_low=1.0, clip_high=4.0, aggregate="token_mean"), "arXiv:2506.13585; cap 5 of ScaleRL and TRL", "the paper does not print its cap."),
    "sapo": Preset(replace(GRPO, gate="sigmoid", temperature_pos=1.0, temperature_neg=1.05), "arXiv:2511.20347"),
    "gmpo": Preset(GMPO, "arXiv:2507.20673"),
    "minirl": Preset(replace(GRPO, gate="mask", aggregate="sum", advantage_scale="none", corrections=(Correction("token_truncate", high=5.0, optional=True),)), "arXiv:2512.01374", "without rollout log-probabilities the engine weight is 1: one engine samples and scores."),
    "vespo": Preset(replace(GRPO, gate="gamma", ratio="sequence_product", aggregate="token_mean"), "arXiv:2602.10693, as TRL `loss_type='vespo'` has it", "log-ratios are not clamped at 20 nats, where the weight is below 1e-15 anyway; TRL multiplies the engine's correction into the ratio, here `anchor: rollout` does that."),
    # The divergence instead of the ratio
    "dppo_tv": Preset(DPPO, "arXiv:2602.04879; verl `dppo_tv`, TRL `DPPOTrainer` until July 2026", f"{_ANCHOR} Threshold of verl's example and TRL; 0.2 is in use too."),
    "dppo_kl": Preset(replace(DPPO, gate="divergence_kl", clip_low=0.05, clip_high=0.05), "arXiv:2602.04879; verl `dppo_kl`, TRL `DPPOTrainer` until July 2026", _ANCHOR),
    "drpo": Preset(replace(GRPO, gate="quadratic", clip_low=0.15, clip_high=0.15, aggregate="sum", advantage_scale="none"), "arXiv:2606.09821 eq. 8, table 1", "anchored at the training engine's old policy, not at the rollout engine; delta is DPPO's, that of the paper's experiments was not seen."),
    # Router-shift weight
    "rspo": Preset(replace(GMPO, route_weight="before_clip", route_floor=0.8), "arXiv:2510.23027 v2", f"floor 0.8 from public code; the paper's default was not seen. {_GAMMA_AT}"),
    "rspo_after_clip": Preset(replace(GMPO, route_weight="after_clip", route_floor=0.8), "arXiv:2510.23027 v1", f"floor 0.8 from public code. {_GAMMA_AT}"),
    # Anchored at the engine that sampled, or corrected for it
    "gspo_rollout": Preset(replace(GSPO, anchor="rollout"), f"{_GSPO} section 5.4"),
    "grpo_tis": Preset(replace(GRPO, corrections=(Correction("token_truncate", high=2.0),)), "fengyao.notion.site/off-policy-rl; cap 2 of verl and TRL", _OWN_CLIP),
    "grpo_mis": Preset(replace(GRPO, corrections=(Correction("token_mask", high=3.0),)), "verl, TRL `token_mask`, cap 3", _REJECT),
    "grpo_decoupled": Preset(replace(GRPO, corrections=(Correction("token_mask", high=5.0),)), "arXiv:2505.24298, the decoupled objective of AReaL (after arXiv:2110.00641), cap 5 of its configurations", "clip range and aggregation of the `grpo` preset. Batches that waited (`rollout.lag`) need `rollout.rescore`."),
    "grpo_icepop": Preset(replace(GRPO, corrections=(Correction("token_mask", low=0.5, high=5.0),)), "arXiv:2510.18855", _REJECT),
    "grpo_kpop": Preset(replace(GRPO, corrections=(Correction("binary_kl_mask", high=0.1),)), "arXiv:2606.15079, KPop; threshold of AReaL and prime-rl", f"clip range and aggregation of the `grpo` preset; {_REJECT}"),
    "grpo_seq_tis": Preset(replace(GRPO, corrections=(Correction("sequence_truncate", high=3.0),)), "verl, TRL `sequence_truncate`, cap 3"),
    "grpo_seq_mis": Preset(replace(GRPO, corrections=(Correction("sequence_mask", high=3.0),)), "verl, TRL `sequence_mask`, cap 3", _REJECT),
    "grpo_geo_rs": Preset(replace(GRPO, corrections=(Correction("geometric_mask", low=0.99, high=1.01),)), "verl, geometric rejection sampling", f"bounds are ours; {_REJECT}"),
    "grpo_opsm": Preset(replace(GRPO, corrections=(Correction("off_policy_mask", high=0.1, policy="current"),)), "arXiv:2512.02556 section 3.1", "delta 0.1 is ours, the paper prints none; the report anchors the ratio at the policy that sampled, and its advantages have no standard deviation."),
    # The unified view of DeepSeekMath: imitation as a policy gradient
    "sft": Preset(SFT, "arXiv:2402.03300 A.1"),
    "rft": Preset(replace(SFT, advantage="accepted"), "arXiv:2402.03300 A.1; responses of the initial policy"),
    "online_rft": Preset(replace(SFT, advantage="accepted"), "arXiv:2402.03300 A.1; responses of the current policy"),
}  # fmt: skip

OBJECTIVES: dict[str, Objective] = {name: preset.objective for name, preset in PRESETS.items()}

LEFT_OUT = {
    "VACO (arXiv:2603.01365)": "realigns advantages by V-trace on a value model and filters tokens until the batch's total variation is within its bound; its equations were not seen, and the language-model variant in public code (open-instruct) is another method, of which there have been two definitions.",
    "Score centring (arXiv:2609.20807)": "subtracts the sampler's expected score, which needs the log-probabilities of every token that could have been sampled; the loss sees those of the sampled ones.",
    "M2PO (arXiv:2510.01161)": "drops the tokens with the largest squared log-ratios of a batch until their mean is within a bound: whether a token is dropped depends on tokens of other micro-batches and processes, and the loss sees one micro-batch. The mean is written as `m2`.",
    "MinPRO (arXiv:2601.22718)": "puts the least ratio of the tokens before in place of the product of their ratios; its equations were not seen.",
    "ERPO, VCPO (arXiv:2602.17616)": "importance weights by groups of routes; learning rate by effective sample size and gradient norm: their equations were not seen.",
    "DPPO Top-K": "estimates the divergence from the K most probable tokens of both policies; the loss sees the sampled ones.",
}  # fmt: skip
"""Known methods that have no preset, each with the reason."""


def get_objective(name: str) -> Objective:
    """Return the objective of the preset `name`.

    Raises:
        ValueError: an unknown name; the message gives the most similar one, if any is close.
    """
    if name not in OBJECTIVES:
        raise ValueError(unknown("objective", name, OBJECTIVES))
    return OBJECTIVES[name]
