"""What a run's final reward is: of its last steps, or held out."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from read_studies import at_start, study_of, text_on
from synthetic import write_study

from moe_rl.study import load
from moe_rl.study.comparing import comparisons
from moe_rl.study.figures import FIGURES
from moe_rl.study.outcomes import final_rewards, run_outcomes
from moe_rl.study.published import KINDS, published_values
from moe_rl.study.report import render_report
from moe_rl.study.result_tables import result_tables
from moe_rl.study.results import markdown

EIGHT = (0.80, 0.81, 0.83, 0.79, 0.82, 0.80, 0.84, 0.81)


def test_the_reward_of_demonstrations_is_nobodys_final_reward():
    """SFT scores 1.000 on its demonstrations; what counts is its policy on held-out prompts, in every table."""
    study = study_of({"grpo": EIGHT, "gspo": (1.0,) * 8}, {"gspo": {"method": {"objective": "sft"}}})
    rows = [{"arm": "gspo", "seed": s, "step": step, "reward": 0.4 + step / 10} for s in range(8) for step in (0, 4)]
    rows += [{"arm": "grpo", "seed": s, "step": step, "reward": 0.4 + step / 20} for s in range(8) for step in (0, 4)]
    study = replace(study, evals=pd.DataFrame(rows))
    table = final_rewards(study).set_index("arm")
    assert table["final"].to_dict() == pytest.approx({"grpo": sum(EIGHT) / 8, "gspo": 0.8})
    assert table["measured"].to_dict() == {"grpo": "last 5 steps", "gspo": "held out"}
    pair = comparisons(study)[0]
    assert pair.result.difference.estimate == pytest.approx(0.2)  # held out on both sides: .8 - .6
    assert "1.00" not in text_on(study, "Reward")
    without = replace(study, evals=study.evals.iloc[:0])
    assert np.isnan(final_rewards(without).set_index("arm")["final"]["gspo"])


def test_a_run_that_collapsed_before_its_last_evaluation_is_one_of_its_arms_runs():
    study = study_of({"grpo": (0.0, 0.0)})
    curves = {0: [0.8] * 5 + [0.1] * 5, 1: [0.8] * 10}
    rows = [("grpo", seed, step, reward) for seed, curve in curves.items() for step, reward in enumerate(curve)]
    going = tuple(replace(run, finished=False) for run in study.runs)
    rollouts = pd.DataFrame(rows, columns=["arm", "seed", "step", "reward"])
    study = replace(study, runs=going, rollouts=rollouts, evals=at_start(study, 0.4))
    study = replace(study, config={**study.config, "outcome": "held_out"})
    assert final_rewards(study)["n"].tolist() == [0]
    assert "that collapsed: 1 of 2 (GRPO: 1 of 2)" in text_on(study, "Runs that failed")


def test_a_study_may_declare_held_out_reward_as_what_it_compares():
    study = study_of({"grpo": EIGHT, "gspo": EIGHT})
    rows = [
        {"arm": arm, "seed": seed, "step": step, "reward": reward}
        for arm, at_end in (("grpo", 0.6), ("gspo", 0.8))
        for seed in range(8)
        for step, reward in ((0, 0.4), (4, at_end))
    ]
    study = replace(study, evals=pd.DataFrame(rows))
    (sampled,) = comparisons(study)
    assert sampled.result.difference.estimate == 0 and sampled.beside.difference.estimate == pytest.approx(0.2)
    declared = replace(study, config={**study.config, "outcome": "held_out"})
    assert comparisons(declared)[0].result.difference.estimate == pytest.approx(0.2)
    table = final_rewards(declared).set_index("arm")
    assert table["final"].to_dict() == pytest.approx({"grpo": 0.6, "gspo": 0.8})
    assert set(table["measured"]) == {"held out"} and (table["failed"] == 0).all()


def declared_held_out(in_training):
    """GRPO and GSPO of eight seeds; held-out reward, which is declared, is 0.6 and 0.8, before training 0.4."""
    study = study_of(in_training)
    rows = [
        {"arm": arm, "seed": seed, "step": step, "reward": reward}
        for arm, at_end in (("grpo", 0.6), ("gspo", 0.8))
        for seed in range(8)
        for step, reward in ((0, 0.4), (4, at_end + seed / 1000))
    ]
    config = {**study.config, "outcome": "held_out", "comparisons": [["gspo", "grpo"]]}
    return replace(study, evals=pd.DataFrame(rows), config=config)


def test_tables_of_a_study_that_declares_held_out_reward_have_it_once_and_the_sampled_beside_it():
    study = declared_held_out({"grpo": EIGHT, "gspo": [reward - 0.3 for reward in EIGHT]})
    tables = result_tables(study)
    runs, finals, pairs = (tables[name].set_index("arm") for name in ("runs", "final_reward", "comparisons"))
    assert runs["sampled"]["grpo"].tolist() == pytest.approx(EIGHT)
    assert runs["final"].tolist() == runs["held_out"].tolist()
    assert finals["sampled"].to_dict() == pytest.approx({"grpo": 0.8125, "gspo": 0.5125}) and "evaluation" not in finals
    assert pairs["difference"]["gspo"] == pytest.approx(0.2) and pairs["sampled_difference"]["gspo"] == pytest.approx(
        -0.3
    )
    assert not any(name.startswith("held_out") for name in pairs)
    assert markdown("final_reward", tables["final_reward"]).splitlines() == [
        "| arm | condition | n | held-out reward | as sampled in training | failed | below start | collapsed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| GRPO | natural | 8 | 0.60 [0.60, 0.61] | 0.81 [0.80, 0.83] | 0 of 8 | 0 | 0 |",
        "| GSPO | natural | 8 | 0.80 [0.80, 0.81] | 0.51 [0.50, 0.53] | 0 of 8 | 0 | 0 |",
    ]
    assert markdown("comparisons", tables["comparisons"]).splitlines()[::2] == [
        "| condition | difference | n | Δ held-out reward | p | Δ as sampled in training | verdict |",
        "| natural | GSPO − GRPO | 8 | +0.200 [0.200, 0.200] | 0.008 | −0.300 [−0.300, −0.300] | higher |",
    ]
    elsewhere = result_tables(replace(study, config={**study.config, "outcome": "sampled"}))
    assert not [name for table in elsewhere.values() for name in table if "sampled" in name]
    assert "| final reward | held out |" in markdown("final_reward", elsewhere["final_reward"])


def test_a_report_calls_held_out_reward_by_its_name_where_that_is_declared():
    study = declared_held_out({"grpo": EIGHT, "gspo": [reward - 0.3 for reward in EIGHT]})
    page = render_report(study, [])
    assert "Difference of held-out reward, paired by seed." in page and "final reward, paired" not in page
    assert "<th>Difference of held-out reward</th>" in page and '<h2 id="table">Held-out reward</h2>' in page
    assert "Natural routing, held-out reward. GRPO: 0.60; GSPO: 0.80." in page
    assert "p 0.008; sampled −0.300: higher" in page and "responses are not the policy's, so that" not in page
    assert page.count('<th class="number">Sampled</th>') == 2 and '<th class="number">Held out</th>' not in page
    rows = {name: getattr(study, name).query("arm == 'grpo'") for name in ("rollouts", "evals")}
    begun = replace(study, **rows, runs=tuple(replace(run, finished=run.arm == "grpo") for run in study.runs))
    assert '<h2 id="table">Held-out reward</h2>' in render_report(begun, []), "though GSPO has none yet"


def test_the_reward_before_training_is_no_run_s_held_out_reward():
    """A run that has not come to an evaluation after that has none yet, and is in no mean of them."""
    study = declared_held_out({"grpo": EIGHT, "gspo": EIGHT})
    evals = study.evals[(study.evals["seed"] > 0) | (study.evals["arm"] == "grpo") | (study.evals["step"] == 0)]
    runs = tuple(replace(run, finished=(run.arm, run.seed) != ("gspo", 0)) for run in study.runs)
    begun = replace(study, evals=evals, runs=runs)
    runs = run_outcomes(begun).set_index(["arm", "seed"])
    assert runs["start"]["gspo"].tolist() == [0.4] * 8 and not runs["failed"].any()
    assert runs[["final", "held_out"]].isna().sum(axis=1)["gspo"].tolist() == [2, *[0] * 7]
    table = final_rewards(begun).set_index("arm")
    assert table["n"].to_dict() == {"grpo": 8, "gspo": 7} and table["low"]["gspo"] > 0.79


def test_numbers_beside_final_rewards_stand_beside_them_however_long_the_counts():
    study = study_of({"grpo": EIGHT, "gspo": EIGHT})
    runs = tuple(replace(run, finished=run.seed > 0) for run in study.runs)
    for some in (study, replace(study, runs=runs, evals=at_start(study, 0.4))):
        drawn = FIGURES["final_reward"](some).figure
        ax = drawn.axes[0]
        said = {text.get_text(): text.get_window_extent() for text in ax.texts}
        means = [box for text, box in said.items() if text.startswith("0.81")]
        assert means and all(box.x0 > ax.get_window_extent().x1 for box in means)
    assert "0 of 7 · 0 of 7 · 0" in said


def test_what_was_sampled_of_committed_runs_is_their_final_reward_unless_another_is_declared(tmp_path):
    study = declared_held_out({"grpo": EIGHT, "gspo": [reward - 0.3 for reward in EIGHT]})
    for outcome, final in (("held_out", 0.8), ("sampled", 0.5125)):
        folder = tmp_path / outcome
        folder.mkdir()
        (folder / "env.json").write_text(f'{{"study": "{outcome}"}}')
        result_tables(replace(study, config={**study.config, "outcome": outcome}))["runs"].to_csv(folder / "runs.csv")
        found = {of: published_values(tmp_path, f"{outcome}:gspo", of).mean() for of in list(KINDS)[:4]}
        means = {"final": final, "sampled": 0.5125, "held_out": 0.8, "held_out_less_sampled": 0.2875}
        assert found == pytest.approx(means, abs=0.004)


def test_a_final_reward_of_fewer_than_five_steps_is_said_to_be_of_all(tmp_path):
    """Of one step it is that of the policy before training."""
    study = load(write_study(tmp_path / "s", arms=("grpo", "gspo"), seeds=(0,), steps=6, sequences=2))
    assert "Fewer than" not in text_on(study, "Reward")
    short = replace(study, rollouts=study.rollouts[(study.rollouts["arm"] == "grpo") | (study.rollouts["step"] < 4)])
    said = "Fewer than 5 steps: the final reward of {} is the mean of all steps"
    assert said.format("GSPO") in text_on(short, "Reward")
    assert said.format("every arm") in text_on(replace(study, rollouts=study.rollouts.query("step < 1")), "Reward")
    held_out = replace(short, config={**short.config, "outcome": "held_out"})
    assert "Fewer than" not in text_on(held_out, "Reward")
    unfinished = tuple(replace(run, finished=run.arm == "grpo") for run in short.runs)
    assert "Fewer than" not in text_on(replace(short, runs=unfinished), "Reward")
