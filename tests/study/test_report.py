"""The report: self-contained and well formed; its reading follows the numbers, whichever way they fall."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import yaml
from synthetic import write_study

from moe_rl.study import draw_study, load, write_report
from moe_rl.study.data import Run, StudyData
from moe_rl.study.figures import FIGURES, STUDY_FIGURES, reward
from moe_rl.study.reading import RULES, read
from moe_rl.study.report import inline_svg, render_report
from moe_rl.study.summary import comparisons

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
    for name in set(FIGURES) - {"probability_scatter"}:
        monkeypatch.delitem(FIGURES, name)
    for name in list(STUDY_FIGURES):
        monkeypatch.delitem(STUDY_FIGURES, name)
    assert draw_study(folder) == folder / "report.html"
    page = (folder / "report.html").read_text()
    files = {f"{name}.{kind}" for name in FIGURES for kind in ("pdf", "svg", "png", "csv", "md")}
    assert {path.name for path in (folder / "figures").iterdir()} == files
    assert write_report(folder) == folder / "report.html"
    assert (folder / "report.html").read_text() == page


def test_a_single_unfinished_seed_makes_a_page_without_intervals(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo", "gspo"), seeds=(0,), steps=4, unfinished=(("gspo", 0),))
    data = load(folder)
    page = render_report(data, [reward(data)])
    assert Page(page).unbalanced == []
    assert "Too few seeds to compare" in page
    assert "1 of 2 runs are finished" in page
    assert "gspo/seed0" in page


def test_inline_figures_do_not_share_ids(folder):
    figure = reward(load(folder))
    svg = inline_svg(figure)
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert all(name.startswith("reward-") for name in ids)
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids
    assert svg.startswith('<svg role="img" aria-label="Reward against RL step."')
    assert "<metadata>" not in svg


def test_reading_reports_a_separation_in_the_direction_it_came():
    texts = _reward_texts({"grpo": (0.40, 0.41, 0.42), "gspo": (0.80, 0.81, 0.83)})
    assert "GSPO ends above GRPO by 0.403 in 3 of 3 seeds" in texts
    assert texts.count("separated.") == 1
    reverse = _reward_texts({"grpo": (0.80, 0.81, 0.83), "gspo": (0.40, 0.41, 0.42)})
    assert "GSPO ends below GRPO by 0.403 in 3 of 3 seeds" in reverse


def test_reading_reports_no_separation_as_such():
    texts = _reward_texts({"grpo": (0.80, 0.85, 0.82), "gspo": (0.82, 0.80, 0.83), "grpo_replay": (0.81, 0.83, 0.81)})
    assert "No separation between any two of them (n = 3)." in texts
    assert "above" not in texts


def test_reading_does_not_overclaim_agreeing_signs():
    # differences .01 .10 .20: all positive, but Student 0.103 ± 0.236 includes 0
    texts = _reward_texts({"grpo": (0.5, 0.5, 0.5), "gspo": (0.51, 0.60, 0.70)})
    assert "same sign in every seed, which is weak evidence" in texts


def test_reading_checks_that_replay_under_noise_repeats_the_natural_run():
    arms = {"grpo": (0.5, 0.5, 0.5), "grpo_replay": (0.8, 0.8, 0.8), "grpo_noise": (0.4, 0.4, 0.4)}
    same = _texts({**arms, "grpo_replay_noise": (0.8,)}, "Stress test")
    assert "rewards are identical, as they must be" in same
    other = _texts({**arms, "grpo_replay_noise": (0.7,)}, "Stress test")
    assert "rewards differ by up to 0.1, which must not be" in other


def test_replay_stands_in_under_noise_only_if_nothing_else_differs():
    arms = {"grpo_replay": (0.8, 0.8, 0.8), "grpo_noise": (0.4, 0.41, 0.4)}
    assert "GRPO + Routing Replay (its natural run): 0.80" in _reward_texts(arms)
    assert "its natural run" not in _reward_texts(arms, grpo_noise={"optim": {"learning_rate": 5e-4}})


def test_only_arms_that_differ_in_one_thing_are_compared():
    finals = dict.fromkeys(("grpo", "grpo_replay", "gspo"), (0.5, 0.6, 0.7))
    more = {"gspo": {"optim": {"learning_rate": 5e-4}}}
    pairs = {(pair.arm, pair.other) for pair in comparisons(_study(finals, more))}
    assert pairs == {("grpo_replay", "grpo")}, "gspo differs in method and learning rate from both"
    same = {arm: {"optim": {"learning_rate": rate}} for arm, rate in (("grpo", 1e-3), ("gspo", 5e-4))}
    study = _study({"grpo": (0.5, 0.6, 0.7), "gspo": (0.5, 0.6, 0.7)}, same)
    runs = [replace(run, config={**run.config, "method": {"objective": "grpo"}}) for run in study.runs]
    assert len(comparisons(replace(study, runs=tuple(runs)))) == 1, "one method at two learning rates"


def test_of_many_comparisons_only_separations_are_told():
    study = _study({"grpo": (0.40, 0.41, 0.42)})
    runs, rows, finals = [], [], {"a": 0.4, "b": 0.4, "c": 0.4, "d": 0.8, "e": 0.4}  # 10 pairs, 4 of them with d
    for arm, value in finals.items():
        for seed in range(3):
            runs.append(replace(study.runs[0], arm=arm, seed=seed, config={"method": {"objective": "grpo", "x": arm}}))
            noise = (0.0, 0.01, -0.01)[(seed + ord(arm)) % 3]
            rows += [{"arm": arm, "seed": seed, "step": step, "reward": value + noise} for step in range(5)]
    labels = {"arms": {arm: {"label": arm} for arm in finals}}
    found = read(replace(study, runs=tuple(runs), rollouts=pd.DataFrame(rows), config=labels))
    text = " ".join(statement.text for statement in found if statement.topic == "Reward")
    assert text.count(": separated.") == 4 and "No separation: 6 more." in text
    assert "Comparisons made: 10" in text


def test_reading_compares_clipping_without_dividing_by_zero():
    arms = {"grpo": (0.8, 0.8, 0.8), "gspo": (0.8, 0.8, 0.8)}
    updates = pd.DataFrame(
        [{"arm": arm, "seed": 0, "step": 0, "update": 2, "clipped_tokens": clipped, "tokens": 1000}
         for arm, clipped in (("grpo", 5), ("gspo", 200))]
    )  # fmt: skip
    assert "GRPO 0.5 %, GSPO 20 %; GSPO over GRPO: ×40, 1.6 orders" in _texts(arms, "Clipping", updates=updates)
    none = updates.assign(clipped_tokens=[0, 200])
    assert "GRPO clipped no token, so there is no ratio" in _texts(arms, "Clipping", updates=none)


def test_rules_are_printed_with_the_reading(text):
    for rule in RULES:
        assert rule.split("“")[0][:30].replace("'", "&#39;") in text


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


def _texts(finals, topic, changes=None, updates=None):
    found = read(_study(finals, changes, updates))
    return " ".join(statement.text for statement in found if statement.topic == topic)


def _reward_texts(finals, **changes):
    return _texts(finals, "Reward", changes)
