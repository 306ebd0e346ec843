"""What a reader does with the live page's curves: other metrics, zoom, smoothing, files; arms, studies and experts."""

import json
import re

import numpy as np
import pytest
from browser import lines, serving, text
from synthetic import add_rows, read_rows, write_rows, write_study
from token_files import routes, write_step

from moe_rl.study import load
from moe_rl.study.cursor import LiveError
from moe_rl.study.live import LiveStudies
from moe_rl.study.live_rows import expert_counts, new_rows
from moe_rl.study.shown import choosable

SAVED = (
    "window.saved = []; moeRL.save = async (name, blob) => saved.push([name, blob.type, blob.size, await blob.text()])"
)


def choose(browser, selector, value):
    """A choice in a <select>, as its keyboard would make it."""
    browser.js(
        f"(s => {{ s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change', {{bubbles: true}})); }})"
        f"(document.querySelector({json.dumps(selector)}))"
    )


def ticks(browser, chart="reward"):
    """Numbers on the x axis."""
    return browser.js(
        f"[...document.querySelectorAll('#chart-{chart} .tick[text-anchor=middle]')].map(t => Number(t.textContent))"
    )


def test_every_metric_of_the_catalogue_can_be_drawn_and_the_link_keeps_it(browser, url, study):
    browser.open(url)
    browser.wait("document.querySelectorAll('#add-metric option').length > 100")
    assert browser.js("document.querySelector(\"#add-metric [value='update.k3']\").title").startswith("mean(r - 1 - d)")
    choose(browser, "#add-metric", "update.k3")
    browser.wait("document.querySelectorAll(\"[id='chart-update.k3'] .thick path\").length === 3")
    assert "nats/token" in text(browser, "[id='chart-update.k3'] .chart-note")
    assert "metrics=update.k3" in browser.js("location.hash") and lines(browser) == 3, "the others are still there"
    choose(browser, "#add-metric", "probe.sites_changed")
    browser.wait("document.querySelectorAll(\"[id='chart-probe.sites_changed'] .thick path\").length === 3")
    assert "% of sites" in text(browser, "[id='chart-probe.sites_changed'] .chart-note"), (
        "counts over their denominator"
    )
    choose(browser, "#add-metric", "probe.slots_changed")
    browser.wait("document.querySelectorAll(\"[id='chart-probe.slots_changed'] .thick path\").length === 3")
    own, chosen = (
        browser.js(f"document.querySelector(\"[id='chart-{name}'] .plot\").getAttribute('aria-label')")
        for name in ("changed", "probe.slots_changed")
    )
    latest = re.compile(r"Latest: (.*%)\.")
    assert latest.findall(own) == latest.findall(chosen), "after a step's last update, as the page's own curve"
    assert "last update" in text(browser, "[id='chart-probe.slots_changed'] .chart-note")
    choose(browser, "#add-metric", "engine.ess_token")
    browser.wait("document.querySelector(\"[id='chart-engine.ess_token'] svg\").textContent.includes('no engine rows')")
    browser.click("[id='chart-update.k3'] .tools button:last-child")
    browser.wait("document.getElementById('chart-update.k3') === null")
    browser.open("about:blank")
    browser.open(f"{url}#metrics=update.k3")
    browser.wait("document.querySelectorAll(\"[id='chart-update.k3'] .thick path\").length === 3")
    told = browser.js("document.querySelector(\"[id='chart-update.k3'] .plot\").getAttribute('aria-label')")
    rows = read_rows(study / "gspo" / "seed0")
    last = [row["k3"] for row in rows if row["kind"] == "update" and row["step"] == 5]
    assert len(last) == 4 and "GSPO" in told, "gspo/seed1 is unfinished, so its mean ends earlier"


def test_a_drag_zooms_all_charts_and_files_hold_what_is_shown(browser, url, study):
    browser.open(url)
    browser.wait("document.querySelectorAll('#chart-reward path').length")
    assert ticks(browser)[0] == 0 and browser.js("document.querySelector('#to').placeholder") == "5"
    browser.js("document.querySelector('#chart-reward').scrollIntoView({block: 'center'})")
    box = browser.js(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('#chart-reward .plot').getBoundingClientRect())"
    )
    inner = box[2] - 48 - 12  # between the chart's margins, on which steps 0 to 5 lie
    start, end = (box[0] + 48 + inner * step / 5 for step in (2, 4))
    for kind, x in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
        options = {"button": "left", "clickCount": 1, "buttons": 1}
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=box[1] + 60, **options)
    browser.wait("location.hash.includes('steps=2-4')")
    assert (
        (ticks(browser)[0], ticks(browser)[-1])
        == (2, 4)
        == (ticks(browser, "clipped")[0], ticks(browser, "clipped")[-1])
    )
    browser.js(SAVED)
    browser.click("#chart-reward .tools button:nth-of-type(1)")
    name, kind, _, content = browser.wait("saved[0]")
    assert (name, kind) == ("reward.csv", "text/csv")
    table = [line.split(",") for line in content.splitlines()]
    rewards = load(study).rollouts.set_index(["arm", "seed", "step"])["reward"]
    assert table[0] == ["arm", "run", "step", "reward"]
    assert {int(step) for _, _, step, _ in table[1:]} == {2, 3, 4}
    for arm, run, step, value in table[1:]:
        assert float(value) == pytest.approx(rewards[arm, int(run[-1]), int(step)], rel=1e-5)
    browser.click("#chart-reward .tools button:nth-of-type(2)")
    name, kind, size, content = browser.wait("saved[1]")
    assert (name, kind) == ("reward.png", "image/png") and size > 2000 and content[1:4] == "PNG"
    browser.click("#all-steps")
    assert ticks(browser)[0] == 0 and "steps=" not in browser.js("location.hash")


def test_smoothing_is_the_mean_of_the_last_steps_and_says_so(browser, url):
    browser.open(url)
    browser.wait("document.querySelectorAll('#chart-reward path').length")
    smooth = browser.js("JSON.stringify(moeRL.smooth([[0, 3], [1, 5], [2, null], [3, 7], [4, 1]], 3))")
    assert json.loads(smooth) == [[0, 3], [1, 4], [2, None], [3, 6], [4, 4]]
    before = browser.js("document.querySelector('#chart-reward .thick path').getAttribute('d')")
    choose(browser, "#smoothing", "3")
    assert "each the mean of the last 3 points" in text(browser, "#chart-reward .chart-note")
    after = browser.js("document.querySelector('#chart-reward .thick path').getAttribute('d')")
    assert before != after and before.count("L") == after.count("L")
    assert "smooth=3" in browser.js("location.hash")


def test_long_curves_are_smoothed_before_they_are_thinned(browser, tmp_path):
    rows = ({"kind": "rollout", "step": step, "reward": float(step == 150)} for step in range(300))
    write_rows(tmp_path / "grpo" / "seed0", rows)
    with serving(tmp_path) as address:
        browser.open(f"{address}#smooth=3")
        path = browser.wait("document.querySelector('#chart-reward .thick path').getAttribute('d')")
        note = text(browser, "#chart-reward .chart-note")
    assert "each the mean of the last 3 points; means of 2 points" in note
    assert len({point.split(",")[1] for point in re.split("[ML]", path)[1:]}) == 3, "1/3 twice: 0, 1/3 and 1/6"


def test_a_value_that_is_not_finite_is_a_gap_and_one_that_was_not_recorded_is_none(browser, tmp_path):
    folder = write_study(tmp_path / "s", ("grpo",), (0, 1), 20)
    rows = read_rows(folder / "grpo" / "seed0")
    for row in rows:
        place = row["kind"], row["step"], row.get("update")
        if place in (("update", 3, 2), ("update", 5, 4)):
            row.update(grad_norm=None, k3=None, clipped_tokens=None)
        elif place in (("probe", 3, 4), ("probe", 5, 4)):
            row["entropy"] = None
        elif place == ("probe", 7, 4):
            del row["entropy"]
    write_rows(folder / "grpo" / "seed0", rows)
    with serving(tmp_path) as address:
        browser.open(f"{address}#metrics=update.k3,update.aux_loss")
        browser.wait("document.querySelectorAll(\"[id='chart-update.k3'] .thin path\").length === 2")
        for chart in ("entropy", "grad", "clipped", "update.k3"):
            place = f"[id='chart-{chart}']"
            for kind in ("thin", "thick"):  # the first run; the mean of both
                drawn = browser.js(f"document.querySelector(\"{place} .{kind} path\").getAttribute('d')")
                assert (drawn.count("M"), drawn.count("L")) == (3, 2 + 0 + 13), "steps 0 to 2; 4; 6 to 19"
            assert browser.js(f'document.querySelectorAll("{place} .line circle").length') == 2, "step 4 has no line"
            assert "gaps: not finite, or not to be had" in text(browser, f"{place} .chart-note")
        assert "gaps" not in text(browser, "#chart-reward .chart-note")
        assert "no step shown has finite aux_loss" in text(browser, "[id='chart-update.aux_loss'] svg")
        browser.js("document.querySelector('#chart-grad .plot').focus()")
        for _ in range(3):
            browser.press("ArrowRight")
        assert text(browser, "#chart-grad .readout") == "step 3GRPO–n = 2"
        added = "[[0, 1], [0, null], [1, 5], [1, false]].forEach(v => p.add(...v))"
        for mode in ("last", "mean"):
            points = f"(p => {{ {added}; return [p.y(0), p.y(1)]; }})(new moeRL.Points('{mode}'))"
            assert browser.js(points) == [None, 5]
        rows = "[[0, 1, 1, 1], [0, 5, 1, 2], [0, 2, 1, 1], [0, 4, 1, 2], [1, 9], [0, 6, 2, 1]]"
        for mode, means in {"mean": [1, 3, 3.5, 3, 3, 3], "last": [1, 5, 2, 4, 4, 3]}.items():
            again = f"(p => {rows}.map(v => (p.add(...v), p.y(0))))(new moeRL.Points('{mode}'))"
            assert browser.js(again) == means, "rows of an update that come again count once"
        thinned = browser.js("moeRL.thin([[0, 1], [1, 3], [2, 5], [3, null], [4, null], [5, 7]], 2)")
        assert thinned == [[0.5, 2], [2, 5], [3, None], [5, 7]]


def test_arms_say_how_they_differ(browser, url):
    browser.open(url)
    browser.wait("document.querySelectorAll('#settings tbody tr').length")
    row = "[data-setting='method.objective']"
    cells = browser.js(f'[...document.querySelectorAll("{row} td")].map(e => e.textContent)')
    assert cells == ["grpo", "grpo", "gspo"]
    assert text(browser, "[data-setting='optim.learning_rate']") == "", "what all arms share is not listed"
    browser.click("#legend [data-arm='gspo']")
    assert text(browser, row) == "" and "R2" in text(browser, "[data-setting='method.replay']"), "of the arms shown"


def test_several_studies_are_chosen_from_and_a_link_names_its_own(browser, tmp_path):
    write_study(tmp_path / "one", ("grpo",), (0,), 2)
    write_study(tmp_path / "two", ("grpo", "gspo"), (0, 1), 2)
    studies = LiveStudies(tmp_path)
    assert sorted(studies.names()) == ["one", "two"] and LiveStudies(tmp_path / "one").names() == []
    with pytest.raises(LiveError, match=r"no study .* there are"):
        studies.study("../one")
    with serving(tmp_path) as address:
        browser.open(f"{address}#study=two")
        browser.wait("document.querySelectorAll('#run-rows [data-run]').length === 4")
        assert text(browser, "#name") == "two" and browser.js("document.querySelector('#study').value") == "two"
        choose(browser, "#study", "one")
        browser.wait("document.querySelectorAll('#run-rows [data-run]').length === 1")
        assert text(browser, "#name") == "one"


def test_a_step_whose_tokens_were_not_kept_says_so(browser, url):
    browser.open(url)
    browser.wait("document.querySelectorAll('.tv-token').length")
    browser.js("document.querySelector('#chart-reward .plot').focus()")
    browser.press("Home")
    browser.press("ArrowRight")
    browser.press("Enter")
    browser.wait("!document.querySelector('#not-kept').hidden")
    said = text(browser, "#not-kept")
    assert said.startswith("Tokens of step 1 were not kept") and said.endswith("Kept: 3, 5.")
    for _ in range(2):
        browser.press("ArrowRight")
    browser.press("Enter")
    browser.wait("document.querySelector('#not-kept').hidden")


def test_the_map_of_experts_sums_old_against_new_over_the_stored_steps(browser, url, study):
    counts = expert_counts(study / "grpo" / "seed0")
    assert counts["steps"] == [3, 5] and counts["moved"] != counts["new"]
    old, new = (routes(update).ids[:, 2:] for update in (0, 2))  # the responses: three tokens and two
    kept = np.array([[True] * 3, [True, True, False]])
    for name, ids in (("old", old), ("new", new)):
        expected = [np.bincount(ids[:, :, site].numpy()[kept].ravel(), minlength=6) * 2 for site in range(2)]
        assert counts[name] == np.array(expected).tolist()
    assert counts["moved"] == [[2, 2, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]], "twice: 0 and 1 at one token, 0 at another"
    assert expert_counts(study / "gspo" / "seed0")["steps"] == []
    browser.open(url)
    browser.wait("document.querySelectorAll('#experts rect').length === 12")
    title = browser.js("document.querySelector('#experts rect title').textContent")
    assert title == "model.layers.0.mlp.gate, expert 0: old 10, new 8 tokens; 2 left it"
    note = text(browser, "#experts p")
    assert "15 % of the slots left" in note, "6 of 40"
    assert note.endswith("colour is 10 % of a site’s slots, purple where an expert gained, orange where it lost.")
    choose(browser, "#experts select", "old")
    assert browser.js("document.querySelector('#experts rect').getAttribute('fill')") == browser.js(
        "document.querySelectorAll('#experts rect')[1].getAttribute('fill')"
    )
    browser.click("[data-run='gspo/seed0']")
    browser.wait("document.querySelector('#experts p').textContent.includes('No routes are stored')")


def test_the_map_of_experts_shows_nothing_of_another_run_and_asks_again(browser, url, study):
    write_step(study / "gspo" / "seed0", 3)
    browser.open(url)
    drawn, note = "document.querySelector('#experts svg').checkVisibility()", "document.querySelector('#experts p')"
    browser.wait(f"{drawn} && {note}.textContent.includes('15 %')")
    browser.js(
        "window.answer = () => new Promise(() => {}); window.asked = window.fetch; window.fetch = (path, ...rest) =>"
        " answer && path.includes('api/experts') ? answer() : asked(path, ...rest)"
    )
    browser.click("[data-run='gspo/seed0']")
    browser.wait(f"!{drawn} && {note}.textContent === ''")
    browser.js("window.answer = () => Promise.reject(new Error('no luck'))")
    browser.click("[data-run='grpo/seed0']")
    browser.wait(f"{note}.textContent === 'no luck'")
    assert not browser.js(drawn)
    browser.js("window.answer = null")
    browser.wait(f"{drawn} && {note}.textContent.includes('15 %')")


def test_the_menu_of_responses_is_of_the_step_shown(browser, url, study):
    write_step(study / "grpo" / "seed0", 5, reward=0.5)
    options = "[...document.querySelectorAll('.tv-controls select')][2].textContent"
    browser.open(url)
    browser.wait(f"{options}.includes('3 · reward 0.5 · 2 changed')")
    choose(browser, ".tv-controls select", "3")
    browser.wait(f"{options}.includes('3 · reward 1 · 2 changed')")


def test_chosen_values_come_with_their_denominators_and_of_one_pair_of_engines(tmp_path):
    rows = [
        {"kind": "update", "step": 0, "update": 1, "clipped_tokens": 3, "tokens": 12},
        {"kind": "engine", "step": 0, "pair": "engines", "update": 0, "k3": 0.25},
        {"kind": "engine", "step": 0, "pair": "rollout_to_new", "update": 0, "k3": 9.0},
        {"kind": "update", "step": 1, "update": 1, "clipped_tokens": None, "tokens": 12},
        {"kind": "update", "step": 2, "update": 1, "tokens": 12},
    ]
    write_rows(tmp_path, rows)
    known = choosable()
    wanted = {name: known[name] for name in ("update.clipped_tokens", "engine.k3")}
    chosen = new_rows(tmp_path / "metrics.jsonl", "", wanted)["chosen"]
    assert chosen == {"update.clipped_tokens": [[0, 3, 12, 1], [1, None, 12, 1]], "engine.k3": [[0, 0.25, None, 0]]}
    assert known["update.clipped_tokens"]["over"] == "tokens" and known["engine.k3"]["over"] == ""
    assert not [name for name in known if "site_names" in name or "histogram" in name or "<" in name]


def test_the_token_view_shows_gates_and_margins_where_they_were_kept(browser, url, study):
    browser.open(url)
    browser.click("[data-update='2'] [data-token='1']")
    browser.wait("document.querySelector('.tv-detail table + p') && document.querySelectorAll('.tv-came').length")
    assert browser.js("document.querySelectorAll('.tv-gate').length") == 0 and "margin" not in text(
        browser, ".tv-detail"
    )
    write_step(study / "grpo" / "seed0", 4, routers=True)
    add_rows(study / "grpo" / "seed0", {"kind": "step", "step": 6, "seconds": 1.0})
    browser.wait("[...document.querySelectorAll('.tv-controls select')][0].options.length === 3")
    choose(browser, ".tv-controls select", "4")
    browser.click("[data-update='2'] [data-token='1']")
    browser.wait("document.querySelectorAll('.tv-gate').length === 8")
    assert browser.js("[...document.querySelectorAll('.tv-gate')].slice(0, 4).map(e => e.textContent)") == [
        "40 %", "20 %", "50 %", "30 %",
    ]  # fmt: skip
    assert "0.25 → 1.5" in text(browser, ".tv-detail")
    frame = load(study).tokens
    assert not [name for name in frame if name.endswith(("gates", "margins"))], "lists stay in the files"
