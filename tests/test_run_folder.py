"""Run folders written by other people's trainers: rows, resumes, crashes, wrong names."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_rl.files import InUseError
from moe_rl.run_rows import RunFolderError
from moe_rl.study import RunWriter, load
from moe_rl.study.comparing import comparisons
from moe_rl.study.figures import FIGURES, NothingToDraw
from moe_rl.study.live import LiveStudy
from moe_rl.study.result_tables import result_tables
from moe_rl.study.token_view import TokenStep

SETTINGS = {"objective": "grpo", "replay": "R2", "label": "TRL, replayed", "optim": {"steps": 3}}


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(run, steps):
    for step in steps:
        run.rollout(step, reward=0.1 * step)
        run.update(step, 1, loss=torch.tensor(0.5, requires_grad=True), grad_norm=np.float32(2), **{"trl/kl": 0.25})
        run.probe(step, 1, slots_changed=torch.tensor(3), slots=12)


def test_what_was_written_is_what_the_laboratory_reads(tmp_path):
    with RunWriter(tmp_path / "s", arm="mine", seed=2, config=SETTINGS) as run:
        write(run, range(3))
        assert not (run.folder / "DONE").exists()
    assert run.folder == tmp_path / "s" / "mine" / "seed2"
    data = load(tmp_path / "s")
    assert data.rollouts["reward"].tolist() == [0.0, 0.1, 0.2]
    assert data.updates[["step", "update", "loss", "grad_norm", "trl/kl"]].iloc[2].tolist() == [2, 1, 0.5, 2.0, 0.25]
    assert data.probes["slots_changed"].sum() / data.probes["slots"].sum() == 0.25
    arm = data.arms.loc["mine"]
    assert (arm["label"], arm["method"], arm["seeds"], arm["finished"]) == ("TRL, replayed", "grpo_replay", [2], 1)
    assert data.unfinished == []
    assert "torch" in data.runs[0].environment["versions"]


def test_arms_of_another_trainer_are_compared_whatever_its_settings_are_called(tmp_path):
    for arm, replay, gain in (("grpo", "none", 0.0), ("grpo_r2", "R2", 0.2)):
        for seed in range(6):
            own = {"model": "owner/name", "optim": "adamw", "rollout": "vllm", "noise": "low", "method": {"clip": gain}}
            own |= {"objective": "grpo", "replay": replay, "run": {"output": f"out/{arm}/{seed}"}, "lr": 1e-6}
            with RunWriter(tmp_path, arm=arm, seed=seed, config=own) as run:
                for step in range(2):
                    run.rollout(step, reward=0.5 + gain + 0.01 * seed)
                tokens = {"seq": [0, 0], "pos": [0, 1], "token": [1, 2], "update": [1, 1], "flips": [0, 1]}
                run.tokens(1, **tokens, old_logp=[-1.0, -2.0], logp_natural=[-1.0, -2.1])
    data = load(tmp_path)
    (pair,) = comparisons(data)
    assert (pair.arm, pair.other, str(pair.result.verdict)) == ("grpo_r2", "grpo", "higher")
    assert pair.result.difference.estimate == pytest.approx(0.2)
    assert [run["steps"] for run in LiveStudy(tmp_path).overview()["runs"]] == [None] * 12
    tables = result_tables(data)
    assert len(tables["final_reward"]) == 2 and "design_effect" not in tables, "no token was scored under replay"
    with pytest.raises(NothingToDraw, match="the runs recorded no logp_replayed "):
        FIGURES["tail_fraction"](data)
    for name in ("minibatches", "precision", "depth_width"):  # which read settings of the laboratory's own runs
        with pytest.raises(NothingToDraw):
            FIGURES[name](data)


def test_a_label_of_another_trainer_that_is_no_mathematics_is_drawn_as_it_is(tmp_path):
    labels = {"dear": "costs $5_{ and $6", "half": r"rate $\frac{1}{2}$"}
    for arm, label in labels.items():
        with RunWriter(tmp_path, arm=arm, config={"label": label}) as run:
            run.rollout(0, reward=0.5)
    drawn = load(tmp_path).arms["label"]
    assert drawn["dear"] == r"costs \$5_{ and \$6" and drawn["half"] == labels["half"]


def test_the_path_of_the_run_itself_is_taken_as_it_is_and_must_agree(tmp_path):
    with RunWriter(tmp_path / "mine" / "seed2", arm="mine", seed=2) as run:
        run.rollout(0, reward=None)
    assert run.folder == tmp_path / "mine" / "seed2"
    assert len(load(run.folder).rollouts) == 1
    for arm, seed in (("other", 2), ("mine", 3)):
        with pytest.raises(RunFolderError, match=rf"not the folder of arm '{arm}', seed {seed}"):
            RunWriter(tmp_path / "mine" / "seed2", arm=arm, seed=seed)
    for arm in ("a/b", "\u65e5" * 67, 3, None):
        with pytest.raises(RunFolderError, match=f"arm {arm!r}: a folder is named so"):
            RunWriter(tmp_path, arm=arm)
    for arm in ("study.yaml", "report.html", "logs", "figures", "config.yaml", "metrics.jsonl", "rounding_avx2"):
        with pytest.raises(RunFolderError, match=f"arm '{arm}': in a study's folder that name is something else's"):
            RunWriter(tmp_path, arm=arm)


def test_a_folder_that_cannot_be_one_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("")
    for folder in (tmp_path / "notes", tmp_path / "notes" / "deeper", Path("notes")):
        with pytest.raises(RunFolderError, match=r"a folder is needed there, and .*notes is a file"):
            RunWriter(folder, arm="mine")
    with pytest.raises(RunFolderError, match="'' would be the current folder"):
        RunWriter("", arm="mine")
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_what_is_not_finite_is_null_and_no_row_is_lost_for_it(tmp_path):
    with RunWriter(tmp_path, arm="a") as run:
        run.update(0, 1, loss=float("nan"), grad_norm=torch.tensor(float("inf")))
        run.probe(0, 1, site_names=("x", "y"), site_slots=[4, 4], site_router_kl=torch.tensor([0.5, float("nan")]))
    assert rows(run.folder)[0] == {"kind": "update", "step": 0, "update": 1, "loss": None, "grad_norm": None}
    assert rows(run.folder)[1]["site_router_kl"] == [0.5, None]
    assert load(tmp_path).updates["loss"].isna().all()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            lambda r: r.update(0, 1, gradnorm=1.0),
            r"no metric 'gradnorm'; did you mean 'grad_norm'\?.*'mine/",
        ),
        (lambda r: r.update(0, 1, load_cv_mean=1.0), "no metric 'load_cv_mean'; it is one of probe rows"),
        (lambda r: r.rollout(0, reward=[1.0]), r"reward: expected one value, got \[1.0\]"),
        (lambda r: r.rollout(0, reward="high"), "reward: expected numbers, got 'high'"),
        (lambda r: r.rollout(0, reward=object()), "expected a number, text or a list of them, got object"),
        (lambda r: r.probe(0, 1, site_slots=3), "site_slots: expected a list, got 3"),
        (lambda r: r.probe(0, 1, site_slots=torch.tensor([[4]])), r"site_slots: expected numbers, got \[\[4\]\]"),
        (lambda r: r.probe(0, 1, site_slots=[1, 2], site_max_vio=[1.0]), r"one length, got .*'site_max_vio': 1"),
        (lambda r: r.probe(0, 1, slots=10, slots_changed=20), "slots_changed is 20 of slots 10"),
        (lambda r: r.probe(0, 1, site_slots=[4, 4], site_slots_changed=[0, 5]), "changed is 5 of site_slots 4"),
        (lambda r: r.probe(0, 1, layer_names=["0"], layer_gradient_cosine=[0.5, 0.5]), r"lists by layer must have one"),
        (lambda r: r.probe(0, 0, slots=1), "update must be a whole number from 1 on, got 0"),
        (lambda r: r.rollout(-1, reward=0), "step must be a whole number from 0 on, got -1"),
        (lambda r: r.row("rolout", 0), "no kind of row 'rolout'; did you mean 'rollout'"),
        (lambda r: r.row("engine", 0, update=0), "engine rows need 'pair'"),
        (lambda r: r.rewind(1.5), r"rewind: step must be a whole number from 0 on, got 1\.5"),
        (lambda r: r.keep_updates(-1), "keep_updates: count must be a whole number from 0 on, got -1"),
        (lambda r: r.row("rollout", 0, response_length=3), "rollout rows need 'reward', None where it is not known"),
    ],
)
def test_a_row_that_cannot_be_right_is_refused_and_leaves_nothing(tmp_path, write, said):
    with RunWriter(tmp_path, arm="a") as run:
        with pytest.raises(RunFolderError, match=said):
            write(run)
        run.rollout(0, reward=1)
    assert len(rows(run.folder)) == 1


def test_a_crash_leaves_no_done_and_the_rows_and_says_why(tmp_path):
    with pytest.raises(ZeroDivisionError), RunWriter(tmp_path, arm="a", config=SETTINGS) as run:
        write(run, range(2))
        1 / 0  # noqa: B018
    assert not (run.folder / "DONE").exists()
    assert (tmp_path / "logs" / "a_seed0.log").read_text().endswith("ZeroDivisionError: division by zero\n")
    assert len(load(tmp_path).unfinished) == 1
    with RunWriter(tmp_path, arm="a", config={**SETTINGS, "optim": {"steps": 9}}) as again:
        assert again.next_step == 2
        write(again, [2])
    assert not (tmp_path / "logs" / "a_seed0.log").exists()
    data = load(tmp_path)
    assert data.rollouts["step"].tolist() == [0, 1, 2]
    assert data.runs[0].config["optim"] == {"steps": 9}


def test_the_traceback_of_a_relative_folder_is_in_its_studys_logs(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), RunWriter("seed0", arm="a"):
        1 / 0  # noqa: B018
    assert (tmp_path / "logs" / "a_seed0.log").exists() and not (tmp_path / "a" / "logs").exists()


def test_a_row_is_written_once_and_a_checkpoint_rewinds(tmp_path):
    run = RunWriter(tmp_path, arm="a")
    write(run, range(4))
    with pytest.raises(RunFolderError, match=r"update row of step 3, update 1 is there already.*rewind\(3\)"):
        run.update(3, 1, loss=1.0)
    with pytest.raises(RunFolderError, match=r"eval|rollout row of step 1 "):
        run.rollout(1, reward=1.0)
    run.close()  # killed
    run = RunWriter(tmp_path, arm="a")  # it knows the rows of the file, too
    with pytest.raises(RunFolderError, match="probe row of step 3, update 1 is there already"):
        run.probe(3, 1, slots=1)
    assert run.rewind(2) == 6
    assert run.next_step == 2
    write(run, [2, 3])
    assert run.keep_updates(9) == 0  # there are no more than four
    assert run.keep_updates(3) == 3  # rollout, update and probe of the last step
    assert run.next_step == 3
    run.eval(3, reward=0.5, reward_n=4)  # after three batches: the next is still batch 3
    assert run.next_step == 3
    write(run, [3])
    run.finish()
    assert [row["step"] for row in rows(run.folder) if row["kind"] == "probe"] == [0, 1, 2, 3]
    assert load(tmp_path).notes == ()


def test_what_would_make_the_folder_unreadable_is_refused_when_it_is_written(tmp_path):
    with RunWriter(tmp_path, arm="a") as run:
        for reward in (True, torch.tensor(True), np.bool_(False)):
            with pytest.raises(RunFolderError, match=r"rollout row, reward: expected numbers, got (True|False)"):
                run.rollout(0, reward=reward)
        with pytest.raises(RunFolderError, match="site_slots_changed: expected numbers"):
            run.probe(0, 1, site_slots_changed=torch.tensor([True, False]))
        with pytest.raises(RunFolderError, match="engine rows need 'pair'"):
            run.row("engine", 0, pair=None, update=0)
        run.rollout(True, reward=1.0)
        run.update(1, 1, skipped=True, **{"mine/flag": False})
    data = load(tmp_path)
    assert data.rollouts["step"].tolist() == [1] and data.updates["skipped"].tolist() == [True]


def test_tokens_go_with_the_rows_of_their_step(tmp_path):
    def tokens(run, step):
        updates = [1, 2, 3]
        for update in updates:
            run.update(step, update, loss=1.0)
        same = {name: [0, 0, 0] for name in ("seq", "pos", "token", "flips", "old_logp", "logp_natural")}
        run.tokens(step, update=updates, text=["a", "b", "c"], **same)

    def kept():
        return list(zip(load(tmp_path).tokens["step"], load(tmp_path).tokens["update"], strict=True))

    run = RunWriter(tmp_path, arm="a")
    for step in range(4):
        tokens(run, step)
    assert len(kept()) == 12
    run.rewind(3)
    assert kept() == [(step, update) for step in range(3) for update in (1, 2, 3)]
    run.keep_updates(5)
    assert kept() == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert run.keep_updates(9) == 0 and len(kept()) == 5
    run.keep_updates(0)
    assert not list((run.folder / "tokens").glob("*.parquet"))
    run.close()


def test_a_table_of_which_no_token_is_kept_goes(tmp_path):
    same = {name: [0] for name in ("seq", "pos", "token", "flips", "old_logp", "logp_natural")}
    with RunWriter(tmp_path, arm="a") as run:
        for update in (1, 2):
            run.update(0, update, loss=1.0)
        run.tokens(0, update=[2], **same)
        assert run.keep_updates(1) == 1 and not list((run.folder / "tokens").iterdir())


def test_tokens_of_a_step_may_come_update_by_update(tmp_path):
    def tokens(run, update, flips, **more):
        same = {name: [0, 1] for name in ("seq", "pos", "token")} | {"old_logp": [-1, -2], "logp_natural": [-1, -2]}
        run.tokens(3, update=[update] * 2, flips=[flips, flips + 1], **same, **more)

    with RunWriter(tmp_path, arm="a") as run:
        run.rollout(3, reward=0)
        for update, flips in ((1, 10), (3, 30), (2, 20), (3, 40)):
            run.update(3, update) if flips != 40 else None
            tokens(run, update, flips, **({"text": ["a", "b"]} if update == 2 else {}))
    found = load(tmp_path).tokens
    assert list(zip(found["update"], found["flips"], strict=True)) == [
        (1, 10), (1, 11), (2, 20), (2, 21), (3, 40), (3, 41),
    ]  # fmt: skip
    assert found["text"].isna().tolist() == [True, True, False, False, True, True]


def test_a_line_that_was_cut_off_is_removed_and_damage_before_it_is_refused(tmp_path):
    run = RunWriter(tmp_path, arm="a")
    write(run, range(2))
    run.close()
    path = run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"rollout","step":2')
    RunWriter(tmp_path, arm="a").close()
    assert path.read_bytes() == whole
    path.write_bytes(whole.replace(b'"step":0', b'"st\xff":0', 1))
    damaged = path.read_bytes()
    with pytest.raises(RunFolderError, match=r"metrics.jsonl line 1 is damaged"):
        RunWriter(tmp_path, arm="a")
    assert path.read_bytes() == damaged


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch):
    run = RunWriter(tmp_path, arm="a")
    run.rollout(0, reward=1.0)
    whole = (run.folder / "metrics.jsonl").read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"No space left on device.*metrics.jsonl"):
        patch.setattr(os, "fsync", full)
        run.rollout(1, reward=1.0)
    assert (run.folder / "metrics.jsonl").read_bytes() == whole
    run.rollout(1, reward=1.0)  # not taken for written
    run.close()
    with monkeypatch.context() as patch, pytest.raises(OSError), RunWriter(tmp_path, arm="a") as run:
        patch.setattr(os, "fsync", full)  # DONE cannot be written
    RunWriter(tmp_path, arm="a").finish()


def test_a_folder_has_one_writer_one_configuration_and_one_end(tmp_path):
    with RunWriter(tmp_path, arm="a", config=SETTINGS) as run:
        with pytest.raises(InUseError, match=r"another writer of this very process .*: one of an earlier cell"):
            RunWriter(tmp_path, arm="a", config=SETTINGS)
        write(run, [0])
    with pytest.raises(RunFolderError, match="finished run"):
        RunWriter(tmp_path, arm="a", config=SETTINGS)
    (run.folder / "DONE").unlink()
    with pytest.raises(RunFolderError, match=r"replay: 'R2' there, 'none' now"):
        RunWriter(tmp_path, arm="a", config={**SETTINGS, "replay": "none"})
    with pytest.raises(RunFolderError, match="is itself a run"):
        RunWriter(make_run(tmp_path / "copied"), arm="a")
    with pytest.raises(RunFolderError, match="plain values"):
        RunWriter(tmp_path, arm="b", config={"optimizer": object()})
    with pytest.raises(RunFolderError, match="this writer was closed"):
        run.rollout(9, reward=1.0)


def make_run(folder):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    return folder


def test_a_seed_may_be_of_any_whole_kind(tmp_path):
    for seed in (np.int32(3), torch.tensor(3), 3):
        with RunWriter(tmp_path, arm="a", seed=seed) as run:
            run.rewind(0)
            run.rollout(0, reward=1.0)
            run.close()
    assert run.folder == tmp_path / "a" / "seed3"


def test_tokens_are_kept_for_the_views_of_tokens(tmp_path):
    columns = {
        "seq": [0, 0, 1], "pos": [0, 1, 0], "token": torch.tensor([5, 6, 7]), "update": [1, 1, 1], "flips": [0, 2, 1],
        "old_logp": [-1.0, -2.0, float("nan")], "logp_natural": torch.tensor([-1.0, -2.5, -3.0], dtype=torch.bfloat16),
    }  # fmt: skip
    with RunWriter(tmp_path, arm="a") as run:
        run.rollout(4, reward=1.0)
        run.tokens(4, **columns)
        for change, said in (
            ({"flips": [0.5, 1, 1]}, "flips must be a list of whole numbers, got float64"),
            ({"tokn": [1]}, "no column 'tokn'; did you mean 'token'"),
            ({"token": [5, 2**31, 7]}, "token holds 5 to 2147483648, but is kept in 32 bits"),
            ({"token": torch.tensor([5, -(2**40), 7])}, "token holds -1099511627776 to 7, but"),
            ({"text": ["a", 5, None]}, "text must be a list of texts, got 5 in it"),
            ({"seq": []}, "one length, got .*'seq': 0"),
            ({name: [] for name in columns}, "no rows; a step without tokens needs no table"),
            ({"seq": 3}, r"seq must be a list of whole numbers, got int64 \[\]"),
            ({"seq": [[1], [2, 3]]}, r"seq must be a list of whole numbers, got object \[2\]"),
        ):
            with pytest.raises(RunFolderError, match=said):
                run.tokens(5, **{**columns, **change})
        with pytest.raises(RunFolderError, match="tokens: flips is missing; needed are seq, pos"):
            run.tokens(5, **{k: v for k, v in columns.items() if k != "flips"})
    tokens = load(tmp_path).tokens
    assert tokens["step"].tolist() == [4, 4, 4] and tokens["flips"].tolist() == [0, 2, 1]
    assert tokens["logp_natural"].tolist() == [-1.0, -2.5, -3.0]
    assert tokens["old_logp"].isna().tolist() == [False, False, True] and tokens["logp_replayed"].isna().all()
    view = TokenStep(run.folder, 4)
    assert [response["changed"] for response in view.index()["responses"]] == [2, 1]
    assert view.response(1, 1)["old_logp"] == [None] and view.response(0, 1)["text"] == ["⟨5⟩", "⟨6⟩"]


def test_a_run_folder_that_is_a_link_to_elsewhere_is_the_run(tmp_path):
    (tmp_path / "disk" / "job7").mkdir(parents=True)
    (tmp_path / "s" / "mine").mkdir(parents=True)
    (tmp_path / "s" / "mine" / "seed2").symlink_to(tmp_path / "disk" / "job7")
    with RunWriter(tmp_path / "s" / "mine" / "seed2", arm="mine", seed=2) as run:
        write(run, range(2))
    assert (tmp_path / "disk" / "job7" / "DONE").exists()
    assert load(tmp_path / "s").runs[0].name == "mine/seed2"
