"""The campaign in small: a few cases of every part, and the page that comes of them."""

import json
import sys

import campaign
import pytest
from campaign import PARTS, read
from combinations import combined
from faults import FAULTS, faulted_runs
from fuzz import Fuzzed, fuzzed
from fuzz_kinds import KINDS
from kills import killed_runs
from operations import stopped_runs
from page import write_page


def test_killed_runs_end_as_their_twin(tmp_path):
    found = killed_runs("grpo, lag 2", 2, tmp_path)
    assert found.runs == 2 and sum(found.kills.values()) >= 2 and found.wrong == []


def test_runs_stopped_at_a_file_operation_end_as_their_twin(tmp_path):
    found = stopped_runs("ppo", tmp_path, most=3)
    assert found.operations > 200 and found.states > 60 and found.finished == 3 and found.wrong == []


@pytest.mark.parametrize("fault", FAULTS)
def test_runs_that_met_a_fault_end_as_their_twin(tmp_path, fault):
    found = faulted_runs(fault, 1, tmp_path)
    assert found.cases == 1 and found.wrong == []
    assert found.met == 1 or "process" in fault, "the others depend on how fast the machine is"


@pytest.mark.parametrize("kind", KINDS)
def test_random_input_is_answered_or_refused(tmp_path, kind):
    cases = 4 if KINDS[kind].weight < 8 else 20
    found = fuzzed(kind, 10**6, cases, tmp_path)  # not those of the page
    assert (found.cases, found.answered + found.refused) == (cases, cases), found


def test_combinations_of_settings_run_and_go_on(tmp_path):
    found = combined(10**6, 3, tmp_path)  # not those of the page
    assert (found.cases, found.not_run + found.ran, found.wrong) == (3, 3, []) and found.settings > found.refused


def test_the_page_says_what_the_record_says(tmp_path):
    lines = [
        {
            "part": "kills",
            "block": "a",
            "cpu": 60.0,
            "method": "grpo",
            "runs": 3,
            "kills": {"SIGKILL": 5},
            "wrong": ["x"],
        },
        {"part": "fuzz", "block": "b", "cpu": 1.0, **vars(Fuzzed("page", "requests", 7, 3, 3, ["t"], [], []))},
    ]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read(tmp_path / "record.jsonl")) == 2 and {"kills", "fuzz"} <= set(PARTS)
    write_page(tmp_path / "record.jsonl", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| grpo | 3 | 5 | 1 |" in page and "| requests | 7 | 3 | 3 | 0 | 1 | 0 |" in page
    assert "`python tests/reliability/campaign.py --only kills` (1.0 CPU minutes)" in page


def test_a_part_run_by_itself_leaves_the_page_to_the_whole_campaign(tmp_path, monkeypatch, capsys):
    page, record = tmp_path / "page.md", tmp_path / "record.jsonl"
    fuzz = {"part": "fuzz", "block": "b", "cpu": 1.0, **vars(Fuzzed("page", "requests", 7, 3, 3, ["t"], [], []))}
    record.write_text(json.dumps(fuzz) + "\n")
    page.write_text("of the whole campaign")
    monkeypatch.setattr(campaign, "PAGE", page)
    monkeypatch.setattr(campaign, "run_part", lambda *_: None)
    for more, written in ((["--only", "fuzz"], False), (["--page"], True)):
        monkeypatch.setattr(sys, "argv", ["campaign.py", "--record", str(record), *more])
        campaign.main()
        assert ("| requests | 7 |" in page.read_text()) == written
    assert "lacks combinations, faults, kills, operations, scale, soak" in capsys.readouterr().out
