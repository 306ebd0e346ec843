"""The live page and the report's token view in a real headless browser, clicked and typed at."""

import json
import os

from browser import lines, serving, text
from synthetic import add_rows, write_study

from moe_rl.study import RunWriter, load, token_view
from moe_rl.study.report import render_report

TOKEN = "[data-update='2'] [data-token='1']"


def test_runs_curves_and_heat_map_are_drawn_and_legend_and_condition_choose(browser, url):
    browser.open(url)
    browser.wait("document.querySelectorAll('#heat rect').length > 6 * 4")
    assert browser.js("document.querySelectorAll('#run-rows [data-run]').length") == 8
    assert "7 of 8 runs done · 1 running" in text(browser, "#status")
    assert lines(browser) == 3 and browser.js("document.querySelectorAll('#chart-reward .thin path').length") == 6
    browser.click("#legend [data-arm='gspo']")
    assert lines(browser) == 2 and "hide=gspo" in browser.js("location.hash")
    browser.click("#conditions button:nth-of-type(2)")
    assert lines(browser) == 1 and "σ" in text(browser, "#conditions [aria-pressed='true']")
    browser.click("[data-run='gspo_noise/seed1']")
    browser.wait("document.querySelector('#run').value === 'gspo_noise/seed1'")
    browser.wait("document.querySelector('#tokens').textContent.includes('No tokens are stored')")
    origins = {request.split("/", 3)[2] for request in browser.requests if request.startswith("http")}
    assert origins == {url.split("/")[2]}


def test_the_noise_floor_stands_beside_the_curve_and_the_map(browser, url, study):
    browser.open(url)
    browser.wait("document.querySelectorAll('#heat rect').length > 6 * 4")
    assert "noise floor by site: not recorded" in text(browser, ".heat-legend"), "runs of older versions"
    assert browser.js("document.querySelectorAll('.level, #heat .floor').length") == 0
    for run, bf16 in (("grpo/seed0", 80), ("gspo/seed0", 40)):  # of 1600 slots: 5 and 2.5 %, their mean 3.75 %
        for variant, changed in (("repeat", 0), ("batch", 8), ("bf16", bf16)):
            by_site = {"site_slots_changed": [changed, 0, 0, 0], "site_slots": [400, 400, 400, 0]}
            row = {"kind": "floor", "step": 0, "variant": variant, "slots_changed": changed, "slots": 1600}
            add_rows(study / run, row | by_site)
    browser.wait("document.querySelectorAll('#heat .floor').length === 1")
    browser.wait("document.querySelectorAll('#chart-changed .level').length === 2")
    titles = "[...document.querySelectorAll('#chart-changed .level title')].map(e => e.textContent)"
    assert browser.js(titles) == ["equal weights, bf16: 3.75 %", "equal weights, own: 0.5 %"]
    assert browser.js("document.querySelectorAll('.level').length") == 2, "only the change rate has this floor"
    assert "dashed: noise floor" in text(browser, "#chart-changed .chart-note")
    label = browser.js("document.querySelector('#chart-changed .plot').getAttribute('aria-label')")
    assert "Noise floor: own 0.5 %, bf16 3.75 %" in label
    cells = browser.js("[...document.querySelectorAll('#heat title')].map(e => e.textContent)")
    floor = [cell for cell in cells if "equal weights" in cell]
    assert floor[0] == "model.layers.0.mlp.gate, equal weights, own: 2 %"  # 8 of 400
    assert floor[3] == "model.layers.3.mlp.gate, equal weights, own: –", "no slot was compared"
    assert floor[4] == "model.layers.0.mlp.gate, equal weights, bf16: 20 %" and len(floor) == 2 * 4
    assert "dashed: noise floor" in text(browser, ".heat-legend")
    browser.click("#legend [data-arm='grpo']")
    assert browser.js(titles)[0] == "equal weights, bf16: 2.5 %", "of the runs shown"


def test_paper_shows_every_run_and_all_details(browser, url):
    browser.look(673, 970)  # A4 within the margins
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.open(url)
    browser.wait("document.querySelectorAll('#run-rows [data-run]').length === 8")
    assert browser.js("(e => e.scrollHeight <= e.clientHeight)(document.querySelector('.runs-scroll'))")
    hidden = "[...document.querySelectorAll('details > :not(summary)')].filter(e => !e.checkVisibility()).length"
    assert browser.js(hidden) == 0


def test_the_read_out_follows_pointer_and_keys(browser, url):
    browser.open(url)
    browser.wait("document.querySelectorAll('#chart-reward path').length")
    box = browser.js(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('#chart-reward .plot').getBoundingClientRect())"
    )
    browser.hover(box[0] + box[2] - 13, box[1] + box[3] / 2)  # the right end of the axis: the last step, 5
    assert "step 5" in text(browser, "#chart-reward .readout") and "n = 2" in text(browser, "#chart-reward .readout")
    assert browser.js("document.querySelectorAll('#chart-clipped .cross line').length") == 1, (
        "all charts share the cursor"
    )
    browser.js("document.querySelector('#chart-reward .plot').focus()")
    browser.press("ArrowLeft")
    assert "step 4" in text(browser, "#chart-reward .readout")
    browser.press("Enter")
    browser.wait("document.querySelector('#heat output').textContent === '4'")


def test_a_click_on_a_token_shows_its_experts_and_scores(browser, url):
    browser.open(url)
    browser.click(TOKEN)
    detail = browser.wait("document.querySelector('.tv-detail').textContent")
    assert "Token 1 <b> after update 2" in detail, "text stays text"
    assert "new, live routing−0.75+0.251.28" in detail  # exp(0.25) = 1.284
    assert "part of routing+0.25" in detail
    assert browser.js("[...document.querySelectorAll('.tv-gone')].map(e => e.textContent)") == ["0"]
    assert browser.js("[...document.querySelectorAll('.tv-came')].map(e => e.textContent)") == ["4"]
    assert "token=1" in browser.js("location.hash")
    plain, coloured = (
        browser.js(f'getComputedStyle(document.querySelector("{s}")).backgroundColor')
        for s in (TOKEN.replace("'1'", "'0'"), TOKEN)
    )
    assert plain == "rgb(255, 255, 255)" != coloured
    browser.press("ArrowLeft")
    browser.press("Enter")
    assert "Token 0" in text(browser, ".tv-detail")
    unchanged = "old−1new, live routing−101new, old routes replayed−101"  # log-ratio 0, ratio 1
    assert unchanged in text(browser, ".tv-detail")
    assert text(browser, ".tv-prompt") == "^1="


def test_a_permalink_opens_run_step_update_response_and_token(browser, url):
    browser.open(f"{url}#run=grpo/seed0&tokens=3&update=2&response=3&token=0&colour=natural")
    browser.wait("!!document.querySelector('.tv-detail h4')")
    assert "Token 0 2 after update 2" in text(browser, ".tv-detail")
    assert browser.js("[...document.querySelectorAll('.tv-came')].map(e => e.textContent)") == ["2", "5"]
    assert browser.js("[...document.querySelectorAll('.tv-controls select')].map(s => s.value)") == [
        "3",
        "2",
        "3",
        "natural",
    ]
    assert text(browser, ".tv-prompt") == "^12="
    browser.js("location.hash = '#run=grpo/seed0&tokens=5&update=1&response=0&token=2'")
    browser.wait("document.querySelector('.tv-detail h4').textContent.includes('Token 2 ↵ after update 1')")


def test_new_rows_appear_and_a_resumed_run_is_read_again(browser, url, study):
    browser.open(url)
    row = "document.querySelector(\"[data-run='gspo/seed1']\").closest('tr').textContent"
    browser.wait(f"/ [23].6/.test({row})")  # an unfinished run has half of its six steps
    metrics = study / "gspo" / "seed1" / "metrics.jsonl"
    with open(metrics, "a") as file:
        file.write(json.dumps({"kind": "rollout", "step": 3, "reward": 0.987}) + '\nbroken\n{"kind": "st')
    browser.wait(f"{row}.includes('0.987')")
    assert "1 damaged lines" in text(browser, "#problems")
    metrics.write_text(json.dumps({"kind": "rollout", "step": 0, "reward": 0.111}) + "\n")
    browser.wait(f"{row}.includes('0.111') && {row}.includes('0/6')")


def test_of_several_studies_the_first_stays_and_what_the_server_says_is_wrong_is_shown(browser, tmp_path):
    for name, arm in (("a", "grpo"), ("b", "gspo")):
        write_study(tmp_path / name, (arm,), (0,), 2)
        for path in (tmp_path / name, tmp_path / name / arm / "seed0" / "metrics.jsonl"):
            os.utime(path, (0, 0 if name == "b" else 60))
    with serving(tmp_path) as address:
        browser.open(address)
        browser.wait("document.querySelectorAll('#chart-reward path').length === 1")
        first = text(browser, "#study option:checked")
        assert first == "a"
        os.utime(tmp_path / "b" / "gspo" / "seed0" / "metrics.jsonl")  # it is written to, and the first of the list now
        asked = "performance.getEntriesByType('resource').filter(e => e.name.includes('api/study?study=a')).length"
        browser.wait(f"{asked} > 1")
        assert browser.js("document.querySelector('#study').value") == first and text(browser, "#name") == "a"
        (tmp_path / "a").rename(tmp_path / "gone")
        browser.wait("document.querySelector('#status').textContent.includes(\"no study 'a'\")")
        assert browser.js("document.querySelector('#status').classList.contains('lost')")
    assert all("404" in complaint for complaint in browser.complaints)
    browser.complaints.clear()


def test_a_study_without_runs_is_waited_for(browser, tmp_path):
    (tmp_path / "study.yaml").write_text("name: early\nseeds: [0]\narms: {}\n")
    with serving(tmp_path) as address:
        browser.open(address)
        browser.wait("document.querySelector('#status').textContent.includes('no run has begun yet')")
        write_study(tmp_path, ("grpo",), (0,), 2)
        browser.wait("document.querySelectorAll('#chart-reward path').length === 1")


def test_the_end_of_a_run_without_step_times_is_seen_with_the_tokens_that_it_stored_last(browser, tmp_path):
    run = RunWriter(tmp_path, arm="mine", config={"optim": {"steps": 2}})
    for step in (0, 1):
        run.rollout(step, reward=0.5)
    with serving(tmp_path) as address:
        browser.open(address)
        browser.wait("document.querySelector('#run-rows').textContent.includes('1/2')")
        run.tokens(1, seq=[0], pos=[0], token=[5], update=[1], flips=[0], old_logp=[-1], logp_natural=[-1])
        run.finish()
        browser.wait("document.querySelector('#run-rows').textContent.includes('2/2')")
        browser.wait("!!document.querySelector('.tv-detail h4')")


def test_curves_of_a_run_without_rewards_reach_its_last_step(browser, tmp_path):
    run = RunWriter(tmp_path, arm="mine")
    for step in range(30):
        run.update(step, 1, grad_norm=1.0 + step)
    with serving(tmp_path) as address:
        browser.open(address)
        browser.wait("document.querySelectorAll('#chart-grad path').length === 1")
        ticks = browser.js("[...document.querySelectorAll('#chart-grad text.tick')].map((t) => t.textContent)")
    assert "20" in ticks
    run.close()


def test_panels_without_data_say_why_and_a_stopped_run_since_when(browser, tmp_path):
    run = RunWriter(tmp_path, arm="mine")
    run.rollout(0, reward=0.5)
    run.update(0, 1, loss=1.0)
    with serving(tmp_path) as address:
        browser.open(address)
        browser.wait("document.querySelectorAll('#chart-reward path').length === 1")
        assert "no probe rows yet" in text(browser, "#chart-changed svg")
        assert "update rows have no grad_norm" in text(browser, "#chart-grad svg")
        run.close()
        browser.wait("document.querySelector('#status').textContent.includes('1 stopped')")
        assert "mine/seed0 stopped before its end" in text(browser, "#problems")
        run = RunWriter(tmp_path, arm="mine")
        run.rollout(1, reward=0.5)
        run.finish()
        browser.wait("document.querySelector('#chart-changed svg').textContent.includes('no probe rows were written')")
        browser.wait("document.querySelector('#problems').textContent === ''")


def test_dark_and_narrow(browser, url):
    browser.look(390, 800, dark=True)
    browser.open(url)
    browser.wait("document.querySelectorAll('.tv-token').length && document.querySelectorAll('#heat rect').length")
    assert browser.js("getComputedStyle(document.documentElement).backgroundColor") == "rgb(21, 24, 28)"
    assert browser.js("document.querySelector('#chart-reward .thick path').getAttribute('stroke')") == "#d55e00"
    assert browser.js("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    unnamed = browser.js(
        "[...document.querySelectorAll('button, select, input, [tabindex=\"0\"]')].filter(e =>"
        " !(e.textContent.trim() || e.ariaLabel || e.getAttribute('aria-labelledby') || e.labels?.length)).length"
    )
    assert unnamed == 0, "every control has a name"


def test_the_report_carries_the_token_view(browser, study, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(render_report(load(study), []))
    browser.open(page.as_uri())
    browser.click(TOKEN)
    assert "Token 1 <b> after update 2" in text(browser, ".tv-detail")
    assert browser.js("[...document.querySelectorAll('.tv-came')].map(e => e.textContent)") == ["4"]
    browser.js(
        "(s => { s.value = '3'; s.dispatchEvent(new Event('change')); })(document.querySelectorAll('.tv select')[2])"
    )
    browser.wait("document.querySelector('.tv-prompt').textContent === '^12='")
    assert [request for request in browser.requests if not request.startswith("file:")] == []


def test_what_is_said_of_a_response_is_of_all_its_tokens(browser, study, tmp_path, monkeypatch):
    monkeypatch.setattr(token_view, "REPORT_TOKENS", 1)
    page = tmp_path / "report.html"
    page.write_text(render_report(load(study), []))
    browser.open(page.as_uri())
    said = browser.wait("document.querySelector('.tv-values').textContent")
    assert "3 tokens; the prompt is grey. 1 tokens changed, 1 of 12 experts." in said
    assert said.endswith("+0.0833 nats. 2 more tokens are not shown.")  # 0.25 at one token of three


def test_alarms_are_listed_marked_and_ordered_before_a_collapse(browser, url, study):
    with open(study / "study.yaml", "a") as file:
        file.write("alarms: {gone: {metric: update.trl/k, above: 1, title: Gone}}\n")
    browser.open(url)
    browser.wait("document.querySelectorAll('#alarms tbody tr').length > 0")
    assert text(browser, "#alarms [data-alarm='ess']") == "", "no run recorded it"
    assert text(browser, "#alarms [data-alarm='gone']") == "Gonenot recorded–", "which of the study's own is said"
    rows = [{"kind": "rollout", "step": step, "reward": 0.8 if step < 10 else 0.05} for step in range(6, 20)]
    rows += [{"kind": "update", "step": s, "update": 1, "ess_token": e, "k3": 0.5} for s, e in ((7, 0.1), (9, 0.2))]
    add_rows(study / "grpo" / "seed0", *sorted(rows, key=lambda row: row["step"]))
    browser.wait("document.querySelector(\"#alarms [data-alarm='ess']\")?.textContent.includes('1 of 1')")
    assert "7" in text(browser, "#alarms [data-alarm='ess'] td:last-child")
    title = browser.js("document.querySelector(\"#alarms [data-alarm='ess']\").title")
    assert "below 0.3" in title and "verl" in title and "GRPO, seed 0: 2 steps, first 7" in title
    fall = text(browser, "#alarms .falls")
    assert "GRPO, seed 0 collapsed at step 1" in fall and "Effective sample size (step 7)" in fall
    yaml = (study / "study.yaml").read_text().replace("gone: {", "high: {metric: rollout.reward, above: 0.7}, gone: {")
    (study / "study.yaml").write_text(yaml.replace("alarms: {", "alarms: {ess: 0.15, "))  # nothing writes to a run
    browser.wait("document.querySelector(\"#alarms [data-alarm='ess']\").title.includes('GRPO, seed 0: 1 steps')")
    browser.wait("document.querySelector(\"#alarms [data-alarm='high'] td.n\")?.textContent.startsWith('1 of ')")
    assert "below 0.15" in browser.js("document.querySelector(\"#alarms [data-alarm='ess']\").title")
    browser.click("#legend [data-arm='grpo']")
    assert text(browser, "#alarms .falls") == "", "of the arms shown"
