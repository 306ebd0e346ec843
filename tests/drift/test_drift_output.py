"""Where moe-rl drift writes: a folder of its own, whole or not at all."""

import json
import sys
from pathlib import Path

import pytest
from drift_models import Gone, refused

from moe_rl import files
from moe_rl.cli import VERBS
from moe_rl.drift import run
from moe_rl.drift.output import put_in_place, short_names, unfinished
from moe_rl.drift.run import DriftOptions, run_drift
from moe_rl.files import InUseError


def test_output_is_named_after_the_pair_replaced_and_never_someone_elses(
    saved, prompts, tmp_path, undrawn, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    pair = [str(folder) for folder in saved("olmoe")]
    output = run_drift(DriftOptions(tuple(pair), prompts))
    assert output.as_posix() == "runs/drift/old_vs_new"
    (output / "experts.parquet").write_text("")
    assert run_drift(DriftOptions(tuple(pair), prompts)) == output and (output / "experts.parquet").stat().st_size
    (output / ".DS_Store").write_text("")
    assert run_drift(DriftOptions(tuple(pair), prompts)) == output
    (output / "notes.txt").write_text("mine")
    assert "holds notes.txt, which this command does not write" in refused(capsys, "drift", *pair, "--prompts", prompts)
    assert (output / "notes.txt").read_text() == "mine"
    (output / "notes.txt").unlink()
    partial = output.with_name("old_vs_new.partial")
    (partial / "cache").mkdir(parents=True)
    for name in (".lock", ".drift.json.a.tmp", "drift.json"):  # as a killed command leaves it
        (partial / name).write_text("")
    (partial / "notes.txt").write_text("mine")
    error = refused(capsys, "drift", *pair, "--prompts", prompts)
    assert "old_vs_new.partial is emptied first" in error and "holds notes.txt" in error
    (partial / "notes.txt").unlink()
    assert run_drift(DriftOptions(tuple(pair), prompts)) == output and not partial.exists()
    assert short_names(["a/step_1/hf", "a/step_2/hf"]) == ["step_1-hf", "step_2-hf"]
    assert short_names(["runs/x/grpo/seed0"]) == ["grpo-seed0"], "runs/floor/seed0 would pass for a run"
    assert short_names(["x/grpo/seed0/checkpoint", "x/gspo/seed0"]) == ["grpo-seed0-checkpoint", "gspo-seed0"]
    assert short_names(["old", "./old/", "new"]) == ["old", "old", "new"]
    assert short_names(["a/new/hf/..", "old/."]) == ["new", "old"]
    assert short_names(["base", "step 1", "step-1"]) == ["1-base", "2-step-1", "3-step-1"], "a table needs them unequal"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    assert "no earlier comparison" in refused(
        capsys, "drift", *pair, "--prompts", prompts, "--output", tmp_path / "mine"
    )
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "..."
    (tmp_path / "next.partial").write_text("mine")
    for place, file in (("mine/thesis.tex/a/b", "thesis.tex"), ("next", "next.partial")):
        error = refused(capsys, "drift", *pair, "--prompts", prompts, "--output", place)
        assert f"--output: {place} cannot be made, as {tmp_path}" in error and f"{file} is a file" in error
    monkeypatch.chdir(tmp_path / "runs")
    assert "is the folder you are in" in refused(capsys, "drift", *pair, "--prompts", prompts, "--output", "..")


def test_an_earlier_comparison_goes_only_when_the_new_one_stands(tmp_path, monkeypatch):
    former, made, link = tmp_path / "out", tmp_path / "made", tmp_path / "link"
    for folder in (former, made):
        folder.mkdir()
        (folder / "drift.json").write_text(folder.name)
    link.symlink_to(former)
    rename = Path.rename

    def busy(path, to):
        if path == made:
            raise PermissionError("busy")
        return rename(path, to)

    with monkeypatch.context() as patched, pytest.raises(PermissionError):
        patched.setattr(Path, "rename", busy)
        put_in_place(made, former)
    assert (former / "drift.json").read_text() == "out"
    with unfinished(link) as folder:
        (folder / "drift.json").write_text("new")
    assert link.is_symlink() and (former / "drift.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "made", "out"]


def test_two_commands_do_not_share_what_is_not_finished(tmp_path):
    with unfinished(tmp_path / "out") as folder:
        (folder / "a.csv").write_text("1")
        with pytest.raises(InUseError, match=r"out.partial is being written by another"):
            unfinished(tmp_path / "out").__enter__()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.csv"]
    assert not (tmp_path / "out.partial").exists()


def test_what_is_not_finished_has_a_folder_where_there_are_no_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)  # as on Windows
    with unfinished(tmp_path / "out") as folder:
        (folder / "a.csv").write_text("1")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.csv"]


def full_disk(*_):
    raise OSError(28, "No space left on device", "figures")


def test_an_error_halfway_leaves_nothing_behind_but_samples(saved, prompts, tmp_path, monkeypatch, capsys):
    old, new = saved("qwen3_moe")
    batches = iter([run.count])
    monkeypatch.setattr(run, "count", lambda one: next(batches, full_disk)(one))  # the second batch fails
    options = ["--prompts", prompts, "--output", tmp_path / "out", "--batch-size", "1", "--no-per-site"]
    error = refused(capsys, "drift", old, new, *options)
    assert "No space left" in error and "nothing else was written" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jsonl"]
    error = refused(capsys, "drift", old, new, *options, "--sample", "1", "--max-new-tokens", "2")
    assert "the responses sampled so far (samples.jsonl)" in error and "OUTPUT.partial" in error
    assert (tmp_path / "out.partial" / "samples.jsonl").exists()
    assert not (tmp_path / "out.partial" / "drift.json").exists()


def test_what_was_measured_outlives_an_error_of_the_figures(saved, prompts, tmp_path, undrawn, monkeypatch, capsys):
    whole = run_drift(DriftOptions(tuple(map(str, saved("qwen3_moe"))), prompts, tmp_path / "whole"))
    monkeypatch.setattr(run, "draw", full_disk)
    error = refused(capsys, "drift", *saved("qwen3_moe"), "--prompts", prompts, "--output", tmp_path / "out")
    assert "OUTPUT.partial, if it is there, has all numbers (drift.json); nothing else was written" in error
    left, tables = tmp_path / "out.partial", {path.name for path in whole.glob("*.parquet")}
    assert {path.name for path in left.iterdir()} == {"drift.json", *tables} and "tokens.parquet" in tables
    results = (json.loads((folder / "drift.json").read_text()) for folder in (left, whole))
    assert len({json.dumps({**found, "settings": None}) for found in results}) == 1
    assert not (tmp_path / "out").exists()


def test_a_reader_that_has_gone_is_not_told_that_nothing_was_written(saved, prompts, tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Gone())
    pair = map(str, saved("olmoe"))
    with pytest.raises(BrokenPipeError):
        VERBS["drift"]([*pair, "--prompts", str(prompts), "--output", str(tmp_path / "out"), "--no-per-site"])
    assert (tmp_path / "out" / "drift.json").exists()
