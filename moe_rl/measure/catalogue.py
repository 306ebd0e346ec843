"""Definitions of all metrics in a run folder: the registry from which docs/metrics.md is generated.

    python -m moe_rl.measure.catalogue > docs/metrics.md

`CATALOGUE` maps a kind of row in `metrics.jsonl` (or `tokens`, the columns of tokens/*.parquet) to its metrics. A test
runs micro runs and compares the names that they write with the names here, in both directions.
"""

# ruff: noqa: E501  (a table: one metric, one line)
import re
from itertools import combinations

from moe_rl.measure.metrics import TAUS
from moe_rl.measure.moments import PARTS
from moe_rl.measure.peer_metrics import OF_ENGINES, OF_RATIOS, OF_TRUST_REGIONS
from moe_rl.objectives import LOSS_METRICS
from moe_rl.objectives.diagnostics import M, Metric

GSPO, R3, SCHULMAN = "arXiv 2507.18071", "arXiv 2510.11370", "Schulman, Approximating KL divergence"


SPREAD = (
    M("k1", "nats/token", "mean(-d), an estimate of KL(old || new)", "Σ -d / tokens", SCHULMAN),
    M("k2", "nats/token", "mean(d²/2), another estimate of KL(old || new)", "Σ d²/2 / tokens", SCHULMAN),
    M("k3", "nats/token", "mean(r - 1 - d), an estimate of KL(old || new) that is never negative", "Σ (r-1-d) / tokens", SCHULMAN),
    M("m2", "nats²", "mean(d²), twice k2", "Σ d² / tokens", "M2PO, arXiv 2510.01161"),
    M("gap_mean", "nats", "mean of abs(d)", "Σ abs(d) / tokens"),
    M("gap_p99", "nats", "99th percentile of abs(d), nearest rank"),
    M("gap_max", "nats", "largest abs(d)"),
    *(M(f"extreme_{t}", "count", f"tokens with max(r, 1/r) > {t}", f"over tokens: F({t})", R3) for t in TAUS),
    M("var_ratio", "1", "variance of r over tokens (divisor n-1)"),
    M("chi2_token", "1", "mean(r²) - 1 over tokens; below 0 by chance in a small sample", "Σ r² / tokens, less 1"),
    M("chi2_sequence", "1", "mean(s²) - 1 over sequences", "Σ s² / sequences, less 1", f"s: {GSPO} eq. 7"),
    M("ess_token", "fraction", "effective sample size of r over n", "(Σ r)² / (n Σ r²)", "Kish"),
    M("ess_sequence", "fraction", "effective sample size of s over n", "(Σ s)² / (n Σ s²)", "Kish"),
    M("var_within", "nats²", "variance of d within a sequence (divisor n), mean over sequences", source="SAPO, Var_i, arXiv 2511.20347"),
    M("max_token_kl_mean", "nats", "largest r - 1 - d in a sequence, mean over sequences", source="after TRM, arXiv 2512.23075, which takes whole distributions"),
    M("max_token_kl_max", "nats", "largest r - 1 - d of any token", source="after TRM, arXiv 2512.23075"),
)  # fmt: skip

CHANGE = (
    M("slots_changed", "count", "expert slots of response tokens whose expert is not in the other set", "over slots: slot rate", f"one reading of {GSPO} section 5.3"),
    M("slots", "count", "slots compared: tokens x sites x K"),
    M("sites_changed", "count", "(token, site) pairs whose sets of experts differ", "over sites: site rate", R3),
    M("sites", "count", "(token, site) pairs compared"),
    M("tokens_changed", "count", "tokens with any site changed", "over tokens: token rate", R3),
    M("tokens", "count", "response tokens compared"),
)  # fmt: skip

BY_SITE = (
    M("site_names", "names", "the routing sites, in the order of every list by site"),
    M("site_slots_changed", "count", "slots changed, by site", "over site_slots"),
    M("site_slots", "count", "slots compared, by site"),
    M("flips_histogram", "count", "tokens that changed at 0, 1, .., L sites", "over tokens", R3),
    M("deviation_histogram", "count", "(token, site) pairs that changed 0, 1, .., K slots", "over sites", "PR², arXiv 2606.00395"),
    M("overdispersion", "1", "variance of flips per token over that of independent sites; above 1: they cluster; null if none changed", "Var(flips) / Σ p(1-p)"),
)  # fmt: skip

GAP = (
    *(m for m in SPREAD if m.name in ("gap_mean", "gap_p99", "gap_max", "k3")),
    M("extreme_fraction", "fraction", "F(2): tokens with max(r, 1/r) > 2", "such tokens / tokens", R3),
    M("var_token", "nats²", "variance of d over tokens"),
    M("var_sequence", "nats²", "variance over sequences of the mean of d"),
)  # fmt: skip

UPDATE = M("update", "index", "1, 2, .. within the step")
LAG = "before the step's updates (under rollout lag newer than the policy that sampled)"


def _suffixed(metrics: tuple[Metric, ...], suffix: str, words: str) -> tuple[Metric, ...]:
    return tuple(m._replace(name=f"{m.name}_{suffix}", definition=f"{m.definition}; {words}") for m in metrics)


PROBED = (
    M("var_token", "nats²", "variance of d over tokens (divisor n-1)"),
    M("var_sequence", "nats²", "variance over sequences of the mean of d", source=f"log s, {GSPO} eq. 7"),
    *SPREAD,
)


def _level(level: str) -> tuple[Metric, ...]:
    of = "tokens" if level == "token" else "means over sequences"
    return (
        M(f"{level}_variance", "nats²", f"Var(log r) over {of}: Σ var + 2 Σ cov"),
        *(M(f"{level}_var_{p}", "nats²", f"variance of the {p} part over {of}") for p in PARTS),
        *(M(f"{level}_cov_{a}_{b}", "nats²", f"covariance of the {a} and {b} parts over {of}") for a, b in combinations(PARTS, 2)),
        *(M(f"{level}_share_{p}", "fraction", f"share of the {p} part, may be negative",
            f"Cov({p}, log r) / Var(log r)") for p in PARTS),
    )  # fmt: skip


CATALOGUE: dict[str, tuple[Metric, ...]] = {
    "rollout": (
        M("reward", "reward", "mean of the verifier's rewards over the sampled responses, those of replaced groups included", "Σ reward / reward_n"),
        M("reward_std", "reward", "standard deviation of the rewards (divisor n-1), replaced groups left out"),
        M("reward_n", "count", "responses sampled"),
        M("response_length", "tokens", "mean length of a response, replaced groups left out", "response tokens / responses"),
        M("groups_equal", "fraction", "groups whose verifier's rewards are all equal, replaced ones left out: no signal, but for `rollout.overlong_buffer` and learned rewards", "such groups / groups"),
        M("rollout_logp_gap", "nats", "mean abs(log mu - log pi_old), sampler against scorer; pi_old routed live, under R3 and PR2 too; null where others than the policy write the responses (`method.source`), and of batches that `rollout.scoring: decoding` scores without a pass (steps that are neither probed nor split)", "Σ / response tokens"),
        M("lag", "steps", "steps between sampling and training, as configured"),
        M("kept_reward", "reward", "mean over the responses that are trained on", when="rollout.dynamic_sampling"),
        M("refills", "count", "samplings beyond the first", when="rollout.dynamic_sampling"),
        M("groups_sampled", "count", "groups sampled in all", when="rollout.dynamic_sampling"),
        M("groups_replaced", "count", "groups without a signal that were replaced", "over groups_sampled", "DAPO, arXiv 2503.14476 eq. 11", "rollout.dynamic_sampling"),
        M("version_age", "steps", "how many versions of the weights ago a token was written, mean; batches that wait never become fewer, so that after a long response all later ones wait as long", "Σ / response tokens", when="rollout.segment"),
        M("version_age_max", "steps", "the oldest token's", when="rollout.segment"),
        M("old_tokens", "fraction", "tokens that an older version wrote", "such tokens / response tokens", when="rollout.segment"),
        M("mixed_responses", "fraction", "responses that several versions wrote", "such responses / responses", when="rollout.segment"),
        M("overlong_penalty", "reward", "mean soft overlong punishment; not in reward", source="DAPO, arXiv 2503.14476 eq. 13", when="rollout.overlong_buffer"),
        M("overlong", "fraction", "responses that are punished", "such responses / responses", when="rollout.overlong_buffer"),
        M("value", "reward", "mean value on response tokens", when="advantage gae"),
        M("explained_variance", "fraction", "1 - Var(return - V) / Var(return), over tokens; null where all returns are equal", when="advantage gae"),
        M("learned_reward", "score", "mean score of the learned reward model", when="reward.model learned"),
        M("learned_reward_agreement", "fraction", "pairs in a group that it orders as the verifier does", when="reward.model learned"),
        M("accepted", "fraction", "responses with a reward above 0.5, that are learned from", when="advantage accepted"),
        M("step_reward", "reward", "mean reward of a step of a response", "Σ / steps", when="advantage process"),
        M("steps_per_response", "count", "rewarded steps of a response, mean", when="advantage process"),
        M("reward_<name>", "reward", "mean of one of the task's rewards", when="advantage decoupled"),
        M("pairs", "count", "pairs with a preference", when="DPO"),
    ),
    "update": (
        UPDATE,
        M("loss", "1", "the objective's loss on the minibatch, to be minimised; without the load-balancing loss. In TRL less its entropy bonus (`entropy_coef`), in ms-swift with its SDAR loss, where this is on"),
        M("lr", "1", "learning rate, warm-up included"),
        M("grad_norm", "1", "global L2 norm of the gradient before clipping"),
        M("skipped", "boolean", "its gradient was not finite and no weight was moved", when="such an update, `optim.on_nonfinite: skip`"),
        *LOSS_METRICS,
        M("var_token_log_ratio", "nats²", "variance of d over tokens (divisor n-1), under the arm's own routing"),
        M("var_sequence_log_ratio", "nats²", "variance over sequences of the mean of d", source=f"log s, {GSPO} eq. 7"),
        *SPREAD,
        *(m for m in OF_ENGINES if m.name in ("probs_ratio_min", "probs_ratio_max", "outside_fraction")),
        *(m._replace(when="the policy's own responses") for m in OF_TRUST_REGIONS),
        M("max_vio", "1", "(largest load of an expert - even load) / even load, mean over sites; prompts included, after replay", source="MaxVio, arXiv 2408.15664; prime-rl"),
        M("entropy", "nats/token", "mean entropy of the distributions that response tokens are drawn from"),
        M("aux_loss", "1", "load-balancing loss; null where its coefficient is 0"),
        M("aux_loss_coef", "1", "its coefficient"),
        M("replayed_rows", "count", "(token, site) rows whose experts were forced", "over routed_rows; less than all of them also where micro-batches were scored without padding that the update has"),
        M("routed_rows", "count", "(token, site) rows of the forward, hash-routed sites left out; with padding, but for rows that share prompts"),
        M("slots_changed", "count", "response slots that the update forward routed otherwise than the old policy: the dose", "over slots"),
        M("slots", "count", "response slots compared"),
        M("value_loss", "reward²", "loss of the value model", when="advantage gae"),
        M("value_grad_norm", "1", "its gradient's norm before clipping", when="advantage gae"),
        M("predictor_kl", "nats", "KL of what the routers say in this forward from what was predicted when the batch was scored, before the predictors learned from its updates, mean over tokens and sites", "KL(now || predicted)", "PR², arXiv 2606.00395", when="replay PR2, from the second update of a batch on"),
        M("predictor_kl_unmoved", "nats", "the same without a prediction: where it is smaller, a predictor is worse than none", "KL(now || old)", "ours", when="replay PR2, from the second update of a batch on"),
    ),
    "probe": (
        UPDATE,
        *CHANGE,
        *BY_SITE,
        M("entropy", "nats/token", "mean entropy of the distributions, live routing"),
        *_suffixed(PROBED, "natural", "live routing"),
        *_suffixed(PROBED, "replayed", "the old routes on the same weights"),
        M("load_cv_mean", "1", "std / mean of the experts' loads (divisor E), mean over sites"),
        M("load_cv_max", "1", "std / mean of the experts' loads (divisor E), largest over sites"),
        M("load_entropy_mean", "nats", "entropy of the load over experts, mean over sites; ln E is even"),
        M("load_entropy_min", "nats", "entropy of the load over experts, smallest over sites"),
        M("site_max_vio", "1", "(largest load of an expert - even load) / even load, by site", source="MaxVio, arXiv 2408.15664; prime-rl, verl"),
        M("site_min_vio", "1", "(smallest load - even load) / even load, by site", source="verl rollout/moe/"),
        M("site_avg_vio", "1", "mean abs(load - even load) / even load, by site", source="verl rollout/moe/"),
        M("active_set_churn", "fraction", "experts a sequence uses and did not use before, mean over sequences and sites", "those not used before / all that it uses", f"second reading of {GSPO} section 5.3; ours"),
        M("router_kl", "nats", f"KL(old || new) of the softmax over all experts, mean over tokens and sites; old: {LAG}", when="router logits"),
        M("router_js", "nats", "Jensen-Shannon divergence of the softmax over all experts, old and new, at most ln 2", when="router logits"),
        M("site_router_kl", "nats", "router_kl by site", when="router logits"),
        M("site_router_js", "nats", "router_js by site", when="router logits"),
        M("margin_p10", "logits", "10th percentile of s_(k) - s_(k+1) over (token, site), new weights; no selection bias", when="router logits"),
        M("margin_median", "logits", "median of s_(k) - s_(k+1) over (token, site), new weights; no selection bias", when="router logits"),
        M("shift_over_margin", "1", "median over (token, site) of (largest change of a logit, mean removed) / (half the old margin), old as for router_kl; a pair below 1 could not flip, unless groups of experts are chosen first (DeepSeek-V3)", when="router logits"),
        M("site_routing_confidence", "fraction", "mass of the softmax over all experts that the chosen ones have, new weights, mean over tokens, by site", source="prime-rl routing_confidence", when="router logits"),
        M("gradient_cosine", "1", "cosine of the loss's gradients on the probed responses, live and under the old routes", "g·g' / (|g| |g'|)", when="probe.gradients"),
        M("gradient_norm_ratio", "1", "norm of the gradient under the old routes over that of the live one", "|g'| / |g|", when="probe.gradients"),
        M("gradient_halves_cosine", "1", "cosine of the live gradients of two halves of the responses: what sampling does", when="probe.gradients"),
        M("router_gradient_cosine", "1", "gradient_cosine of the routers' parameters", when="probe.gradients"),
        M("router_gradient_norm_ratio", "1", "gradient_norm_ratio of the routers' parameters", when="probe.gradients"),
        M("layer_names", "names", "the layers, in the order of every list by layer; other: parameters in none", when="probe.gradients"),
        M("layer_gradient_cosine", "1", "gradient_cosine by layer", when="probe.gradients"),
        M("layer_gradient_norm_ratio", "1", "gradient_norm_ratio by layer", when="probe.gradients"),
    ),
    "eval": (
        M("reward", "reward", "mean reward on held-out prompts, sampled at the training temperature", "Σ / reward_n"),
        M("reward_n", "count", "held-out prompts"),
        M("greedy", "boolean", "whether tokens were taken greedily (never so far)"),
    ),
    "step": (
        M("seconds", "s", "wall time of the step: sampling, scoring, updates and probes, without checkpoint and evaluation"),
        M("model_parameters", "count", "parameters of the policy"),
        M("model_bytes", "bytes", "of its weights; under fsdp2 here and below of all shards together"),
        M("model_optimizer_bytes", "bytes", "of its optimizer's state"),
        M("<model>_parameters", "count", "the same of other models. model: the policy; value: PPO; reward: learned reward; reference, initial: where the method keeps them; what is shared with the policy (model.lora) does not count again", when="such a model"),
        M("<model>_optimizer_bytes", "bytes", "of their optimizers' states", when="such a model, trained"),
        M("<model>_bytes", "bytes", "of their weights", when="such a model"),
        M("peak_bytes", "bytes", "most that torch held at once on its device since the process began, the largest over ranks", when="a GPU"),
        M("reward_model_loss", "nats", "mean loss over the pairs of the retraining's last epoch", when="reward.model learned"),
        M("reward_model_new", "count", "new comparisons in it", when="reward.model learned"),
        M("reward_model_old", "count", "older ones", when="reward.model learned"),
        M("reward_model_skipped", "count", "minibatches whose gradient was not finite, left out", when="reward.model learned"),
    ),
    "floor": (
        M("variant", "name", "repeat, batch, experts or bf16: in what the second forward differs, with equal weights"),
        M("detail", "words", "the two sides"),
        *CHANGE,
        *BY_SITE,
        M("position_sites_changed", "count", "(token, site) pairs changed, by position in the response, from 0", "over position_sites"),
        M("position_sites", "count", "pairs compared, by position"),
        *GAP,
    ),
    "decomposition": (
        UPDATE,
        M("tokens", "count", "tokens measured"),
        M("sequences", "count", "sequences measured"),
        M("harmonic_length", "tokens", "harmonic mean length of the responses", "sequences / Σ 1/n"),
        *_level("token"),
        *_level("sequence"),
        *(M(f"averaging_{p}", "1", f"what the mean over a sequence divides the variance of the {p} part by", "Var over tokens / Var over sequence means") for p in PARTS),
        *(M(f"design_effect_{p}", "1", f"1 where tokens' {p} parts are independent; above, they move together", "Var over sequence means x harmonic_length / Var over tokens", "Kish") for p in PARTS),
        M("replay_effect_var", "nats²", "token variance of f(new, new) - f(new, old): what replay takes out of log r"),
        M("site_names", "names", "the routing sites, in the order of the lists below"),
        *(M(f"site_{level}_var_{kind}", "nats²", f"variance over {level}s of what a site does {words}")
          for level in ("token", "sequence") for kind, words in (("alone", "alone (new routes there only)"), ("last", "last (old routes there only)"))),
        *(M(f"site_token_share_{kind}", "fraction", f"share of the replay effect of a site {kind}, over tokens", "Cov(site, whole) / Var(whole)") for kind in ("alone", "last")),
    ),
    "engine": (
        M("pair", "name", "engines, engines_replayed (R3's routes on pi_old) or rollout_to_new; d = log pi - log mu"),
        M("update", "index", "0 before the updates"),
        M("measured", "count", "response tokens whose log-probabilities are compared: those of every d, and of r and w"),
        *(m._replace(over=m.over.replace("/ tokens", "/ measured")) for m in (*GAP, *(m for m in SPREAD if m.name in OF_RATIOS and m not in GAP), *OF_ENGINES)),
        *(m._replace(when="routes compared") for m in CHANGE[:-1]),
        M("tokens", "count", "response tokens whose routes are compared: without those of which the sampler has none, as the last of a response", when="routes compared"),
        *(m._replace(when="routes compared") for m in BY_SITE),
        M("sync_gap", "nats/token", "mean abs(log pi - log mu) on the fixed batch that checks a weight transfer, after the last one; of several ranks the largest mean", when="a synced engine"),
        M("sync_tolerance", "nats/token", "what that check allows", when="a synced engine"),
    ),
    "tokens": (
        M("seq", "index", "row of the response in the step's batch"),
        M("pos", "index", "position in the response, from 0"),
        M("token", "id", "token id"),
        M("text", "words", "the token as it stands inside a text"),
        M("update", "index", "after which update"),
        M("old_logp", "nats", "log-probability under the old policy, natural routing"),
        M("logp_natural", "nats", "after the update, live routing"),
        M("logp_replayed", "nats", "after the update, the old routes"),
        M("flips", "count", "sites changed at this token (they shape the prediction of the next)", "over L"),
        M("reward", "reward", "of the token's response"),
        *(M(f"{which}_gates", "fraction", f"share of the softmax over all experts that each expert of {routes} has, {weights}, lists [sites x K]", when="router logits") for which, routes, weights in (("old", "the old routes", "weights before the step"), ("new", "the live routes", "weights after the update"))),
        *(M(f"{which}_margins", "logits", f"s_(k) - s_(k+1) of {weights}, lists by site; no selection bias", when="router logits") for which, weights in (("old", "the weights before the step"), ("new", "the weights after the update"))),
    ),
}  # fmt: skip
"""Kind of row -> its metrics, in the order in which they are written; `kind` and `step` are in every row."""

HEADS = {
    "rollout": "one per sampled batch, at the step that sampled it. Under `rollout.lag` it is trained on `lag` steps later, and the first step samples `lag` + 1 batches, of which `moe_rl.study.load` keeps the last",
    "update": "one per optimizer step, on its minibatch, under the arm's own routing; old is the objective's anchor: under `anchor: rollout` the engine that sampled",
    "probe": "one per update of a probed step, on a fixed subset of the batch, without noise, old policy against new",
    "eval": "held-out prompts, after as many batches as `step` says: 0 is before training",
    "step": "one per step",
    "floor": "once per run, before its first update: equal weights, equal tokens, other arithmetic",
    "decomposition": f"one per update of a step that is split (`probe.decompose_every`); old: {LAG}. f(weights, routes) is a token's log-probability under these weights and routes. log r = f(new, new) - f(old, old) is the sum of three parts: weight = f(new, old) - f(old, old), routing = f(old, new) - f(old, old), and the interaction, which is the rest",
    "engine": "one per pair, where the sampler's routes are recorded (another engine, R3, PR2; under `rollout.scoring: decoding` for batches whose step is probed or split): of a batch at the step that samples it, rollout_to_new after each update of a probed step",
    "tokens": "columns of `tokens/step_NNNNNN.parquet`, one row per response token of the probe and update",
}


def find(kind: str, name: str) -> Metric | None:
    """Return the entry of a metric, by exact name or by a placeholder such as `<model>_bytes`; None if there is none.

    >>> find("update", "k3").unit, find("step", "reference_bytes").name, find("update", "kl3")
    ('nats/token', '<model>_bytes', None)
    """
    entries = CATALOGUE.get(kind, ())
    exact = next((m for m in entries if m.name == name), None)
    return exact or next(
        (m for m in entries if "<" in m.name and re.fullmatch(re.sub("<.*>", ".+", m.name), name)), None
    )


def render() -> str:
    """Return the text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from `moe_rl/measure/catalogue.py` by",
        "",
        "    python -m moe_rl.measure.catalogue > docs/metrics.md",
        "",
        "Do not edit; a test compares this page with the registry, and the registry with what runs write.",
        "",
        "Every row of `metrics.jsonl` has a `kind` and a `step`; numbers that are not finite are null. Site, slot, probe",
        "and R3 are explained in the [README](../README.md#words).",
        "",
        "- pi is the current policy's probability of a token, pi_old the old policy's in the training engine, and mu that",
        "  of the rollout engine when it sampled. w is the ratio of one of the first two to mu.",
        "- r is a token's probability ratio new / old, d = log r in nats, and s = exp(mean of d over a sequence), which is",
        "  GSPO's ratio.",
        "- K is the number of experts per token, L that of routing sites, E that of experts of a site; A is an advantage.",
        "- *Live* (or *natural*) means that the routers choose for themselves.",
        '- Rates are stored as counts. "over X" names the count to divide by; over several rows, divide sums by sums.',
        "- Change counts never look at the order of slots.",
        "- *Only with* names the setting, or the circumstance, without which the metric is not written.",
        "",
        "`routes/step_NNNNNN_update_U.parquet` holds the probe's routes (update 0: the old policy's);",
        "`moe_rl.training.route_tables.read_route_table` reads them.",
    ]
    for kind, metrics in CATALOGUE.items():
        lines += ["", f"## {kind}", "", f"{HEADS[kind][0].upper()}{HEADS[kind][1:]}.", ""]
        lines += ["| Name | Unit | Definition | Numerator / denominator | Source | Only with |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for m in metrics:
            cells = (f"`{m.name}`", m.unit, m.definition, m.over or "–", m.source or "–", m.when or "–")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
