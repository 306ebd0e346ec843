"""A run with data missing is not done, whoever reads it."""

import os
import shutil

import pytest
from synthetic import write_study

from moe_rl.checks import sealed, sha256_of_bytes
from moe_rl.done import what_is_lost, write_done
from moe_rl.files import write_json
from moe_rl.study.data import StudyDataError, load
from moe_rl.study.live import LiveStudy


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = write_study(tmp_path_factory.mktemp("runs") / "s", ("grpo",), (0,), 3, tokens_every=1) / "grpo" / "seed0"
    (folder / "checkpoint").mkdir()
    for name in ("state.json", "model.safetensors"):
        (folder / "checkpoint" / name).write_text(name)
    write_done(folder, seconds=1.0)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole.parents[1], tmp_path / "s") / "grpo" / "seed0"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def remove(path):
    path.unlink()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("metrics.jsonl", flip),
        ("metrics.jsonl", cut),
        ("metrics.jsonl", remove),
        ("tokens/step_000001.parquet", cut),
        ("tokens/step_000001.parquet", remove),
        ("DONE", flip),
        ("DONE", cut),
    ],
)
def test_what_is_missing_is_named_by_every_reader(run, name, damage):
    assert what_is_lost(run, checkpoint=True) == ""
    damage(run / name)
    with pytest.raises(
        StudyDataError, match=rf"{name}.*(missing|damaged|cut off|not what|cannot be read).*Without it the run is not"
    ):
        load(run.parents[1])
    state = LiveStudy(run.parents[1]).overview()["runs"][0]
    assert state["state"] == "failed" and name in state["problem"]


def test_a_damaged_table_of_the_same_size_cannot_be_done_without_either(run):
    path = run / "tokens" / "step_000001.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(40) + content[44:])
    with pytest.raises(
        StudyDataError, match=r"(?s)step_000001\.parquet.*Without it the run is not what it was\. Restore"
    ):
        _ = load(run.parents[1]).tokens


@pytest.mark.parametrize(("name", "damage"), [("state.json", flip), ("model.safetensors", cut)])
def test_a_lost_checkpoint_is_missed_by_who_resumes_and_not_by_who_draws(run, name, damage):
    damage(run / "checkpoint" / name)
    assert name in what_is_lost(run, checkpoint=True)
    assert load(run.parents[1]).runs[0].finished


def test_an_unfinished_run_is_asked_for_what_its_checkpoint_saw(run):
    (run / "DONE").unlink()
    rows = (run / "metrics.jsonl").read_bytes()
    seen = rows[: rows.index(b"\n", len(rows) // 2) + 1]
    mark = {"bytes": len(seen), "sha256": sha256_of_bytes(seen), "tables": {}}
    write_json(run / "checkpoint" / "state.json", sealed({"metrics": mark}))
    assert len(load(run.parents[1]).unfinished) == 1
    (run / "metrics.jsonl").write_bytes(rows.replace(b'"lag": 0', b'"lag": 9', 1))
    with pytest.raises(StudyDataError, match=r"metrics\.jsonl is not what was written: a line is not"):
        load(run.parents[1])
    (run / "metrics.jsonl").write_bytes(rows.replace(b'{"kind"', b'{"kind', 1))
    with pytest.raises(StudyDataError, match=r"metrics\.jsonl is not what was written: line 1 is damaged"):
        load(run.parents[1])


def test_a_run_that_an_earlier_version_finished_is_done(run):
    (run / "DONE").write_text('{"seconds": 3.5}\n')
    remove(run / "tokens" / "step_000001.parquet")
    assert what_is_lost(run, checkpoint=True) == "" and load(run.parents[1]).runs[0].finished


def test_done_is_flushed_after_what_it_names(run, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino) or fsync(handle))
    write_done(run)
    for first, then in (("metrics.jsonl", "DONE"), ("tokens", "DONE"), ("DONE", ".")):
        assert flushed.index((run / first).stat().st_ino) < flushed.index((run / then).stat().st_ino)


@pytest.mark.parametrize("complete", [True, False])
def test_a_run_that_lost_what_came_after_its_checkpoint_can_go_on_from_there(run, complete):
    rows = (run / "metrics.jsonl").read_bytes()
    seen = rows[: rows.index(b"\n", len(rows) // 2) + 1]
    mark = {"bytes": len(seen), "sha256": sha256_of_bytes(seen), "tables": {}}
    files = {"model.safetensors": "its sum"} if complete else {"optimizer.safetensors": "is not there"}
    write_json(run / "checkpoint" / "state.json", sealed({"step": 2, "metrics": mark, "files": files}))
    write_done(run)
    cut(run / "metrics.jsonl")
    with pytest.raises(StudyDataError, match=r"run it again\." + r" Or delete .*DONE: .*\(step 2\)\." * complete + "$"):
        load(run.parents[1])
    (run / "metrics.jsonl").write_bytes(rows[:5])
    with pytest.raises(StudyDataError, match=r"run it again\.$"):
        load(run.parents[1])
    (run / "metrics.jsonl").write_bytes(rows[:-3])
    (run / "DONE").unlink()
    assert what_is_lost(run, checkpoint=True) == ""
