"""moe-rl check-routes, as a person calls it: a real model, captures in every kind of file."""

import json
import re

import numpy as np
import pytest
import torch
from drift_models import FORMS, LENGTHS, captured_rows, write
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3MoeForCausalLM

from moe_rl.cli import main
from moe_rl.drift.capture_files import read_capture
from moe_rl.drift.check import checked
from moe_rl.drift.errors import DriftError
from moe_rl.drift.options import CheckOptions
from moe_rl.routing import RoutedExperts, record_routes


@pytest.mark.parametrize("form", FORMS)
def test_a_bf16_capture_is_the_models_in_every_kind_of_file(place, tmp_path, form):
    result = checked(CheckOptions(write(place, tmp_path, form), place.model))
    assert result.faults == (), result.verdict
    assert 0.5 < result.as_captured < 1, "rounding did change some"
    assert abs(result.as_captured - result.floor) < 0.02
    assert result.tokens in (sum(LENGTHS), sum(LENGTHS) - 2)
    assert [row.site for row in result.rows] == ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]


def test_the_command_says_it_in_one_sentence_and_by_its_exit_status(place, tmp_path, capsys):
    file = write(place, tmp_path, "lines")
    with pytest.raises(SystemExit) as end:
        main(["check-routes", str(file), "--model", place.model])
    out = capsys.readouterr().out
    assert end.value.code == 0 and out.startswith("These agree with the model's routes: ")
    assert "model.layers.2.mlp.gate" in out
    late = [
        {"tokens": words, "routed_experts": np.roll(ids, 1, axis=0).tolist()} for words, ids in captured_rows(place)
    ]
    file.write_text("\n".join(map(json.dumps, late)))
    with pytest.raises(SystemExit) as end:
        main(["check-routes", str(file), "--model", place.model, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert end.value.code == 1 and not said["ok"]
    assert [finding["name"] for finding in said["findings"]] == ["shifted by one token"]
    assert said["shift"] == -1 and "shifted by one token" in said["verdict"]


def test_padding_that_was_recorded_is_named_and_taken_out(place, tmp_path):
    left = torch.full((2, 50), 7)
    for b, n in enumerate(LENGTHS):
        left[b, 50 - n :] = place.ids[b, :n]
    ids = torch.zeros(2, 50, 2, 2, dtype=torch.long)
    for b, n in enumerate(LENGTHS):
        ids[b, 50 - n :] = place.routes.ids[b, :n]
    ids[:, :10] = torch.tensor([0, 1])
    ids[1, 10:22] = torch.tensor([0, 1])
    RoutedExperts(ids, place.routes.sites, 8, tokens=left).save(tmp_path / "x.safetensors")
    wrong = checked(CheckOptions(tmp_path / "x.safetensors", place.model))
    assert wrong.faults and "--pad-token-id 7" in wrong.findings[-1].text
    assert checked(CheckOptions(tmp_path / "x.safetensors", place.model, pad_token_id=7)).faults == ()


def test_long_captures_are_cut_with_their_routes(place, tmp_path):
    said = []
    options = CheckOptions(write(place, tmp_path, "lines"), place.model, max_tokens=30, max_sequences=1)
    result = checked(options, said.append)
    assert (result.sequences, result.tokens, result.faults) == (1, 30, ())
    assert said[:2] == [
        "the first 1 of 2 sequences (--max-sequences)",
        "1 sequence cut to the first 30 tokens (--max-tokens)",
    ]
    whole = [(words, ids.tolist()) for words, ids in captured_rows(place)]
    lines = [{"tokens": words, "routed_experts": rows[5:]} for words, rows in whole]
    options.file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(
        DriftError, match=rf"sequence 0 has .* which of them are of the first 30: --max-tokens {LENGTHS[0]}"
    ):
        checked(options)
    result = checked(CheckOptions(options.file, place.model))
    assert [fault.name for fault in result.faults] == ["prefix-cache hits without routes"]


def test_how_a_file_was_read_is_said_and_advice_is_of_what_it_takes(place, tmp_path):
    file = tmp_path / "x.jsonl"
    rows = [
        {
            "tokens": words + [0] * 4,
            "meta_info": {"routed_experts": np.roll(ids, 1, axis=0).tolist() + ids[:4].tolist()},
        }
        for words, ids in captured_rows(place)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = checked(CheckOptions(file, place.model)).findings[-1]
    assert found.name == "padding?" and found.text.endswith("nothing else: write .jsonl without it")
    found = checked(CheckOptions(file, place.model, pad_token_id=0)).findings[0]
    assert (found.text, found.fault) == ("--pad-token-id does nothing: no sequence of .jsonl is padded", False)


def test_files_and_models_that_cannot_be_right(place, tmp_path):
    def refused(file, said, model=place.model, **more):
        with pytest.raises(DriftError, match=said):
            checked(CheckOptions(file, model, **more))

    lines = tmp_path / "x.jsonl"
    refused(lines, "there is no file")
    lines.write_text('{"tokens": [1, 2]}\n')
    refused(lines, "line 1: there is no 'routed_experts'; expected tokens")
    lines.write_text("[1, 2]\n")
    refused(lines, "line 1: a JSON list instead of an object; expected tokens")
    lines.write_text('{"tokens": [1, 2], "routed_experts": [[1, 2]]}\n')
    refused(lines, r"line 1: routed_experts are int64 \[1, 2\], expected \[rows, layers, K\]")
    lines.write_text('{"tokens": [1, 99], "routed_experts": [[[1, 2], [1, 2]]]}\n')
    refused(lines, "sequence 0 has token 99, the model 64")
    for tokens in ("5", "[[1], [2]]", "[1, true]"):
        lines.write_text(f'{{"tokens": {tokens}, "routed_experts": [[[1, 2], [1, 2]]]}}\n')
        refused(lines, r"x\.jsonl line 1: tokens are no list of token ids; expected")
    refused(lines, "--batch-size: at least 1, got 0", batch_size=0)
    lines.write_text("")
    refused(lines, "holds no sequence")
    other = tmp_path / "x.csv"
    other.write_text("1")
    refused(other, r"\.csv; expected \.safetensors")
    np.savez(tmp_path / "x.npz", tokens=np.zeros((2, 3), int), routed_experts=np.zeros((2, 4, 3, 2), int))
    refused(tmp_path / "x.npz", r"tokens \[2, 3\].*routed_experts \[2, 4, 3, 2\] do not fit")
    RoutedExperts(place.routes.ids, place.routes.sites, 8).save(tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", "saved without their tokens")
    LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8).save_pretrained(
        tmp_path / "dense"
    )
    refused(lines, "--model: .*registers no router", model=str(tmp_path / "dense"))
    refused(lines, "--model: there is no folder", model=str(tmp_path / "nothing"))


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64])
def test_tokens_of_an_unsigned_kind_are_tokens(kind, place, tmp_path):
    ids = place.ids.numpy().astype(kind)
    np.savez(tmp_path / "x.npz", tokens=ids, routed_experts=place.engine)
    found = read_capture(tmp_path / "x.npz", 2)
    assert [words.tolist() for words in found.tokens] == place.ids.tolist()


def test_routes_of_another_shape_are_refused_as_the_file_is_read(place, tmp_path):
    """Not only once the model has scored the tokens twice."""
    for ids, got in ((place.engine.astype(np.float32), "float32 [28, 3, 2]"), (place.engine[:, :, 1], "int32 [28, 2]")):
        np.savez(tmp_path / "x.npz", tokens=place.ids, routed_experts=ids, attention_mask=place.mask)
        with pytest.raises(DriftError, match=re.escape(f"layers and K alike in all sequences; got ['{got}'")):
            read_capture(tmp_path / "x.npz", 2)


@pytest.mark.parametrize("value", [-100, 2, np.nan])
def test_a_mask_that_is_none_is_refused(value, place, tmp_path):
    mask = np.where(place.mask.numpy(), 1, value)
    np.savez(tmp_path / "x.npz", tokens=place.ids.numpy(), routed_experts=place.engine, attention_mask=mask)
    with pytest.raises(DriftError, match=r"x\.npz: attention_mask holds other values than 0 and 1"):
        read_capture(tmp_path / "x.npz", 2)


def test_a_line_of_a_million_brackets_is_one_message(tmp_path):
    (tmp_path / "x.jsonl").write_text("[" * 1_000_000)
    with pytest.raises(DriftError, match=r"x\.jsonl line 1: nested too deeply"):
        read_capture(tmp_path / "x.jsonl", 2)


def test_files_that_are_damaged_or_weights_are_one_message(place, tmp_path):
    def refused(name, said):
        with pytest.raises(DriftError, match=said):
            checked(CheckOptions(tmp_path / name, place.model))

    whole = write(place, tmp_path, "npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    refused("cut.npz", "cut.npz: cannot be read")
    (tmp_path / "empty.npz").write_bytes(b"")
    refused("empty.npz", "empty.npz: cannot be read")
    np.save(tmp_path / "array.npy", place.engine)
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    refused("array.npz", "array.npz: cannot be read")
    half = {f"layers.{n}.weight": torch.zeros(1, dtype=torch.bfloat16) for n in range(9)}
    save_file(half, tmp_path / "weights.safetensors")
    refused(
        "weights.safetensors", r"holds layers.0.weight, .*layers.4.weight and 4 more; expected tokens and routed_ex"
    )
    save_file({"tokens": place.ids, "routed_experts": torch.zeros(2, 4).bfloat16()}, tmp_path / "half.safetensors")
    refused("half.safetensors", "half.safetensors: cannot be read")


def test_a_model_whose_copy_cannot_run_has_no_limits_and_says_so(place, tmp_path, monkeypatch):
    def no_kernel(model, dtype):
        raise RuntimeError("\"some_kernel\" not implemented for 'BFloat16'\nand more lines")

    monkeypatch.setattr("moe_rl.drift.check.rounded_copy", no_kernel)
    with pytest.raises(DriftError, match=r"a copy of the model in bfloat16 cannot run here.*not implemented for 'BFl"):
        checked(CheckOptions(write(place, tmp_path, "lines"), place.model))


def test_a_file_with_its_sequences_twice_is_told_as_one_with_each_once(place, tmp_path):
    file = write(place, tmp_path, "lines")
    file.write_text(2 * file.read_text())
    result = checked(CheckOptions(file, place.model))
    assert result.faults == (), result.verdict
    assert result.chance < 0.9 * result.as_captured, "half of the file further is the very same token"


def test_tokens_for_which_a_model_chooses_alike_tell_nothing(place, capsys):
    """One text over and over: the routes of other tokens would do as well."""
    ids = torch.full((2, 40), 7)
    model = Qwen3MoeForCausalLM.from_pretrained(place.folder).eval()
    with torch.no_grad(), record_routes(model) as recording:
        model(input_ids=ids)
    path = place.folder / "alike.safetensors"
    recording.routes.save(path)
    with pytest.raises(SystemExit, match="1"):
        main(["check-routes", str(path), "--model", place.model])
    said = capsys.readouterr().out
    assert said.startswith("Nothing tells whose routes these are") and "fault: not told apart" in said
