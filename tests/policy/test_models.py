"""Models by path: local folders, the hub, and what each wrong one is told."""

import json
import os
import re
import shutil
import socket
import threading
from dataclasses import replace

import pytest
import torch
from policy_helpers import CONFIG, SMALL, TASK, TOKENIZER, equal, truncate
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from moe_rl.measure.randomness import random_parts
from moe_rl.policy.models import ModelConfig, all_finite, load_policy
from moe_rl.policy.tiny import ModelError, build_tiny
from moe_rl.routing import RoutingError
from moe_rl.routing.others import sites_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny(SMALL, TOKENIZER).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def load(path, **options):
    return load_policy(ModelConfig(path=str(path), **options), TASK)


def test_a_local_folder(saved, monkeypatch):
    model, tokenizer = load(saved)
    assert equal(model, build_tiny(SMALL, TOKENIZER)) and tokenizer.padding_side == "left"
    monkeypatch.chdir(saved.parent)
    assert equal(load("tiny")[0], model)
    monkeypatch.setenv("HOME", str(saved.parent))
    assert equal(load("~/tiny")[0], model)
    assert load(saved, dtype="bfloat16")[0].dtype == torch.bfloat16


def test_the_tiny_model_in_bf16_is_the_same_after_it_was_saved_and_loaded(tmp_path):
    """Rotary frequencies are in fp32 in both; in bf16 they turn late positions otherwise."""
    options = {"dtype": "bfloat16", "experts_implementation": "eager"}
    config = ModelConfig(tiny=replace(SMALL, max_position_embeddings=512), cold_start=None, **options)
    model, tokenizer = load_policy(config, TASK)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = torch.randint(len(tokenizer), (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, load(tmp_path, **options)[0](ids).logits)


def test_dropout_is_off_and_said(copied):
    """Else the ratio of the policy to itself would not be 1."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    with pytest.warns(UserWarning, match=r"2 places, first model.layers.0.self_attn.attention_dropout = 0.5"):
        model = load(copied)[0].train()
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert not list(random_parts(model))


def test_a_tokenizer_without_padding_gets_some(copied):
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(copied)[1].pad_token_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize("path", ["no/such/folder", "./none", "none", "/none", "~/none"])
def test_a_folder_that_is_not_there(path):
    with pytest.raises(ModelError, match=r"model.path: there is no folder /"):
        load(path)


def test_an_empty_path_is_not_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"model\.path: '' names no model"):
        load("")


def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(monkeypatch, tmp_path):
    """transformers would ask for each file six times more, in 23 seconds."""
    from huggingface_hub import constants

    asked = []

    def hang_up():
        while True:
            try:
                connection, address = hub.accept()
            except OSError:  # closed: the test is over
                return
            asked.append(address)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as hub:
        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/{revision}/{filename}")
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelError) as refused:
            load("nobody/nothing")
        first = len(asked)
        with pytest.raises(RoutingError, match=r"^nobody/nothing: no configuration of a model there"):
            sites_of("nobody/nothing")
    assert first <= 2 and len(asked) <= 4, "a connection that breaks off is made once more"
    assert str(refused.value).startswith(
        f"model.path: cannot load nobody/nothing; there is no folder {tmp_path}/nobody/nothing, so it was taken for a "
        f"hub id, which is not among the downloaded models ({constants.HF_HUB_CACHE}), and {endpoint} does not answer ("
    )


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"holds no model \(no config.json\)$"):
        load(tmp_path)
    for name in ("seed10", "seed2"):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
        (tmp_path / name / "checkpoint" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"but runs, of which one has to be named: seed2, seed10$"):
        load(tmp_path)


def test_a_model_with_adapters_beside_it_is_not_loaded_with_them(copied):
    """transformers puts them on: a run trained other names of weights, and its checkpoint was read as a LoRA run's."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    peft.get_peft_model(build_tiny(SMALL, TOKENIZER), adapters).save_pretrained(copied)
    with pytest.raises(ModelError, match=r"holds LoRA adapters, .* merge them .* move adapter_config\.json away"):
        load(copied)
    (copied / "adapter_config.json").unlink()
    assert equal(load(copied)[0], build_tiny(SMALL, TOKENIZER))


def test_damaged_weights(copied):
    truncate(copied / "model.safetensors")
    with pytest.raises(ModelError, match=rf"model.path: cannot load {copied}: {copied}/model.safetensors is damaged"):
        load(copied)


def test_weights_that_do_not_fit_the_config(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"does not fit its config: missing keys \['model.layers.2"):
        load(copied)
    (copied / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 12}))
    with pytest.raises(ModelError, match=r"model.path: .*(mismatch|shape|size)"):
        load(copied)


@pytest.mark.parametrize("bad", ["gate.weight", "e_score_correction_bias"])
def test_weights_and_balancing_biases_that_are_not_finite_are_refused(tmp_path, bad):
    model = build_tiny(replace(SMALL, family="minimax_m2"), TOKENIZER)
    place = f"model.layers.0.mlp.{bad}"
    model.state_dict()[place][0] = float("nan")
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"1 tensors hold values that are not finite, first {place}"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_weights_of_few_bits_are_looked_at_too(dtype):
    assert all_finite(torch.ones(2).to(dtype)) and not all_finite(torch.tensor([1, float("nan")]).to(dtype))


def test_a_missing_tokenizer(copied):
    for file in copied.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        load(copied)


def test_a_dense_model(tmp_path):
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is no Mixture-of-Experts to study: .*Llama"):
        load(tmp_path)


def test_not_a_causal_language_model(tmp_path):
    config = T5Config(vocab_size=len(TOKENIZER), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model.path: cannot load .*T5Config"):
        load(tmp_path)


def test_an_unknown_dtype():
    with pytest.raises(ModelError, match=r"model.dtype: expected one of float32, bfloat16, float16, got 'fp8'"):
        load_policy(replace(CONFIG, dtype="fp8"), TASK)


def test_the_file_of_the_weights_that_cannot_be_read_is_named(copied):
    build_tiny(SMALL, TOKENIZER).save_pretrained(copied / "parts", max_shard_size="10KB")
    parts = sorted((copied / "parts").glob("model-*.safetensors"))
    assert len(parts) > 1
    truncate(parts[1])
    with pytest.raises(ModelError, match=rf"model\.path: cannot load .*: {re.escape(str(parts[1]))} is damaged \("):
        load(copied / "parts")
    file = copied / "model.safetensors"
    file.chmod(0)
    if not os.access(file, os.R_OK):  # root may read it all the same
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read \(Permission denied\)"):
            load(copied)
