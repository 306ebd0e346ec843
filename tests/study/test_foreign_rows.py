"""Figures and report of legal rows that another trainer wrote: few columns, nulls, nothing counted."""

import html
import json
import re

import numpy as np
import pytest
import yaml
from read_studies import text_on

from moe_rl.measure.catalogue import CATALOGUE
from moe_rl.run_rows import OTHER_NAMES
from moe_rl.runlog import RunFolderError
from moe_rl.study import RunWriter, draw_study, load
from moe_rl.study.data import StudyDataError
from moe_rl.study.figures import FIGURES
from moe_rl.study.result_tables import result_tables
from moe_rl.study.summary import in_run_variance, noise_floor

CHANGED = {"slots_changed": 0, "slots": 5, "sites_changed": 0, "sites": 3, "tokens_changed": 0, "tokens": 2}
SITES = {"site_names": ["a", "b"], "site_slots_changed": [0, 1], "site_slots": [2, 3]}
ONE_SITE = {"site_names": ["a"], "site_slots_changed": [0], "site_slots": [2]}


@pytest.mark.parametrize(
    ("probes", "reason"),
    [
        ({"slots_changed": 1, "slots": 5}, "expert_change: the runs recorded no sites_changed, sites"),
        ({"slots_changed": 1}, "expert_change: the runs recorded no slots, sites_changed"),
        (dict.fromkeys(CHANGED, 0), "expert_change: slots, sites and tokens are 0 in every probe"),
        ({"flips_histogram": [0, 0], "deviation_histogram": [0, 0]}, "flips_per_token: no arm has tokens in"),
        ({"flips_histogram": [], "deviation_histogram": []}, "flips_per_token: no arm has tokens in"),
        (
            [{"flips_histogram": [1] * n, "deviation_histogram": [1]} for n in (2, 3)],
            "flips_per_token: rows of one arm have a flips_histogram of 2 and 3 entries",
        ),
        ({name: [] for name in SITES}, "expert_change_by_site: the runs name no routing site"),
        ({**SITES, "site_slots_changed": [0, 0], "site_slots": [0, None]}, "expert_change_by_site: site_slots is 0 at"),
        ([SITES, ONE_SITE], "expert_change_by_site: rows of one arm have a site_slots_changed of 1 and 2 entries"),
    ],
)
def test_the_report_says_what_is_missing_of_legal_rows_that_make_no_figure(tmp_path, probes, reason):
    write_probes(tmp_path, probes)
    assert reason in html.unescape(draw_study(tmp_path).read_text())


@pytest.mark.parametrize(
    ("probes", "figure"),
    [
        ({**CHANGED, "tokens": 0}, "expert_change"),
        ({"flips_histogram": [2, None], "deviation_histogram": [3]}, "flips_per_token"),
        ({**SITES, "site_slots_changed": [None, 1], "site_slots": [None, 3]}, "expert_change_by_site"),
    ],
)
def test_null_is_0_of_0(tmp_path, probes, figure):
    write_probes(tmp_path, probes)
    frame = FIGURES[figure](load(tmp_path)).frame
    if figure == "expert_change_by_site":
        assert frame["site_slots"].tolist() == [0, 6]
        assert frame["rate"].tolist() == pytest.approx([np.nan, 1 / 3], nan_ok=True)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("update", {"clipped_tokens": 0, "tokens": 0}),
        ("update", {"clipped_tokens": 0}),
        ("floor", {"variant": "repeat", "slots_changed": 0, "slots": 3}),
        ("engine", {"pair": "engines", "update": 0, "var_token": 0.1, "var_sequence": 0.2}),
        ("decomposition", {"update": 1, "token_variance": 0.1, "sequence_variance": 0.2, "token_var_routing": 0.1}),
    ],
)
def test_rows_with_some_of_the_columns_make_a_report(tmp_path, kind, values):
    with RunWriter(tmp_path, arm="a") as run:
        run.rollout(0, reward=0.3)
        run.probe(0, 1, **CHANGED)
        run.row(kind, 0, **({"update": 1} if kind == "update" else {}), **values)
    assert ('id="figure-engine_mismatch"' in draw_study(tmp_path).read_text()) == (kind == "engine")


def test_the_token_variance_alone_is_compared_and_drawn(tmp_path):
    for arm, replay, variance in (("grpo", "none", 0.3), ("grpo_r2", "R2", 0.1)):
        with RunWriter(tmp_path, arm=arm, config={"objective": "grpo", "replay": replay}) as run:
            run.rollout(0, reward=0.5)
            run.update(0, 1, var_token_log_ratio=variance)
    data = load(tmp_path)
    assert "grpo without replay has 3 times the token variance of grpo_r2" in text_on(data, "What replay removes")
    assert in_run_variance(data)["token"].tolist() == [0.3, 0.1]


def test_a_floor_of_which_nothing_was_counted_is_no_floor(tmp_path):
    """A count without its other half is not counted either: 1 of 4 slots, not 1 of 104."""
    gaps = {"gap_mean": 0.0, "gap_max": 0.5}
    with RunWriter(tmp_path, arm="a") as run:
        run.row("floor", 0, variant="repeat", **{**CHANGED, "slots_changed": 1, "slots": 4}, **gaps)
        run.row("floor", 1, variant="repeat", **{**CHANGED, "slots_changed": None, "slots": 100}, **gaps)
        run.row("floor", 1, variant="bf16", **dict.fromkeys(CHANGED, 0), **gaps)
    assert noise_floor(load(tmp_path))["slot"].to_dict() == {"own": 0.25}


def test_probes_without_rollouts_make_tables(tmp_path):
    with RunWriter(tmp_path, arm="a") as run:
        run.probe(0, 1, var_token_natural=0.2, var_token_replayed=0.1)
    assert result_tables(load(tmp_path)).keys().isdisjoint({"sizes", "power_laws"})


def write_probes(folder, probes):
    with RunWriter(folder, arm="a") as run:
        for step, values in enumerate(probes if isinstance(probes, list) else [probes] * 2):
            run.rollout(step, reward=0.3)
            run.probe(step, 1, **values)


def written(folder, arm, rewards=(0.1, 0.2)):
    for seed in (0, 1):
        place = folder / arm / f"seed{seed}"
        place.mkdir(parents=True)
        rows = [{"kind": "rollout", "step": step, "reward": reward} for step, reward in enumerate(rewards)]
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_without_any_configuration_have_a_report(tmp_path):
    for arm in ("own", "other"):
        written(tmp_path, arm)
    assert "own" in draw_study(tmp_path).read_text()


def test_declared_comparisons_without_runs_are_told(tmp_path):
    written(tmp_path, "base")
    (tmp_path / "study.yaml").write_text("comparisons: [[nw, base]]\n")
    page = html.unescape(draw_study(tmp_path).read_text())
    assert "The study file declares comparisons of nw, of which there is no run." in page


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("outcome: final", r"study\.yaml: outcome: expected sampled or held_out, got .final."),
        ("interest: abc", r"study\.yaml: interest: expected a difference of reward above 0, got 'abc'"),
        ("interest: true", "above 0, got True"),
        ("interest: .inf", "above 0, got inf"),
        ("comparisons: a", r"comparisons: expected a list of pairs \[arm, other\], got 'a'"),
        ("comparisons: [[a, a]]", r"comparisons\[0\]: 'a' is compared with itself"),
        ("comparisons: [[a, b], [b, a]]", r"comparisons\[1\]: 'b' and 'a' are compared twice"),
        ("comparisons: [[a, b], [a]]", r"comparisons\[1\]: expected a pair \[arm, other\], got \['a'\]"),
    ],
)
def test_declarations_that_cannot_be_followed_are_refused(tmp_path, declared, words):
    written(tmp_path, "base")
    (tmp_path / "study.yaml").write_text(f"{declared}\n")
    with pytest.raises(StudyDataError, match=words):
        load(tmp_path)


def test_an_arm_that_comparisons_misspell_is_told(tmp_path):
    for arm in ("base", "gmpo"):
        written(tmp_path, arm)
    (tmp_path / "study.yaml").write_text("comparisons: [[gmpo, base], [gmop, base]]\n")
    (note,) = load(tmp_path).notes
    assert note.startswith("comparisons name gmop, of which there is no run") and "gmpo" in note


def configured(folder, arm, **configs):
    written(folder, arm)
    for seed, config in enumerate(configs.values()):
        (folder / arm / f"seed{seed}" / "config.yaml").write_text(yaml.safe_dump(config))


def test_seeds_of_one_arm_under_other_settings_are_told(tmp_path):
    own = {"objective": "grpo", "optim": {"lr": 1e-5}, "output_dir": "a", "data_seed": 0, "tracker": "wandb"}
    configured(tmp_path, "base", a=own, b={**own, "output_dir": "b", "data_seed": 1, "tracker": None})
    assert load(tmp_path).notes == ()
    configured(tmp_path, "other", a=own, b={**own, "optim": {"lr": 1e-3}})
    said = "other: its runs differ in optim.lr (1e-05 in seed0, 0.001 in seed1), and count as one arm all the same"
    assert load(tmp_path).notes == (said,)


def test_words_of_other_trainers_decide_no_numbers(tmp_path):
    own = {"objective": "grpo", "replay": False, "source": "gsm8k", "noise": 0.1, "seed": None}
    configured(tmp_path, "base", a=own, b=own)
    run = load(tmp_path).runs[1]
    assert (run.method, run.replay, run.responses, run.noise, run.seed) == ("grpo", "none", "policy", 0.0, 1)
    configured(tmp_path, "odd", a={"seed": "one"}, b={})
    with pytest.raises(StudyDataError, match=r"odd/seed0/config\.yaml: seed: expected a whole number, got 'one'"):
        load(tmp_path)


def test_a_done_that_was_made_by_hand_says_who_makes_it(tmp_path):
    written(tmp_path, "base")
    (tmp_path / "base" / "seed0" / "DONE").touch()
    with pytest.raises(StudyDataError, match=r"is empty, and is not made by hand: RunWriter\.finish"):
        load(tmp_path)


def test_other_trainers_names_are_told_by_ours(tmp_path):
    known = {name for metrics in CATALOGUE.values() for name in (m.name for m in metrics)}
    for ours in OTHER_NAMES.values():
        assert re.findall(r"\b[a-z]+[a-z0-9]*_?[a-z0-9]+\b", ours)[0] in known, ours
    with (
        RunWriter(tmp_path / "s", arm="a", seed=0, config={}) as run,
        pytest.raises(RunFolderError, match="no metric 'clip_fraction'; ours is clipped_tokens over tokens, a rate is"),
    ):
        run.update(0, 1, clip_fraction=0.1)
