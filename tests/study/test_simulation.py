"""The rules' error rates, by a small simulation; docs/statistics.md holds the same table from a large one."""

import re
from pathlib import Path

import numpy as np
import pytest

from moe_rl.study import simulation
from moe_rl.study.reading import rules
from moe_rl.study.simulation import Scenario, simulate
from moe_rl.study.statistics import compare_paired

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
STUDIES = 400


def rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_rules_on_the_page_are_the_codes():
    text = PAGE.read_text()
    assert text.count("\n- ") == len(rules())
    for rule in rules():
        assert f"\n- {rule}\n" in text
    assert simulation.COMMAND in text


def test_rates_on_the_page_come_out_again():
    """Every row of one size, with its own Monte Carlo error; the page has ten times as many studies."""
    made = simulation.page(STUDIES)
    committed, again = rows(PAGE.read_text()), rows(made)
    assert [row[:3] for row in committed] == [row[:3] for row in again]  # the same scenarios
    compared = 0
    for page, new in zip(committed, again, strict=True):
        for there, here in zip(page[3:], new[3:], strict=True):
            if re.fullmatch(r"\d+\.\d", there) and re.fullmatch(r"\d+\.\d", here):
                share = np.clip(float(there) / 100, 0.005, 0.995)
                error = 100 * np.sqrt(share * (1 - share) * (1 / STUDIES + 1 / 4000))
                assert float(here) == pytest.approx(float(there), abs=4.5 * error + 0.1), (page, new)
                compared += 1
    assert compared > 150


def test_false_claims_stay_below_the_error_rate_where_the_rule_promises_it():
    for failing, what in ((0.0, "runs"), (0.2, "runs"), (0.2, "seeds")):
        for n in (6, 8, 12):
            equal = simulate(Scenario(n, failing=failing, what=what), STUDIES)
            assert equal.any_difference <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / STUDIES)
            apart = simulate(Scenario(n, effect=0.05, failing=failing, what=what), STUDIES)
            assert apart.any_equivalent <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / STUDIES)


def test_power_grows_with_n():
    found = [simulate(Scenario(n, effect=0.1, sd=0.08), STUDIES).difference for n in (6, 8, 10, 12)]
    assert found == sorted(found) and found[0] == 0.0 and found[-1] > 0.9


def test_a_simulated_study_is_judged_as_a_real_one(monkeypatch):
    """The simulator's arrays go through the same rule as `compare_paired`."""
    drawn = {}
    monkeypatch.setattr(simulation, "sign_flip_test", lambda d: drawn.setdefault("d", d) is None or _p(d))
    rates = simulate(Scenario(8, effect=0.07, family=1), 40)
    verdicts = []
    for d in drawn["d"][:, 0]:
        verdicts.append(compare_paired(dict(enumerate(d)), dict.fromkeys(range(8), 0.0)).verdict)
    assert rates.difference == np.mean([v in ("higher", "lower") for v in verdicts])
    assert rates.equivalent == np.mean([v == "no difference of interest" for v in verdicts])
    assert 0 < rates.difference < 1


def _p(d):
    from moe_rl.study.statistics import sign_flip_test

    return sign_flip_test(d)
