"""moe-rl drift on LoRA adapters, as PEFT, TRL and ms-swift write them: the numbers of the merged model."""

import importlib.util
import json
import re
import shutil

import pytest
import torch
from drift_models import build, compared, refused, save
from safetensors.torch import load_file, save_file

from moe_rl.cli import main
from moe_rl.drift.adapters import Source, resolve
from moe_rl.drift.errors import DriftError
from moe_rl.policy import lora as policy_lora
from moe_rl.policy.tiny import ModelError

peft = pytest.importorskip("peft")

MEASURED = ("change", "gate_swap", "decomposition", "kl", "replay_effect_var", "overdispersion", "measured_tokens")
ROUTERS = {"whole": {"modules_to_save": ["gate"]}, "lora": {"target_parameters": ["mlp.gate.weight"]}}


def adapted(base, model, seed=1, std=0.3, **settings):
    """A policy whose adapters, and trained copies, are far from where training begins."""
    config = peft.LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    policy = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += std * torch.randn(parameter.shape, generator=generator)
    policy.peft_config["default"].base_model_name_or_path = str(base)
    return policy


@pytest.fixture(scope="module")
def lora(tmp_path_factory, tokenizer, saved):
    """Adapters by what trains the routers, each beside the same merged by PEFT."""
    root, (base, _) = tmp_path_factory.mktemp("lora"), saved("qwen3_moe")
    found = {}
    for name, routers in ROUTERS.items():
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", *routers.get("target_parameters", [])]
        settings = {"target_modules": ["q_proj", "v_proj"], **routers, "target_parameters": experts}
        policy = adapted(base, build("qwen3_moe", tokenizer), **settings)
        policy.save_pretrained(root / name)
        found[name] = root / name, save(policy.merge_and_unload(), tokenizer, root / f"{name}_merged")
    return found


@pytest.mark.parametrize("routers", ROUTERS)
def test_the_numbers_are_those_of_the_merged_model(routers, lora, saved, prompts, tmp_path, undrawn):
    base, _ = saved("qwen3_moe")
    adapters, merged = lora[routers]
    expected = compared(tmp_path / "a", prompts, base, merged)
    found = compared(tmp_path / "b", prompts, base, adapters)
    assert {name: found[name] for name in MEASURED} == {name: expected[name] for name in MEASURED}, "bit for bit"
    assert found["adapters"] == {"NEW": str(base)} and expected["adapters"] == {}
    swap = found["gate_swap"]
    assert swap["routers"]["slot"]["changed"] > 0 < swap["body"]["slot"]["changed"], "trained routers are not lost"
    same = compared(tmp_path / "c", prompts, adapters, merged, one_at_a_time=True)
    assert same["change"]["slot"]["changed"] == 0 == same["kl"]["k3_natural"]


def test_a_trainers_folder_of_adapters_is_a_series_after_its_model(
    lora, saved, prompts, tmp_path, tokenizer, undrawn, capsys
):
    base, _ = saved("qwen3_moe")
    for step, (adapters, _) in zip((9, 10), lora.values(), strict=True):
        policy = peft.PeftModel.from_pretrained(build("qwen3_moe", tokenizer), str(adapters))
        policy.peft_config["default"].base_model_name_or_path = "/where/it/was/trained"
        policy.save_pretrained(tmp_path / "out" / f"checkpoint-{step}")
        tokenizer.save_pretrained(tmp_path / "out" / f"checkpoint-{step}")
    common = ["--prompts", prompts, "--floor-sequences", "0", "--no-gate-swap", "--output", tmp_path / "s"]
    error = refused(capsys, "drift", base, tmp_path / "out", *common)
    assert re.search(r"checkpoint 2 \(checkpoint-9\): .* adapters of /where/it/was/trained, which is neither", error)
    assert "drift --base MODEL" in error and not (tmp_path / "s").exists()
    main(["drift", *map(str, (base, tmp_path / "out", *common, "--base", base))])
    said = f"Adapters: checkpoint 2 (checkpoint-9), checkpoint 3 (checkpoint-10) merged into {base}, in float32."
    assert said in capsys.readouterr().out and said in (tmp_path / "s" / "report.html").read_text()
    rows = json.loads((tmp_path / "s" / "series.json").read_text())["rows"]
    for row, (_, merged) in zip(rows[1:], lora.values(), strict=True):
        pair = compared(tmp_path / row["name"], prompts, base, merged, per_site=False)
        assert row["change"]["slot"]["changed"] == pair["change"]["slot"]["changed"] > 0
    common[-1] = tmp_path / "other"
    error = refused(capsys, "drift", base, lora["whole"][1], *common, "--base", base)
    assert "--base: no folder of LoRA adapters" in error


def test_adapters_that_are_not_what_they_seem_are_refused(
    lora, saved, prompts, tmp_path, tokenizer, capsys, monkeypatch
):
    base, _ = saved("qwen3_moe")
    tied = save(build("qwen3_moe", tokenizer, tie_word_embeddings=True), tokenizer, tmp_path / "tied")
    policy = adapted(
        tied, build("qwen3_moe", tokenizer, tie_word_embeddings=True), target_modules=["q_proj", "lm_head"]
    )
    policy.save_pretrained(tmp_path / "head")
    both = save(build("qwen3_moe", tokenizer), None, tmp_path / "both")
    (both / "adapter_config.json").write_text("{}")
    partial = tmp_path / "partial"
    peft.PeftModel.from_pretrained(build("qwen3_moe", tokenizer), str(lora["whole"][0])).save_pretrained(partial)
    config = json.loads((partial / "adapter_config.json").read_text())
    (partial / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    tensors = load_file(partial / "adapter_model.safetensors")
    first = next(name for name in tensors if "gate" in name)
    save_file({name: one for name, one in tensors.items() if name != first}, partial / "adapter_model.safetensors")
    odd = tmp_path / "odd"
    shutil.copytree(lora["whole"][0], odd)
    (odd / "adapter_config.json").write_text(
        json.dumps(config | {"rank_pattern": [1], "base_model_name_or_path": str(base)})
    )
    for old, new, message in (
        (tied, tmp_path / "head", r"NEW: .*head cannot be merged into .*lm_head.* in two places \(tied\)"),
        (base, odd, "NEW: .*odd does not fit .*: AttributeError"),
        (base, both, "NEW: .*both holds a model and LoRA adapters"),
        (base, partial, "NEW: .*partial does not fit .*: KeyError: .*layers.0.mlp.gate.weight"),
    ):
        error = refused(capsys, "drift", old, new, "--prompts", prompts, "--output", tmp_path / "out")
        assert re.search(message, error) and not (tmp_path / "out").exists(), error
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    error = refused(capsys, "drift", base, lora["whole"][0], "--prompts", prompts)
    assert "the peft package is not installed. pip install '.[peft]' in the checkout" in error


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"lora_bias": True}, "base layer has no bias"), ({"alora_invocation_tokens": [3]}, "not support safe merging")],
)
def test_what_peft_does_not_merge_is_refused(settings, said, tokenizer):
    policy = adapted("base", build("qwen3_moe", tokenizer), target_modules=["q_proj"], **settings)
    with pytest.raises(ModelError, match=f"PEFT's merge_and_unload refuses: .*{said}"):
        policy_lora.merged(policy)


def test_a_model_that_only_the_adapters_name_is_not_fetched(lora, tmp_path, monkeypatch):
    """A hub model comes from what is downloaded, in the revision that the adapters were trained on."""
    from moe_rl.drift import adapters

    asked = []

    def cached(name, file, **how):
        asked.append((name, how))
        return str(tmp_path / "snapshot" / file)

    folder = tmp_path / "hub"
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "o/name", "revision": "abc"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({}, folder / "adapter_model.safetensors")
    monkeypatch.setattr(adapters, "cached_file", cached)
    assert resolve("NEW", str(folder)) == Source(str(tmp_path / "snapshot"), folder)
    assert asked == [("o/name", {"revision": "abc", "local_files_only": True})]
    assert resolve("NEW", str(folder), "o/other") == Source("o/other", folder), "what the user names may be"
    with pytest.raises(DriftError, match=r"are of revision abc of o/name\. Download it"):
        resolve("NEW", str(folder), "o/name")
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "peft_type": "XLORA"}))
    with pytest.raises(DriftError, match="adapters of the kind 'XLORA'"):  # PEFT fetches the adapters that it names
        resolve("NEW", str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(DriftError, match=r"NEW: .*adapter_model\.safetensors is damaged"):
        resolve("NEW", str(folder))
