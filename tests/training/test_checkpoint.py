"""A checkpoint survives an interruption at every file operation, and nothing damaged passes for one."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from micro import MICRO
from safetensors.torch import load_file
from small_checkpoints import Killed, dying, small_state

from moe_rl.files import write_atomic
from moe_rl.policy.lora import LoraConfig
from moe_rl.policy.models import ModelConfig, load_model
from moe_rl.policy.tiny import ModelError
from moe_rl.routing.packing import hide
from moe_rl.runlog import DamagedMetricsError
from moe_rl.study.config import dump_run
from moe_rl.tables import write_table
from moe_rl.training import resume, run
from moe_rl.training.checkpoint import (
    CheckpointError,
    _optimizer_tensors,
    _restore_optimizer,
    load_checkpoint,
    save_checkpoint,
    settle,
)
from moe_rl.training.launch import DistributedError
from moe_rl.training.optimizer import make_optimizer
from moe_rl.training.ranks import Ranks


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


def test_of_two_complete_checkpoints_the_newer_is_gone_on_with(tmp_path):
    """An interruption between the renames leaves both, and no `checkpoint`."""
    for step, name in ((2, "newer"), (1, "checkpoint.old")):
        save_checkpoint(small_state(tmp_path, step, float(step)))
        (tmp_path / "checkpoint").rename(tmp_path / name)
    (tmp_path / "newer").rename(tmp_path / "checkpoint.new")
    settle(tmp_path)
    load_checkpoint(state := small_state(tmp_path, 0, 0.0))
    assert state.step == 2 and state.policy.weight[0, 0] == 2
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint"]


def test_a_run_is_not_begun_again_because_both_of_its_checkpoints_are_damaged(tmp_path):
    """Interrupted between the renames, on a disk that then lost files: starting over would remove all rows."""
    for step, name in ((2, "newer"), (1, "checkpoint.old")):
        save_checkpoint(small_state(tmp_path, step, float(step)))
        (tmp_path / "checkpoint").rename(tmp_path / name)
    (tmp_path / "newer").rename(tmp_path / "checkpoint.new")
    for path in tmp_path.glob("*/model.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint.old/model.safetensors is missing.* Delete .*checkpoint.old"):
        settle(tmp_path)
    assert {path.name for path in tmp_path.glob("checkpoint*")} == {"checkpoint.old", "checkpoint.new"}


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
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


def test_ranks_agree_on_the_checkpoint_and_not_on_its_step_alone(tmp_path, monkeypatch):
    """Before any row goes: those of a rank with another checkpoint of the step are not what the checkpoint saw."""
    said = []

    def agree(ranks, what, own):
        said.append((what, own))
        raise DistributedError("one of them differs")

    monkeypatch.setattr(Ranks, "agree", agree)
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        state = small_state(tmp_path / name, 3, value)
        save_checkpoint(state)
        state.log.append("step", 3)
    for name in ("a", "b", "a"):
        with pytest.raises(DistributedError):
            resume(small_state(tmp_path / name, 0, 0.0))
        assert (tmp_path / name / "metrics.jsonl").read_bytes()
    assert said[0] == said[2] != said[1] and [own["step"] for _, own in said] == [3, 3, 3]


def test_routes_of_a_waiting_batch_keep_what_a_mask_hid(tmp_path):
    """A resumed run writes them as the run does that was never stopped."""
    state = small_state(tmp_path, 1, 1.0)
    routes, tokens, mask = state.waiting[0].routes, torch.tensor([[5, 6]]), torch.tensor([[False, True]])
    state.waiting[0] = replace(state.waiting[0], routes=routes._with(routes.packed, hide(tokens, mask)))
    save_checkpoint(state)
    path = tmp_path / "checkpoint" / "batch_0_routes.safetensors"
    written, again = load_file(path), small_state(tmp_path, 0, 0.0)
    load_checkpoint(again)
    assert torch.equal(again.waiting[0].routes.attended, mask)
    save_checkpoint(again)
    assert {name: part.tolist() for name, part in load_file(path).items()} == {
        name: part.tolist() for name, part in written.items()
    }


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


def test_a_tokenizer_of_several_chat_templates_is_kept_whole(state_of, tmp_path):
    """transformers puts all but the first into a folder of their own."""
    from transformers import AutoTokenizer

    state = state_of(MICRO, tmp_path)
    state.tokenizer.chat_template = templates = {"default": "{{ messages }}", "tool_use": "tools {{ messages }}"}
    save_checkpoint(state)
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint").chat_template == templates
    load_checkpoint(state)
    (other,) = (tmp_path / "checkpoint").glob("*/tool_use.jinja")
    other.write_text("another")
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja is damaged"):
        load_checkpoint(state)


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
