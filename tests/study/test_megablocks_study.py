"""A study file that names MegaBlocks: refused where its kernels are not; its plain-torch twin runs end to end."""

import json

import pytest
import torch
import yaml

from moe_rl.cli import main
from moe_rl.routing import experts
from moe_rl.routing.errors import UnsupportedExpertsError
from moe_rl.routing.experts import check_megablocks

TINY = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_experts": 6, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"experts_implementation": "megablocks", "dtype": "bfloat16"}},
        {"rollout": {"engine": {"kind": "hf", "experts_implementation": "megablocks"}}},
    ],
)
def test_kernels_that_are_not_here_are_refused_before_anything_is_written(changes, capsys, tmp_path, monkeypatch):
    """An arm after the first, so that every arm is looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    study = {"name": "kernels", "question": "?", "seeds": [0], "base": {"model": {"device": "cpu"}}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study | {"arms": {"plain": {}, "kernels": changes}}))
    for command in (["run", "study.yaml", "--arm", "kernels"], ["study", "study.yaml"], ["doctor", "study.yaml"]):
        with pytest.raises(SystemExit) as stop:
            main(command)
        said = capsys.readouterr()
        assert stop.value.code == 1, command
        assert "experts_implementation: megablocks needs a CUDA device (device is 'cpu')" in said.out + said.err
        assert "megablocks_reference runs the same" in said.out + said.err
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": {"experts_implementation": "megablox"}}, "model"),
        ({"rollout": {"engine": {"kind": "hf", "experts_implementation": "megablox"}}}, "rollout.engine"),
    ],
)
def test_an_implementation_that_nobody_knows_is_refused_before_anything_is_written(
    changes, field, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    study = {"name": "typo", "question": "?", "seeds": [0], "arms": {"a": changes}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    with pytest.raises(SystemExit) as stop:
        main(["study", "study.yaml"])
    said = capsys.readouterr().err
    assert stop.value.code == 1
    assert f"{field}.experts_implementation: expected one of batched_mm, " in said and "got 'megablox'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["study.yaml"]


def test_all_that_megablocks_lacks_is_one_message(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    missing = ImportError("no megablocks_ops")
    monkeypatch.setattr("moe_rl.routing.experts._megablocks_backend", lambda: (_ for _ in ()).throw(missing))
    with pytest.raises(UnsupportedExpertsError, match=r"a CUDA device \(there is none here\), bfloat16 .*no mega"):
        check_megablocks(torch.float32, "auto")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("moe_rl.routing.experts._megablocks_backend", lambda: None)
    check_megablocks(torch.bfloat16, "auto")
    with pytest.raises(UnsupportedExpertsError, match=r"needs bfloat16 \(dtype is float32\)\."):
        check_megablocks(torch.float32, "cuda")


def test_the_plain_torch_twin_trains_as_the_default_does(tmp_path, monkeypatch, capsys):
    """Recording, replay and updates through a study file; in fp32 the two differ by rounding alone."""
    monkeypatch.chdir(tmp_path)
    base = {
        "model": {"device": "cpu", "tiny": TINY, "cold_start": None},
        "task": {"name": "mod_chain", "options": {"steps": 1}},
        "method": {"objective": "sft", "replay": "R2"},
        "rollout": {"prompts": 4, "group_size": 2},
        "optim": {"steps": 2, "num_minibatches": 2, "learning_rate": 0.01, "warmup_updates": 2},
        "eval": {"prompts": 4},
        "probe": {"sequences": 4, "tokens_every": 0, "floor": False},
    }
    arms = {"default": {}, "twin": {"model": {"experts_implementation": "megablocks_reference"}}}
    study = {"name": "kernels", "question": "?", "seeds": [0], "base": base, "arms": arms}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    calls, dropless = [], experts.dropless_experts
    monkeypatch.setattr(experts, "dropless_experts", lambda *args: calls.append(1) or dropless(*args))
    found = {}
    for arm in arms:
        main(["run", "study.yaml", "--arm", arm, "--output", arm])
        lines = (tmp_path / arm / "metrics.jsonl").read_text().splitlines()
        assert bool(calls) == (arm == "twin")
        found[arm] = [row for row in map(json.loads, lines) if row["kind"] == "update"]
    assert len(found["twin"]) == 4
    for twin, default in zip(found["twin"], found["default"], strict=True):
        assert twin["replayed_rows"] == default["replayed_rows"] > 0
        for key in ("loss", "grad_norm", "var_token", "entropy"):
            if key in default:
                assert twin[key] == pytest.approx(default[key], rel=1e-4, abs=1e-7), key
    assert "megablocks_reference" in (tmp_path / "twin" / "config.yaml").read_text()
