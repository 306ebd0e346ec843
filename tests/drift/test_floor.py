"""moe-rl floor, as a person calls it."""

import io
import json
import re
import sys

import pandas as pd
import pytest
import torch
from drift_models import Gone, build, refused, save, stands_alone
from pretended_cuda import pretended_cuda
from safetensors.torch import load_file, save_file

from moe_rl.cli import VERBS, main
from moe_rl.drift import floor_run
from moe_rl.drift.floor_page import say, verdict
from moe_rl.drift.floor_run import run_floor
from moe_rl.drift.options import FloorOptions
from moe_rl.drift.output import Screen
from moe_rl.measure.arithmetic import compare
from moe_rl.policy.lora import LoraConfig, add_lora

TEXTS = [("abc=", "def+a"), ("ghij+a=", "aa bb"), ("aa ", "cc dd j=i+h"), ("j=", "i+h fedcba")]


@pytest.fixture(scope="module")
def granite(tmp_path_factory, tokenizer):
    model = build("granitemoe", tokenizer, intermediate_size=16)
    return save(model, tokenizer, tmp_path_factory.mktemp("granite") / "tiny")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in TEXTS))
    return path


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(floor_run, "draw", lambda *_: None)
    monkeypatch.setattr(floor_run, "render", lambda *_: "")


def test_a_granite_is_measured_in_every_dtype_and_said_in_a_sentence(granite, prompts, tmp_path, capsys):
    output = tmp_path / "out"
    main(["floor", str(granite), "--prompts", str(prompts), "--output", str(output), "--batch-size", "2"])
    said = capsys.readouterr().out
    results = json.loads((output / "floor.json").read_text())
    rows = {(row["dtype"], row["variant"]): row for row in results["rows"]}
    layouts = ["repeat", "batch_1", "batch_1_unpadded", "padding_left", "padding_right", "decode", "experts_eager"]
    own = [(dtype, name) for dtype in ("float32", "bfloat16", "float16") for name in layouts]
    assert set(rows) == {*own, ("bfloat16", "dtype"), ("float16", "dtype")} and results["left_out"] == []
    assert results["complete"] is True and results["sequences"] == 4 and results["architecture"] == "granitemoe"
    measured = sum(len(b) for _, b in TEXTS)
    assert results["measured_tokens"] == rows["float32", "repeat"]["measured"] == measured
    assert all(rows["float32", name]["slots_changed"] == 0 for name in layouts)
    assert rows["bfloat16", "dtype"]["gap_mean"] > rows["float16", "dtype"]["gap_mean"] > 0, "8 and 11 bits"
    assert said.replace("\n", " ").startswith("At equal weights, arithmetic alone takes the ratio outside [0.9, 1.1]")
    assert "in float32" in results["verdict"] and str(output / "report.html") in said
    table = pd.read_csv(output / "floor.csv")
    assert len(table) == len(rows) and table["slots"].eq(4 * table["tokens"]).all(), "2 sites, K = 2"
    left = table[table["variant"] == "padding_left"]
    assert (left["tokens"] < measured).all(), "batches without padding are not compared"
    sites = pd.read_csv(output / "sites.csv")
    changed = sites.groupby(["dtype", "variant"])["slots_changed"].sum()
    assert all(changed[key] == row["slots_changed"] for key, row in rows.items())
    page = (output / "report.html").read_text()
    assert results["verdict"] in page and stands_alone(page, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.jsonl"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_without_float64_is_measured_whole(granite, prompts, tmp_path, undrawn):
    """As Apple's (`--device mps`): sums are taken on the CPU."""
    options = FloorOptions(str(granite), prompts, tmp_path / "out", dtypes=("float32",), device="cuda")
    with pretended_cuda(float64=False):
        results = json.loads((run_floor(options) / "floor.json").read_text())
    assert results["left_out"] == [] and {row["variant"] for row in results["rows"]} >= {"decode", "padding_left"}


def test_adapters_are_compared_with_themselves_merged(granite, prompts, tmp_path, tokenizer, undrawn, capsys):
    import torch

    policy = add_lora(build("granitemoe", tokenizer, intermediate_size=16), LoraConfig(rank=2))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    policy.peft_config["default"].base_model_name_or_path = str(granite)
    policy.save_pretrained(tmp_path / "adapters")
    common = ["--prompts", str(prompts), "--dtypes", "float32", "bfloat16", "--experts", "eager", "--json"]
    main(["floor", str(tmp_path / "adapters"), *common, "--output", str(tmp_path / "a")])
    results = json.loads(capsys.readouterr().out)
    rows = {(row["dtype"], row["variant"]): row for row in results["rows"]}
    assert rows["float32", "merged"]["gap_max"] < 1e-4 < rows["bfloat16", "merged"]["gap_max"]
    assert rows["float32", "merged"]["slots_changed"] == 0 and results["adapter"] == str(tmp_path / "adapters")
    bare = run_floor(FloorOptions(str(granite), prompts, tmp_path / "b", ("float32",)))
    plain = json.loads((bare / "floor.json").read_text())
    assert "merged" not in {row["variant"] for row in plain["rows"]}
    error = refused(capsys, "floor", granite, "--prompts", prompts, "--adapter", granite)
    assert "--adapter: " in error and "holds no LoRA adapters" in error
    weights = tmp_path / "adapters" / "adapter_model.safetensors"
    tensors = load_file(weights)
    first, tensor = next(iter(tensors.items()))
    elsewhere = first.replace("layers.", "blocks.", 1)
    for given, said in (
        (tensors | {elsewhere: tensor.clone()}, "has no place for 1 tensors, first .*blocks"),
        ({name: one for name, one in tensors.items() if name != first}, "is not given 1 tensors, first "),
    ):
        save_file(given, weights)
        assert re.search(said, refused(capsys, "floor", str(tmp_path / "adapters"), "--prompts", prompts))
    weights.write_bytes(weights.read_bytes()[:-9])
    assert "safetensors is damaged" in refused(capsys, "floor", tmp_path / "adapters", "--prompts", prompts)


def test_what_was_measured_before_an_interruption_is_kept(granite, prompts, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "floor.json").write_text("{}")

    def stops(model, texts, reference, variant, **options):
        if variant == "batch_1_unpadded":
            raise KeyboardInterrupt
        return compare(model, texts, reference, variant, **options)

    monkeypatch.setattr(floor_run, "compare", stops)
    error = refused(capsys, "floor", granite, "--prompts", prompts, "--output", tmp_path / "out", status=130)
    assert "OUTPUT.partial" in error and (tmp_path / "out" / "floor.json").read_text() == "{}", "an earlier one stays"
    results = json.loads((tmp_path / "out.partial" / "floor.json").read_text())
    assert results["complete"] is False and [row["variant"] for row in results["rows"]] == ["repeat", "batch_1"]
    assert len(pd.read_csv(tmp_path / "out.partial" / "floor.csv")) == 2


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_a_reader_that_has_gone_is_known_as_such(json_too, granite, prompts, tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Gone())
    options = ["--output", str(tmp_path / "out"), "--dtypes", "float32", "--experts", "eager", *json_too]
    with pytest.raises(BrokenPipeError):
        VERBS["floor"]([str(granite), "--prompts", str(prompts), *options])
    assert (tmp_path / "out" / "floor.json").exists()


def test_a_dtype_that_cannot_run_is_left_out_with_the_reason(prompts, tmp_path, tokenizer, undrawn):
    """Experts of 12 inner units have rows of 24 bytes in bf16, and grouped_mm wants multiples of 16."""
    odd = save(build("qwen3_moe", tokenizer), tokenizer, tmp_path / "odd")
    options = FloorOptions(str(odd), prompts, tmp_path / "out", ("float32", "bfloat16"), decode_tokens=0)
    results = json.loads((run_floor(options) / "floor.json").read_text())
    assert {row["dtype"] for row in results["rows"]} == {"float32"}
    (left,) = results["left_out"]
    assert left["dtype"] == "bfloat16" and "--experts-implementation eager" in left["reason"]


def test_a_reason_is_printed_as_it_is_with_all_brackets():
    reason = "[enforce fail at alloc_cpu.cpp:117] no memory [/end]"
    text = {"kinds": {"texts": 1}, "temperature": 1.0, "of_old": None, "sampled_from": None}
    left_out = [{"dtype": "float32", "variant": "decode", "reason": reason}]
    console = Screen(file=io.StringIO(), width=160)
    say({"verdict": "Verdict.", "text": text, "model": "m", "rows": [], "left_out": left_out}, console)
    assert f"not measured: float32 decode: {reason}\n" in console.file.getvalue()


def test_the_text_is_that_of_the_examples_used(granite, prompts, tmp_path, undrawn):
    prompts.write_text(prompts.read_text() + '{"text": "abc"}\n')
    options = FloorOptions(
        str(granite), prompts, tmp_path / "out", ("float32",), sequences=3, decode_tokens=0, experts=("eager",)
    )
    results = json.loads((run_floor(options) / "floor.json").read_text())
    assert results["text"]["kinds"] == {"completions": 3} and results["sequences"] == 3 and results["examples"] == 5


def test_the_verdict_names_the_worst_variant_of_each_dtype_and_no_other_dtype():
    def row(dtype, variant, outside, mean, changed=1, **more):
        results = {"slot_change": 0.02, "token_change": 0.1, "tokens_changed": changed, "gap_max": mean}
        shares = {"outside_fraction": outside, "gap_mean": mean, "routing_share_gap_mean": 0.6}
        return {"dtype": dtype, "variant": variant, "detail": "float32 and x", **results, **shares, **more}

    rows = [
        row("float32", "repeat", 0.0, 0.0),
        row("bfloat16", "batch_1", 0.1369, 0.05),
        row("bfloat16", "decode", 0.1, 0.5),
        row("bfloat16", "dtype", 0.9, 0.9),
        row("float16", "padding_left", 0.0, 0.001, changed=0),
    ]
    assert verdict(rows) == (
        "At equal weights, arithmetic alone takes the ratio outside [0.9, 1.1] for this share of tokens: "
        "0 % in float32 (every variant bit-exact), "
        "13.7 % in bfloat16 (batch 1; 2 % of slots and 10 % of tokens re-routed; routing makes 60 % of the mean gap) "
        "and 0 % in float16 (padding left; no route changed)."
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--prompts": "nowhere.jsonl"}, "there is no file nowhere.jsonl"),
        ({"--dtypes": "float8"}, "--dtypes: unknown 'float8'"),
        ({"--dtypes": "float32 float32"}, "--dtypes: one of float32 float32 is named twice"),
        ({"--experts": "nonsense"}, "--experts: expected one of "),
        ({"--experts": "eager eager"}, "--experts: one of eager eager is named twice"),
        ({"--batch-size": "0"}, "--batch-size: at least 1, got 0"),
        ({"--max-tokens": "65"}, "--max-tokens: 65 are more than the model's 64 positions"),
        ({"--max-tokens": "2"}, "no token to measure: 4 of 4 examples are empty.* fills the 2 tokens .* 64 positions"),
        ({"--experts-implementation": "fastest"}, "error: --experts-implementation: expected .*'fastest'"),
        ({"model": "nowhere"}, "MODEL: there is no folder"),
        ({"model": "dense"}, "MODEL: .*dense is no Mixture-of-Experts"),
        ({"model": "bare"}, "MODEL: .*bare has no usable tokenizer.*--tokenizer PATH"),
        ({"empty": True}, "holds no examples"),
    ],
)
def test_bad_input_is_one_message_and_nothing_written(change, message, granite, prompts, tmp_path, tokenizer, capsys):
    change = dict(change)
    model = change.pop("model", granite)
    if model == "dense":
        model = save(build("llama", tokenizer), tokenizer, tmp_path / "dense")
    elif model == "bare":
        model = save(build("qwen3_moe", tokenizer), None, tmp_path / "bare")
    if change.pop("empty", False):
        prompts.write_text("\n\n")
    options = {"--prompts": prompts, "--output": tmp_path / "out", **change}
    error = refused(
        capsys, "floor", model, *(word for pair in options.items() for part in pair for word in str(part).split())
    )
    assert re.search(message, error), error
    assert error.count("moe-rl: error") == 1 and "Traceback" not in error
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
