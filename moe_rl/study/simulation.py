"""Simulation of how often the rules of `moe_rl.study.statistics` are right, with runs that fail among the others.

    python -m moe_rl.study.simulation > docs/statistics.md

A simulated study has one control and m treatments on the same n seeds; every treatment is compared with the control.
A run's final reward is  mean of its arm + effect of its seed (shared by the arms: the cold start) + its own scatter,
the last two normal; with probability `failing` the run fails and ends `fall` lower. Single runs fail, or whole seeds (a
cold start from which no arm learns), or only runs of the control (a method that the treatments mend).
"""

import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_rl.study.power import resolvable_difference
from moe_rl.study.reading import rules
from moe_rl.study.statistics import (
    ALPHA,
    FEWEST,
    INTEREST,
    Verdict,
    equivalence_test,
    holm,
    sign_flip_test,
    student_factor,
    verdicts,
)
from moe_rl.study.words import markdown_table

COMMAND = "python -m moe_rl.study.simulation"


@dataclass(frozen=True)
class Scenario:
    """The distribution from which simulated studies are drawn.

    `sd` is the standard deviation of a paired difference (own scatter of a run times √2), `seed_sd` that of the seeds'
    effects; `failing` is the probability with which each of `what` fails.
    """

    n: int
    sd: float = 0.05
    effect: float = 0.0
    family: int = 6
    failing: float = 0.0
    what: Literal["runs", "seeds", "control"] = "runs"
    fall: float = 0.5
    seed_sd: float = 0.05

    @property
    def truth(self) -> float:
        """Expected difference between a treatment and the control, failing runs included."""
        return self.effect + (self.failing * self.fall if self.what == "control" else 0.0)


@dataclass(frozen=True)
class Rates:
    """Shares of the simulated studies, or of their comparisons, in which something holds.

    `coverage`: Student's interval holds the true mean difference, failures included; `range_coverage`: the range of the
    pairs holds it; `any_difference`: at least one comparison of the study is "higher" or "lower"; `difference`: a
    comparison is; `equivalent`: a comparison is "no difference of interest"; `any_equivalent`: at least one is.
    """

    coverage: float
    range_coverage: float
    any_difference: float
    difference: float
    equivalent: float
    any_equivalent: float


def simulate(scenario: Scenario, studies: int) -> Rates:
    """Simulate `studies` independent studies and return the rates of the rules; equal arguments give equal rates."""
    s, rng = scenario, np.random.default_rng(0)
    shape = (studies, s.family + 1, s.n)
    runs = rng.normal(0, s.seed_sd, (studies, 1, s.n)) + rng.normal(0, s.sd / np.sqrt(2), shape)
    runs[:, 1:] += s.effect
    failed = rng.random(shape) < s.failing
    if s.what == "seeds":
        failed[:, :] = failed[:, :1]
    if s.what == "control":
        failed[:, 1:] = False
    runs -= s.fall * failed
    d = runs[:, 1:] - runs[:, :1]  # [studies, family, n]
    mean, half = d.mean(-1), student_factor(s.n) * d.std(-1, ddof=1)
    low, high = mean - half, mean + half
    adjusted, equivalent = holm(sign_flip_test(d)), holm(equivalence_test(d))
    told = verdicts(mean, low, high, adjusted, equivalent, INTEREST)
    tested = s.n >= FEWEST
    different, equal = tested & np.isin(told, [Verdict.HIGHER, Verdict.LOWER]), tested & (told == Verdict.EQUIVALENT)
    return Rates(
        coverage=float(((low <= s.truth) & (s.truth <= high)).mean()),
        range_coverage=float(((d.min(-1) <= s.truth) & (s.truth <= d.max(-1))).mean()),
        any_difference=float(different.any(-1).mean()),
        difference=float(different.mean()),
        equivalent=float(equal.mean()),
        any_equivalent=float(equal.any(-1).mean()),
    )


SIZES = (6, 8, 10, 12)
FAILURES: tuple[tuple[float, Literal["runs", "seeds", "control"]], ...] = (
    (0.0, "runs"), (0.1, "runs"), (0.2, "runs"), (0.2, "seeds"), (0.1, "control"), (0.2, "control")
)  # fmt: skip
_WORDS = {"runs": "runs", "seeds": "seeds, in every arm", "control": "the control's runs alone"}


def _failures(failing: float, what: str) -> str:
    return f"{100 * failing:.0f} % of {_WORDS[what]}" if failing else "none"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def false_claims(studies: int) -> list[list[str]]:
    """Return table rows with how often something false is claimed.

    Of arms that are equal but for failures, and of arms that truly differ by the smallest difference of interest or
    more.
    """
    rows = []
    for failing, what in FAILURES:
        for n in (3, *SIZES):
            equal = Scenario(n, failing=failing, what=what)
            apart = Scenario(n, effect=max(0.0, INTEREST - equal.truth), failing=failing, what=what)
            first, second = simulate(equal, studies), simulate(apart, studies)
            row = [_failures(failing, what), f"{equal.truth:g}", str(n)]
            if n < FEWEST:
                rows.append([*row, "range", _percent(first.range_coverage), "–", "–"])
                continue
            false = "–" if equal.truth else _percent(first.any_difference)
            rows.append([*row, "Student", _percent(first.coverage), false, _percent(second.any_equivalent)])
    return rows


def detection_rates(studies: int) -> list[list[str]]:
    """Return table rows with how often true differences, and equal arms, are called so, by the spread of the pairs."""
    rows = []
    for failing in (0.0, 0.1):
        for sd in (0.03, 0.05, 0.08):
            for n in SIZES:
                shares = [
                    simulate(Scenario(n, sd=sd, effect=effect, failing=failing), studies)
                    for effect in (0.05, 0.1, 0.15)
                ]
                equal = simulate(Scenario(n, sd=sd, failing=failing), studies)
                resolved = f"{resolvable_difference(sd, n, alpha=ALPHA / 6):.3f}"
                values = [_percent(rates.difference) for rates in shares] + [_percent(equal.equivalent)]
                rows.append([_failures(failing, "runs"), f"{sd}", str(n), *values, resolved])
    return rows


def page(studies: int = 4000) -> str:
    """Return the text of docs/statistics.md, from `studies` simulated studies for each row."""
    listed = "\n".join(f"- {rule}" for rule in rules())
    first = markdown_table(
        [
            "Failing",
            "True difference",
            "n",
            "Interval",
            "Holds the truth, %",
            "Any false difference, %",
            "Any false equivalence, %",
        ],
        false_claims(studies),
    )
    second = markdown_table(
        ["Failing", "Paired sd", "n", "0.05 found, %", "0.10 found, %", "0.15 found, %", "Equal called so, %",
         "Resolves (formula)"],
        detection_rates(studies),
    )  # fmt: skip
    return f"""# Statistics

Generated from `moe_rl/study/simulation.py` by

    {COMMAND} > docs/statistics.md

Do not edit; a test compares the rules with the code and the rates with a new simulation.

## Rules

{listed}

## How often they are right

{studies} simulated studies a row, each of six treatments compared with one control on the same n seeds (one family of
six). A run scatters around its arm and its seed; a failing run ends 0.5 lower. Standard error of a share: at most
{50 / np.sqrt(studies):.1f} percentage points, {100 * np.sqrt(0.05 * 0.95 / studies):.1f} at 5 %.

What is claimed wrongly (paired sd 0.05). *True difference*: of treatments and control, failures included, in the next
two columns. *Any false difference*: studies of equal arms with at least one “higher” or “lower”. *Any false
equivalence*: studies whose treatments all differ from the control by {INTEREST}, or by the true difference if that is
more, with at least one “no difference of interest”. At n = 3 there is a range and no claim.

{first}

Where runs fail in all arms alike, few differences are claimed wrongly. Where only the control's fail, Student's
interval holds the truth less often than its name says, and equivalence is claimed wrongly more often: a study in which
none of the runs happened to fail knows nothing of failures. Where a seed fails in every arm, it cancels in the pairs.

What is found. *Found*: comparisons with a true difference of 0.05, 0.10, 0.15 that get “higher”. A true difference of
exactly the smallest of interest is called so in about half of the studies at most, for the estimate must reach it. Six
pairs carry one comparison only, so that of six none is found. *Equal called so*: comparisons of equal arms that get “no
difference of interest”. *Resolves*: the difference that a paired t-test at 5 % / 6, Holm's first step, finds with 80 %
power; it knows neither how coarse the exact test is at small n nor the runs that fail.

{second}
"""


if __name__ == "__main__":
    sys.stdout.write(page())
