"""The report: self-contained and well formed; its reading follows the numbers, whichever way they fall."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from browser import Browser, find_browser
from markupsafe import escape
from synthetic import write_study

from moe_rl.study import draw_study, load, write_report
from moe_rl.study.answer import answer
from moe_rl.study.data import Run, StudyData
from moe_rl.study.figures import FIGURES, reward
from moe_rl.study.figures.screen import ON_DARK_CELL, ON_LIGHT_CELL
from moe_rl.study.reading import read, rules_of
from moe_rl.study.report import inline_svg, render_report
from moe_rl.study.summary import comparisons, condition_label, factor_table, final_rewards, run_outcomes

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects ids, links and unbalanced tags."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.open, self.tags, self.unbalanced = [], [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "data"):
                self.links.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_study(tmp_path_factory.mktemp("runs") / "small", steps=6, sequences=4, tokens_every=3)
    study = yaml.safe_load((folder / "study.yaml").read_text())
    study["question"] = "Is <b>GSPO</b> & replay needed?"
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return folder


DRAWN = ("reward", "expert_change_by_site", "probability_scatter")


@pytest.fixture(scope="module")
def text(folder):
    data = load(folder)
    return render_report(data, [FIGURES[name](data) for name in DRAWN])


def test_the_page_is_whole_and_needs_nothing_from_outside(text):
    page = Page(text)
    assert page.unbalanced == []
    assert page.open == []
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def test_the_page_holds_every_part(text):
    for part in ("reading", "table", "figures", "arms", "commands", "environment", "limits"):
        assert f'<h2 id="{part}">' in text
    assert re.findall(r'<figure id="figure-(\w+)"', text) == list(DRAWN)
    assert "Is &lt;b&gt;GSPO&lt;/b&gt; &amp; replay needed?" in text
    assert "moe-rl study experiments/replay_vs_gspo.yaml" in text
    assert "0123456789abcdef" in text
    assert "<td><code>method.clip_low</code></td>" in text  # what differs between arms
    differ, shared = text.split("Settings that all arms share")
    assert "optim.learning_rate" in shared
    assert "optim.learning_rate" not in differ


def test_the_page_says_what_the_stress_test_is(text):
    assert "Selection noise is a stress test" in text
    assert "Replay under noise equals the natural replay run by construction" in text


def test_figures_and_page_are_written_and_the_same_each_time(folder, monkeypatch):
    few = {"probability_scatter": FIGURES["probability_scatter"]}
    monkeypatch.setattr("moe_rl.study.figures.FIGURES", few)
    assert draw_study(folder) == folder / "report.html"
    page = (folder / "report.html").read_text()
    files = {f"{name}.{kind}" for name in few for kind in ("pdf", "svg", "png", "csv", "md")}
    assert {path.name for path in (folder / "figures").iterdir()} == files
    assert write_report(folder) == folder / "report.html"
    assert (folder / "report.html").read_text() == page


def test_a_single_unfinished_seed_makes_a_page_without_intervals(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo", "gspo"), seeds=(0,), steps=4, unfinished=(("gspo", 0),))
    data = load(folder)
    page = render_report(data, [reward(data)])
    assert Page(page).unbalanced == []
    assert "GSPO against GRPO: no seed of both has finished." in page
    assert "There is no verdict" in page.replace("so there", "There")
    assert "1 of 2 runs are finished" in page
    assert "gspo/seed0" in page


def test_inline_figures_do_not_share_ids(folder):
    figure = reward(load(folder))
    svg = inline_svg(figure)
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert all(name.startswith("reward-") for name in ids)
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids
    assert svg.startswith('<svg id="reward-svg" role="img" aria-label="Reward against RL step."')
    assert "<metadata>" not in svg


EIGHT = (0.80, 0.81, 0.83, 0.79, 0.82, 0.80, 0.84, 0.81)
LOW = (0.40, 0.42, 0.42, 0.41, 0.40, 0.43, 0.41, 0.39)


def test_six_figures_are_the_main_ones_and_shared_words_are_said_once(folder):
    data = load(folder)
    page = render_report(data, _eight_figures(data))
    first, rest = page.split('<h2 id="figures">')
    main, appendix = rest.split('<h2 id="appendix">')
    assert re.findall(r'<figure id="figure-(\w+)"', first) == ["final_reward"], "beside the verdict"
    assert first.index('id="verdict"') < first.index("<figure") < first.index("<summary>Notes of the study file")
    numbers = re.findall(r"<figcaption><b>(\w+)\.", page)
    assert numbers == ["1", "2", "3", "4", "5", "6", "A1", "A2"]
    assert len(re.findall("<figure", main)) == 5 and len(re.findall("<figure", appendix)) == 2
    for once in ("n = 3 seeds per arm", "Selection noise (scale σ"):
        assert page.count(f"<li>{once}") == 1 and not re.search(
            rf"<figcaption>[^<]*<b>[^<]*</b>[^<]*{re.escape(once)}", page
        )


def _eight_figures(data):
    """Real figures of one small picture: what the page does with them is the question."""
    drawn = FIGURES["final_reward"](data)
    names = list(FIGURES)[:8]
    return [replace(drawn, name=name, title=f"{name}.") for name in names]


def test_a_phone_needs_no_sideways_scrolling_and_a_dark_page_is_dark(folder, tmp_path):
    executable = find_browser()
    if executable is None:
        pytest.skip("no browser found; on Debian: apt-get install chromium")
    data = load(folder)
    page = tmp_path / "report.html"
    page.write_text(render_report(data, [FIGURES[name](data) for name in ("final_reward", *DRAWN)]), encoding="utf-8")
    browser = Browser(executable)
    try:
        for width, columns in ((390, 1), (1280, 2)):
            browser.look(width, 844, dark=True)
            browser.open(page.as_uri())
            browser.wait("document.readyState === 'complete' && document.querySelectorAll('figure svg').length == 4")
            assert browser.js("document.documentElement.scrollWidth <= innerWidth")
            tracks = browser.js("getComputedStyle(document.querySelector('#verdict')).gridTemplateColumns")
            assert len(tracks.split()) == columns, "the verdict stands beside its figure where there is room"
            paper = browser.js(
                "getComputedStyle(document.querySelector('#final_reward-svg #final_reward-patch_1 path')).fill"
            )
            assert (
                paper == browser.js("getComputedStyle(document.documentElement).backgroundColor") == "rgb(21, 24, 28)"
            )
        assert browser.complaints == []
    finally:
        browser.close()


def test_figures_have_colours_of_their_own_on_a_dark_page(folder):
    svg = inline_svg(FIGURES["expert_change_by_site"](load(folder)))
    style = re.search(
        r"<style>@media \(prefers-color-scheme:dark\)\{#expert_change_by_site-svg\{(.*?)\}\}</style>", svg
    )[1]
    dark = dict(pair.split(":") for pair in style.strip(";").split(";"))
    assert dark["--cffffff"] == "#15181c" and dark["--c1a1a1a"] == "#e9e7e2", "paper and ink change places"
    used = set(re.findall(r"(?:fill|stroke): var\(--c([0-9a-f]{6}), #\1\)", svg))
    assert {f"--c{colour}" for colour in used} == dark.keys()
    bare = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg))
    assert bare == {ON_LIGHT_CELL, ON_DARK_CELL}, "only ink on the cells of a heat map stays as it is"


def test_reading_reports_a_difference_in_the_direction_it_came():
    # differences .40 .39 .41 .38 .42 .37 .43 .42: mean .4025, sd .0212, half-width 2.365 · .0212/√8 = .0177
    texts = _reward_texts({"grpo": LOW, "gspo": EIGHT})
    assert "GSPO minus GRPO: +0.403 [0.385, 0.420], 8 pairs, p 0.008: higher." in texts
    reverse = _reward_texts({"grpo": EIGHT, "gspo": LOW})
    assert "GSPO minus GRPO: −0.403 [−0.420, −0.385], 8 pairs, p 0.008: lower." in reverse


def test_reading_claims_equality_only_by_equivalence():
    near = tuple(np.add(EIGHT, (0.01, -0.01, 0.0, 0.02, -0.02, 0.0, 0.01, -0.01)))
    texts = _reward_texts({"grpo": EIGHT, "gspo": near})
    assert "p of equivalence < 0.001: no difference of interest." in texts
    far = tuple(np.add(EIGHT, (0.1, -0.1, 0.0, 0.12, -0.12, 0.05, 0.1, -0.1)))
    texts = _reward_texts({"grpo": EIGHT, "gspo": far})
    assert "not resolved." in texts and "no difference" not in texts


def test_agreeing_signs_of_three_seeds_are_a_range_and_no_verdict():
    texts = _reward_texts({"grpo": (0.5, 0.5, 0.5), "gspo": (0.51, 0.60, 0.70)})
    assert "GSPO minus GRPO: +0.103, range [0.010, 0.200], 3 pairs: too few pairs." in texts
    assert "none has 6 pairs, so there is no verdict" in texts


def test_reading_checks_that_replay_under_noise_repeats_the_natural_run():
    arms = {"grpo": (0.5, 0.5, 0.5), "grpo_replay": (0.8, 0.8, 0.8), "grpo_noise": (0.4, 0.4, 0.4)}
    same = _texts({**arms, "grpo_replay_noise": (0.8,)}, "Stress test")
    assert "rewards are identical, as they must be" in same
    other = _texts({**arms, "grpo_replay_noise": (0.7,)}, "Stress test")
    assert "rewards differ by up to 0.1, which must not be" in other


def test_replay_stands_in_under_noise_only_if_nothing_else_differs():
    arms = {"grpo_replay": (0.8, 0.8, 0.8), "grpo_noise": (0.4, 0.41, 0.4)}
    assert "GRPO + Routing Replay (natural): 0.80" in _reward_texts(arms)
    assert "(natural)" not in _reward_texts(arms, grpo_noise={"optim": {"learning_rate": 5e-4}})


def test_only_arms_that_differ_in_one_thing_are_compared():
    finals = dict.fromkeys(("grpo", "grpo_replay", "gspo"), (0.5, 0.6, 0.7))
    more = {"gspo": {"optim": {"learning_rate": 5e-4}}}
    pairs = {(pair.arm, pair.other) for pair in comparisons(_study(finals, more))}
    assert pairs == {("grpo_replay", "grpo")}, "gspo differs in method and learning rate from both"
    same = {arm: {"optim": {"learning_rate": rate}} for arm, rate in (("grpo", 1e-3), ("gspo", 5e-4))}
    study = _study({"grpo": (0.5, 0.6, 0.7), "gspo": (0.5, 0.6, 0.7)}, same)
    runs = [replace(run, config={**run.config, "method": {"objective": "grpo"}}) for run in study.runs]
    assert len(comparisons(replace(study, runs=tuple(runs)))) == 1, "one method at two learning rates"


def _many(**config):
    study = _study({"grpo": (0.40, 0.41, 0.42)})
    runs, rows = [], []
    finals = {"a": 0.4, "b": 0.4, "c": 0.4, "d": 0.8, "e": 0.41, "f": 0.4, "g": 0.42, "h": 0.4}
    for arm, value in finals.items():
        for seed in range(10):
            runs.append(replace(study.runs[0], arm=arm, seed=seed, config={"method": {"objective": "grpo", "x": arm}}))
            noise = ((seed * 7 + ord(arm)) % 5 - 2) / 30
            rows += [{"arm": arm, "seed": seed, "step": step, "reward": value + noise} for step in range(5)]
    labels = {"arms": {arm: {"label": arm} for arm in finals}, **config}
    return replace(study, runs=tuple(runs), rollouts=pd.DataFrame(rows), config=labels)


def test_of_many_comparisons_only_resolved_ones_are_told():
    found = [s.text for s in read(_many()) if s.topic == "Reward"]
    assert "d minus a: +0.400" in found[0] and found[0].count(" minus ") == 1
    assert "Not resolved: 5 more. No difference of interest: 1 more." in found[0]
    assert found[1].startswith("7 comparisons, not declared in the study file; p adjusted by Holm over 7.")


def test_declared_comparisons_are_the_family():
    study = _many(comparisons=[["d", "b"], ["c", "e"]], interest=0.45)
    pairs = comparisons(study)
    assert [(pair.arm, pair.other, pair.result.family) for pair in pairs] == [("d", "b", 2), ("c", "e", 2)]
    assert pairs[0].result.verdict == "no difference of interest"  # .4 is not of interest here
    text = " ".join(s.text for s in read(study) if s.topic == "Reward")
    assert "2 comparisons, declared in the study file; p adjusted by Holm over 2." in text
    assert "at least 0.45" in " ".join(rules_of(study))
    assert comparisons(_many(comparisons=[["d", "not run yet"]])) == []


def test_unfinished_runs_are_not_compared():
    study = _study({"grpo": LOW, "gspo": EIGHT})
    half = tuple(replace(run, finished=run.seed < 6) for run in study.runs)
    assert comparisons(replace(study, runs=half))[0].result.seeds == (0, 1, 2, 3, 4, 5)


def test_failed_below_start_and_collapsed_runs_are_counted():
    # curves of ten steps; start .40 (held out): ends at .80, .45, .30, and .80 falling to .10
    curves = [[0.4] * 5 + [end] * 5 for end in (0.8, 0.45, 0.3)] + [[0.8] * 5 + [0.1] * 5]
    study = _study({"grpo": (0.0,) * 4})
    rows = [
        {"arm": "grpo", "seed": seed, "step": step, "reward": value}
        for seed, curve in enumerate(curves)
        for step, value in enumerate(curve)
    ]
    study = replace(study, rollouts=pd.DataFrame(rows), evals=_at_start(study, 0.4))
    runs = run_outcomes(study).set_index("seed")
    assert runs["failed"].tolist() == [False, True, True, True]  # gains .4 .05 -.1 -.3
    assert runs["below_start"].tolist() == [False, False, True, True]
    assert runs["collapsed"].tolist() == [False, False, False, True]
    row = final_rewards(study).iloc[0]
    assert (row["failed"], row["below_start"], row["collapsed"], row["start"]) == (3, 2, 1, 0.4)
    text = next(s.text for s in read(study) if s.topic == "Runs that failed")
    assert "3 of 4 did not gain 0.1 over the held-out reward at step 0 (GRPO: 3 of 4)" in text
    assert "2 of 4 ended below it (GRPO: 2 of 4); 1 of 4 collapsed (GRPO: 1 of 4)" in text
    going = replace(study, runs=tuple(replace(run, finished=False) for run in study.runs))
    assert not run_outcomes(going)[["failed", "below_start"]].any(axis=None)  # not yet


def test_the_reward_of_demonstrations_is_nobodys_final_reward():
    """SFT scores 1.000 on its demonstrations; what counts is its policy on held-out prompts, in every table."""
    study = _study({"grpo": EIGHT, "gspo": (1.0,) * 8}, {"gspo": {"method": {"objective": "sft"}}})
    rows = [{"arm": "gspo", "seed": s, "step": step, "reward": 0.4 + step / 10} for s in range(8) for step in (0, 4)]
    rows += [{"arm": "grpo", "seed": s, "step": step, "reward": 0.4 + step / 20} for s in range(8) for step in (0, 4)]
    study = replace(study, evals=pd.DataFrame(rows))
    table = final_rewards(study).set_index("arm")
    assert table["final"].to_dict() == pytest.approx({"grpo": sum(EIGHT) / 8, "gspo": 0.8})
    assert table["measured"].to_dict() == {"grpo": "last 5 steps", "gspo": "held out"}
    pair = comparisons(study)[0]
    assert pair.result.difference.estimate == pytest.approx(0.2)  # held out on both sides: .8 - .6
    assert "1.00" not in _by_topic_text(study, "Reward")
    without = replace(study, evals=study.evals.iloc[:0])
    assert np.isnan(final_rewards(without).set_index("arm")["final"]["gspo"])


def test_which_methods_answer_themselves_agrees_with_training():
    from moe_rl.objectives import OBJECTIVES
    from moe_rl.training import RunConfig
    from moe_rl.training.method import resolve_method

    for objective in [*OBJECTIVES, "dpo"]:
        config = RunConfig()
        config = replace(config, method=replace(config.method, objective=objective))
        run = Run("a", 0, Path(), True, {"method": {"objective": objective}}, {})
        assert run.responses == resolve_method(config, 8).source, objective
    assert Run("a", 0, Path(), True, {"method": {"objective": "sft", "source": "policy"}}, {}).responses == "policy"


def test_doses_are_named_by_what_they_re_routed():
    updates = pd.DataFrame(
        [{"arm": arm, "seed": 0, "step": 0, "update": 1, "slots_changed": changed, "slots": 1000}
         for arm, changed in (("grpo_noise", 380), ("gspo_noise", 412), ("grpo_replay_noise", 0), ("grpo", 30))]
    )  # fmt: skip
    arms = dict.fromkeys(("grpo", "grpo_noise", "gspo_noise", "grpo_replay_noise"), (0.5,))
    study = _study(arms, updates=updates)
    assert condition_label(study, 1.0) == "38–41 % of slots re-routed (noise σ = 1)"  # replay takes no dose
    assert condition_label(study, 0.0) == "natural"
    assert condition_label(_study(arms), 1.0) == "noise σ = 1"  # not measured


def test_factors_are_of_natural_arms_by_update():
    probes = pd.DataFrame(
        [{"arm": arm, "seed": 0, "step": step, "update": update, "var_token_natural": natural * scale,
          "var_token_replayed": 1.0, "var_sequence_natural": 0.5 * scale}
         for arm, scale in (("grpo", 1.0), ("grpo_noise", 100.0))
         for update, values in ((1, (8.0, 10.0, 60.0)), (4, (2.0, 4.0, 6.0)))
         for step, natural in enumerate(values)]
    )  # fmt: skip
    study = replace(_study({"grpo": (0.5,), "grpo_noise": (0.4,)}), probes=probes)
    table = factor_table(study).set_index("update")
    assert set(table["arm"]) == {"grpo"}
    assert table["replay_median"].to_dict() == {1: 10.0, 4: 4.0}
    assert table["replay_of_means"].to_dict() == {1: 26.0, 4: 4.0}  # (8 + 10 + 60) / 3
    assert table["averaging_median"].to_dict() == {1: 20.0, 4: 8.0}
    text = _by_topic_text(study, "What replay removes")
    assert "after update 1 10 times (26) and after update 4 4 times (4) that with replayed routing" in text


def test_the_first_answer_follows_the_verdicts():
    better = tuple(value + 0.1 for value in LOW)
    study = _study({"grpo": LOW, "grpo_replay": better, "gspo": LOW})
    study = replace(study, evals=_at_start(study, 0.2))
    first, second, third = answer(study).lines
    assert (first.question, first.answer) == ("Did GRPO need replay?", "Yes")
    assert second.answer == "Yes, ended as high as GRPO"
    assert third.answer == "n = 8"
    assert [(row.comparison, row.verdict, row.resolved) for row in answer(study).rows] == [
        ("GRPO + Routing Replay − GRPO", "higher", True),
        ("GSPO − GRPO", "no difference of interest", True),
    ]
    assert "not declared" in answer(study).note
    few = answer(_study({"grpo": (0.8, 0.8), "grpo_replay": (0.9, 0.9), "gspo": (0.1, 0.1)}))
    assert few.title == "Did GRPO need replay? Too few seeds. Did GSPO do without? Too few seeds."
    other = answer(_many())
    assert (other.lines[0].question, other.lines[0].answer) == ("Do the arms differ?", "1 of 7 comparisons resolved")


def test_two_arms_that_failed_are_not_an_answer():
    worse = tuple(value - 0.1 for value in LOW)
    study = _study({"grpo": worse, "grpo_replay": LOW})
    evals = _at_start(study, 0.4)
    first = answer(replace(study, evals=evals)).lines[0]
    assert first.answer == "Most runs of both failed (higher)"
    assert first.text == "Runs that failed: GRPO: 8 of 8, GRPO + Routing Replay: 8 of 8."


def test_a_family_too_large_for_n_is_said():
    study = _many()
    six = replace(study, runs=tuple(run for run in study.runs if run.seed < 6))
    text = _by_topic_text(six, "What n can show")
    assert text.startswith("6 pairs and 7 comparisons: no difference can get a verdict, for Holm over 7 needs 9 pairs.")


def test_reading_compares_clipping_without_dividing_by_zero():
    arms = {"grpo": (0.8, 0.8, 0.8), "gspo": (0.8, 0.8, 0.8)}
    updates = pd.DataFrame(
        [{"arm": arm, "seed": 0, "step": 0, "update": 2, "clipped_tokens": clipped, "tokens": 1000}
         for arm, clipped in (("grpo", 5), ("gspo", 200))]
    )  # fmt: skip
    assert "GRPO 0.5 %, GSPO 20 %; GSPO over GRPO: ×40, 1.6 orders" in _texts(arms, "Clipping", updates=updates)
    none = updates.assign(clipped_tokens=[0, 200])
    assert "GRPO clipped no token, so there is no ratio" in _texts(arms, "Clipping", updates=none)


def test_rules_are_printed_with_the_reading(text, folder):
    for rule in rules_of(load(folder)):
        assert str(escape(rule)) in text


def test_the_page_opens_with_the_verdict(text):
    parts = ('id="verdict"', "Did GRPO need replay?", "What can n say?", "<summary>Notes of", 'id="reading"')
    place = [text.index(part) for part in parts]
    assert place == sorted(place)
    assert "<summary>Notes of the study file</summary>" in text


def _study(finals, changes=None, updates=None):
    """Runs of five equal steps, so that the final reward is the given number."""
    from synthetic import ARMS

    runs, rows = [], []
    for arm, values in finals.items():
        for seed, value in enumerate(values):
            config = {"method": ARMS[arm]["method"], "optim": {"learning_rate": 1e-3}, **(changes or {}).get(arm, {})}
            runs.append(Run(arm, seed, Path(arm) / f"seed{seed}", True, config, {}))
            rows += [{"arm": arm, "seed": seed, "step": step, "reward": value} for step in range(5)]
    empty = pd.DataFrame({"arm": [], "seed": [], "step": [], "update": []})
    config = {"arms": {arm: {"label": ARMS[arm]["label"]} for arm in finals}}
    frames = (pd.DataFrame(rows), empty if updates is None else updates, empty, empty)
    return StudyData("s", Path(), config, tuple(runs), *frames)


def _at_start(study, reward):
    """The held-out reward at step 0, the same in every run."""
    return pd.DataFrame([{"arm": run.arm, "seed": run.seed, "step": 0, "reward": reward} for run in study.runs])


def _texts(finals, topic, changes=None, updates=None):
    found = read(_study(finals, changes, updates))
    return " ".join(statement.text for statement in found if statement.topic == topic)


def _by_topic_text(study, topic):
    return " ".join(statement.text for statement in read(study) if statement.topic == topic)


def _reward_texts(finals, **changes):
    return _texts(finals, "Reward", changes)
