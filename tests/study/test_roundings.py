"""Other roundings: components of variance against their definition, and which conclusions survive."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from synthetic import read_rows, write_rows, write_study

from moe_rl.study import load
from moe_rl.study.comparing import comparisons
from moe_rl.study.outcomes import run_outcomes
from moe_rl.study.reading import read
from moe_rl.study.report import render_report
from moe_rl.study.results import write_results
from moe_rl.study.roundings import (
    SURVIVAL_RULES,
    Rounding,
    Survival,
    component_table,
    components,
    components_of,
    conclusion_table,
    of_each_rounding,
    same_kernels,
    survival,
)
from moe_rl.study.statistics import Verdict


def test_components_by_hand():
    # seeds differ by 2 in both roundings, rounding two adds 1 to both: no residual
    found = components(np.array([[0.0, 1.0], [2.0, 3.0]]))
    # MS_seed = 2·(1 + 1)/1 = 4, MS_rounding = 2·(.25 + .25)/1 = 1, MS_res = 0: seed 4/2, rounding 1/2
    assert (found.seed, found.rounding, found.residual, found.mean) == (2.0, 0.5, 0.0, 1.5)
    # [[1, 0], [0, 1]]: all residual. MS_res = 1, the others 0, and no variance is negative
    found = components(np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert (found.seed, found.rounding, found.residual) == (0.0, 0.0, 1.0)
    assert np.isnan(components(np.array([[1.0, 2.0]])).seed)


def test_components_are_unbiased():
    rng = np.random.default_rng(0)
    drawn = [
        components(rng.normal(0, 3, (8, 1)) + rng.normal(0, 2, (1, 5)) + rng.normal(0, 1, (8, 5))) for _ in range(2000)
    ]
    means = np.mean([[found.seed, found.rounding, found.residual] for found in drawn], axis=0)
    assert means == pytest.approx([9.0, 4.0, 1.0], rel=0.06)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight native seeds and three of another rounding, in which every reward is 0.03 lower."""
    folder = write_study(
        tmp_path_factory.mktemp("runs") / "s", arms=("grpo", "gspo", "grpo_noise", "gspo_noise"), seeds=tuple(range(8)),
        steps=24, sequences=1, tokens_every=10**9,
    )  # fmt: skip
    for run in sorted(folder.glob("*/seed[012]")):
        other = folder / "rounding_avx2" / run.parent.name / run.name
        shutil.copytree(run, other)
        rows = read_rows(other)
        write_rows(other, [row | {"reward": row["reward"] - 0.03} if row["kind"] == "rollout" else row for row in rows])
        environment = json.loads((other / "env.json").read_text()) | {"rounding": "avx2"}
        (other / "env.json").write_text(json.dumps(environment))
    return folder


def test_roundings_lie_beside_the_study_and_not_in_its_tables(folder):
    data = load(folder)
    assert list(data.roundings) == ["avx2"]
    assert set(data.arms.index) == {"grpo", "gspo", "grpo_noise", "gspo_noise"} and len(data.runs) == 32
    other = data.roundings["avx2"]
    assert [run.rounding for run in other.runs] == ["avx2"] * 12 and data.runs[0].rounding == "native"
    assert other.arms.loc["gspo", "label"] == "GSPO"  # from the study's file
    assert other.not_started == () and "avx2" in other.name
    assert load(folder / "gspo" / "seed1").roundings == {}


def test_components_of_a_study(folder):
    table = component_table(load(folder)).set_index("name")
    row = table.loc["grpo"]
    assert (row["seeds"], row["roundings"]) == (3, 2)
    # the shift is the same in every seed: with means a, a - .03 the rounding's variance is .03²/2, the residual 0
    assert row["sd_rounding"] == pytest.approx(0.03 / np.sqrt(2))
    assert row["sd_residual"] == pytest.approx(0.0, abs=1e-9)
    native = run_outcomes(load(folder)).query("arm == 'grpo' and seed < 3")["final"]
    assert row["sd_seed"] == pytest.approx(native.std(ddof=1))
    begun = load(folder)
    begun.roundings["default"] = replace(begun, runs=tuple(replace(run, finished=False) for run in begun.runs))
    assert component_table(begun)["what"].tolist() == component_table(load(folder))["what"].tolist()
    # it cancels in pairs
    assert table.loc["gspo_noise - grpo_noise", "sd_rounding"] == pytest.approx(0.0, abs=1e-9)


def test_a_run_that_has_not_ended_is_in_no_component():
    def runs(finals, finished):
        return Rounding(pd.DataFrame({"arm": "a", "seed": [0, 1, 2], "final": finals, "finished": finished}), [])

    both = {"native": runs([0.1, 0.2, 0.3], True), "avx2": runs([0.1, 0.2, 0.9], [True, True, False])}
    (row,) = components_of(both).to_dict("records")
    assert (row["seeds"], row["mean"], row["sd_rounding"]) == (2, pytest.approx(0.15), 0)


def test_which_conclusions_survive(folder):
    data = load(folder)
    table = conclusion_table(data)
    noisy = table[table["arm"] == "gspo_noise"].set_index("rounding")
    assert noisy.loc["native", "verdict"] == "higher" and noisy.loc["avx2", "verdict"] == "too few pairs"
    assert set(noisy["survival"]) == {"same direction"}  # three pairs are no verdict
    assert noisy.loc["pooled", "n"] == 3
    native, other = (
        list(p.result.differences[:3]) for p in (comparisons(data)[1], comparisons(data.roundings["avx2"])[1])
    )
    assert noisy.loc["pooled", "difference"] == pytest.approx((np.mean(native) + np.mean(other)) / 2)
    words = " ".join(s.text for s in read(data) if s.topic == "Other roundings")
    assert "run again under avx2" in words and "Same direction: the verdict is not the same in every rounding" in words
    assert "Paired differences, components of variance" in words


def test_a_rounding_with_the_kernels_of_the_native_runs_is_none(folder, tmp_path):
    """Runs of a cluster whose nodes differ: what repeats a run does not confirm it."""
    study = shutil.copytree(folder, tmp_path / "s")

    def kernels(place, name):
        for file in study.glob(f"{place}*/seed*/env.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"kernels": name}))

    kernels("", "AVX2")
    kernels("rounding_avx2/", "DEFAULT")
    assert same_kernels(load(study)) == {} and not conclusion_table(load(study)).empty
    kernels("rounding_avx2/gspo", "AVX2")
    data = load(study)
    assert len(same_kernels(data)["avx2"]) == 6 and same_kernels(data)["avx2"][0] == "gspo/seed0"
    assert conclusion_table(data).empty and component_table(data).empty
    assert "rounding" not in of_each_rounding(data, run_outcomes), "committed, it would come back as a repetition"
    words = " ".join(s.text for s in read(data) if s.topic == "Other roundings")
    assert "avx2 is left out: 6 runs of it had the kernels of the native ones" in words and "Survives" not in words


def test_survival_of_every_kind(folder):
    native = next(p for p in comparisons(load(folder)) if p.arm == "gspo_noise").result
    assert native.verdict == "higher"

    def again(verdict, estimate):
        interval = replace(native.difference, estimate=estimate)
        return replace(native, verdict=Verdict(verdict), difference=interval)

    assert survival(native, []) == Survival.UNTESTED
    assert survival(native, [again("higher", 0.3), again("higher", 0.06)]) == Survival.SURVIVES
    assert survival(native, [again("higher", 0.3), again("not resolved", 0.06)]) == Survival.DIRECTION
    assert survival(native, [again("higher", 0.3), again("not resolved", 0.85 - 0.8)]) == Survival.DIRECTION  # a tie
    assert survival(native, [again("higher", 0.3), again("not resolved", 0.04)]) == Survival.FALLS
    equal = again("no difference of interest", 0.01)
    assert survival(equal, [again("not resolved", -0.04)]) == Survival.DIRECTION
    assert survival(equal, [again("not resolved", -0.06)]) == Survival.FALLS
    assert survival(equal, [again("not resolved", 0.85 - 0.8)]) == Survival.FALLS
    lower = again("lower", -0.3)
    assert survival(lower, [again("lower", -0.06)]) == Survival.SURVIVES
    assert survival(lower, [again("not resolved", 0.8 - 0.85)]) == Survival.DIRECTION
    assert survival(lower, [again("not resolved", -0.04)]) == Survival.FALLS
    assert survival(lower, [again("not resolved", 0.3)]) == Survival.FALLS
    assert survival(again("not resolved", 0.3), [native]) == Survival.NO_CLAIM
    assert set(SURVIVAL_RULES) == set(Survival)


def test_report_and_results_have_the_roundings(folder, tmp_path):
    page = render_report(load(folder), [])
    assert "Under other roundings" in page and "rounding" in page
    names = {path.stem for path in write_results(folder, tmp_path)}
    assert {"roundings", "variance_components"} <= names
    for name in ("runs", "updates"):
        table = pd.read_csv(tmp_path / folder.name / f"{name}.csv")
        assert table["rounding"].value_counts().to_dict() == {"native": 32, "avx2": 12}
