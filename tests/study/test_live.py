"""Reading a study while it is written: states, cursors, resumes, damage."""

import json
import os
import re

import pytest
from synthetic import write_study

from moe_rl.files import sole_writer
from moe_rl.study import RunWriter, cursor, folders, load
from moe_rl.study.cursor import LiveError, read_since
from moe_rl.study.data import StudyDataError
from moe_rl.study.figures.screen import on_dark
from moe_rl.study.figures.style import LOOKS
from moe_rl.study.live import LiveStudies, LiveStudy
from moe_rl.study.live_rows import new_rows, new_sites
from moe_rl.study.report import render_report
from moe_rl.study.runs import last_line
from moe_rl.yaml_files import parse_yaml


@pytest.fixture
def folder(tmp_path):
    return write_study(tmp_path / "s", ("grpo", "gspo", "gspo_noise"), (0, 1), 4, unfinished=(("gspo", 1),))


def line(**row):
    return json.dumps(row) + "\n"


def test_overview_tells_states_looks_and_conditions(folder):
    (folder / "grpo" / "seed1" / "DONE").unlink()
    (folder / "gspo" / "seed0" / "DONE").unlink()
    (folder / "gspo" / "seed0" / "metrics.jsonl").unlink()
    study = (folder / "study.yaml").read_text()
    (folder / "study.yaml").write_text(re.sub(r"(?m)^seeds:\n- 0\n- 1$", "seeds:\n- 0\n- 1\n- 2", study))
    (folder / "logs").mkdir()
    log = folder / "logs" / "grpo_seed1.log"
    log.write_text("step 0: reward 0.1\nmoe-rl: error: the gradient norm is inf\n")
    crash = folder / "logs" / "gspo_noise_seed2.log"
    crash.write_text("Traceback (most recent call last):\n  File x\nImportError: no torch\n")
    about = LiveStudy(folder).overview()
    states = {run["run"]: run["state"] for run in about["runs"]}
    assert states == {
        "grpo/seed0": "done",
        "grpo/seed1": "failed",
        "grpo/seed2": "waiting",
        "gspo/seed0": "starting",
        "gspo/seed1": "running",
        "gspo/seed2": "waiting",
        "gspo_noise/seed0": "done",
        "gspo_noise/seed1": "done",
        "gspo_noise/seed2": "failed",
    }
    problems = {run["run"]: run["problem"] for run in about["runs"] if run["problem"]}
    assert problems == {"grpo/seed1": "the gradient norm is inf", "gspo_noise/seed2": "ImportError: no torch"}
    assert {run["steps"] for run in about["runs"]} == {4}  # of what has not begun: from the study's base
    assert about["conditions"] == ["Natural routing", "Selection noise σ = 1 (stress test)"]
    arms = {arm["arm"]: arm for arm in about["arms"]}
    assert [arms[a]["condition"] for a in ("grpo", "gspo", "gspo_noise")] == [0, 0, 1]
    assert arms["gspo"]["colour"]["light"] == LOOKS["gspo"].colour
    assert arms["gspo"]["dash"] == list(LOOKS["gspo"].dash[1])
    os.utime(log, (1, 1))  # the run went on after the error
    again = {run["run"]: run["state"] for run in LiveStudy(folder).overview()["runs"]}
    assert again["grpo/seed1"] == "running"


def test_a_study_that_has_not_written_is_waited_for_and_a_wrong_folder_is_named(folder, tmp_path):
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with pytest.raises(StudyDataError, match="no study and no run found"):
        LiveStudy(fresh)
    with pytest.raises(StudyDataError, match="no such folder"):
        LiveStudy(tmp_path / "none")
    with pytest.raises(StudyDataError, match="It holds studies: s"):
        LiveStudy(tmp_path)
    (fresh / "study.yaml").write_text("name: x\narms: {}\n")
    assert LiveStudy(fresh).overview()["runs"] == []
    alone = LiveStudy(folder / "gspo" / "seed1").overview()
    assert (alone["name"], [run["run"] for run in alone["runs"]]) == ("gspo/seed1", ["gspo/seed1"])


def test_runs_are_looked_up_by_name_and_never_made_into_paths(folder):
    assert LiveStudy(folder).run("gspo/seed1").folder == folder / "gspo" / "seed1"
    for name in ("../s/grpo/seed0", "grpo/seed9", "/etc", "grpo/seed0/../seed1", ""):
        with pytest.raises(LiveError, match="no run"):
            LiveStudy(folder).run(name)


def test_a_cursor_goes_on_where_it_stopped_and_leaves_half_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_since(path) == ([], {"since": "", "more": False, "reset": False, "damaged": 0})
    path.write_text(line(kind="eval", step=0) + '{"kind": "roll')
    rows, answer = read_since(path)
    assert [row["step"] for row in rows] == [0] and answer["since"].startswith("28-")
    assert read_since(path, answer["since"])[0] == []
    path.write_text(
        line(kind="eval", step=0) + line(kind="eval", step=1) + "not json\n[1]\n" + line(kind="eval", step=2)
    )
    rows, answer = read_since(path, answer["since"])
    assert [row["step"] for row in rows] == [1, 2]
    assert answer["damaged"] == 2 and not answer["reset"]
    for wrong in ("x", "5", "-1-00000000", "5-zz"):
        with pytest.raises(LiveError, match="since"):
            read_since(path, wrong)


def test_a_resume_that_rewrote_the_file_resets_the_cursor(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(kind="rollout", step=i, reward=0.1) for i in range(9)))
    before = read_since(path)[1]["since"]
    path.write_text("".join(line(kind="rollout", step=i, reward=0.1) for i in range(5)))  # shorter
    rows, answer = read_since(path, before)
    assert answer["reset"] and [row["step"] for row in rows] == list(range(5))
    path.write_text(
        "".join(line(kind="rollout", step=i, reward=0.1 * (1 + (i > 4))) for i in range(12))
    )  # grown past it
    rows, answer = read_since(path, before)
    assert answer["reset"] and len(rows) == 12
    path.unlink()
    assert read_since(path, before)[1]["reset"]


@pytest.mark.parametrize("size", [1, 27, 28, 29, 1000])
def test_pieces_of_any_size_give_every_row_once(tmp_path, monkeypatch, size):
    monkeypatch.setattr(cursor, "CHUNK", size)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(kind="eval", step=i) for i in range(25)))
    steps, since, more = [], "", True
    while more:
        rows, answer = read_since(path, since)
        steps += [row["step"] for row in rows]
        since, more = answer["since"], answer["more"]
    assert steps == list(range(25))


def test_curves_and_sites_are_sent_as_the_run_wrote_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        line(kind="rollout", step=0, reward=0.123456789)
        + line(kind="update", step=0, update=1, clipped_tokens=3, tokens=40, grad_norm=None)
        + '{"kind": "probe", "step": 0, "update": 1, "slots_changed": 3, "slots": 12, "var_token_natural": NaN, '
        '"site_names": ["l.0.gate", "l.1.gate"], "site_slots_changed": [1, 2], "site_slots": [4, 0]}\n'
        '{"kind": "probe", "step": 0, "update": 2, "site_slots_changed": [1, null], "site_slots": [null, 3]}\n'
        + line(kind="something new", step=0)
        + line(kind="rollout", step="?")
    )
    answer = new_rows(path)
    assert answer["rows"] == {
        "rollout": [[0, 0.123457, False]],
        "update": [[0, 1, 3, 40, None]],
        "probe": [[0, 1, 3, 12, None, False, False], [0, 2, False, False, False, False, False]],
    }, "null for what is not finite, false for what was not recorded"
    sites = new_sites(path)
    assert sites["rows"] == [[0, 1, [0.25, None]], [0, 2, [None, None]]]
    assert (sites["labels"], sites["common"]) == (["0", "1"], "l.·.gate")


def test_the_floor_is_sent_with_the_curves_and_by_site(tmp_path):
    path = tmp_path / "metrics.jsonl"
    by_site = {"site_names": ["l.0.gate", "l.1.gate"], "site_slots": [8, 8]}
    path.write_text(
        line(kind="floor", step=0, variant="batch", slots_changed=1, slots=16, site_slots_changed=[1, 0], **by_site)
        + line(kind="floor", step=0, variant="bf16", slots_changed=6, slots=16, site_slots_changed=[2, 4], **by_site)
        + line(kind="floor", step=0, variant="repeat", slots_changed=0, slots=16)  # of a version without sites
        + line(kind="floor", step=0, variant="of another version", slots_changed=9, slots=16)
    )
    rows = new_rows(path)["rows"]
    assert rows == {"floor": [[0, "own", 1, 16], [0, "bf16", 6, 16], [0, "own", 0, 16], [0, None, 9, 16]]}
    answer = new_sites(path)
    assert answer["floor"] == [["own", [0.125, 0.0]], ["bf16", [0.25, 0.5]]] and answer["rows"] == []
    assert new_sites(path, answer["since"])["floor"] == []


def contrast(a, b):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("method", LOOKS)
def test_every_method_stands_out_from_a_dark_page(method):
    colour = LOOKS[method].colour
    assert contrast(on_dark(colour), "#15181c") >= 4.4  # 4.5 but for rounding to whole bytes
    if contrast(colour, "#15181c") >= 4.6:
        assert on_dark(colour) == colour.lower()


def test_a_run_that_was_left_is_stopped_and_says_since_when(tmp_path):
    run = RunWriter(tmp_path, arm="mine")
    run.rollout(0, reward=1.0)
    assert LiveStudy(tmp_path).overview()["runs"][0]["state"] == "running"
    run.close()  # as a process that was killed leaves it
    os.utime(run.folder / "metrics.jsonl", (1e9, 1e9))
    (about,) = LiveStudy(tmp_path).overview()["runs"]
    assert (about["state"], about["written"]) == ("stopped", 1e9)
    report = render_report(load(tmp_path), [])
    assert "mine/seed0 (last row 2001-09-09 01:46 UTC; nothing writes to it any more)" in report
    RunWriter(tmp_path, arm="mine").finish()
    assert LiveStudy(tmp_path).overview()["runs"][0]["state"] == "done"


TORCHRUN = """\
E1127 11:54:10 torch/distributed/elastic/api.py:1002] failed (exitcode: 1) local_rank: 1 of binary: python
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
moe_rl FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 15575) 
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
RANKS = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "moe_rl/x.py", line 7, in f
[rank1]:     f()
[rank1]: TypeError: no len()
[rank0]: Traceback (most recent call last):
[rank0]:   File "moe_rl/x.py", line 9, in f
[rank0]: RuntimeError: Connection closed by peer
"""
CUDA = """\
moe-rl: error: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
MEMORY = "moe-rl: error: out of memory\n[rank0]: moe-rl: error: Connection closed by peer\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CUDA, "CUDA error: an illegal memory access was encountered"),
        ("step 3/12: reward 0.5\n" + MEMORY + TORCHRUN, "out of memory"),
        (RANKS + TORCHRUN, "TypeError: no len()"),
        (RANKS + TORCHRUN + MEMORY + TORCHRUN, "out of memory"),  # started twice
        (MEMORY + TORCHRUN + "moe-rl: error: no such file\n", "no such file"),
        ("Traceback (most recent call last):\n  File x\nKeyError: 1\n\nDuring handling of the above exception, another "
         "exception occurred:\n\nTraceback (most recent call last):\n  File y\nTypeError: 2\n", "TypeError: 2"),
        (CUDA + "cold start: step 50/100, loss 0.1\n", ""),  # begun again
        ("moe-rl: error: interrupted; the same command goes on from the last checkpoints\n", ""),
        (RANKS + TORCHRUN + "step 4/12: reward 0.5, slots changed 1.0%, 0:30 left\n", ""),
    ],
)  # fmt: skip
def test_the_error_of_a_log_is_found_above_what_follows_it(folder, text, said):
    (folder / "logs").mkdir()
    log = folder / "logs" / "gspo_seed1.log"
    log.write_text(text)
    (about,) = (run for run in LiveStudy(folder).overview()["runs"] if run["run"] == "gspo/seed1")
    assert (about["state"], about["problem"]) == (("failed" if said else "running"), said)
    if "interrupted" not in text:
        assert last_line(log) == (said or text.splitlines()[-1])


def test_a_run_that_a_process_writes_has_not_failed_whatever_an_earlier_start_said(folder):
    (folder / "logs").mkdir()
    (folder / "logs" / "gspo_seed1.log").write_text(CUDA)
    with sole_writer(folder / "gspo" / "seed1", "test"):
        states = {run["run"]: run["state"] for run in LiveStudy(folder).overview()["runs"]}
    assert states["gspo/seed1"] == "running"


def test_configurations_of_many_runs_are_parsed_once(folder, monkeypatch):
    for seed in range(2, 302):
        (run := folder / "grpo" / f"seed{seed}").mkdir()
        (run / "config.yaml").write_text("optim: {steps: 4}")
    parsed = []
    monkeypatch.setattr(folders, "parse_yaml", lambda content: (parsed.append(1), parse_yaml(content))[1])
    counts = [(LiveStudy(folder).overview(), len(parsed))[1] for _ in range(2)]
    assert counts[0] == counts[1] > 300
    (folder / "grpo" / "seed2" / "config.yaml").write_text("optim: {steps: 40}")
    assert {run["run"]: run["steps"] for run in LiveStudy(folder).overview()["runs"]}["grpo/seed2"] == 40


def test_studies_of_other_trainers_stand_beside_declared_ones(tmp_path):
    write_study(tmp_path / "declared", ("grpo",), (0,), 2)
    RunWriter(tmp_path / "mine", arm="grpo").finish()
    (tmp_path / "notes").mkdir()
    assert sorted(LiveStudies(tmp_path).names()) == ["declared", "mine"]


def test_the_study_that_was_written_last_is_the_first(tmp_path):
    """Rows do not change the time of the study's folder."""
    for number, name in enumerate("ab"):
        RunWriter(tmp_path / name, arm="grpo").finish()
        for path in (tmp_path / name, tmp_path / name / "grpo" / "seed0" / "metrics.jsonl"):
            os.utime(path, (number, number))
    assert LiveStudies(tmp_path).names() == ["b", "a"]
    os.utime(tmp_path / "a" / "grpo" / "seed0" / "metrics.jsonl", (9, 9))
    assert LiveStudies(tmp_path).names() == ["a", "b"]


def test_a_crash_of_a_writer_is_told_with_its_error(tmp_path):
    with pytest.raises(OverflowError), RunWriter(tmp_path, arm="mine") as run:
        run.rollout(0, reward=1.0)
        raise OverflowError("reward is too large")
    for folder in (tmp_path, tmp_path / "mine" / "seed0"):  # the study, and the run alone
        (about,) = LiveStudy(folder).overview()["runs"]
        assert (about["state"], about["problem"]) == ("failed", "OverflowError: reward is too large")
