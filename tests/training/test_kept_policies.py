"""Policies of earlier steps: kept whole or not at all, neither lost nor mixed, and where another run may begin."""

import os
from dataclasses import replace

import pytest
import torch
from micro import MICRO
from safetensors.torch import load_file
from small_checkpoints import Killed, dying, small_state

from moe_rl.checks import changed_since
from moe_rl.drift.checkpoints import chosen
from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig, load_model
from moe_rl.policy.tiny import ModelError
from moe_rl.training import MethodConfig, run, train, validate
from moe_rl.training.checkpoint import (
    CheckpointError,
    drop_policies_after,
    keep_policy,
    save_checkpoint,
    settle,
)


def test_a_kill_at_every_file_operation_leaves_a_kept_policy_whole_or_not_there(tmp_path, monkeypatch):
    """What is left over goes when the run goes on, and the policy is kept then."""
    at, there, killed = 0, [0, 0], True
    while killed:
        folder, place = tmp_path / str(at), tmp_path / str(at) / "checkpoints" / "step_000002"
        folder.mkdir()
        with monkeypatch.context() as patch:
            dying(patch, at, before=False)
            try:
                keep_policy(small_state(folder, 2, 2.0))
                killed = False
            except Killed:
                pass
        there[place.exists()] += 1
        drop_policies_after(folder, 2)
        keep_policy(small_state(folder, 2, 2.0))
        assert os.listdir(place.parent) == [place.name] and not changed_since(place, "state.json")
        assert load_file(place / "model.safetensors")["weight"][0, 0] == 2
        at += 1
    assert there[False] > 5 and there[True] > 1


def test_what_was_moved_to_another_disk_and_linked_is_gone_on_with(tmp_path):
    """Of what is replaced or made again the link alone goes. A link to nothing is no run without a checkpoint."""
    folder, disk = tmp_path / "run", tmp_path / "disk"
    folder.mkdir()
    disk.mkdir()
    save_checkpoint(small_state(folder, 1, 1.0))
    for step in (1, 2):
        keep_policy(small_state(folder, step, 1.0))
    for name in ("checkpoint", "checkpoints/step_000001", "checkpoints/step_000002"):
        moved = (folder / name).rename(disk / os.path.basename(name))
        (folder / name).symlink_to(moved)
    settle(folder)
    drop_policies_after(folder, 1)
    assert os.listdir(folder / "checkpoints") == ["step_000001"] and len(os.listdir(disk)) == 3
    (disk / "step_000001").rename(disk / "away")
    keep_policy(small_state(folder, 1, 1.0))
    assert (folder / "checkpoints" / "step_000001").is_symlink(), "stays as it is"
    (disk / "checkpoint").rename(disk / "away_too")
    with pytest.raises(CheckpointError, match=r"run/checkpoint links to .*disk/checkpoint, which is not there"):
        settle(folder)
    (disk / "away_too").rename(disk / "checkpoint")
    for step in (2, 3):
        save_checkpoint(small_state(folder, step, 2.0))
    assert load_file(folder / "checkpoint" / "model.safetensors")["weight"][0, 0] == 2
    assert os.listdir(folder / "checkpoint") and not (folder / "checkpoint.old").is_symlink()


KEEPS = replace(MICRO, optim=replace(MICRO.optim, steps=4), checkpoint_every=3, keep_policy_every=2)


def kept_policies(folder):
    return {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in folder.iterdir()}


@pytest.mark.parametrize("stopped", [2, 3], ids=["before the first checkpoint", "after it"])
def test_policies_of_earlier_steps_stay_and_a_run_that_goes_on_neither_loses_nor_mixes_them(
    paid_by_parity, tmp_path, stopped
):
    train(KEEPS, tmp_path / "whole")
    expected = kept_policies(tmp_path / "whole" / "checkpoints")
    assert sorted(expected) == ["step_000000", "step_000002", "step_000004"], "the first, and the last where it is due"

    def stop(row):
        if row["kind"] == "update" and row["step"] == stopped:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(KEEPS, tmp_path / "halved", listener=stop)
    own = tmp_path / "halved" / "checkpoints"
    assert sorted(path.name for path in own.iterdir()) == ["step_000000", "step_000002"]
    if stopped == 2:  # no checkpoint saw it, so that it is made again
        (own / "step_000002" / "model.safetensors").unlink()
    train(KEEPS, tmp_path / "halved")
    assert kept_policies(own) == expected


def test_a_run_starts_from_a_kept_policy_of_another(state_of, tmp_path):
    """Back to step 2 and on with GSPO: the policy is carried over, the optimizer and the count of steps are not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    old = state_of(KEEPS, tmp_path / "grpo")
    run(old)
    (tmp_path / "grpo" / "checkpoints" / ".step_000006.new").mkdir()  # is being written
    (tmp_path / "grpo" / "checkpoints" / ".step_000006.new" / "config.json").write_text("{}")
    series = [tmp_path / "grpo" / "checkpoints" / f"step_00000{step}" for step in (0, 2, 4)]
    assert chosen([str(tmp_path / "grpo" / "checkpoints")]) == list(map(str, series)), "what moe-rl drift compares"
    model, report = AutoModelForCausalLM.from_pretrained(series[2], output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(weight, old.policy.state_dict()[name]) for name, weight in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(series[2]).get_vocab() == old.tokenizer.get_vocab()

    policy = replace(MICRO.model, path=str(series[1]), experts_implementation="sorted_mm")
    new = state_of(replace(MICRO, model=policy, method=MethodConfig(objective="gspo")), tmp_path / "gspo")
    weights = load_file(series[1] / "model.safetensors")
    assert all(torch.equal(weight, new.policy.state_dict()[name]) for name, weight in weights.items())
    assert new.step == 0 and not new.optimizer.state and old.optimizer.state
    run(new)
    assert new.step == 2 and not all(torch.equal(new.policy.state_dict()[name], w) for name, w in weights.items())
    path = series[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ModelError, match=r"step_000002/model\.safetensors is damaged"):
        load_model(str(series[1]), ModelConfig())


def test_what_hub_format_cannot_hold_is_not_kept():
    for config, said in (
        (replace(MICRO, model=replace(MICRO.model, lora=LoraConfig(rank=2))), r"model\.lora"),
        (replace(MICRO, optim=replace(MICRO.optim, expert_bias_rate=0.01)), r"optim\.expert_bias_rate"),
    ):
        validate(config)
        with pytest.raises(ValueError, match=f"keep_policy_every .* does not go with this {said}"):
            validate(replace(config, keep_policy_every=1))


def test_a_policy_with_a_bias_on_its_routers_is_no_model_of_hub_format(tmp_path):
    """It was loaded without its bias and without a word: log-probabilities were up to 0.05 nats off."""
    train(replace(MICRO, optim=replace(MICRO.optim, expert_bias_rate=0.01)), tmp_path)
    with pytest.raises(ModelError, match=r"optim\.expert_bias_rate: .* copy config\.json"):
        load_model(str(tmp_path), ModelConfig())
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tmp_path / "checkpoint" / name).read_bytes())
    load_model(str(bare), ModelConfig())
