"""Alarms: what crosses a threshold, when, and what crossed before a collapse."""

import json
import math
import random
import re

import pytest
import yaml
from synthetic import add_rows, read_rows, write_rows, write_study

from moe_rl.cli import main
from moe_rl.measure.catalogue import find
from moe_rl.study import RunWriter, StudyDataError, load
from moe_rl.study.alarm_table import alarm_rows, collapses, study_alarms
from moe_rl.study.alarms import ALARMS, DECAY, WARM_UP, AlarmError, LiveAlarms, RunAlarms, Spikes, alarms_of
from moe_rl.study.config import ConfigError, dump_study, parse_study
from moe_rl.study.figures import FIGURES, NothingToDraw
from moe_rl.study.live import LiveStudy
from moe_rl.study.outcomes import run_outcomes
from moe_rl.study.report import render_report
from moe_rl.study.watch import make_server


def rows(steps=20, **update):
    """A run's rows whose reward falls at step 12 for good."""
    for step in range(steps):
        yield {"kind": "rollout", "step": step, "reward": 0.8 if step < 12 else 0.1}
        yield {"kind": "update", "step": step, "update": 1, "tokens": 100, **{k: f(step) for k, f in update.items()}}


def taken(found, alarms=ALARMS):
    seen = RunAlarms(alarms)
    for row in found:
        seen.take(row)
    return seen


def test_every_alarm_watches_a_metric_of_the_catalogue_and_names_its_source():
    for alarm in ALARMS:
        assert find(alarm.kind, alarm.metric) and alarm.source and math.isfinite(alarm.threshold), alarm.name
        assert not alarm.over or find(alarm.kind, alarm.over), alarm.name
    assert len({alarm.name for alarm in ALARMS}) == len(ALARMS)


def test_levels_are_crossed_on_their_side_and_counts_are_divided():
    seen = taken(rows(ess_token=lambda s: 0.29 if s in (3, 4) else 0.3, extreme_2=lambda s: 11 if s >= 9 else 10))
    assert seen.crossed["ess"] == [(3, 0.29), (4, 0.29)], "0.3 itself is not below 0.3"
    assert [step for step, _ in seen.crossed["f2"]] == list(range(9, 20)), "11 of 100 is above a tenth, 10 is not"
    assert seen.summary()["lacks"] == [a.name for a in ALARMS if a.name not in ("ess", "f2")]


def test_a_step_is_listed_once_and_rows_of_other_pairs_and_broken_values_are_not_looked_at():
    seen = RunAlarms()
    row = {"kind": "engine", "step": 0, "pair": "engines"}
    for update, pair in enumerate(("engines_replayed", "rollout_to_new")):
        seen.take({**row, "pair": pair, "update": update, "k3": (1.0, None)[update]})
    assert seen.nulls == {}
    for update, value in enumerate((None, True, "2", float("nan"))):
        seen.take({**row, "update": update, "k3": value})
    seen.take({**row, "k3": 1.0})  # of no update: no row
    assert seen.seen["engine_k3"] == 0 and seen.nulls == {"engine_k3": [0]}
    for update, value in enumerate((0.5, 0.7)):
        seen.take({**row, "step": 1, "update": update, "k3": value})
    assert seen.crossed["engine_k3"] == [(1, 0.5)]


def test_rows_that_repeat_a_key_count_once_and_the_last_counts(tmp_path, capsys):
    """The batches that a lag samples in the first step, and rows written again after a resume; the same in the report,
    on the page and in text."""
    rewards = [(0, 0.1), (0, 0.1), (0, 0.9), (1, 0.1), (2, 0.0), (3, 0.0), (2, 0.9), (3, None)]
    found = [{"kind": "rollout", "step": step, "reward": reward} for step, reward in rewards]
    found.insert(1, {"kind": "update", "step": 0, "update": 1, "k3": 1.0})
    found.insert(2, {"kind": "update", "step": 0, "update": 2, "k3": 0.0})
    write_rows(tmp_path / "s" / "a" / "seed0", found, {})
    (tmp_path / "s" / "study.yaml").write_text("alarms: {low: {metric: rollout.reward, below: 0.51, window: 2}}")
    alarms = alarms_of({"low": {"metric": "rollout.reward", "below": 0.51, "window": 2}})
    seen = taken(found, alarms)
    assert seen.crossed["low"] == [(1, 0.5), (2, 0.5)], "0.9, 0.1, 0.9 and nothing: two means of two"
    assert seen.crossed["k3"] == [(0, 1.0)] and seen.seen["low"] == 3 and seen.nulls == {"low": [3]}
    (of_report,) = study_alarms(load(tmp_path / "s")).values()
    assert of_report.crossed == seen.crossed and of_report.seen == seen.seen
    assert LiveAlarms(tmp_path / "s" / "a" / "seed0" / "metrics.jsonl", alarms).now() == seen.summary()
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path / "s"), "--once"])
    assert "low crossed at 2 steps, first 1, last 2 (" in capsys.readouterr().out


def test_alarms_of_a_file_that_a_resume_rewrote_are_of_what_it_holds_now(tmp_path):
    run, low = tmp_path / "a" / "seed0", list(rows(ess_token=lambda s: 0.1))
    write_rows(run, low, {})
    live = LiveAlarms(run / "metrics.jsonl", ALARMS)
    assert live.now() == taken(low).summary() and live.now()["crossed"]["ess"]
    again = list(rows(5, ess_token=lambda s: 0.9))
    write_rows(run, again, {})
    assert live.now() == taken(again).summary() and not live.now()["crossed"]["ess"]


def test_a_value_is_looked_at_once_however_often_a_run_is_polled(tmp_path, monkeypatch):
    """And again only where a row is written in place of another."""
    run, looked, crosses = tmp_path / "a" / "seed0", [], Spikes.crosses
    monkeypatch.setattr(Spikes, "crosses", lambda self, value: (looked.append(value), crosses(self, value))[1])
    found = [{"kind": "update", "step": step, "update": 1, "grad_norm": 1 + step % 3} for step in range(40)]
    write_rows(run, [], {})
    live = LiveAlarms(run / "metrics.jsonl", ALARMS)
    for row in found:
        add_rows(run, row)
        said = live.now()
    assert looked == [row["grad_norm"] for row in found] and said == taken(found).summary()
    looked.clear()
    again = {**found[30], "grad_norm": 99.0}
    add_rows(run, again)
    assert live.now() == taken([*found[:30], again, *found[31:]]).summary()
    assert live.now()["crossed"]["grad_norm"] == [[30, 99.0]]


def test_what_crossed_before_a_collapse_comes_in_the_order_of_its_first_steps():
    seen = taken(
        rows(k3=lambda s: 0.02 * (s >= 7), ess_token=lambda s: 1 - 0.8 * (s >= 4), extreme_2=lambda s: 50 * (s > 18))
    )
    end = seen.collapse
    assert 12 < end <= 16, "half the best mean of five steps is lost after a few steps at 0.1"
    assert [(alarm.name, step) for alarm, step in seen.before_collapse()] == [("ess", 4), ("k3", 7)]
    assert seen.summary()["first"] == [["ess", 4], ["k3", 7]]
    for step, first in ((end, [("ess", end)]), (end + 1, [])):
        seen = taken(rows(ess_token=lambda s, step=step: 1 - 0.8 * (s == step)))
        assert [(alarm.name, number) for alarm, number in seen.before_collapse()] == first, "by the step, not after it"
    steady = taken({**row, "reward": 0.8} for row in rows(ess_token=lambda s: 0.1))
    assert steady.collapse is None and steady.before_collapse() == []


def test_rewards_of_others_responses_collapse_nothing(tmp_path):
    run = tmp_path / "a" / "seed0"
    write_rows(run, rows(), {"method": {"objective": "sft", "replay": "none", "noise": 0.0}})
    data = load(tmp_path)
    assert collapses(data) == [] and not run_outcomes(data)["collapsed"].any()
    live = LiveStudy(tmp_path)
    assert live.responses("a/seed0") == "demonstrations"
    alarms = LiveAlarms(run / "metrics.jsonl", ALARMS)
    assert alarms.now(own=False)["collapse"] is None and alarms.now()["collapse"] is not None


def test_a_spike_is_told_from_the_runs_own_past():
    rng = random.Random(0)
    norms = [1 + 0.1 * rng.gauss(0, 1) for _ in range(WARM_UP)]
    spikes = Spikes(2.5)
    assert not any(spikes.crosses(norm) for norm in norms)
    mean = sum(norms) / WARM_UP
    sd = math.sqrt(sum((x - mean) ** 2 for x in norms) / WARM_UP)
    assert spikes.crosses(mean + 5 * sd) and not Spikes(2.5).crosses(1e9)
    assert spikes.mean == pytest.approx(DECAY * mean + (1 - DECAY) * (mean + sd * 2.5**2 / 5)), (
        "ZClip's reciprocal rule"
    )
    after = mean + (1 - DECAY) * sd * 2.5**2 / 5
    assert spikes.variance == pytest.approx(DECAY * sd**2 + (1 - DECAY) * (mean + sd * 2.5**2 / 5 - after) ** 2)
    assert not spikes.crosses(mean)
    flat = Spikes(2.5)
    assert [flat.crosses(norm) for norm in [1.0] * (WARM_UP + 1) + [0.9]] == [False] * (WARM_UP + 2)
    flat = Spikes(2.5)
    assert [flat.crosses(norm) for norm in [1.0] * WARM_UP + [1.001, 1.0]] == [False] * WARM_UP + [True, False]
    huge = Spikes(2.5)
    assert not any(huge.crosses(value) for value in [0.1] * 5 + [3e155] * 2 + [0.1] * WARM_UP), "no OverflowError"
    assert flat.mean == 1.0, "a spike of infinitely many standard deviations moves nothing"


def test_a_study_sets_its_own_thresholds():
    own = {alarm.name: alarm for alarm in alarms_of({"ess": 0.9, "k3": None})}
    assert own["ess"].threshold == 0.9 and own["ess"].source.startswith("this study (0.3:") and "k3" not in own
    assert taken(rows(ess_token=lambda s: 0.5), own.values()).crossed["ess"][0] == (0, 0.5)
    with pytest.raises(AlarmError, match=r"alarms\.es: no such alarm.*did you mean 'ess'"):
        alarms_of({"es": 1.0})
    study = {"name": "s", "question": "?", "arms": {"a": {"label": "A"}}, "alarms": {"ess": 0.9}}
    assert parse_study(study).alarms == {"ess": 0.9}
    with pytest.raises(ConfigError, match=r"alarms\.ess"):
        parse_study({**study, "alarms": {"ess": "low"}})
    with pytest.raises(ConfigError, match="no such alarm"):
        parse_study({**study, "alarms": {"none": 1}})
    parsed = parse_study({**study, "alarms": ADDED})
    assert parse_study(yaml.safe_load(dump_study(parsed))).alarms == parsed.alarms == ADDED


ADDED = {
    "low": {"metric": "rollout.reward", "below": 0.5, "window": 3, "title": "Reward"},
    "runaway": {"metric": "probe.extreme_2_natural", "above": "1e-1"},
    "theirs": {"metric": "update.trl/kl", "spike": 3},
}


def test_a_study_adds_alarms_on_any_metric():
    low, runaway, theirs = alarms_of(ADDED)[len(ALARMS) :]
    assert low.rule == "mean of 3 values of reward of the rollout rows below 0.5" and low.title == "Reward"
    assert (runaway.over, runaway.threshold) == ("tokens", 0.1), "counts over what the catalogue divides them by"
    assert theirs.rule == "trl/kl of the update rows more than 3 standard deviations above its moving mean"
    (count,) = alarms_of({"n": {"metric": "probe.extreme_2_natural", "above": 3, "over": None}})[len(ALARMS) :]
    assert count.over == "" and count.title == "n"
    probes = [{"kind": "probe", "step": s, "update": 1, "extreme_2_natural": 11 * s, "tokens": 100} for s in (0, 1)]
    seen = taken([*rows(), *probes], (low, runaway, theirs))
    assert seen.crossed["runaway"] == [(1, 0.11)]
    assert [step for step, _ in seen.crossed["low"]] == list(range(13, 20)), "0.8, 0.8, 0.1 are 0.57 in the mean"
    assert seen.crossed["low"][0][1] == pytest.approx((0.8 + 0.1 + 0.1) / 3)
    assert seen.summary()["lacks"] == ["theirs"]
    assert not taken(rows(1), alarms_of({"low": {**ADDED["low"], "below": 1}})[-1:]).crossed["low"], "one of three"


def test_windows_follow_steps_in_whatever_order_rows_were_written():
    low = alarms_of({"low": {"metric": "rollout.reward", "below": 0.3, "window": 2}})[-1:]
    found = [{"kind": "rollout", "step": step, "reward": reward} for step, reward in ((0, 0.1), (2, 0.1), (1, 0.9))]
    assert taken(found, low).crossed["low"] == [], "each pair has 0.9"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, r"alarms\.mine: no such alarm \(.*: \{metric: KIND\.NAME, above: NUMBER\}\); did you mean 'margin'"),
        ({"metric": "probe.extrem_2_natural", "above": 1}, "metric: probe rows have no number 'extrem_2_natural'; did"),
        ({"metric": "update.site_names", "above": 1}, "update rows have no number"),
        ({"metric": "reward", "above": 1}, "expected KIND.NAME, of the kinds rollout"),
        ({"above": 1}, "metric: expected KIND.NAME"),
        ({"metric": "update.k3"}, "one of above, below and spike, got none"),
        ({"metric": "update.k3", "above": 1, "below": 0}, "got above and below"),
        ({"metric": "update.k3", "above": float("nan")}, r"alarms\.mine\.above: expected a finite number; got nan"),
        ({"metric": "update.k3", "above": True}, "above: expected a finite number"),
        ({"metric": "update.k3", "spike": 0}, "spike: .* above 0"),
        ({"metric": "update.k3", "above": 1, "window": 0}, "window: expected a whole number of values from 1 to 10000"),
        ({"metric": "update.k3", "spike": 1, "window": 2}, "window: a spike"),
        ({"metric": "update.k3", "above": 1, "over": "token"}, "over: update rows have no number 'token'"),
        ({"metric": "update.k3", "above": 1, "title": "$x_{$"}, "title: expected a text that figures can draw"),
        ({"metric": "update.k3", "abov": 1}, "mine.abov: no such field; there are metric, above"),
    ],
)
def test_an_alarm_that_cannot_be_is_refused_by_its_field(given, said):
    with pytest.raises(AlarmError, match=said):
        alarms_of({"mine": given})


def test_a_table_row_takes_a_threshold_and_no_other_definition():
    with pytest.raises(AlarmError, match=r"alarms\.ess: .*another definition needs a name of its own"):
        alarms_of({"ess": {"metric": "update.ess_token", "below": 0.1}})


def test_an_alarm_behind_the_last_update_is_drawn(tmp_path):
    with RunWriter(tmp_path / "s", arm="mine", seed=0, config={"label": "Mine"}) as run:
        for step in range(3):
            run.rollout(step, reward=0.5)
            run.update(step, 1, grad_norm=1.0)
        run.eval(3, reward=0.1)
    (tmp_path / "s" / "study.yaml").write_text("alarms: {low: {metric: eval.reward, below: 0.2}}")
    assert FIGURES["alarms"](load(tmp_path / "s")).frame["step"].tolist() == [3]


def test_a_figure_of_alarms_needs_what_they_read_and_no_more(tmp_path):
    with RunWriter(tmp_path / "s", arm="mine", seed=0) as run:
        for step in range(3):
            run.rollout(step, reward=0.5 - 0.2 * step)
    with pytest.raises(NothingToDraw, match=r"no signal crossed .*, and no run collapsed\. None was recorded\."):
        FIGURES["alarms"](load(tmp_path / "s"))
    (tmp_path / "s" / "study.yaml").write_text("alarms: {low: {metric: rollout.reward, below: 0.2}}")
    drawn = FIGURES["alarms"](load(tmp_path / "s"))
    assert drawn.frame[["alarm", "step"]].values.tolist() == [["low", 2]] and "n = 1 seed" in drawn.caption
    (tmp_path / "s" / "study.yaml").write_text(
        "alarms: {low: {metric: rollout.reward, below: 0}, gone: {metric: update.trl/kl, above: 1}}"
    )
    with pytest.raises(NothingToDraw, match=r"collapsed\. Never crossed: low\. Never recorded: gone\."):
        FIGURES["alarms"](load(tmp_path / "s"))


def test_an_alarm_needs_a_name_that_is_a_text():
    with pytest.raises(AlarmError, match="False is no name; put it in quotes"):
        alarms_of({False: {"metric": "rollout.reward", "below": 1}})
    with pytest.raises(AlarmError, match="above: expected a finite number"):
        alarms_of({"mine": {"metric": "rollout.reward", "above": 10**400}})


def test_added_alarms_show_wherever_those_of_the_table_do(tmp_path, capsys):
    """On the page, in the report and its figure, and in text; where no run has the metric, that is said."""
    with RunWriter(tmp_path / "s", arm="mine", seed=0, config={"label": "Mine"}) as run:
        for step in range(4):
            run.rollout(step, reward=0.2 * step)
            run.update(step, 1, grad_norm=1.0, **{"trl/kl": 0.01})
    study = tmp_path / "s" / "study.yaml"
    study.write_text("alarms: {low: {metric: rollout.reward, below: 0.3}, gone: {metric: update.trl/k, above: 1}}")
    data = load(tmp_path / "s")
    found = {row["title"]: row for row in alarm_rows(data)}
    assert found["low"]["arms"] == [{"arm": "mine", "crossed": 1, "of": 1, "first": 0}]
    assert found["gone"]["rule"] == "trl/k of the update rows above 1: no run recorded a finite value"
    page = render_report(data, figures=[])
    assert "reward of the rollout rows below 0.3" in page and "no run recorded a finite value" in page
    drawn = FIGURES["alarms"](data)
    assert drawn.frame["step"].tolist() == [0, 1] and "Never recorded: gone." in drawn.caption
    server = make_server(tmp_path / "s")
    try:
        shown = {alarm["name"]: alarm for alarm in server.api.study({})["alarms"]}
        assert shown["gone"]["declared"] and not shown["ess"]["declared"]
        assert server.api.run({"run": "mine/seed0"})["alarms"]["crossed"]["low"] == [[0, 0.0], [1, 0.2]]
    finally:
        server.server_close()
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path / "s"), "--once"])
    assert end.value.code == 3
    assert capsys.readouterr().out.splitlines() == [
        "mine/seed0: low crossed at 2 steps, first 0, last 1 (reward of the rollout rows below 0.3)",
        "mine/seed0: gone has no value so far (trl/k of the update rows above 1)",
    ]
    study.write_text("alarms: {low: {metric: rollout.reward, below: 0.1}}")
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path / "s"), "--once"])
    assert capsys.readouterr().out == "mine/seed0: low crossed at step 0 (reward of the rollout rows below 0.1)\n"
    study.write_text("alarms: {high: {metric: rollout.reward, above: 9}}")
    rows = tmp_path / "s" / "mine" / "seed0" / "metrics.jsonl"
    was = rows.read_bytes()
    rows.write_bytes(was + json.dumps({"kind": "rollout", "step": 7, "reward": None}).encode() + b"\n")
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path / "s"), "--once"])
    said = capsys.readouterr().out
    assert end.value.code == 3 and said == "mine/seed0: rollout.reward is null at step 7 (high)\n"
    more = [json.dumps({"kind": "rollout", "step": step, "reward": r}) + "\n" for step, r in ((8, 0.5), (9, None))]
    rows.write_bytes(rows.read_bytes() + "".join(more).encode())
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path / "s"), "--once"])
    assert capsys.readouterr().out == "mine/seed0: rollout.reward is null at 2 steps, first 7, last 9 (high)\n"
    rows.write_bytes(was)
    study.write_text("alarms: {high: ")
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path / "s"), "--once"])
    assert end.value.code == 1 and "study.yaml: not valid YAML" in capsys.readouterr().err
    study.write_text("alarms: {}")
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path), "--once"])
    assert end.value.code == 0 and capsys.readouterr().out == "no alarm has crossed\n"
    study.write_text("alarms: {low: {metric: rollout.rewards, below: 0.3}}")
    said = r"study\.yaml.*: alarms\.low\.metric: rollout rows have no number 'rewards'; did you mean 'rollout\.reward'"
    with pytest.raises(StudyDataError, match=said):
        load(tmp_path / "s")
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path / "s"), "--once"])
    assert end.value.code == 1 and re.search(said, capsys.readouterr().err)


@pytest.fixture
def fallen(tmp_path):
    """A study of two arms; grpo's first seed collapses at once after a low effective sample size."""
    folder = write_study(tmp_path / "s", ("grpo", "gspo"), (0, 1), 20)
    found = read_rows(folder / "grpo" / "seed0")
    for row in found:
        if row["kind"] == "rollout":
            row["reward"] = 0.8 if row["step"] < 10 else 0.1
        if row["kind"] == "update":
            row["ess_token"] = 0.1 if row["step"] == 6 else 0.9
    write_rows(folder / "grpo" / "seed0", found)
    return folder


def test_the_report_tells_what_crossed_and_what_crossed_first(fallen):
    data = load(fallen)
    (fall,) = collapses(data)
    assert fall["run"] == "grpo/seed0" and ("Effective sample size", 6) in fall["first"]
    ess = next(row for row in alarm_rows(data) if row["title"] == "Effective sample size")
    assert [(arm["arm"], arm["crossed"], arm["of"], arm["first"]) for arm in ess["arms"]] == [
        ("grpo", 1, 1, 6),
        ("gspo", 0, 0, None),
    ]
    page = render_report(data, figures=[])
    assert f"GRPO, seed 0 collapsed at step {fall['step']}; crossed by then: " in page
    assert "Effective sample size (step 6)" in page and "verl, docs/algo/rollout_corr.md" in page
    drawn = FIGURES["alarms"](data).frame
    mark = drawn[(drawn["alarm"] == "ess") & (drawn["seed"] == 0)]
    assert mark["step"].tolist() == [6] and mark["threshold"].tolist() == [0.3]
    assert len(study_alarms(data)) == 4


def test_a_gradient_that_was_not_finite_is_a_spike(tmp_path):
    def norms(steps):
        for step in range(steps):
            yield {"kind": "update", "step": step, "update": 1, "tokens": 100} | (
                {"grad_norm": None, "skipped": True} if step in (3, 30) else {"grad_norm": 1.0 + step % 2}
            )

    seen = taken(norms(40))
    assert seen.crossed["grad_norm"] == [(3, math.inf), (30, math.inf)]
    assert seen.summary()["crossed"]["grad_norm"] == [[3, None], [30, None]]
    write_rows(tmp_path / "grpo" / "seed0", [{"kind": "rollout", "step": 0, "reward": 0.5}, *norms(40)], {})
    (found,) = study_alarms(load(tmp_path)).values()
    assert [step for step, _ in found.crossed["grad_norm"]] == [3, 30]
