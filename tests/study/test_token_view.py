"""The token view's data against hand-made tokens and routes, and its fragment of HTML."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from synthetic import write_study
from token_files import routes, write_step

from moe_rl.study import RunWriter, load
from moe_rl.study.data import StudyDataError
from moe_rl.study.token_view import TokenStep, evenly, stored_steps, token_view_html
from moe_rl.training.route_tables import write_route_table


def test_a_response_has_its_text_scores_and_experts(tmp_path):
    write_step(tmp_path, 7)
    step = TokenStep(tmp_path, 7)
    index = step.index()
    assert index["responses"] == [
        {"seq": 0, "updates": [1, 2], "reward": 0.0, "tokens": 3, "changed": 1},
        {"seq": 3, "updates": [1, 2], "reward": 1.0, "tokens": 2, "changed": 2},
    ]
    assert (index["updates"], index["top"], index["unit"], index["slots"]) == ([1, 2], 2, "experts", 4)
    assert (index["labels"], index["common"]) == (["0", "1"], "model.layers.·.mlp.gate")
    found = step.response(0, 2)
    assert found["prompt"] == "^1=" and found["text"] == ["2", "<b>", "\n"]
    assert found["changed"] == [0, 1, 0] and found["logp_natural"] == [-1.0, -0.75, -1.0]
    assert found["old_experts"] == [[[0, 1], [0, 1]]] * 3
    assert found["new_experts"] == [{}, {1: [1, 4]}, {}]
    other = step.response(3, 2)
    assert other["changed"] == [2, 0]  # both at site 0; at site 1 only the order of slots differs
    assert other["new_experts"] == [{0: [2, 5]}, {}]
    assert step.response(3, 1)["changed"] == [0, 0]
    cut = step.response(0, 2, most=1)
    assert cut["left_out"] == 2 and cut["text"] == ["2"]
    whole = {"tokens": 3, "touched": 1, "changed": 1, "log_ratio": 0.0833333}  # 0.25 / 3
    assert cut["whole"] == found["whole"] == whole
    assert other["whole"] == {"tokens": 2, "touched": 1, "changed": 2, "log_ratio": 0.125}
    missing = TokenStep(tmp_path, 7)
    missing.table.loc[missing.table["pos"] == 2, "logp_natural"] = float("nan")
    assert missing.response(0, 1)["whole"]["log_ratio"] is None


def test_log_probabilities_are_sent_as_they_were_kept(tmp_path):
    write_step(tmp_path, 0)
    step = TokenStep(tmp_path, 0)
    old = np.float32([-12.345679, -0.000123456789, -1234.5678] * 4)[: len(step.table)]
    step.table["old_logp"] = old
    step.table["logp_natural"] = np.nextafter(old, np.float32(0))
    found = step.response(0, 1)
    assert np.float32(found["old_logp"]).tolist() == old[:3].tolist()
    assert all(new > before for new, before in zip(found["logp_natural"], found["old_logp"], strict=True))


def test_gates_are_sent_with_four_digits(tmp_path):
    write_step(tmp_path, 0, routers=True)
    step = TokenStep(tmp_path, 0)
    step.table["old_margins"] = [np.array([0.00012345678, 0.0])] * len(step.table)
    step.table["new_margins"] = [np.array([np.nan, -98765.4])] * len(step.table)
    found = step.response(0, 2, routers=True)
    assert found["old_gates"] == [[[0.4, 0.2]] * 2] * 3 and found["new_gates"] == [[[0.5, 0.3]] * 2] * 3
    assert found["old_margins"] == [[0.0001235, 0.0]] * 3 and found["new_margins"] == [[None, -98770.0]] * 3


def test_older_files_without_text_or_routes_still_show(tmp_path):
    write_step(tmp_path, 0, texts=False)
    bare = TokenStep(tmp_path, 0)
    assert bare.response(3, 2)["text"] == ["⟨5⟩", "⟨3⟩"]
    assert bare.response(0, 2)["new_experts"] == [{}, {1: [1, 4]}, {}]  # where it begins is found by its tokens
    write_step(tmp_path, 1, kept=False)
    unrouted = TokenStep(tmp_path, 1)
    assert unrouted.index()["unit"] == "sites"
    assert unrouted.response(0, 2)["changed"] == [0, 1, 0] and unrouted.response(0, 2)["old_experts"] is None
    assert stored_steps(tmp_path) == [0, 1]


def test_files_that_do_not_fit_each_other_are_refused(tmp_path):
    write_step(tmp_path, 0)
    with pytest.raises(StudyDataError, match=r"no tokens of step 5; stored are \[0\]"):
        TokenStep(tmp_path, 5)
    with pytest.raises(StudyDataError, match=r"no response 1 after update 2; stored are responses \[0, 3\]"):
        TokenStep(tmp_path, 0).response(1, 2)
    write_step(tmp_path, 1)
    table = TokenStep(tmp_path, 1)
    table.table["token"] += 1
    with pytest.raises(StudyDataError, match="its tokens are not those of tokens/step_000001"):
        table.response(0, 2)
    place = tmp_path / "routes" / "step_000000_update_1.parquet"
    write_route_table(place, routes(1).rows(torch.tensor([0, 1, 1])))
    with pytest.raises(
        StudyDataError, match=r"update_1\.parquet: 3 responses, tokens of 2; the files are of different"
    ):
        TokenStep(tmp_path, 0).response(0, 1)
    (tmp_path / "routes" / "step_000000_update_2.parquet").write_bytes(b"short")
    with pytest.raises(StudyDataError, match="update_2"):
        TokenStep(tmp_path, 0).response(0, 2)
    (tmp_path / "tokens" / "step_000000.parquet").write_bytes(b"short")
    with pytest.raises(StudyDataError, match="not a readable Parquet file"):
        TokenStep(tmp_path, 0)


def test_responses_may_be_stored_after_some_updates_only(tmp_path):
    """As by a trainer that stores the minibatch of each update."""
    folder = write_study(tmp_path / "s", ("grpo",), (0,), steps=2)
    shutil.rmtree(folder / "grpo" / "seed0" / "tokens", ignore_errors=True)
    with RunWriter(folder, arm="mine", config={"objective": "grpo"}) as run:
        for update, seq in ((1, 0), (2, 3)):
            run.tokens(1, seq=[seq], pos=[0], token=[5], update=[update], flips=[seq], old_logp=[-1], logp_natural=[-2])
    step = TokenStep(folder / "mine" / "seed0", 1)
    found = step.index()
    assert (found["updates"], found["top"]) == ([1, 2], 3)
    assert [(one["seq"], one["updates"], one["changed"]) for one in found["responses"]] == [(0, [1], 0), (3, [2], 3)]
    content = re.search(r'id="token-view-data">(.*?)</script>', token_view_html(load(folder)), re.DOTALL)[1]
    assert set(json.loads(content)["responses"]) == {"0/1", "3/2"}
    write_step(tmp_path, 7)
    routed = TokenStep(tmp_path, 7)
    routed.table = routed.table[(routed.table["update"] == 2) == (routed.table["seq"] == 3)]
    assert [(one["tokens"], one["changed"]) for one in routed.index()["responses"]] == [(3, 0), (2, 2)]
    assert routed.all_experts(2).tolist() == TokenStep(tmp_path, 7).all_experts(2).tolist()


def test_the_fragment_holds_data_that_cannot_end_its_script_and_keeps_its_limit(tmp_path):
    folder = write_study(tmp_path / "s", ("gspo", "grpo"), (0,), steps=2, tokens_every=9, sequences=16)
    for path in folder.glob("*/seed0/tokens/*"):
        path.unlink()
    assert token_view_html(load(folder)) == ""
    write_step(folder / "grpo" / "seed0", 1)
    html = token_view_html(load(folder))
    assert "GRPO, seed 0, step 1: 2 of the 2 responses" in html
    content = re.search(r'id="token-view-data">(.*?)</script>', html, re.DOTALL)[1]
    assert "<" not in content
    data = json.loads(content)
    assert data["responses"]["0/2"]["text"] == ["2", "<b>", "\n"]
    assert set(data["responses"]) == {"0/1", "0/2", "3/1", "3/2"}
    small = token_view_html(load(folder), limit=1)
    assert "1 of the 2 responses" in small, "at least one, however small the limit"
    assert not re.search(r"(src|href)=|url\(|https?://(?!www\.w3\.org)", html)


def test_responses_are_taken_from_all_over_the_step():
    for n in range(1, 40):
        order = list(evenly(range(n)))
        assert sorted(order) == list(range(n))
        assert set(order[:2]) == {0, n - 1}
