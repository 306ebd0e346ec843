"""`moe-rl watch DIR --once` on folders that are not as they should be: nothing raw, nothing passed over in silence."""

import pytest
from synthetic import write_rows

from moe_rl.cli import main
from moe_rl.study import StudyDataError, load
from moe_rl.study.watch_once import print_alarms

STEADY = [{"kind": "rollout", "step": step, "reward": 0.5} for step in range(6)]
LOW = "alarms: {low: {metric: rollout.reward, below: 0.9, window: 5}}"


@pytest.fixture
def metrics(tmp_path):
    write_rows(tmp_path / "s" / "a" / "seed0", STEADY, {})
    return tmp_path / "s" / "a" / "seed0" / "metrics.jsonl"


@pytest.mark.parametrize(
    ("damage", "said", "status"),
    [
        (lambda lines: [*lines, '{"kind": "rol'], "no alarm has crossed", 0),
        (lambda lines: ['{"kind": "new", "step": 0}', *lines], "rows of kind 'new' were left out (written by ano", 0),
        (lambda lines: [*lines, '{"kind": "rollout", "step": 6}', ""], "line 7: not a metrics row (lacks reward)", 1),
        (lambda lines: [lines[0], "{", *lines[1:]], "metrics.jsonl line 2: not a metrics row (Exp", 1),
        (lambda lines: [lines[0], '{"kind": "update", "step": 0}', *lines[1:]], "(lacks update); it was left out", 1),
        (lambda lines: ["[1]", *lines[1:4], "[", *lines[4:]], "got list); it and 1 more like it were left out", 1),
        (lambda lines: [], "no alarm has crossed; without rows so far: 1 of 1 runs", 0),
    ],
)
def test_lines_that_are_no_rows_are_said_with_file_and_line(metrics, capsys, damage, said, status):
    """But for a last one that is being written."""
    metrics.write_text("\n".join(damage(metrics.read_text().splitlines())))
    assert print_alarms(metrics.parents[2]) == status
    assert said in (out := capsys.readouterr().out)
    assert ("no alarm has crossed" in out) == (status == 0)
    (metrics.parents[2] / "study.yaml").write_text(LOW)
    assert print_alarms(metrics.parent) == (3 if metrics.stat().st_size else 0), (
        "what is left is looked at all the same"
    )


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("{arms: {a: {}}, seeds: 3}", r"study\.yaml: seeds: expected a list of whole numbers, got 3"),
        ("{arms: {a: {seeds: [x]}}}", r"study\.yaml: arms\.a\.seeds: expected a list of whole numbers, got \['x'\]"),
        ("[1]", "expected a mapping of settings, got list"),
        ("", "expected a mapping of settings, got NoneType"),
        ("alarms: [ess]", r"study\.yaml: alarms: expected a mapping of alarm to threshold"),
        ("interest: -1", r"study\.yaml: interest: expected a difference of reward above 0, got -1"),
    ],
)
def test_a_study_file_that_cannot_be_followed_is_refused_as_the_report_refuses_it(metrics, capsys, yaml, said):
    study = metrics.parents[2]
    (study / "study.yaml").write_text(yaml)
    for read in (load, print_alarms):
        with pytest.raises(StudyDataError, match=said):
            read(study)
    write_rows(study.parent / "t" / "a" / "seed0", STEADY, {})
    (study.parent / "t" / "study.yaml").write_text(LOW)
    assert print_alarms(study.parent) == 3, "of several studies the others are looked at"
    out = capsys.readouterr().out
    assert "study.yaml: " in out and "t/a/seed0: low crossed at 2 steps, first 4, last 5" in out


def test_other_folders_are_named_with_what_is_wrong(metrics, capsys):
    study, run = metrics.parents[2], metrics.parent
    (study / "empty").mkdir()
    for path, said in (
        (study / "empty", "no study and no run found; expected ARM/seedN"),
        (run.parent, "the runs of one arm; name their study"),
        (metrics, "metrics.jsonl: a file; expected runs/STUDY"),
    ):
        for read in (load, print_alarms):
            with pytest.raises(StudyDataError, match=said):
                read(path)
    for name, content, said in (
        ("config.yaml", "a: [1,", "config.yaml: not valid YAML"),  # says whose responses the rewards are of
        ("DONE", "", "DONE cannot be read"),
    ):
        was = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).write_text(content)
        assert print_alarms(run) == 1 and said in capsys.readouterr().out
        (run / name).unlink() if was is None else (run / name).write_bytes(was)
    metrics.unlink()
    metrics.mkdir()
    assert print_alarms(study) == 1
    assert "metrics.jsonl cannot be read (Is a directory)" in capsys.readouterr().out
    (study / "empty" / "study.yaml").write_text("name: x")
    assert print_alarms(study / "empty") == 0
    assert capsys.readouterr().out == "no alarm has crossed; there is no run yet\n"


def test_runs_under_another_rounding_are_looked_at_by_the_thresholds_of_their_study(metrics, capsys):
    study = metrics.parents[2]
    falling = [{"kind": "rollout", "step": step, "reward": 0.8 if step < 10 else 0.05} for step in range(20)]
    write_rows(study / "rounding_avx2" / "a" / "seed0", falling, {})
    (study / "rounding_avx2" / "study.yaml").write_text("{arms: {a: {}}, seeds: [0, 1]}")
    (study / "study.yaml").write_text("alarms: {high: {metric: rollout.reward, above: 0.7}}")
    for folder, above in ((study, ""), (study.parent, "s/")):
        assert print_alarms(folder) == 3
        assert capsys.readouterr().out.splitlines() == [
            f"{above}rounding_avx2/a/seed0: high crossed at 10 steps, first 0, last 9 "
            "(reward of the rollout rows above 0.7)",
            f"{above}rounding_avx2/a/seed0: the reward collapsed at step 12",
            "without rows so far: 1 of 3 runs",
        ]
    (study / "rounding_avx2" / "study.yaml").write_text("seeds: 3")
    with pytest.raises(StudyDataError, match=r"rounding_avx2/study\.yaml: seeds"):
        print_alarms(study)


@pytest.mark.parametrize("option", [["--port", "9"], ["--open"]])
def test_options_of_the_server_do_not_go_with_it(metrics, capsys, option):
    with pytest.raises(SystemExit) as end:
        main(["watch", str(metrics.parents[2]), "--once", *option])
    assert end.value.code == 2 and "--once serves nothing; leave --port and --open out" in capsys.readouterr().err


def test_a_run_in_the_folder_of_another_seed_is_an_error_as_for_the_report(metrics, capsys):
    copy = metrics.parent.rename(metrics.parent.with_name("seed7"))
    (copy / "config.yaml").write_text("seed: 0\n")
    for folder in (copy, copy.parents[1]):
        assert print_alarms(folder) == 1
        said = f"{copy} holds a run of seed 0 (config.yaml): a copy of a run is no other seed. Name the folder seed0"
        assert said in capsys.readouterr().out
        with pytest.raises(StudyDataError, match="a copy of a run is no other seed"):
            load(folder)
