"""Committed results and the pages made from them: every number of a page's tables lies in docs/results."""

import json
from pathlib import Path

import pandas as pd
import pytest
from synthetic import read_rows, write_rows, write_study

from moe_rl.done import write_done
from moe_rl.study import load
from moe_rl.study.outcomes import final_rewards
from moe_rl.study.published import published_roundings, published_values
from moe_rl.study.result_tables import result_tables
from moe_rl.study.results import ResultsError, fill, main, markdown, write_results
from moe_rl.study.summary import change_rates

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("experiments/**/*.md"))]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    return write_study(folder, arms=("grpo", "grpo_replay"), seeds=tuple(range(6)), steps=6, sequences=2)


@pytest.fixture(scope="module")
def results(study, tmp_path_factory):
    to = tmp_path_factory.mktemp("docs") / "results"
    write_results(study, to)
    return to


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_hold_the_committed_tables(page):
    text = page.read_text(encoding="utf-8")
    assert fill(text, ROOT / "docs" / "results") == text, "python -m moe_rl.study.results fill " + str(page)


def test_tables_are_those_of_the_study(study, results):
    data = load(study)
    assert {path.name for path in (results / "small").iterdir()} == {
        *("final_reward.csv", "comparisons.csv", "runs.csv", "change_rates.csv", "factors.csv", "volatility.csv"),
        *("updates.csv", "signals.csv", "design_effect.csv", "env.json"),
    }
    finals = pd.read_csv(results / "small" / "final_reward.csv").set_index("arm")
    expected = final_rewards(data).set_index("arm")
    for column in ("n", "final", "low", "high", "evaluation", "failed"):
        assert finals[column].tolist() == pytest.approx(expected[column].tolist(), rel=1e-5), column
    rates = pd.read_csv(results / "small" / "change_rates.csv")
    assert (rates["slot"] - rates["slots_changed"] / rates["slots"]).abs().max() < 1e-6
    assert len(rates) == len(change_rates(data)) == 2 * 4
    pair = pd.read_csv(results / "small" / "comparisons.csv").iloc[0]
    assert (pair["arm"], pair["other"], pair["n"], pair["declared"]) == ("grpo_replay", "grpo", 6, False)
    assert pair["difference"] == pytest.approx(expected["final"]["grpo_replay"] - expected["final"]["grpo"], abs=1e-5)
    environment = json.loads((results / "small" / "env.json").read_text())
    assert environment["versions.torch"] == "2.13.0" and environment["runs"] == 12


def test_loads_and_versions_of_the_weights_are_tables_by_hand(tmp_path):
    """MaxVio of the last probe's last update, mean over sites; of all updates; tokens of earlier weights over steps."""
    for seed in (0, 1):
        rows = [
            {"kind": "rollout", "step": 0, "reward": 0.5, "old_tokens": 0.0, "version_age": 0, "version_age_max": 0},
            {"kind": "rollout", "step": 1, "reward": 0.5, "old_tokens": 0.8, "version_age": 2, "version_age_max": 3},
        ]
        for step, update, busiest in ((0, 2, 9.0), (1, 1, 7.0), (1, 2, 1.0 + seed)):
            counts = {"slots_changed": 1, "slots": 2, "sites_changed": 1, "sites": 1, "tokens_changed": 1, "tokens": 1}
            rows.append({"kind": "probe", "step": step, "update": update, "site_max_vio": [busiest, 0.0], **counts})
            slots = {"slots_changed": update + seed, "slots": 10}
            rows.append({"kind": "update", "step": step, "update": update, "max_vio": 2.0 * update, **slots})
        write_rows(tmp_path / "a" / f"seed{seed}", rows, {})
    tables = result_tables(load(tmp_path))
    balance, versions = tables["balance"].iloc[0], tables["versions"].iloc[0]
    assert balance["max_vio"] == pytest.approx((0.5 + 1.0) / 2)
    assert balance["trained_max_vio"] == pytest.approx((4 + 2 + 4) / 3)
    assert tables["volatility"].iloc[0]["slots_rerouted"] == pytest.approx((5 / 30 + 8 / 30) / 2)
    assert versions["old_tokens"] == pytest.approx(0.4) and versions["version_age"] == pytest.approx(1)
    assert (
        markdown("balance", tables["balance"]).splitlines()[-1] == "| a | 2 | 0.75 [0.50, 1.00] | 3.33 [3.33, 3.33] |"
    )


def test_writing_twice_gives_the_same_bytes_and_sweeps_what_is_gone(study, results, tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "roundings.csv").write_text("old")
    write_results(study, tmp_path)
    for file in (results / "small").iterdir():
        assert (tmp_path / "small" / file.name).read_bytes() == file.read_bytes()
    assert not (tmp_path / "small" / "roundings.csv").exists()


def test_what_runs_differ_in_is_kept_by_run(study, tmp_path):
    import shutil

    copy = shutil.copytree(study, tmp_path / "copy")
    file = copy / "grpo" / "seed3" / "env.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cpus": 8}))
    (tmp_path / "linked").symlink_to(copy)
    write_results(tmp_path / "linked", tmp_path / "out")
    environment = json.loads((tmp_path / "out" / "linked" / "env.json").read_text())
    assert "cpus" not in environment
    assert (environment["by_run"]["cpus"]["grpo/seed3"], environment["by_run"]["cpus"]["grpo/seed2"]) == (8, 2)


def test_a_page_gets_its_table_between_the_markers(results):
    page = "Before.\n\n<!-- table: small/final_reward -->\nby hand\n<!-- end -->\n\nAfter.\n"
    filled = fill(page, results)
    assert "by hand" not in filled and fill(filled, results) == filled
    lines = filled.splitlines()
    assert lines[3].startswith("| arm | condition | n | final reward | held out | failed |")
    row = pd.read_csv(results / "small" / "final_reward.csv").iloc[0]
    assert f"| GRPO | natural | 6 | {row['final']:.2f} [{row['low']:.2f}, {row['high']:.2f}] |" in filled
    assert lines[0] == "Before." and lines[-1] == "After."
    changed = pd.read_csv(results / "small" / "final_reward.csv").assign(final=0.123)
    assert "| 0.12 [" in markdown("final_reward", changed)
    unknown = markdown("final_reward", changed.assign(start=float("nan"))).splitlines()[2]
    assert unknown.endswith("| – | – | 0 |"), "without a reward to begin with it is not known which runs failed"
    for name in ("comparisons", "change_rates", "runs"):
        assert fill(f"<!-- table: small/{name} -->\n<!-- end -->", results).count("\n|") >= 3


def test_a_page_counts_failures_of_the_runs_that_can_be_judged(tmp_path):
    """Of two finished runs one has no reward before its first update."""
    folder = write_study(tmp_path / "s", arms=("grpo",), seeds=(0, 1), steps=6, sequences=2)
    rows = read_rows(folder / "grpo" / "seed1")
    write_rows(folder / "grpo" / "seed1", [row for row in rows if row["step"]])
    table = result_tables(load(folder))["final_reward"]
    assert (table["finished"][0], table["judged"][0]) == (2, 1)
    assert " of 1 | 0 | 0 |" in markdown("final_reward", table)


def test_a_folded_table_is_a_line_that_opens(results):
    page = fill("<!-- table: small/final_reward, folded -->\n<!-- end -->\n", results)
    lines = page.splitlines()
    assert lines[1:3] == ["<details><summary>small: final reward</summary>", ""], "else what follows is no Markdown"
    assert lines[3].startswith("| arm |") and lines[-3:] == ["", "</details>", "<!-- end -->"]
    assert fill(page, results) == page


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<!-- table: gone/final_reward -->\n<!-- end -->", "table gone/final_reward: no .*final_reward.csv. Run the"),
        ("<!-- table: small/final_reward -->\n", "1 of 1 table markers cannot be read"),
        ("<!-- table: small final_reward -->\n<!-- end -->", "1 of 1 table markers cannot be read"),
        ("<!-- table: small/final_reward, open -->\n<!-- end -->", "1 of 1 table markers cannot be read"),
        (
            "<!-- table: small/runs -->\n<!-- table: small/final_reward -->\n<!-- end -->",
            "table small/runs: its marker has no <!-- end -->",
        ),
    ],
)
def test_markers_that_cannot_be_filled_are_refused(results, page, words):
    with pytest.raises(ResultsError, match=words):
        fill(page, results)


def test_unfinished_studies_are_not_published(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo",), seeds=(0, 1), steps=4, unfinished=(("grpo", 1),))
    with pytest.raises(ResultsError, match="1 runs are not finished \\(grpo/seed1\\)"):
        write_results(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_study_whose_repetition_is_under_way_is_not_published(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo",), seeds=(0, 1), steps=4)
    write_study(folder / "rounding_avx2", arms=("grpo",), seeds=(0, 1), steps=4, unfinished=(("grpo", 1),))
    with pytest.raises(ResultsError, match="1 runs are not finished \\(avx2: grpo/seed1\\)"):
        write_results(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_fills_and_checks(results, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results").symlink_to(results)
    page = tmp_path / "PAGE.md"
    page.write_text("<!-- table: small/comparisons -->\n<!-- end -->\n")
    assert main(["check", "PAGE.md"]) == 1
    assert main(["fill", "PAGE.md"]) == 0 and "| GRPO + Routing Replay − GRPO |" in page.read_text()
    assert main(["check", "PAGE.md"]) == 0
    capsys.readouterr()
    assert main(["publish", "PAGE.md"]) == 2 and capsys.readouterr().out == ""
    assert main(["--help"]) == 0 and "study.results fill PAGE.md" in capsys.readouterr().out
    page.write_text("<!-- table: other/comparisons -->\n<!-- end -->\n")
    for verb in ("fill", "check"):
        with pytest.raises(ResultsError, match=r"PAGE\.md: table other/comparisons"):
            main([verb, "PAGE.md"])
    assert "other/comparisons" in page.read_text()


def test_names_of_arms_that_look_like_numbers_or_like_nothing_are_names(tmp_path):
    """Written and read again, `8` would be a number and `null` no name."""
    to = tmp_path / "results"
    for study, arms in (("sizes", ("8", "16")), ("empty", ("null", "nan"))):
        folder = tmp_path / study
        for place in (folder, folder / "rounding_1"):
            for arm in arms:
                rows = [{"kind": "rollout", "step": step, "reward": 0.5 + 0.1 * (arm == arms[0])} for step in range(2)]
                for seed in range(6):
                    write_rows(place / arm / f"seed{seed}", rows, {"objective": "grpo", "method": {"clip": arm}})
                    write_done(place / arm / f"seed{seed}")
        (folder / "study.yaml").write_text(f"comparisons: [['{arms[0]}', '{arms[1]}']]\n")
        write_results(folder, to)
        for name in ("final_reward", "comparisons", "roundings"):
            assert f"| {arms[0]}" in fill(f"<!-- table: {study}/{name} -->\n<!-- end -->", to)
        both = published_roundings(to / study)
        assert list(both) == ["native", "1"] and [len(pair.result.seeds) for pair in both["1"].pairs] == [6]
        differences = published_values(to, f"{study}:{arms[0]}:{arms[1]}", roundings=True)
        assert differences.tolist() == pytest.approx([0.1] * 12)


def test_repetitions_and_early_signals_stand_side_by_side_on_pages():
    row = {"difference": 0.1, "low": 0.05, "high": 0.15}
    roundings = pd.DataFrame(
        [
            {"arm": "b", "other": "a", "rounding": "native", "n": 8, **row, "verdict": "higher", "survival": "s"},
            {"arm": "b", "other": "a", "rounding": "avx2", "n": 7, **row, "verdict": "not resolved", "survival": "s"},
            {"arm": "b", "other": "a", "rounding": "pooled", "n": 7, **row, "verdict": None, "survival": "s"},
            {"arm": "a", "other": "c", "rounding": "native", "n": 8, **row, "verdict": "higher", "survival": "no"},
        ]
    )
    difference = "+0.100 [0.050, 0.150]"
    assert markdown("roundings", roundings).splitlines() == [
        "| difference | n | native | avx2 | pooled | conclusion |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| b − a | 8, 7 | {difference}, higher | {difference}, not resolved | {difference} | s |",
        f"| a − c | 8 | {difference}, higher | – | – | no |",
    ]
    area, rank = {"auc": 0.5, "auc_low": 0.4, "auc_high": 0.6}, {"correlation": -0.1}
    signals = [
        {"signal": signal, "steps": steps, "runs": 9, "bad": 2, **area, **rank, "correlation_low": -0.2}
        | {"auc": 0.5 + steps / 100, "correlation_high": 0.0}
        for steps in (5, 10)
        for signal in ("k3", "entropy")
    ]
    lines = markdown("early_warning", pd.DataFrame(signals)).splitlines()
    assert lines[0].startswith("| signal | runs | ended badly | area under ROC, 5 steps | area under ROC, 10 steps |")
    assert lines[3].startswith("| entropy | 9 | 2 | 0.55 [0.40, 0.60] | 0.60 [0.40, 0.60] | −0.10 [−0.20, 0.00] |")
    within = pd.DataFrame(signals).assign(within=0.5, within_low=0.3, within_high=0.7)
    lines = markdown("early_warning", within).splitlines()
    assert " | the same within an arm, 5 steps | the same within an arm, 10 steps | rank " in lines[0]
    assert " | 0.60 [0.40, 0.60] | 0.50 [0.30, 0.70] | 0.50 [0.30, 0.70] | −0.10 " in lines[3]
