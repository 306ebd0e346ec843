"""The page of the report: whole, self-contained and well formed, on a phone and in the dark."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import yaml
from browser import Browser, find_browser
from markupsafe import escape
from synthetic import write_study

from moe_rl.study import draw_study, load
from moe_rl.study.answer import answer
from moe_rl.study.comparing import interest
from moe_rl.study.figures import FIGURES, reward
from moe_rl.study.figures.screen import ON_DARK_CELL, ON_LIGHT_CELL
from moe_rl.study.reading import rules
from moe_rl.study.report import _commands, _own_limits, inline_svg, render_report

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
    assert "replay of all rows under noise is the natural replay run by construction" in text


def test_figures_and_page_are_written_and_the_same_each_time(folder, monkeypatch):
    few = {"probability_scatter": FIGURES["probability_scatter"]}
    monkeypatch.setattr("moe_rl.study.figures.FIGURES", few)
    assert draw_study(folder) == folder / "report.html"
    page = (folder / "report.html").read_text()
    files = {f"{name}.{kind}" for name in few for kind in ("pdf", "svg", "png", "csv", "md")}
    assert {path.name for path in (folder / "figures").iterdir()} == files
    assert draw_study(folder) == folder / "report.html"
    assert (folder / "report.html").read_text() == page


def test_a_single_unfinished_seed_makes_a_page_without_intervals(tmp_path):
    folder = write_study(tmp_path / "s", arms=("grpo", "gspo"), seeds=(0,), steps=4, unfinished=(("gspo", 0),))
    data = load(folder)
    page = render_report(data, [reward(data)])
    assert Page(page).unbalanced == []
    assert "GSPO against GRPO: no seed of both has finished with a reward." in page
    assert "There is no verdict" in page.replace("so there", "There")
    assert "1 of 2 runs are finished" in page
    assert "gspo/seed0" in page


def test_intervals_of_the_table_are_of_the_runs_that_have_a_reward(tmp_path):
    """A folder in which nothing was written yet is no seed of an interval."""
    data = load(write_study(tmp_path / "s", ("grpo",), tuple(range(6)), 3, sequences=2, tokens_every=9))
    assert "Intervals: 95 % Student over 6 seeds." in render_report(data, [])
    begun = replace(data, rollouts=data.rollouts.query("seed < 5"), evals=data.evals.query("seed < 5"))
    assert "Bars and bands: the range of the 5 seeds, which is no confidence interval." in render_report(begun, [])


def test_a_seed_without_a_reward_has_a_dash_in_the_table(folder):
    data = load(folder)
    rewards = data.rollouts["reward"].mask((data.rollouts["arm"] == "grpo") & (data.rollouts["seed"] == 1))
    page = render_report(replace(data, rollouts=data.rollouts.assign(reward=rewards)), [])
    assert re.search(r'class="[^"]*seeds[^"]*">0\.\d{3}, –, 0\.\d{3}<', page)


def test_arms_of_a_seed_that_began_from_other_weights_are_a_limit(folder):
    data = load(folder)

    def limits(digest, **config):
        runs = [
            replace(
                run, environment={**run.environment, "weights_sha256": digest(run)}, config={**run.config, **config}
            )
            for run in data.runs
        ]
        return [text for text in _own_limits(replace(data, runs=tuple(runs))) if "same weights" in text]

    assert limits(lambda run: f"of seed {run.seed}") == []
    (said,) = limits(lambda run: f"{run.arm == 'gspo' and run.seed != 1} {run.seed}")
    assert "made on several machines: seed 0, 2. They are paired" in said
    other = [replace(run, config={**run.config, "model": run.arm}) for run in data.runs]
    data = replace(data, runs=tuple(other))
    assert limits(lambda run: run.arm) == [], "other models begin from other weights"


def test_runs_that_ended_early_are_not_counted_as_runs_that_did_not_fail(tmp_path):
    left = (("gspo", 0), ("gspo", 1), ("grpo_replay", 1))
    data = load(write_study(tmp_path / "s", ("grpo", "grpo_replay", "gspo"), (0, 1), 6, unfinished=left))
    drawn = FIGURES["final_reward"](data)
    words = [text.get_text() for text in drawn.figure.axes[0].texts]
    assert {"0 · 0 · 0", "0 of 1 · 0 of 1 · 0", "– · – · 0"} <= set(words)
    page = render_report(data, [drawn])
    table = page[page.index('<h2 id="table">') :]
    cells = {
        row[0]: row[7:10]
        for row in (re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.splitlines())
        if len(row) == 12
    }
    assert cells == {
        "GRPO": ["0", "0", "0"],
        "GRPO + Routing Replay (1 of 2 runs unfinished)": ["0 of 1", "0 of 1", "0"],
        "GSPO (2 of 2 runs unfinished)": ["–", "–", "0"],
    }
    assert "3 of 6 runs not finished, and in no comparison." in page[: page.index("<nav")]


def test_a_comparison_without_a_pair_has_no_difference(tmp_path):
    method = {"objective": "grpo", "replay": "none", "noise": 0.0, "clip_low": 0.1}
    more = {"tight": ({"label": "GRPO, tight clip", "method": method}, 0.8)}
    unfinished = (("tight", 0), ("tight", 1))
    folder = write_study(tmp_path / "s", ("grpo", "gspo", "tight"), (0, 1), 6, unfinished=unfinished, more=more)
    first = answer(load(folder)).lines[0]
    assert first.text == "GRPO, tight clip − GRPO: –, too few pairs."


def test_many_comparisons_with_too_few_pairs_are_counted_in_words(tmp_path):
    method = {"objective": "grpo", "replay": "none", "noise": 0.0}
    more = {f"low{i}": ({"label": f"GRPO, {i}", "method": {**method, "clip_low": 0.01 * i}}, 0.8) for i in range(1, 6)}
    folder = write_study(tmp_path / "s", ("grpo", *more), (0, 1), 6, more=more)
    (line,) = (line for line in answer(load(folder)).lines if line.text.endswith("too few pairs."))
    assert line.text == "5 with too few pairs."


def test_paper_shows_all_details_and_every_column(folder, browser, tmp_path):
    wide = tmp_path / "wide"
    shutil.copytree(folder, wide)
    study = yaml.safe_load((wide / "study.yaml").read_text())
    for i in range(8):  # many arms with long names, each with a setting of its own
        name = f"grpo_with_another_learning_rate_{i}"
        shutil.copytree(wide / "grpo", wide / name)
        study["arms"][name] = {**study["arms"]["grpo"], "label": f"GRPO, rate {i}"}
        for path in wide.glob(f"{name}/*/config.yaml"):
            config = yaml.safe_load(path.read_text())
            path.write_text(yaml.safe_dump({**config, "optim": {**config["optim"], "learning_rate": 1e-4 * i}}))
    (wide / "study.yaml").write_text(yaml.safe_dump(study))
    page = tmp_path / "report.html"
    page.write_text(render_report(load(wide), []), encoding="utf-8")
    browser.look(673, 970)  # A4 within the margins
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.open(page.as_uri())
    browser.wait("document.readyState === 'complete' && document.querySelectorAll('details').length > 2")
    hidden = "[...document.querySelectorAll('details > :not(summary)')].filter(e => !e.checkVisibility()).length"
    assert browser.js(hidden) == 0
    ends = "[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right / innerWidth)"
    assert max(browser.js(ends)) < 1.4, "what is a little wider is printed smaller, what is twice as wide cut off"


def test_inline_figures_do_not_share_ids(folder):
    figure = reward(load(folder))
    svg = inline_svg(figure)
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert all(name.startswith("reward-") for name in ids)
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids
    assert svg.startswith('<svg id="reward-svg" role="img" aria-label="Reward against RL step."')
    assert "<metadata>" not in svg


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


def test_rules_are_printed_with_the_reading(text, folder):
    for rule in rules(interest(load(folder))):
        assert str(escape(rule)) in text


def test_the_page_opens_with_the_verdict(text):
    parts = ('id="verdict"', "Did GRPO need replay?", "What can n say?", "<summary>Notes of", 'id="reading"')
    place = [text.index(part) for part in parts]
    assert place == sorted(place)
    assert "<summary>Notes of the study file</summary>" in text


def test_commands_can_be_pasted_wherever_the_study_lies(folder, tmp_path):
    place = tmp_path / "röns with a space"
    shutil.copytree(folder, place)
    shown = dict(_commands(load(place)))
    assert shlex.split(shown["figures and this page again"]) == ["moe-rl", "figures", str(place)]
    path = shown["the same tables in Python"].removeprefix("moe_rl.study.load(").removesuffix(")")
    assert json.loads(path) == str(place)


def test_a_range_of_few_seeds_is_said_to_be_one(text):
    table = text[text.index('<h2 id="table">') :]
    assert re.search(r"\[0\.\d{3}, 0\.\d{3}\] range</td>", table), "three seeds"
