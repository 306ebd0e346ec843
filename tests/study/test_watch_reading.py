"""What a reader of the live page has chosen or is doing stays as it is: while runs write, by links, by the mouse."""

import http.client
import os
import shutil

import yaml
from browser import serving, text
from synthetic import add_rows, read_rows, write_rows, write_study
from token_files import write_step

from moe_rl.study import RunWriter, load
from moe_rl.study.alarm_table import alarm_rows

FOCUS = "document.activeElement.dataset.arm || document.activeElement.id || document.activeElement.tagName"


def opened(browser, address):
    browser.open("about:blank")
    browser.open(address)
    browser.wait("document.querySelectorAll('#chart-reward path').length && document.documentElement.dataset.ready")


def plot(browser, chart="reward"):
    """Left edge, top and width of a chart's plot."""
    browser.js(f"document.querySelector('#chart-{chart}').scrollIntoView({{block: 'center'}})")
    of = f"document.querySelector('#chart-{chart} .plot').getBoundingClientRect()"
    return browser.js(f"(b => [b.x, b.y, b.width])({of})")


def test_new_rows_leave_read_out_typing_and_focus_alone(browser, url, study):
    opened(browser, url)
    writing = study / "gspo" / "seed1"
    row = "document.querySelector(\"[data-run='gspo/seed1']\").closest('tr').textContent"
    left, top, width = plot(browser)
    browser.hover(left + 0.4 * width, top + 90)
    assert "step" in text(browser, "#chart-reward .readout")
    add_rows(writing, {"kind": "rollout", "step": 3, "reward": 0.123})
    browser.wait(f"{row}.includes('0.123')")
    assert browser.js("document.querySelector('#chart-reward .readout').hidden") is False
    browser.js("document.querySelector('#from').focus()")
    browser.call("Input.insertText", text="3")
    add_rows(writing, {"kind": "rollout", "step": 4, "reward": 0.234})
    browser.wait(f"{row}.includes('0.234')")
    assert browser.js("document.querySelector('#from').value") == "3"
    browser.js("document.querySelector('#legend [data-arm=gspo]').focus()")
    browser.wait("location.hash.includes('steps=3-')")  # the typed step took effect when the field was left
    add_rows(writing, {"kind": "rollout", "step": 9, "reward": 0.345})
    browser.wait(f"{row}.includes('0.345')")
    assert browser.js(FOCUS) == "gspo"
    ends = "[...document.querySelectorAll('#chart-reward .tick[text-anchor=middle]')].at(-1).textContent"
    assert browser.js(ends) == "8", "a range without a last step goes on with the run"
    browser.js("document.querySelector('#conditions button:nth-of-type(2)').focus()")
    browser.press("Enter")
    assert browser.js("document.activeElement.textContent").startswith("Selection noise")


def test_a_link_to_another_study_shows_nothing_of_this_one_and_the_skip_link_changes_nothing(browser, tmp_path):
    write_study(tmp_path / "one", ("grpo", "gspo"), (0,), 20, tokens_every=99)
    write_study(tmp_path / "two", ("grpo",), (0,), 6, tokens_every=99)
    for name, kept in (("one", True), ("two", False)):
        shutil.rmtree(tmp_path / name / "grpo" / "seed0" / "tokens", ignore_errors=True)
        write_step(tmp_path / name / "grpo" / "seed0", 3, kept=kept)
    os.utime(tmp_path / "two" / "grpo" / "seed0" / "metrics.jsonl", (2e9, 2e9))  # the first of the list
    with serving(tmp_path) as address:
        opened(browser, f"{address}#study=one&run=grpo/seed0&smooth=3&steps=5-15&hide=gspo")
        browser.wait("document.querySelectorAll('#experts rect').length > 0")
        chosen = "#study=one&run=grpo/seed0&smooth=3&steps=5-15&hide=gspo"
        browser.js("window.jumps = 0; addEventListener('hashchange', () => { jumps += 1; })")
        browser.js("document.querySelector('.skip').focus()")
        browser.press("Enter")
        browser.wait("jumps > 0")
        browser.click("#legend [data-arm='gspo']")
        browser.click("#legend [data-arm='gspo']")
        assert browser.js("location.hash").startswith(chosen) and text(browser, "#name") == "one"
        browser.js("location.hash = 'study=two&run=grpo/seed0'")
        browser.wait("document.querySelector('#name').textContent === 'two'")
        browser.wait("document.querySelector('#experts').textContent.includes('No routes')")
        assert browser.js("document.querySelectorAll('#experts rect').length") == 0
        opened(browser, f"{address}#study=two&hide=100%25")  # made by hand: not the page's own encoding
        assert text(browser, "#name") == "two"


def test_a_drag_may_end_beyond_the_chart(browser, url):
    opened(browser, url)
    left, top, width = plot(browser)
    for kind, share in (("mousePressed", 0.5), ("mouseMoved", 0.9), ("mouseMoved", 1.03), ("mouseReleased", 1.03)):
        options = {"button": "left", "clickCount": 1, "buttons": 1}
        browser.call("Input.dispatchMouseEvent", type=kind, x=left + share * width, y=top + 60, **options)
    browser.wait("/steps=\\d-5/.test(location.hash)")


def test_dots_and_read_out_are_of_the_smoothed_line(browser, url):
    opened(browser, f"{url}#smooth=5")
    browser.js("document.querySelector('#chart-reward .plot').focus()")
    browser.press("End")
    browser.press("ArrowLeft")
    dots = browser.js("[...document.querySelectorAll('#chart-reward .cross circle')].map(c => +c.getAttribute('cy'))")
    drawn = browser.js(
        "[...document.querySelectorAll('#chart-reward .thick path')].map(p => p.getAttribute('d').split('L').at(-2))"
    )
    assert dots and [round(y, 1) for y in dots[:2]] == [float(place.split(",")[1]) for place in drawn[:2]]
    assert "step 4, averaged like the lines" in text(browser, "#chart-reward .readout")


def test_alarms_of_ones_own_mark_charts_of_shares_and_nulls_are_told(browser, study):
    config = yaml.safe_load((study / "study.yaml").read_text())
    config["alarms"] = {
        "many": {"metric": "probe.slots_changed", "above": 0.0001},
        "none": {"metric": "update.k1", "above": 50.0},
        "half": {"metric": "update.k3", "above": 50.0},
    }
    (study / "study.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = read_rows(study / "grpo" / "seed0")
    for row in rows:
        if row["kind"] == "update":
            row |= {"k1": None, "k3": None if row["step"] > 2 else 0.5}
    write_rows(study / "grpo" / "seed0", rows)
    others = [path for path in study.glob("*/seed*") if path != study / "grpo" / "seed0"]
    for path in others:
        write_rows(path, [row | ({"k1": 0.0, "k3": 0.0} if row["kind"] == "update" else {}) for row in read_rows(path)])
    with serving(study) as address:
        opened(browser, address)
        browser.wait("document.querySelectorAll('#chart-changed .alarm').length > 0")
        for hidden in ("gspo", "grpo_replay"):
            browser.click(f"#legend [data-arm='{hidden}']")
        assert text(browser, "#alarms [data-alarm='none']") == "none0 of 1, null in 1–"
        assert text(browser, "#alarms [data-alarm='half']") == "half0 of 2, null in 1–"
        assert browser.js("document.querySelector(\"#alarms [data-alarm='none']\").classList.contains('crossed')")
    rules = {row["title"]: row["rule"] for row in alarm_rows(load(study))}
    assert rules["none"].endswith("above 50") and rules["many"].endswith("above 0.0001")
    assert rules["half"].endswith("above 50: null at some steps of 1 runs")


def test_a_log_ratio_that_is_not_finite_has_a_look_of_its_own(browser, tmp_path):
    run = RunWriter(tmp_path, arm="mine")
    run.rollout(0, reward=0.5)
    columns = {"seq": [0, 0], "pos": [0, 1], "token": [5, 6], "update": [1, 1], "flips": [0, 1], "old_logp": [-1, -1]}
    run.tokens(0, **columns, logp_natural=[-1, float("-inf")])
    with serving(tmp_path) as address:
        opened(browser, f"{address}#colour=natural")
        browser.wait("document.querySelectorAll('.tv-token').length === 2")
        none = browser.js("[...document.querySelectorAll('.tv-token')].map(e => e.classList.contains('tv-none'))")
        assert none == [False, True] and text(browser, ".tv-legend").endswith("no finite value")
    run.close()


def test_folders_that_go_away_and_rows_of_a_wrong_type_are_told(browser, study):
    with serving(study) as address:
        opened(browser, f"{address}#run=gspo/seed1")
        add_rows(study / "gspo" / "seed1", {"kind": "rollout", "step": "8", "reward": 0.5})
        browser.wait("document.querySelector('#problems').textContent.includes('1 damaged lines')")
        study.rename(study.with_name("gone"))
        browser.wait("document.querySelector('#status').textContent.includes('is gone, or no folder any more')")
        connection = http.client.HTTPConnection(address.split("/")[2], timeout=30)
        connection.putrequest("GET", "http://[", skip_host=True)
        connection.putheader("Host", "localhost")
        connection.endheaders()
        assert connection.getresponse().status == 400
    browser.complaints.clear()
