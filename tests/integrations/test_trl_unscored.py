"""Rows of a TRL run folder where TRL's own means leave something out: responses without a reward, masked ones."""

import pytest

pytest.importorskip("trl", reason="needs `pip install '.[trl]'`")

from tiny_trl import make
from trl import GRPOTrainer

from moe_rl.integrations.trl import routing_replay
from moe_rl.run_rows import read_rows


def rows_of(folder, kind):
    return [row for _, row in read_rows(next(folder.rglob("metrics.jsonl"))) if row["kind"] == kind]


def test_responses_without_a_reward_are_not_counted_as_rewarded(tmp_path):
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options={"run_folder": tmp_path / "runs"}, max_steps=5)
    some = [[None] * 4 + [1.0, None] * 6, [0.0, 1.0] * 8]
    trainer.reward_funcs = [lambda completions, **_: some.pop(0)]
    trainer.train()
    first, second = rows_of(tmp_path / "runs", "rollout")
    assert (first["reward"], first["reward_n"]) == (1.0, 6)
    assert "groups_equal" not in first, "TRL takes a group without any reward for one of unequal rewards"
    assert (second["reward"], second["reward_n"], second["groups_equal"]) == (0.5, 16, 0.0)


@pytest.mark.parametrize("longest", [1, 2])
def test_a_mean_over_rows_is_no_mean_over_tokens(longest, tmp_path):
    settings = {"max_completion_length": longest, "mask_truncated_completions": True, "max_steps": 4}
    trainer = make(routing_replay(GRPOTrainer), tmp_path, options={"run_folder": tmp_path / "runs"}, **settings)
    trainer.train()
    rows = rows_of(tmp_path / "runs", "update")
    masked = [row for row in rows if row["sequences"] < 4]
    assert masked, "no response was cut off"
    for row in masked:
        assert ("entropy" in row) == ("clipped_tokens" in row) == (longest > 1)
