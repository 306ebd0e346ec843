"""Loading run folders: tidy tables, unfinished and damaged runs, folders copied from elsewhere."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import yaml
from synthetic import ARMS, SITES, write_study

from moe_rl.study import RunWriter, StudyDataError, load
from moe_rl.study.live import LiveStudy
from moe_rl.study.summary import change_rates


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("runs") / "small", steps=6, sequences=4, tokens_every=3)


def name_seed(run, seed):
    """What the configuration of a run says of its seed."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "seed": seed}))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "elsewhere" / "renamed")


def test_tables_hold_every_row_with_its_arm_and_seed(folder):
    data = load(folder)
    runs = 5 * 3 + 1  # five arms of three seeds, the replay run under noise has one
    assert len(data.runs) == runs
    assert len(data.rollouts) == runs * 6
    assert len(data.updates) == len(data.probes) == runs * 6 * 4
    assert list(data.arms.index) == list(ARMS)  # the study's order, not the alphabet's
    line = json.loads((folder / "gspo" / "seed2" / "metrics.jsonl").read_text().splitlines()[0])
    row = data.rollouts.query("arm == 'gspo' and seed == 2 and step == 0").iloc[0]
    assert row["reward"] == line["reward"]
    assert data.rollouts["step"].dtype == np.int64
    assert data.updates["aux_loss"].isna().all()  # null is a number that was not asked for
    assert data.updates["aux_loss"].dtype == float
    assert data.notes == ()
    assert data.not_started == ()


def test_arms_say_method_noise_and_seeds(folder):
    arms = load(folder).arms
    assert arms.loc["grpo_replay", "method"] == "grpo_replay"
    assert arms.loc["gspo_noise", "method"] == "gspo"
    assert arms.loc["gspo_noise", "noise"] == 1.0
    assert arms.loc["grpo_replay_noise", "seeds"] == [0]
    assert (arms["finished"] == arms["seeds"].map(len)).all()


def test_a_copied_folder_gives_the_same_tables(folder, copy):
    here, there = load(folder), load(copy)
    pd.testing.assert_frame_equal(here.probes, there.probes)
    pd.testing.assert_frame_equal(here.tokens, there.tokens)


def test_a_single_run_loads_with_its_label(folder):
    data = load(folder / "gspo" / "seed1")
    assert list(data.arms.index) == ["gspo"]
    assert data.arms.loc["gspo", "label"] == "GSPO"
    assert data.seeds == [1]
    assert data.not_started == ()  # the rest of the study is none of its business
    assert len(data.rollouts) == 6


def test_folders_that_are_links_to_elsewhere_keep_their_arms_and_seeds(copy, tmp_path):
    for number, place in enumerate(("gspo", "grpo/seed0")):
        shutil.move(copy / place, tmp_path / f"disk{number}" / "seed0")
        (copy / place).symlink_to(tmp_path / f"disk{number}" / "seed0")
    data, run = load(copy), copy / "grpo" / "seed0"
    assert list(data.arms.index) == list(ARMS) and not data.not_started
    assert (data.arms["seeds"].loc[["grpo", "gspo"]].map(len) == 3).all()
    assert load(run).name == LiveStudy(run).overview()["name"] == "grpo/seed0"
    assert load(run).arms.loc["grpo", "label"] == LiveStudy(run).overview()["arms"][0]["label"] == "GRPO"
    (tmp_path / "newest").symlink_to(run)
    assert load(tmp_path / "newest").arms.index[0] == "disk1"  # where it leads in the end, under whatever name that has


def test_tokens_are_read_when_asked_for(folder):
    data = load(folder)
    assert "tokens" not in vars(data)
    tokens = data.tokens
    assert set(tokens["step"]) == {0, 3}
    assert len(tokens) == 16 * 2 * 4 * 4 * 25  # runs x steps x updates x sequences x tokens


def test_route_files_are_listed_on_demand(copy):
    routes = copy / "gspo" / "seed0" / "routes"
    routes.mkdir()
    (routes / "step_000003_update_1.parquet").write_bytes(b"")
    (routes / ".step_000003.tmp").write_bytes(b"")
    listed = load(copy).route_files
    assert listed[["arm", "seed", "step"]].values.tolist() == [["gspo", 0, 3]]


def test_an_unfinished_run_is_loaded_and_named(tmp_path):
    data = load(write_study(tmp_path / "s", arms=("grpo",), steps=6, unfinished=(("grpo", 1),)))
    assert [(run.arm, run.seed) for run in data.unfinished] == [("grpo", 1)]
    assert "config" not in repr(data.unfinished) and "environment" not in repr(data.unfinished)
    assert len(data.rollouts.query("seed == 1")) == 3
    assert data.arms.loc["grpo", "finished"] == 2


def test_runs_that_have_not_started_are_named(copy):
    shutil.rmtree(copy / "gspo" / "seed2")
    shutil.rmtree(copy / "gspo_noise")
    data = load(copy)
    assert data.not_started == ("gspo/seed2", "gspo_noise/seed0", "gspo_noise/seed1", "gspo_noise/seed2")


def test_a_run_that_wrote_nothing_yet(copy):
    metrics = copy / "gspo" / "seed0" / "metrics.jsonl"
    metrics.unlink()
    data = load(copy)
    assert data.notes == ("gspo/seed0: no metrics.jsonl yet",)
    assert len(data.rollouts) == 15 * 6
    assert data.rollouts["step"].dtype == np.int64


@pytest.mark.parametrize("tail", [b'{"kind":"rollout","st', b"\xff\xfe"])
def test_an_interrupted_last_line_is_left_out_with_a_note(copy, tail):
    metrics = copy / "gspo" / "seed0" / "metrics.jsonl"
    lines = metrics.read_bytes().count(b"\n")
    metrics.write_bytes(metrics.read_bytes() + tail)
    data = load(copy)
    assert len(data.rollouts) == 16 * 6
    assert f"metrics.jsonl line {lines + 1} is cut off" in data.notes[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("not json", "Expecting value"),
        ("[1, 2]", "expected an object, got list"),
        ('{"kind":"update","step":0}', "lacks update"),
        ('{"step":0}', "lacks kind"),
        ('{"kind":["x"],"step":0}', "lacks kind"),
        ('{"kind":"rollout","step":0,"reward":"good"}', "reward cannot be 'good'"),
        ('{"kind":"update","step":{},"update":1}', "step cannot be {}"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("place", [2, -1])
def test_other_damage_names_file_and_line(copy, damage, words, place):
    """A last line that has its end was not interrupted."""
    metrics = copy / "gspo" / "seed0" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines[place] = damage
    metrics.write_text("\n".join(lines) + "\n")
    with pytest.raises(StudyDataError) as error:
        load(metrics.parent)
    assert f"{metrics} line {place % len(lines) + 1}: " in str(error.value)
    assert words in str(error.value)


def test_rows_written_twice_by_a_resumed_run_count_once(copy):
    metrics = copy / "gspo" / "seed0" / "metrics.jsonl"
    again = json.dumps({"kind": "rollout", "step": 2, "reward": 0.123, "reward_n": 256})
    metrics.write_text(metrics.read_text() + again + "\n")
    data = load(copy)
    rows = data.rollouts.query("arm == 'gspo' and seed == 0")
    assert rows["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert rows["reward"].tolist()[2] == 0.123
    assert "repeated rollout rows" in data.notes[0]


def test_batches_that_a_lag_samples_ahead_are_no_rows_of_a_resumed_run(copy):
    run = copy / "gspo" / "seed0"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["rollout"] = {**config.get("rollout", {}), "lag": 2}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    ahead = [{"kind": "rollout", "step": 0, "reward": reward, "reward_n": 256} for reward in (0.1, 0.2)]
    ahead += [{"kind": "engine", "step": 0, "update": 0, "pair": "engines", "k3": k3} for k3 in (0.1, 0.2, 0.3)]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    metrics = "".join(json.dumps(row) + "\n" for row in ahead) + "".join(lines)
    (run / "metrics.jsonl").write_text(metrics)
    data = load(copy)
    assert not any("repeated" in note for note in data.notes)
    assert data.rollouts.query("arm == 'gspo' and seed == 0")["step"].tolist() == [0, 1, 2, 3, 4, 5]
    (run / "metrics.jsonl").write_text(json.dumps(ahead[0]) + "\n" + metrics)
    assert "repeated rollout rows" in load(copy).notes[0], "one more than the lag says"


def test_rows_of_an_unknown_kind_are_left_out_with_a_note(copy):
    metrics = copy / "gspo" / "seed0" / "metrics.jsonl"
    metrics.write_text('{"kind":"novelty","step":0}\n' * 2 + metrics.read_text())
    data = load(copy)
    assert len(data.notes) == 1
    assert "'novelty'" in data.notes[0]


def test_damaged_settings_and_tokens_name_their_file(copy):
    (copy / "gspo" / "seed0" / "config.yaml").write_text("a: [1,")
    with pytest.raises(StudyDataError, match=r"config\.yaml: not valid YAML"):
        load(copy)
    (copy / "gspo" / "seed0" / "config.yaml").write_text("- 1")
    with pytest.raises(StudyDataError, match="expected a mapping of settings, got list"):
        load(copy)
    (copy / "gspo" / "seed0" / "config.yaml").unlink()
    (copy / "gspo" / "seed0" / "tokens" / "step_000000.parquet").write_bytes(b"PAR1")
    data = load(copy)
    with pytest.raises(StudyDataError, match=r"step_000000\.parquet: not a readable Parquet file"):
        _ = data.tokens


def test_folders_without_runs_say_what_was_expected(folder, tmp_path):
    with pytest.raises(StudyDataError, match="no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(StudyDataError, match="no run found; expected"):
        load(tmp_path)
    with pytest.raises(StudyDataError, match=r"It holds studies: small\. Name one of them"):
        load(folder.parent)
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs / "small")
    with RunWriter(runs / "by_trl", arm="grpo", seed=0, config={}) as writer:
        writer.rollout(0, reward=0.5, reward_n=4)
    with pytest.raises(StudyDataError, match=r"It holds studies: by_trl, small\. Name one of them"):
        load(runs)
    (tmp_path / "study.yaml").write_text("name: empty\n")
    with pytest.raises(StudyDataError, match="a study without runs yet"):
        load(tmp_path)


@pytest.mark.parametrize("declared", [True, False])
def test_an_arm_that_may_not_be_read_is_not_left_out(copy, monkeypatch, declared):
    if not declared:
        (copy / "study.yaml").unlink(missing_ok=True)
    arm = next(copy.glob("*/seed*")).parent
    monkeypatch.setattr("os.access", lambda path, _: path != arm)  # the tests' user may read everything
    with pytest.raises(StudyDataError, match=f"{arm.name}: you may not read this folder"):
        load(copy)


def test_rows_of_three_hundred_runs_load_in_seconds(folder, tmp_path):
    """Linear in rows: ten times the runs take about ten times as long, in seconds of this process."""
    import time

    def seconds(runs):
        many = tmp_path / f"many{runs}"
        for seed in range(runs):
            run = shutil.copytree(folder / "gspo" / "seed0", many / "gspo" / f"seed{seed}")
            name_seed(run, seed)
        began = time.process_time()
        assert len(load(many).probes) == runs * 6 * 4
        return time.process_time() - began

    few, more = seconds(30), seconds(300)
    assert more < 25 * few and more < 30


def test_a_study_shows_itself(folder):
    data = load(folder)
    text, html = repr(data), data._repr_html_()
    assert "16 of 16 runs finished; rows: rollouts 96, updates 384, probes 384" in text
    for arm in ARMS:
        assert arm in text and f"<th>{arm}</th>" in html
    reward = data.rollouts.query("arm == 'gspo' and step >= 1")["reward"].mean()  # the last five of six steps
    assert re.search(rf"gspo +GSPO +gspo .* {reward:.3f} ", text)
    few = replace(data, rollouts=data.rollouts[data.rollouts["step"] != 3])  # the last five that there are
    assert few._overview["reward"]["gspo"] == pytest.approx(
        data.rollouts.query("arm == 'gspo' and step != 3")["reward"].mean()
    )
    assert "<script" not in html and len(text.splitlines()) == len(ARMS) + 3
    sft = {"method": {"objective": "sft"}}  # its rollouts are demonstrations
    runs = tuple(replace(run, config={**run.config, **sft}) if run.arm == "gspo" else run for run in data.runs)
    shown = replace(data, runs=runs)._overview
    assert shown["reward"].isna()[["gspo", "grpo"]].tolist() == [True, False] and shown["steps"]["gspo"] == 6


def test_rates_are_sums_over_sums(folder):
    data = load(folder)
    found = data.rates("slot", by=["arm", "update"]).set_index(["arm", "update"])
    part = data.probes.query("arm == 'gspo' and update == 2")
    assert found.loc[("gspo", 2), "rate"] == part["slots_changed"].sum() / part["slots"].sum()
    assert found.loc[("gspo", 2), "total"] == part["slots"].sum()
    assert len(found) == len(ARMS) * 4
    infinite = replace(data, probes=data.probes.assign(ratio=float("inf")))  # as other trainers may write it
    assert infinite.rates("slot", by=["arm", "update"]).set_index(["arm", "update"]).equals(found)
    some = data.probes.assign(slots_changed=data.probes["slots_changed"].where(data.probes["step"] > 0))
    later = replace(data, probes=data.probes[data.probes["step"] > 0])
    unrecorded = replace(data, probes=some)  # a count that was not recorded is not 0
    assert np.array_equal(unrecorded.rates("slot", by="arm"), later.rates("slot", by="arm"))
    assert change_rates(unrecorded)[["slot", "slot_low"]].equals(change_rates(later)[["slot", "slot_low"]])
    whole = data.rates("token", by=[])
    assert whole["rate"].item() == data.probes["tokens_changed"].sum() / data.probes["tokens"].sum()
    sites = data.rates("slot", by="routing_site")
    assert sites["changed"].sum() == data.probes["slots_changed"].sum()
    assert sites["routing_site"].tolist() == SITES
    assert sites[["changed", "total"]].dtypes.tolist() == [np.int64, np.int64], "counts are whole numbers"


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda d: d.rates("slots"), "no level 'slots'; did you mean 'slot'"),
        (lambda d: d.rates("slot", by=["arms"]), "cannot group by 'arms'; did you mean 'arm'"),
        (lambda d: d.rates("slot", by=["site"]), "cannot group by 'site'; did you mean 'routing_site'"),
        (lambda d: d.rates("slot", by=["site_slots"]), "cannot group by 'site_slots'"),
        (lambda d: d.rates("slot", by=["arm"], table="floors"), "the floors of this study have no slots_changed"),
        (lambda d: d.rates("token", by=["routing_site"]), "by routing site only slots"),
        (lambda d: d.describe("kl3"), "no metric 'kl3'; did you mean 'k3'"),
        (lambda d: d.describe("routing/first_change"), "routing/first_change is asserted .* no row holds it"),
    ],
)
def test_what_is_asked_wrongly_is_said(folder, ask, said):
    with pytest.raises(StudyDataError, match=said):
        ask(load(folder))


def test_a_metric_is_described_from_the_catalogue(folder):
    said = load(folder).describe("slots_changed")
    text, html = repr(said), said._repr_html_()
    for kind in ("probe", "update", "engine", "floor"):
        assert f"slots_changed, {kind} rows [count]" in text and f"<td>{kind}</td>" in html
    assert "= over slots: slot rate" in text and "arXiv 2507.18071" in text
    count = repr(load(folder).describe("extreme_2_natural"))
    assert repr(load(folder).describe("routing/f2_natural")) == count, "the rate of TRL's log is kept as a count"
    assert "never negative" in repr(load(folder).describe("k3"))
    logged = {  # by the trainers of others, and the rows that hold it
        "routing/max_vio": ("site_max_vio, probe rows", "by site (the log has their mean)"),
        "routing/replayed_fraction": ("replayed_rows, update rows", "over routed_rows"),
        "routing/engine_slot_change": ("slots_changed, engine rows", "(pair engines; "),
        "engine_gap_mean": ("gap_mean, engine rows", "(pair engines)"),
        "engine_k3_replayed": ("k3, engine rows", "(pair engines_replayed)"),
    }
    for name, (begins, within) in logged.items():
        text = repr(load(folder).describe(name))
        assert text.startswith(begins) and within in text and text.count(" rows [") == 1
    assert repr(load(folder).describe("max_vio")).startswith("max_vio, update rows")
    assert (
        repr(load(folder).describe("slot_change")) == repr(load(folder).describe("routing/slot_change")) == repr(said)
    )


def test_one_run_is_not_two_seeds(copy):
    """n = 8 of one run and seven copies of it would be a verdict."""
    shutil.copytree(copy / "gspo" / "seed0", copy / "gspo" / "seed7")
    with pytest.raises(StudyDataError, match=r"seed7 holds a run of seed 0 \(config.yaml\).*Name the folder seed0"):
        load(copy)
    (copy / "gspo" / "seed7").rename(copy / "gspo" / "seed00")
    with pytest.raises(StudyDataError, match=r"gspo/seed0 and .*gspo/seed00 both hold gspo/seed0"):
        load(copy)


def test_an_arm_is_neither_a_study_nor_a_run(copy):
    remedy = f"gspo: the runs of one arm; name their study, {re.escape(str(copy))}, or one of them"
    with pytest.raises(StudyDataError, match=remedy):
        load(copy / "gspo")
