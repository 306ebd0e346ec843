"""moe-rl drift on responses that OLD writes: what RL's ratios and KL are of."""

import json
import math
import re
import shutil

import pytest
import torch
from drift_models import ALPHABET, compared, refused
from transformers import AutoModelForCausalLM

from moe_rl.cli import main
from moe_rl.drift import run
from moe_rl.drift.checkpoints import fingerprint
from moe_rl.drift.prompts import question, tokenised
from moe_rl.drift.words import own_samples, text_sentence
from moe_rl.policy.tiny import char_tokenizer

MEASURED = ("change", "decomposition", "kl", "gate_swap", "measured_tokens")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "abc=", "completion": "d"}, {"prompt": "j+i"}, {"text": "a b c d"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def samples_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_responses_of_old_are_measured_kept_and_taken_again(saved, prompts, tmp_path, tokenizer, undrawn, capsys):
    old, new = map(str, saved("qwen3_moe"))
    common = ["--floor-sequences", "0", "--no-per-site", "--batch-size", "4", "--output"]
    sampling = ["--sample", "3", "--max-new-tokens", "6", "--temperature", "0.7", "--seed", "5"]
    main(["drift", old, new, "--prompts", str(prompts), *common, str(tmp_path / "a"), *sampling])
    said = capsys.readouterr().out
    rows, found = samples_of(tmp_path / "a"), json.loads((tmp_path / "a" / "drift.json").read_text())
    assert [row["prompt"] for row in rows] == ["abc="] * 3 + ["j+i"] * 3 + ["a b c d"] * 3
    assert all(row["prompt_ids"] == tokenizer(row["prompt"])["input_ids"] for row in rows)
    assert found["measured_tokens"] == sum(len(row["completion_ids"]) for row in rows)
    sentence = (
        f"{found['measured_tokens']} tokens of 9 sequences (3 prompts): responses sampled from old at temperature 0.7. "
    )
    assert sentence in said and sentence in (tmp_path / "a" / "report.html").read_text()
    assert "nats per token, the first an estimate of KL(old || new)" in said

    main(["drift", old, new, "--prompts", str(tmp_path / "a" / "samples.jsonl"), *common, str(tmp_path / "a")])
    again = json.loads((tmp_path / "a" / "drift.json").read_text())
    assert samples_of(tmp_path / "a") == rows, "what is replaced is kept where it is the text"
    assert {name: again[name] for name in MEASURED} == {name: found[name] for name in MEASURED}
    assert again["text"] == found["text"] and sentence in capsys.readouterr().out
    other = compared(tmp_path / "c", tmp_path / "a" / "samples.jsonl", new, old, per_site=False)
    said = f"responses sampled from {old}, with other weights, settings or dtype than new's, at temperature 0.7"
    assert text_sentence(other["text"], "new") == said
    assert not own_samples(other["text"]), "they are not the text of the model that is OLD now"

    main(["drift", old, new, "--prompts", str(prompts), *common, str(tmp_path / "d")])
    said = capsys.readouterr().out
    parts = ("completions as given (1 ", "prompts without responses (what RL sees are", "whole texts (1 examples)")
    assert all(part in said for part in parts) and "averages over this text and no estimate of KL" in said
    assert not (tmp_path / "d" / "samples.jsonl").exists()


def test_k3_is_a_kl_only_of_the_weights_that_wrote_the_samples(saved, prompts, tmp_path, undrawn, monkeypatch, capsys):
    old, new = saved("qwen3_moe")
    before, now = tmp_path / "before", tmp_path / "checkpoint"
    shutil.copytree(old, before)
    shutil.copytree(old, now)
    quick = {"per_site": False, "gate_swap": False}
    compared(tmp_path / "a", prompts, now, new, sample=1, max_new_tokens=4, **quick)
    samples = tmp_path / "samples.jsonl"
    shutil.copy(tmp_path / "a" / "samples.jsonl", samples)

    def text(number, first=now, **options):
        return compared(tmp_path / f"{number}", samples, first, new, **quick, **options)["text"]

    assert text(1)["of_old"] is text(2, before)["of_old"] is text(3, one_at_a_time=True)["of_old"] is True, "by weights"
    dtypes = (torch.float32, torch.bfloat16)
    loaded = [fingerprint(AutoModelForCausalLM.from_pretrained(now, dtype=dtype)) for dtype in dtypes]
    assert loaded[0] == samples_of(tmp_path / "a")[0]["sampler_sha256"] != loaded[1]
    config = json.loads((now / "config.json").read_text())
    (now / "config.json").write_text(json.dumps(config | {"norm_topk_prob": True}))
    assert text(5)["of_old"] is False, "equal weights, and another distribution"
    (now / "config.json").write_text(json.dumps(config))
    shutil.copy(new / "model.safetensors", now)  # a later step
    assert text(6)["of_old"] is False
    main(["drift", str(now), str(old), "--prompts", str(samples), "--no-per-site", "--output", str(tmp_path / "7")])
    said = capsys.readouterr().out
    assert f"sampled from {now}, with other weights, settings or dtype than checkpoint's, at temperature 1. " in said
    assert "averages over this text and no estimate of KL(checkpoint || old)" in said

    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    samples.write_text("\n".join(json.dumps(row | {"sampler_sha256": None}) for row in rows))
    assert "line 1: sampler_sha256 must be a text" in refused(capsys, "drift", old, new, "--prompts", samples)
    for row in rows:
        del row["sampler_sha256"]
    samples.write_text("\n".join(map(json.dumps, rows)))
    unsaid = text(8, before)
    assert unsaid["of_old"] is None and not own_samples(unsaid)
    assert text_sentence(unsaid, "before").startswith(f"responses sampled from {now}, with which weights is not known,")

    def rewritten(*args, **kwargs):
        model = load(*args, **kwargs)
        shutil.copy(new / "model.safetensors", before)
        return model

    load = run.pair.load
    monkeypatch.setattr(run.pair, "load", rewritten)
    found = compared(tmp_path / "b", prompts, before, new, sample=1, max_new_tokens=4, **quick)
    assert found["text"]["of_old"] is False, "while they were written"


def test_greedy_responses_are_those_of_generate_and_a_seed_holds_for_every_batch_size(
    saved, prompts, tmp_path, tokenizer, undrawn
):
    old, new = saved("qwen3_moe")
    options = {"sample": 1, "max_new_tokens": 6}
    found = compared(tmp_path / "a", prompts, old, new, temperature=0.0, per_site=False, **options)
    model, ends = AutoModelForCausalLM.from_pretrained(old), tokenizer.eos_token_id
    for row in samples_of(tmp_path / "a"):
        ids = torch.tensor([row["prompt_ids"]])
        mine = model.generate(ids, do_sample=False, max_new_tokens=6, eos_token_id=ends, pad_token_id=0)
        assert row["completion_ids"] == mine[0, ids.shape[1] :].tolist()
    assert text_sentence(found["text"], "old") == "responses sampled from old greedily"
    assert not own_samples(found["text"]), "no average over them is an expectation under OLD"
    for batch, folder in ((1, "b"), (3, "c")):
        compared(tmp_path / folder, prompts, old, new, batch_size=batch, per_site=False, **options)
    assert samples_of(tmp_path / "b") == samples_of(tmp_path / "c")


def test_k3_on_samples_is_the_kl_of_what_was_sampled(saved, tmp_path, undrawn):
    """One token after one prompt: KL(old || new) at the temperature is known exactly, and so is the spread of k3."""
    folders, G, heat = saved("qwen3_moe"), 4000, 0.5
    path = tmp_path / "one.txt"
    path.write_text("abc=")
    options = {"sample": G, "max_new_tokens": 1, "temperature": heat, "batch_size": G, "gate_swap": False}
    found = compared(tmp_path / "out", path, *folders, per_site=False, **options)
    ids = torch.tensor([samples_of(tmp_path / "out")[0]["prompt_ids"]])
    with torch.no_grad():
        old, new = (
            (AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, -1].double() / heat).log_softmax(-1)
            for folder in folders
        )
    k3 = (new - old).expm1() - (new - old)
    kl = float((old.exp() * (old - new)).sum())
    spread = math.sqrt(float((old.exp() * (k3 - kl) ** 2).sum()) / G)
    assert abs(found["kl"]["k3_natural"] - kl) < 4 * spread < 0.3 * kl
    at_one = (old * heat).log_softmax(-1), (new * heat).log_softmax(-1)
    other = float((at_one[0].exp() * (at_one[0] - at_one[1])).sum())
    assert abs(other - kl) > 8 * spread, "another temperature would be seen"


def test_a_series_is_measured_on_the_samples_of_its_first(saved, prompts, tmp_path, undrawn, capsys):
    old, new = map(str, saved("granitemoe"))
    options = ["--sample", "2", "--max-new-tokens", "4", "--floor-sequences", "0", "--no-gate-swap"]
    pair = [*options, "--no-per-site"]
    third = tmp_path / "third"
    third.symlink_to(new)
    main(["drift", old, new, str(third), "--prompts", str(prompts), "--output", str(tmp_path / "s"), *options])
    said = capsys.readouterr().out
    assert "Text: responses sampled from old at temperature 1.\n" in said
    assert "responses sampled from old at temperature 1" in (tmp_path / "s" / "report.html").read_text()
    main(["drift", old, new, "--prompts", str(prompts), "--output", str(tmp_path / "p"), *pair])
    assert samples_of(tmp_path / "s") == samples_of(tmp_path / "p")
    row = json.loads((tmp_path / "s" / "series.json").read_text())["rows"][1]
    found = json.loads((tmp_path / "p" / "drift.json").read_text())
    assert row["tokens"] == found["measured_tokens"]
    assert row["change"]["slot"]["changed"] == found["change"]["slot"]["changed"]


def test_samples_of_a_call_that_was_stopped_are_not_emptied_with_its_folder(saved, tmp_path, capsys):
    left = tmp_path / "out.partial" / "samples.jsonl"
    left.parent.mkdir()
    left.write_text('{"prompt_ids": [3], "completion_ids": [4]}')
    error = refused(capsys, "drift", *saved("qwen3_moe"), "--prompts", left, "--output", tmp_path / "out")
    assert "lies in a folder that is emptied first; move it elsewhere" in error and left.exists()


def test_what_a_line_asks(tokenizer):
    chat = char_tokenizer(ALPHABET + "<>")
    chat.chat_template = "{% for m in messages %}<{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    for row, asked in (
        ({"messages": turns}, "<ab>"),
        ({"messages": turns[:1]}, "<ab>"),
        ({"prompt": turns[:1], "completion": "cd"}, "<ab>"),
        ({"prompt": "ab", "completion": "cd"}, "ab"),
        ({"text": "abcd"}, "abcd"),
        ({"prompt_ids": chat("ab")["input_ids"], "completion_ids": [3], "prompt": "of no matter"}, "ab"),
    ):
        ids, start = question(row, chat)
        assert chat.decode(ids) == asked and start == len(ids)
    assert tokenised({"prompt_ids": [3, 4], "completion_ids": [5], "completion": "cd"}, chat) == ([3, 4, 5], 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sample", "0"], "--sample: at least 1, got 0"),
        (["--temperature", "0.5"], "--temperature is of --sample G, which was not given"),
        (["--sample", "1", "--temperature", "-1"], "--temperature: 0 (greedy) or a number of at least 0.01, got -1.0"),
        (["--sample", "1", "--temperature", "1e-300"], "a number of at least 0.01, got 1e-300"),
        (["--sample", "1", "--max-new-tokens", "61"], "line 1: a prompt of 4 tokens and 61 new ones"),
    ],
)
def test_sampling_that_cannot_be_is_refused_before_a_model_is_loaded(
    options, message, saved, prompts, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(run.pair, "load", None)
    error = refused(capsys, "drift", *saved("qwen3_moe"), "--prompts", prompts, "--output", tmp_path / "out", *options)
    assert message in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt_ids": [3]}], "line 1: completion_ids must be a list of token ids"),
        ([{"prompt_ids": [3], "completion_ids": [-1]}], "line 1: completion_ids must be a list of token ids"),
        ([{"prompt_ids": [3], "completion_ids": [True]}], "line 1: completion_ids must be a list of token ids"),
        ([{"prompt_ids": [], "completion_ids": [3]}], "line 1: prompt_ids is empty"),
        ([{"prompt_ids": [3], "completion_ids": [3], "temperature": -1}], "line 1: temperature must be 0"),
        ([{"prompt_ids": [3], "completion_ids": [3], "temperature": 0.5}, {"text": "ab"}], "line 2: .* another temp"),
        ([{"prompt": "a", "completion": "b", "temperature": 0.5}], "line 1: a temperature beside a completion as text"),
        (
            [{"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")], "temperature": 0.5}],
            "line 1: a temperature beside a completion as text",
        ),
        ([{"prompt_ids": [3], "completion_ids": [99]}], r"line 1 has token 99 \(.*, and the model embeds"),
    ],
)
def test_tokens_that_are_none_are_refused_by_their_line(rows, message, saved, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    error = refused(capsys, "drift", *saved("qwen3_moe"), "--prompts", path, "--output", tmp_path / "out")
    assert re.search(message, error), error
