"""The rules of comparison in words."""

from moe_rl.study.curves import BELOW_START_RULE, COLLAPSE_RULE, FAILED_RULE, FINAL_STEPS
from moe_rl.study.power import fewest_pairs
from moe_rl.study.statistics import ALPHA, FEWEST, INTEREST, VERDICT_RULES


def rules(interest: float = INTEREST) -> list[str]:
    """The rules in words, one sentence or list item each, as the report and this page print them."""
    numbers = {"alpha": ALPHA, "interest": f"{interest:g}", "fewest": FEWEST}
    verdicts = [f"“{verdict}”: {rule.format(**numbers)}." for verdict, rule in VERDICT_RULES.items()]
    return [
        f"Final reward is the mean over a run's last {FINAL_STEPS} steps. Where the responses are not the policy's own "
        "(SFT, RFT, DPO) it is the held-out reward of the last policy, and a comparison with such an arm is of "
        "held-out rewards.",
        "Two arms are compared seed by seed, over their finished runs, with the seeds they share. The comparisons are "
        "those that the study file declares, before it is run; where it declares none, each arm of a condition is "
        "compared with the first if they differ in one thing, and the report says that they are undeclared.",
        f"From {FEWEST} pairs on: Student's 95 % interval of the paired differences, the exact sign-flip test of no "
        "difference and the two one-sided t tests of equivalence; both p are adjusted by Holm over the comparisons of "
        f"the study that have {FEWEST} pairs.",
        *verdicts,
        "That all seeds have one sign is no verdict: without any effect it happens in 2^(1−n) of the comparisons, "
        f"25 % at n = 3. Holm over m comparisons needs m · 2^(1−n) ≤ {ALPHA}: "
        + ", ".join(f"{fewest_pairs(m)} pairs for {m}" for m in (1, 3, 6, 12))
        + " comparisons.",
        f"Failing runs stay in every mean, and are counted: {FAILED_RULE}; {BELOW_START_RULE}; {COLLAPSE_RULE}.",
    ]
