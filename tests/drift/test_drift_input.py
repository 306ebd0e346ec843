"""moe-rl drift names what is wrong with its input, in one message, and writes nothing."""

import copy
import json
import re
import shutil

import pytest
import torch
from drift_models import ALPHABET, build, refused, save
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DbrxConfig, DbrxForCausalLM

from moe_rl.checks import unreadable_weights
from moe_rl.cli import main
from moe_rl.drift import checkpoints, passes, series
from moe_rl.drift.adapters import Source
from moe_rl.drift.checkpoints import _check_weights, _settings, check, check_device, fingerprint, in_order
from moe_rl.drift.errors import DriftError
from moe_rl.drift.prompts import Text
from moe_rl.drift.run import DriftOptions, run_drift
from moe_rl.measure import decompose
from moe_rl.policy.tiny import char_tokenizer


def results_of(folder):
    return json.loads((folder / "drift.json").read_text())


@pytest.fixture(scope="module")
def odd(tmp_path_factory, tokenizer, saved):
    """Checkpoints that do not go with the pair of qwen3_moe, by what is wrong with them."""
    folder = tmp_path_factory.mktemp("odd")
    model = build("qwen3_moe", tokenizer)
    (folder / "empty").mkdir()
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text("{}")

    def spoiled(value):
        other = build("qwen3_moe", tokenizer)
        with torch.no_grad():
            other.lm_head.weight[3] = value
        return other

    return {
        "no tokenizer": save(model, None, folder / "no_tokenizer"),
        "other tokenizer": save(model, char_tokenizer(ALPHABET.replace("a", "z")), folder / "other_tokenizer"),
        "other experts": save(build("qwen3_moe", tokenizer, experts=8), tokenizer, folder / "experts"),
        "other k": save(build("qwen3_moe", tokenizer, num_experts_per_tok=3), tokenizer, folder / "k"),
        "other heads": save(build("qwen3_moe", tokenizer, num_key_value_heads=1), tokenizer, folder / "heads"),
        "other family": saved("olmoe")[0],
        "nan": save(spoiled(float("nan")), tokenizer, folder / "nan"),
        "overflow": save(spoiled(3e38), tokenizer, folder / "overflow"),
        "dense": save(build("llama", tokenizer), tokenizer, folder / "dense"),
        "missing": folder / "missing",
        "empty": folder / "empty",
        "adapters": folder / "adapters",
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("no tokenizer", "NEW: .*no_tokenizer has no usable tokenizer.*--tokenizer PATH"),
        ("other tokenizer", r"two tokenizers: \d+ tokens differ, the first is"),
        ("other experts", "num_experts is 6 in OLD and 8 in NEW"),
        ("other k", "num_experts_per_tok is 2 in OLD and 3 in NEW"),
        ("other heads", r"k_proj.weight is \(16, 16\) in OLD and \(8, 16\) in NEW"),
        ("other family", "OLD is Qwen3MoeForCausalLM, NEW is OlmoeForCausalLM"),
        ("nan", "NEW: .*nan: 1 tensors hold values that are not finite, first lm_head.weight"),
        ("overflow", "NEW: log-probabilities of 6 of 6 texts of a batch are not finite"),
        ("dense", "NEW: .*dense is no Mixture-of-Experts"),
        ("missing", "NEW: there is no folder .*missing"),
        ("empty", r"NEW: .*empty holds no model \(no config.json\)\n"),
        ("adapters", r"NEW: .*adapters has no adapter_model.safetensors \(pickled adapters are not read\)"),
    ],
)
def test_a_pair_that_does_not_go_together_is_one_message_and_nothing_written(
    wrong, message, odd, saved, prompts, tmp_path, capsys
):
    old, _ = saved("qwen3_moe")
    error = refused(capsys, "drift", old, odd[wrong], "--prompts", prompts, "--output", tmp_path / "out")
    assert re.search(message, error), error
    assert error.count("moe-rl: error") == 1 and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jsonl"]


def test_forced_routes_that_overflow_are_refused(saved, prompts, tmp_path, capsys, monkeypatch):
    """As where an expert that the router of NEW no longer chooses has diverged."""
    old, new = saved("qwen3_moe")
    (tmp_path / "third").symlink_to(new)
    for module in (decompose, passes, series):
        monkeypatch.setattr(module, "score_replayed", lambda model, text, *routes: text.input_ids * float("inf"))
    for more, message in (
        (["--no-per-site"], "error: NEW with the routes of OLD: log-probabilities of 6 of 6 texts"),
        (["--no-per-site", "--one-at-a-time"], "error: NEW with the routes of OLD: log-probabilities of 6 of 6"),
        ([tmp_path / "third"], "error: checkpoint 2 with the routes of checkpoint 1: log-probabilities of 6 of 6"),
    ):
        options = ["--prompts", prompts, "--floor-sequences", "0", "--no-gate-swap", "--output", tmp_path / "out"]
        assert message in refused(capsys, "drift", old, new, *more, *options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("none", r"holds no weights \(no model.safetensors\)"),
        ("a shard", r"model-00002-of-0000\d.safetensors is missing, which model.safetensors.index.json names"),
        ("the end", "model-00002-of-.* is damaged"),
        ("an index", "model.safetensors.index.json cannot be read"),
    ],
)
def test_weights_that_are_not_there_are_told_before_a_model_is_loaded(
    wrong, message, saved, prompts, tmp_path, capsys, monkeypatch
):
    old, _ = saved("qwen3_moe")
    new = tmp_path / "new"
    AutoModelForCausalLM.from_pretrained(old).save_pretrained(new, max_shard_size="8KB")
    AutoTokenizer.from_pretrained(old).save_pretrained(new)
    assert unreadable_weights(new) == "" == unreadable_weights(tmp_path / "nowhere")
    shard = sorted(new.glob("*.safetensors"))[1]
    if wrong == "none":
        for path in new.glob("model*"):
            path.unlink()
    elif wrong == "a shard":
        shard.unlink()
    elif wrong == "the end":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (new / "model.safetensors.index.json").write_text("[]")
    monkeypatch.setattr(checkpoints, "load", None)
    options = ["--prompts", prompts, "--sample", "1", "--max-new-tokens", "2", "--output", tmp_path / "out"]
    error = refused(capsys, "drift", old, new, *options)
    assert re.search(f"NEW: the weights of {new} cannot be loaded: .*{message}", error), error
    assert not (tmp_path / "out.partial").exists()


def test_weights_on_the_hub_are_asked_for_before_a_model_is_loaded(monkeypatch):
    asked = []

    def gated(name, file, local_files_only):
        if not local_files_only:
            raise OSError(f"{name} is a gated repository.\nMake sure to request access")

    monkeypatch.setattr(checkpoints, "has_file", lambda name, file, local_files_only: asked.append(file))
    _check_weights("NEW", "o/name")  # also what a hub says that does not answer: loading tells
    assert asked[:2] == ["model.safetensors", "model.safetensors.index.json"] and len(asked) == 8
    monkeypatch.setattr(checkpoints, "has_file", lambda name, file, local_files_only: file.endswith("index.json"))
    _check_weights("NEW", "o/name")
    monkeypatch.setattr(checkpoints, "has_file", gated)
    with pytest.raises(DriftError, match=r"NEW: .*o/name is a gated repository\. Make sure"):
        _check_weights("NEW", "o/name")


def test_files_that_transformers_does_not_take_may_be_damaged(tmp_path):
    """A variant that was not downloaded, and what is left of older shards."""
    (tmp_path / "model.fp16.safetensors").write_text("version https://git-lfs")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("cut off")
    (tmp_path / "pytorch_model.bin").write_text("weights")
    assert unreadable_weights(tmp_path) == ""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert unreadable_weights(tmp_path) == ""


def test_a_chunk_of_attention_is_a_setting_and_one_of_memory_is_none():
    given = {"attention_chunk_size": 8192, "rope_parameters": {"original_max_position_embeddings": 32}}
    assert _settings({**given, "chunk_size_feed_forward": 2, "max_position_embeddings": 64}) == given


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "yarn", "longrope"])
def test_positions_are_a_setting_where_rotary_frequencies_are_made_from_them(rope_type, tokenizer):
    """Equal weights, four times as many positions: the same log-probabilities exactly if these are no setting."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4}
    if rope_type == "longrope":
        rope |= {"original_max_position_embeddings": 32, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    elif rope_type != "default":
        rope |= {"original_max_position_embeddings": 32, "factor": 4.0 if rope_type == "dynamic" else None}
    fewer, more = (
        build("qwen3_moe", tokenizer, max_position_embeddings=positions, rope_parameters=dict(rope)).eval()
        for positions in (64, 256)
    )
    ids = torch.arange(100)[None] % len(tokenizer)
    with torch.no_grad():
        alike = torch.equal(fewer(ids).logits, more(ids).logits)
    assert alike == (rope_type == "default") == (fingerprint(fewer) == fingerprint(more))


def test_a_kind_of_gate_is_a_setting_and_what_is_returned_is_none():
    assert _settings({"output_gate_type": "silu", "output_router_logits": True}) == {"output_gate_type": "silu"}


def test_names_of_checkpoints_may_hold_digits_that_are_no_numbers():
    assert sorted(["run-10²", "run-2²"], key=in_order) == ["run-2²", "run-10²"]


def test_settings_that_change_what_equal_weights_compute_are_named(saved, prompts, tmp_path, capsys, undrawn):
    """As a converter of checkpoints leaves them that lost a setting."""
    old, _ = saved("qwen3_moe")
    other = tmp_path / "other"
    shutil.copytree(old, other)
    config = json.loads((old / "config.json").read_text())
    assert not config["norm_topk_prob"]
    config |= {"norm_topk_prob": True, "use_cache": False, "transformers_version": "5.17.0"}  # two of no concern
    (other / "config.json").write_text(json.dumps(config))
    options = ["--prompts", str(prompts), "--floor-sequences", "0", "--no-per-site"]
    main(["drift", str(old), str(other), *options, "--output", str(tmp_path / "out")])
    said = "Other settings: norm_topk_prob is False in OLD and True in NEW. What that does is counted as weight"
    assert said in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "drift.json").read_text())["change"]["slot"]["changed"] > 0
    main(["drift", str(old), str(old), *options, "--output", str(tmp_path / "same")])
    assert "Other settings" not in capsys.readouterr().out


def test_settings_within_others_are_named_by_themselves_and_another_top_k_is_refused(tokenizer, tmp_path):
    """DBRX has both in `ffn_config`."""
    paths = {}
    for name, changes in {"OLD": {}, "norm": {"moe_normalize_expert_weights": None}, "K": {"moe_top_k": 3}}.items():
        ffn = {"ffn_hidden_size": 12, "moe_num_experts": 6, "moe_top_k": 2, **changes}
        config = DbrxConfig(
            d_model=16, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=len(tokenizer), ffn_config=ffn,
            attn_config={"kv_n_heads": 2, "rope_theta": 1e4},
        )  # fmt: skip
        paths[name] = Source(str(save(DbrxForCausalLM(config), tokenizer, tmp_path / name)))
    found = check({"OLD": paths["OLD"], "NEW": paths["norm"]})
    assert found.other_settings == ("ffn_config.moe_normalize_expert_weights is 1.0 in OLD and None in NEW",)
    with pytest.raises(DriftError, match="the number of experts for a token is 2 in OLD and 3 in NEW"):
        check({"OLD": paths["OLD"], "NEW": paths["K"]})


def test_a_mistyped_folder_that_could_be_a_hub_id_is_named(saved, prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    said = f"there is no folder {tmp_path}/runs/mistyped, so it was taken for a hub id"
    (tmp_path / "x.npz").write_bytes(b"")
    for words in (
        ["drift", "runs/mistyped", saved("qwen3_moe")[0], "--prompts", prompts],
        ["floor", "runs/mistyped", "--prompts", prompts],
        ["check-routes", "x.npz", "--model", "runs/mistyped"],
    ):
        assert said in refused(capsys, *words), words


def test_a_named_tokenizer_stands_in(odd, saved, prompts, tmp_path, undrawn):
    old, _ = saved("qwen3_moe")
    options = DriftOptions((str(old), str(odd["no tokenizer"])), prompts, tmp_path / "out", tokenizer=str(old))
    assert results_of(run_drift(options))["measured_tokens"] > 0


def test_a_folder_of_nothing_but_a_tokenizer_serves_and_padding_that_the_model_does_not_embed_does_no_harm(
    saved, tokenizer, prompts, tmp_path, undrawn
):
    old, new = saved("qwen3_moe")
    padded = AutoTokenizer.from_pretrained(old)
    padded.add_special_tokens({"pad_token": "<padding>"})
    assert padded.pad_token_id >= json.loads((old / "config.json").read_text())["vocab_size"]
    padded.save_pretrained(tmp_path / "alone")
    found = [
        results_of(run_drift(DriftOptions((str(old), str(new)), prompts, tmp_path / name, tokenizer=path)))
        for name, path in (("a", None), ("b", str(tmp_path / "alone")))
    ]
    assert found[0]["measured_tokens"] == found[1]["measured_tokens"] > 0
    assert found[0]["change"] == found[1]["change"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no examples"),
        ("\n\n", "holds no examples"),
        ('{"text": "ab"}\nplain text\n', "line 2 is not JSON.* plain texts, one per line, belong in a .txt"),
        ('{"text": "ab"}\n\n["ab"]\n', "line 3: a JSON list instead of an object"),
        ('{"question": "ab"}\n', r"line 1: none of the keys text, prompt and messages \('question'\)"),
        ('{"prompt": "ab", "completion": 3}\n', "line 1: completion is a int"),
        ('{"text": "ab"}\n{"text": "ab", "completion": "c"}\n', "line 2: a completion without a prompt"),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "model", "content": "b"}]}\n',
            "line 1: a completion must end with a turn of the assistant",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a"}], "completion": "c"}\n',
            "line 1: a completion after messages that end with a turn of the assistant",
        ),
        ('{"messages": []}\n', "line 1: messages must be a list"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]}\n',
            "line 1: the content of a message must be a text",
        ),
        ('{"messages": [{"role": "user", "content": "ab"}]}\n', "line 1 holds chat messages.*no chat template"),
        ('{"text": "ab"}\n{"text": "ab?"}\n', "line 2 cannot be tokenised"),
        ('{"text": "a"}\n{"text": ""}\n', "no token to measure: 2 of 2 examples"),
        ("\ufffe".encode("utf-16").decode("latin1"), "line 1 is not JSON"),
    ],
)
def test_a_prompt_file_that_cannot_be_read_names_the_line(content, message, saved, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content.encode("latin1"))
    error = refused(capsys, "drift", *saved("qwen3_moe"), "--prompts", path, "--output", tmp_path / "out")
    assert re.search(message, error), error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.jsonl"]


def test_chats_are_refused_where_the_checkpoints_write_them_differently(tmp_path, tokenizer):
    chat, text = tmp_path / "chat.jsonl", tmp_path / "text.jsonl"
    chat.write_text('{"messages": [{"role": "user", "content": "ab"}]}\n')
    text.write_text('{"text": "ab"}\n')
    folders = []
    for name, end in (("old", "="), ("new", "+"), ("like_old", "=")):
        own = copy.deepcopy(tokenizer)
        own.chat_template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
        folders.append(Source(str(save(build("qwen3_moe", tokenizer), own, tmp_path / name))))
    old, new, like_old = folders
    Text(chat, check({"OLD": old, "NEW": like_old}), 16, 2)
    differ = check({"OLD": old, "NEW": like_old, "NEWER": new})
    Text(text, differ, 16, 2)
    with pytest.raises(DriftError, match=r"chat.jsonl line 1 .*OLD and NEWER turn them into text.*--tokenizer PATH"):
        Text(chat, differ, 16, 2)
    (example,) = Text(chat, check({"OLD": old, "NEW": new}, tokenizer=new.base), 16, 2).examples()
    assert tokenizer.decode(example.ids) == "ab+"


@pytest.mark.parametrize(
    ("options", "message", "status"),
    [
        (["--device", "cuda:9"], "cuda:9 is not there; this machine has", 1),
        (["--device", "abacus"], "unknown device 'abacus'", 1),
        (["--dtype", "float8"], "unknown 'float8'; expected one of float32", 1),
        (["--batch-size", "0"], "--batch-size: at least 1, got 0", 1),
        (["--max-tokens", "1000000"], "--max-tokens: 1000000 are more than the model's", 1),
        (["--floor-sequences", "-1"], "--floor-sequences: at least 0, got -1", 1),
        (["--prompts", "nowhere.jsonl"], "there is no file nowhere.jsonl", 1),
        (["--batch-sise", "2"], "--batch-size", 2),
    ],
)
def test_options_that_cannot_be_are_named(options, message, status, saved, prompts, tmp_path, capsys):
    error = refused(
        capsys,
        "drift",
        *saved("qwen3_moe"),
        "--prompts",
        prompts,
        "--output",
        tmp_path / "out",
        *options,
        status=status,
    )
    assert message in error and not (tmp_path / "out").exists()


def test_the_default_device_is_there():
    assert check_device(None).type in ("cpu", "cuda")
    with pytest.raises(DriftError, match="mps:1 is not there"):
        check_device("mps:1")


def test_a_table_of_text_is_told_what_is_read(saved, tmp_path, capsys):
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\nab\n")
    error = refused(capsys, "drift", *saved("qwen3_moe"), "--prompts", path, "--output", tmp_path / "out")
    assert "prompts.csv: .csv is not read; write JSON lines, or a .parquet" in error
