"""A study run again elsewhere, beside its committed tables."""

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from synthetic import read_rows, write_rows, write_study

from moe_rl.study import load, results
from moe_rl.study.config import dump_run, load_study
from moe_rl.study.published import ResultsError, against_published, check_settings, published_roundings
from moe_rl.study.results import main, write_results
from moe_rl.study.roundings import conclusion_table
from moe_rl.study.shipped import shipped_studies


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    return write_study(folder, arms=("grpo", "gspo", "grpo_noise"), seeds=tuple(range(8)), steps=24, sequences=1)


@pytest.fixture(scope="module")
def elsewhere(study):
    """The same study where every reward of GSPO is 0.03 lower."""
    other = shutil.copytree(study, study.parent / "small_elsewhere")
    for run in sorted(other.glob("gspo/seed*")):
        rows = read_rows(run)
        write_rows(run, [row | {"reward": row["reward"] - 0.03} if row["kind"] == "rollout" else row for row in rows])
    return other


def test_runs_from_elsewhere_are_another_rounding_of_the_committed_ones(study, elsewhere, tmp_path):
    write_results(study, tmp_path)
    write_results(elsewhere, tmp_path)
    assert not (tmp_path / "small" / "roundings.csv").exists(), "the study itself has one rounding"
    table = pd.read_csv(tmp_path / "small_elsewhere" / "roundings.csv").set_index(["arm", "rounding"])
    gspo = table.loc["gspo"]
    committed = pd.read_csv(tmp_path / "small" / "comparisons.csv").set_index("arm").loc["gspo"]
    for name, moved in (("native", 0.0), ("elsewhere", -0.03), ("pooled", -0.015)):
        assert gspo.loc[name, "difference"] == pytest.approx(committed["difference"] + moved, abs=1e-4)
        assert gspo.loc[name, "n"] == 8
    assert gspo.loc["native", "verdict"] == committed["verdict"]
    # as if both had been run together
    both = shutil.copytree(study, tmp_path / "both")
    shutil.copytree(elsewhere, both / "rounding_elsewhere", ignore=shutil.ignore_patterns("study.yaml"))
    expected = conclusion_table(load(both)).set_index(["arm", "rounding"])
    assert list(expected.index) == list(table.index)
    assert list(expected["verdict"]) == list(table["verdict"].fillna(""))
    assert list(expected["difference"]) == pytest.approx(list(table["difference"]), abs=1e-5)


def test_a_study_that_compares_nothing_is_written_again_without_conclusions(study, elsewhere, tmp_path):
    write_results(study, tmp_path)
    (tmp_path / "small" / "comparisons.csv").unlink()
    write_results(elsewhere, tmp_path)
    names = {path.stem for path in (tmp_path / "small_elsewhere").glob("*.csv")}
    assert "runs" in names and not {"roundings", "variance_components"} & names


def test_a_study_run_again_is_not_written_where_the_study_is_missing(elsewhere, tmp_path):
    """From another folder than the root of the repository it would be written without what became of the study."""
    with pytest.raises(ResultsError, match="small_elsewhere are set beside the committed results of small"):
        write_results(elsewhere, tmp_path)
    assert not list(tmp_path.iterdir())


def test_against_prints_what_becomes_of_each_conclusion(study, elsewhere, tmp_path, monkeypatch, capsys):
    write_results(study, tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert main(["against", str(elsewhere)]) == 0
    said = capsys.readouterr().out
    assert "small: native as committed, here 24 runs" in said
    gspo = said[said.index("gspo − grpo:") :].splitlines()[:4]
    assert [line.split()[0] for line in gspo] == ["gspo", "native", "here", "pooled"]
    assert all("n = 8" in line and "[" in line for line in gspo[1:])


def test_committed_runs_of_several_roundings_are_each_one(study, elsewhere, tmp_path):
    write_results(study, tmp_path)
    runs = pd.read_csv(tmp_path / "small" / "runs.csv")
    pd.concat([runs.assign(rounding="native"), runs.assign(rounding="avx2")]).to_csv(
        tmp_path / "small" / "runs.csv", index=False
    )
    assert list(published_roundings(tmp_path / "small")) == ["native", "avx2"]
    table = against_published(load(elsewhere), tmp_path / "small", "here")["roundings"]
    assert list(table[table["arm"] == "gspo"]["rounding"]) == ["native", "avx2", "here", "pooled"]
    both = shutil.copytree(elsewhere, tmp_path / "both")
    shutil.copytree(elsewhere, both / "rounding_default", ignore=shutil.ignore_patterns("study.yaml"))
    for kernels, names in (("DEFAULT", ["here", "here_default"]), ("AVX2", ["here"])):
        for file in both.glob("**/env.json"):
            of = kernels if "rounding_default" in file.parts else "AVX2"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"kernels": of}))
        table = against_published(load(both), tmp_path / "small", "here")["roundings"]
        assert list(table[table["arm"] == "gspo"]["rounding"]) == ["native", "avx2", *names, "pooled"]


def test_what_cannot_be_set_beside_each_other_is_said(study, tmp_path):
    with pytest.raises(ResultsError, match=r"nowhere: no runs.csv; expected the committed results of a study"):
        against_published(load(study), tmp_path / "nowhere", "here")
    write_results(study, tmp_path)
    other = write_study(tmp_path / "runs", arms=("grpo", "grpo_replay"), seeds=(0, 1), steps=6, sequences=1)
    with pytest.raises(ResultsError, match=r"none of its comparisons \(gspo - grpo.*\) has runs in runs"):
        against_published(load(other), tmp_path / "small", "here")


def test_runs_of_other_settings_are_not_set_beside_the_committed_ones(tmp_path):
    path = shipped_studies()["quick"]
    quick = load_study(path)
    arm, seed = quick.runs()[0]
    folder = write_study(tmp_path / "quick", arms=("grpo",), seeds=(seed,), steps=6, sequences=1)
    run = folder / arm / f"seed{seed}"
    config = quick.resolve(arm, seed)
    (run / "config.yaml").write_text(dump_run(config))
    check_settings(load(folder))
    (run / "config.yaml").write_text(dump_run(replace(config, optim=replace(config.optim, steps=5))))
    of_others = rf"{arm}/seed{seed} was run with other settings than .*quick.yaml.*optim.steps"
    with pytest.raises(ResultsError, match=of_others):
        check_settings(load(folder))
    shutil.copytree(folder / arm, folder / "rounding_avx2" / arm)
    (run / "config.yaml").write_text(dump_run(config))
    with pytest.raises(ResultsError, match=of_others):
        check_settings(load(folder))
