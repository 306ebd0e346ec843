"""A checkpoint survives an interruption at every file operation, and nothing damaged passes for one."""

import builtins
import contextlib
import json
import os
from collections import deque
from dataclasses import replace

import pytest
import torch
from micro import MICRO
from safetensors.torch import load_file

from moe_rl.checks import changed_since
from moe_rl.drift.checkpoints import chosen
from moe_rl.files import write_atomic
from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig, load_model
from moe_rl.policy.tiny import ModelError
from moe_rl.rollout.engine import ModelEngine
from moe_rl.routing import RoutedExperts
from moe_rl.runlog import DamagedMetricsError, RunLog
from moe_rl.study.config import dump_run
from moe_rl.tables import write_table
from moe_rl.training import MethodConfig, run, train, validate
from moe_rl.training.batch import Batch
from moe_rl.training.checkpoint import (
    CheckpointError,
    _optimizer_tensors,
    _restore_optimizer,
    drop_policies_after,
    keep_policy,
    load_checkpoint,
    save_checkpoint,
    settle,
)
from moe_rl.training.method import resolve_method
from moe_rl.training.optimizer import make_optimizer
from moe_rl.training.ranks import Ranks
from moe_rl.training.state import State


class Killed(BaseException):
    """From here on the process is dead: whatever it still tries fails, clean-up included."""


OPERATIONS = [(os, name) for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync", "open")] + [
    (builtins, "open")
]


def dying(monkeypatch, at, before):
    """The process dies before or after its `at`-th file operation; returns the counter of operations."""
    done = [0]

    def wrapped(operation):
        def act(*args, **options):
            if done[0] > at or (done[0] == at and before):
                done[0] = 10**9
                raise Killed
            done[0] += 1
            result = operation(*args, **options)
            if done[0] == at + 1 and not before:
                done[0] = 10**9
                raise Killed
            return result

        return act

    for module, name in OPERATIONS:
        monkeypatch.setattr(module, name, wrapped(getattr(module, name)))
    return done


def small_state(folder, step, value):
    """A run of one linear layer, one batch waiting: everything that a checkpoint holds, in milliseconds."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(value)
    mask = torch.ones(1, 2, dtype=torch.bool)
    routes = RoutedExperts(torch.full((1, 2, 1, 1), step % 3), ("gate",), 3)
    logps = torch.full((1, 2), -value)
    batch = Batch(torch.ones(1, 2).long(), mask, mask, torch.ones(1), torch.ones(1), logps, routes, logps, None, step)
    return State(
        MICRO, folder, Ranks(), RunLog(folder), None, None, resolve_method(MICRO, 4), 4, model, optimizer,
        ModelEngine(model, None), waiting=deque([batch]), step=step,
    )  # fmt: skip


def held(folder):
    """What a new process finds: the step, the weight, the waiting batch, the metrics; None before any checkpoint."""
    settle(folder)
    state = small_state(folder, 0, 0.0)
    mark = load_checkpoint(state)
    state.log.resume(mark)
    if mark is None:
        return None
    rows = tuple(json.loads(line)["step"] for line in state.log.path.read_text().splitlines())
    assert state.waiting[0].routes.meta == {}, "as before it was saved"
    assert not [p for p in folder.iterdir() if p.name in ("checkpoint.new", "checkpoint.old")]
    return state.step, state.policy.weight[0, 0].item(), int(state.waiting[0].routes.ids[0, 0, 0, 0]), rows


def two_checkpoints(folder, monkeypatch, at, before):
    """Steps 1 and 2 are saved; the process dies at one operation of the second save."""
    folder.mkdir()
    for step in (1, 2):
        state = small_state(folder, step, float(step))
        state.log.resume(load_checkpoint(small_state(folder, 0, 0.0)))
        state.log.append("step", step)
        with monkeypatch.context() as patch:
            done = dying(patch, at if step == 2 else 10**8, before)
            try:
                save_checkpoint(state)
            except Killed:
                return True
        if step == 2:
            assert done[0] <= at, "all operations were stopped at"
    return False


FIRST, SECOND = (1, 1.0, 1, (1,)), (2, 2.0, 2, (1, 2))


def test_a_kill_at_every_file_operation_leaves_a_complete_checkpoint(tmp_path, monkeypatch):
    """Before and after each operation of a save; once more, in the middle of what settles the first kill."""
    seen, at = {FIRST: 0, SECOND: 0}, 0
    while True:
        killed = []
        for before in (True, False):
            folder = tmp_path / f"{at}_{before}"
            killed.append(two_checkpoints(folder, monkeypatch, at, before))
            with monkeypatch.context() as patch:  # settling dies, too
                dying(patch, at % 9, before)
                with contextlib.suppress(Killed):
                    settle(folder)
            seen[held(folder)] += 1
        if not any(killed):
            break
        at += 1
    assert at > 40 and seen[FIRST] > 40 and seen[SECOND] > 2


def test_what_a_checkpoint_speaks_of_is_on_the_disk_before_it_is(tmp_path, monkeypatch):
    """Metrics before the manifest that has their checksum; every file of the checkpoint before it gets its name."""
    done = []
    flush, rename = os.fsync, os.rename

    def flushed(handle):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        flush(handle)

    def renamed(source, target, **options):
        done.append(f"{os.path.basename(source)} is {os.path.basename(target)}")
        rename(source, target, **options)

    state = small_state(tmp_path, 1, 1.0)
    state.log.append("step", 1)
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    save_checkpoint(state)
    named = done.index("checkpoint.new is checkpoint")
    written = [path.name for path in (tmp_path / "checkpoint").iterdir()]
    assert "state.json" in written and all(done.index(name) < named for name in written)
    assert done.index("metrics.jsonl") < min(place for place, name in enumerate(done) if "state.json" in name)
    assert done[named - 1] == "checkpoint.new" and done[named + 1] == tmp_path.name, "and the folders' entries"


def test_the_first_checkpoint_comes_whole_or_not_at_all(tmp_path, monkeypatch):
    for at in range(0, 200, 7):
        folder = tmp_path / str(at)
        folder.mkdir()
        state = small_state(folder, 1, 1.0)
        state.log.append("step", 1)
        with monkeypatch.context() as patch:
            dying(patch, at, before=False)
            with contextlib.suppress(Killed):
                save_checkpoint(state)
        assert held(folder) in (None, FIRST)


def saved(folder):
    state = small_state(folder, 3, 1.0)
    for step in range(3):
        state.log.append("update", step, loss=0.5)
    save_checkpoint(state)
    state.log.append("update", 3, loss=0.5)  # of the step that was interrupted
    return state.log.path


def test_an_edited_state_is_refused(tmp_path):
    saved(tmp_path)
    path = tmp_path / "checkpoint" / "state.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 9'))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        load_checkpoint(small_state(tmp_path, 0, 0.0))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: [lines[0], lines[1][:9] + b"\x00" + lines[1][10:], *lines[2:]], "line 2 is damaged"),
        (lambda lines: lines[:2], "of the .* bytes that were written"),
        (lambda lines: [], "it has 0 of the"),
        (lambda lines: [lines[0].replace(b"0.5", b"0.6"), *lines[1:]], "not what was written"),
    ],
)
def test_damaged_metrics_are_refused_and_their_bytes_kept(tmp_path, damage, said):
    path = saved(tmp_path)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    state = small_state(tmp_path, 0, 0.0)
    with pytest.raises(DamagedMetricsError, match=said):
        state.log.resume(load_checkpoint(state))
    assert path.read_bytes() == before


def test_rows_behind_the_checkpoint_go_half_written_ones_too(tmp_path):
    path = saved(tmp_path)
    with open(path, "ab") as file:
        file.write(b'{"kind": "upd')
    state = small_state(tmp_path, 0, 0.0)
    state.log.resume(load_checkpoint(state))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def table(folder, step):
    write_table(folder / "tokens" / f"step_{step:06d}.parquet", {"seq": [step]})


def test_tables_before_the_checkpoint_are_missed_and_later_ones_go(tmp_path):
    state = small_state(tmp_path, 1, 1.0)
    state.log.append("step", 0)
    table(tmp_path, 0)
    save_checkpoint(state)
    table(tmp_path, 1)  # of the step that was interrupted
    resumed = small_state(tmp_path, 0, 0.0)
    resumed.log.resume(load_checkpoint(resumed))
    assert os.listdir(tmp_path / "tokens") == ["step_000000.parquet"]
    (tmp_path / "tokens" / "step_000000.parquet").unlink()
    resumed = small_state(tmp_path, 0, 0.0)
    with pytest.raises(DamagedMetricsError, match=r"step_000000\.parquet is missing"):
        resumed.log.resume(load_checkpoint(resumed))


def test_any_tool_opens_a_checkpoint_as_a_model(state_of, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = state_of(replace(MICRO, optim=replace(MICRO.optim, steps=1)), tmp_path)
    run(state)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    ours = state.policy.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint").get_vocab() == state.tokenizer.get_vocab()
    model = load_model(str(tmp_path), ModelConfig())  # a run's folder means its checkpoint
    assert all(torch.equal(weight, ours[name]) for name, weight in model.state_dict().items())
    path = tmp_path / "checkpoint" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load_model(str(tmp_path), ModelConfig())


def test_a_checkpoint_of_adapters_is_loaded_as_one_model_with_the_settings_of_its_run(state_of, tmp_path):
    pytest.importorskip("peft")
    lora = LoraConfig(rank=2, target_parameters=("mlp.experts.gate_up_proj",), train_router=True)
    config = replace(MICRO, model=replace(MICRO.model, lora=lora), optim=replace(MICRO.optim, steps=1))
    state = state_of(config, tmp_path / "run")
    run(state)
    settings = tmp_path / "run" / "config.yaml"
    with pytest.raises(ModelError, match=r"of a run with model\.lora, and with the settings in .*run/config\.yaml"):
        load_model(str(tmp_path / "run"), ModelConfig())
    write_atomic(settings, dump_run(config))
    ids = torch.tensor([[3, 4, 5]])
    merged = load_model(str(tmp_path / "run"), ModelConfig())
    assert not any("lora" in name or "modules_to_save" in name for name in merged.state_dict())
    assert all(parameter.requires_grad for parameter in merged.parameters()), "a run that begins here trains all of it"
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, state.policy(ids).logits, atol=1e-5, rtol=1e-4)
    write_atomic(settings, dump_run(replace(config, model=replace(config.model, lora=LoraConfig(rank=3)))))
    with pytest.raises(ModelError, match=r"it makes no model: .*Missing key"):
        load_model(str(tmp_path / "run"), ModelConfig())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["AdamW", "MasterAdamW"])
def test_an_optimizer_is_restored_to_the_devices_that_torch_restores_it_to(dtype):
    """Also its count of steps, which a fused AdamW keeps beside the parameter and MasterAdamW on the CPU."""

    def linear(device):
        module = torch.nn.Linear(2, 2, device=device, dtype=dtype)
        return module, make_optimizer([{"params": list(module.parameters()), "lr": 0.1}], (0.9, 0.999), 0.0)

    def kept(optimizer):
        return [{kind: value.device.type for kind, value in state.items()} for state in optimizer.state.values()]

    (saved, trained), (module, own), (_, torchs) = linear("cpu"), linear("meta"), linear("meta")
    saved(torch.ones(1, 2, dtype=dtype)).sum().backward()
    trained.step()
    _restore_optimizer(module, own, _optimizer_tensors(saved, trained).items())
    torchs.load_state_dict(trained.state_dict())
    assert kept(own) == kept(torchs)
    assert {state["step"] for state in kept(own)} == {"meta" if dtype == torch.float32 else "cpu"}


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
        with pytest.raises(ValueError, match=f"keep_policy_every .* does not go with {said}"):
            validate(replace(config, keep_policy_every=1))
